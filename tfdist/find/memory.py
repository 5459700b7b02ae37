"""`estimate_memory`: what a training takes, by its parts, from the graph of one step.

The step is traced, not run: forward and backward, with plain tensors in the place of variables, so
that neither the strategy nor the state of the model matters. Shapes are known then, and
`peak_of` says what is held at once. What TensorFlow itself takes for a graph goes by the number of
its operations (measured: `benchmarks/memory_estimates.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError, require, require_int

_BYTES_AN_OPERATION = 59 * 1024
"""Fitted: docs/find.md has the models, and how well it holds for others."""
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes that one replica takes to train, beside what a started TensorFlow has.

    Attributes:
      weights: of all variables of the model.
      gradients: of those that are trained.
      slots: of the optimizer.
      activations: what forward and backward hold at their peak, gradients of weights left out.
      by_layer: the parts of `activations`, by the name of the layer that made them, largest first.
      program: graph and executor.
      peak: the most at once; gradients need not be there when activations are largest.
    """

    weights: int
    gradients: int
    slots: int
    activations: int
    by_layer: dict[str, int]
    program: int
    peak: int

    def __str__(self) -> str:
        parts = ("weights", "gradients", "slots", "activations", "program", "peak")
        lines = [f"{part:>12} {getattr(self, part) / _MIB:10.1f} MiB" for part in parts]
        layers = [f"{size / _MIB:14.1f} MiB  {name}" for name, size in self.by_layer.items()]
        return "\n".join([*lines, *layers[:10]])


def estimate_memory(model: keras.Model, batch_size: int, optimizer: Any = None) -> MemoryEstimate:
    """Return the memory that training `model` takes; nothing is run, nothing changed.

    Not a collective.

    Args:
      model: built, with inputs of known shape (`keras.Input`); it need not be compiled.
      batch_size: examples of one replica.
      optimizer: an optimizer, or its name; by default that of the model.

    Raises:
      UsageError: the model is not built or its inputs are not known, or there is no optimizer.
    """
    batch_size = require_int("estimate_memory: batch_size", batch_size, least=1)
    specs = _input_specs(model, batch_size)
    optimizer = _optimizer(model, optimizer)
    graph, gradients = _traced(model, specs)
    operations, keys = _operations(graph)
    made = {keys[g.ref()] for g in gradients if g is not None}
    peak = peak_of(operations, kept=made)
    weights = sum(map(_bytes, model.weights))
    slots = _slots(optimizer, model.trainable_variables)
    trained = [_bytes(variable) for variable in model.trainable_variables]
    program = len(operations) * _BYTES_AN_OPERATION
    makers = {op.name for op in operations if any(key in made for key, _ in op.outputs)}
    by_layer = _by_layer(model, peak, without=makers)
    return MemoryEstimate(
        weights=weights,
        gradients=sum(trained),
        slots=slots,
        activations=sum(by_layer.values()),
        by_layer=by_layer,
        program=program,
        peak=weights + slots + peak.size_bytes + program + _of_update(trained, slots),
    )


def _input_specs(model: Any, batch_size: int) -> Any:
    """Return the inputs of a batch as a nest of `tf.TensorSpec`."""
    inputs = getattr(model, "_inputs_struct", None)
    if inputs is None:  # of a Sequential
        inputs = next(iter(getattr(model, "inputs", None) or []), None)
    shapes = [tuple(t.shape[1:]) for t in keras.tree.flatten(inputs)] if inputs is not None else []
    require(
        shapes and all(None not in shape for shape in shapes),
        "estimate_memory",
        received=f"a {type(model).__name__} whose inputs have {shapes or 'no'} shapes",
        expected="a built keras.Model with inputs of known shape",
        fix="make the model from keras.Input of a whole shape, or use tfdist.find_batch_size",
        code="unknown-shape",
    )
    return keras.tree.map_structure(
        lambda t: tf.TensorSpec((batch_size, *t.shape[1:]), t.dtype), inputs
    )


def _traced(model: keras.Model, specs: Any) -> tuple[tf.Graph, list[Any]]:
    """Return the graph of a step, and in it the gradients of the trainable variables."""
    found: list[Any] = []

    def step(trainable: list[Any], others: list[Any], inputs: Any) -> None:
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            outputs, _ = model.stateless_call(trainable, others, inputs, training=True)
            flat = keras.tree.flatten(outputs)
            floats = [output for output in flat if output.dtype.is_floating and output.shape.rank]
            losses = [tf.reduce_mean(tf.nn.log_softmax(output)) for output in floats]
            loss = tf.add_n([tf.cast(each, tf.float32) for each in losses])
        found[:] = tape.gradient(loss, trainable)

    function = tf.function(step, autograph=False)
    traced = function.get_concrete_function(
        [_spec(v) for v in model.trainable_variables],
        [_spec(v) for v in model.non_trainable_variables],
        specs,
    )
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in found]
    return traced.graph, dense


def _operations(graph: tf.Graph) -> tuple[list[Operation], dict[Any, int]]:
    """Return the operations in their order, and the key of each tensor."""
    keys: dict[Any, int] = {}
    found = []
    for op in graph.get_operations():
        outputs = []
        for tensor in op.outputs:
            keys[tensor.ref()] = len(keys)
            outputs.append((keys[tensor.ref()], _tensor_bytes(tensor)))
        inputs = tuple(keys[tensor.ref()] for tensor in op.inputs if tensor.ref() in keys)
        found.append(Operation(name=op.name, kind=op.type, inputs=inputs, outputs=tuple(outputs)))
    return found, keys


def _by_layer(model: keras.Model, peak: Peak, *, without: set[str]) -> dict[str, int]:
    """Return the bytes of each layer at the peak, largest first."""
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    sizes = Counter[str]()
    for name, size in peak.by_operation.items():
        if name not in without:
            sizes[_layer_of(name, names)] += size
    return dict(sizes.most_common())


def _layer_of(operation: str, names: set[str]) -> str:
    """Return the innermost layer whose scope an operation is in.

    Keras opens the scope of a layer twice, to build it and to call it, and TensorFlow puts a number
    behind the second: ``dense_1`` is where ``dense`` is called.
    """
    for scope in reversed(operation.split("/")):
        for name in (re.sub(r"_\d+$", "", scope), scope):
            if name in names:
                return name
    return "(no layer)"


def _slots(optimizer: keras.optimizers.Optimizer, variables: Any) -> int:
    """Return the bytes of an optimizer's own variables once it is built.

    By what it makes for one number; slots that are not of their variable's shape, as Adafactor's
    and Muon's, are only known of an optimizer that is built.
    """
    if optimizer.built:
        return sum(map(_bytes, optimizer.variables))
    probe = keras.Variable(np.zeros(1, "float32"), name="probe")
    another = type(optimizer).from_config(optimizer.get_config())
    before = len(another.variables)
    another.build([probe])
    each = sum(math.prod(v.shape) for v in another.variables[before:] if v.shape == (1,))
    return each * sum(map(_bytes, variables))


def _of_update(trained: Sequence[int], slots: int) -> int:
    """Return what the largest variable's update takes meanwhile: about its size for each slot, and
    once more. It runs as soon as its gradient is there, beside what is left of the backward pass.
    """
    return int(max(trained, default=0) * (1 + slots / max(sum(trained), 1)))


def _optimizer(model: keras.Model, optimizer: Any) -> keras.optimizers.Optimizer:
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is None:
        raise UsageError(
            "estimate_memory",
            received="a model that was not compiled, and no optimizer",
            expected="an optimizer",
            fix='pass optimizer="adam", or compile the model',
            code="not-compiled",
        )
    try:
        return keras.optimizers.get(chosen)
    except ValueError:
        raise UsageError(
            "estimate_memory: optimizer",
            received=repr(chosen),
            expected="a Keras optimizer or its name",
            fix='pass optimizer="adam", for example',
            code="unknown-value",
        ) from None


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tuple(variable.shape), variable.dtype)


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size)


def _tensor_bytes(tensor: Any) -> int:
    elements = tensor.shape.num_elements()
    return 0 if elements is None else int(elements) * int(tensor.dtype.size)


# Most bytes that the tensors of a graph take at once, were its operations run in their order.
#
# A tensor is there from the operation that makes it until the last one that reads it. An operation
# that changes nothing (`VIEWS`) gives its input's memory on, and one that works element by element
# (`IN_PLACE`) writes over an input that nobody reads any more, as TensorFlow's kernels do.


_VIEWS = "Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient"
_HELD = "Placeholder ReadVariableOp Const NoOp Shape ShapeN Size"
_IN_PLACE = (
    "Relu Relu6 LeakyRelu Elu Selu Sigmoid Tanh Softplus Softsign "
    "ReluGrad Relu6Grad LeakyReluGrad EluGrad SigmoidGrad TanhGrad "
    "AddV2 Add AddN Sub Mul RealDiv Maximum Minimum BiasAdd SquaredDifference "
    "Neg Exp Log Sqrt Rsqrt RsqrtGrad Square Erf Softmax LogSoftmax Select SelectV2"
)
VIEWS = frozenset(_VIEWS.split())
HELD = frozenset(_HELD.split())
"""Operations whose tensors are held by somebody else, or are tiny."""
IN_PLACE = frozenset(_IN_PLACE.split())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a graph.

    Attributes:
      name: with its scopes.
      kind: its type.
      inputs: keys of the tensors that it reads; one that it reads twice is there twice.
      outputs: key and bytes of each tensor that it makes.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment at which most is held.

    Attributes:
      size_bytes: of all buffers.
      by_operation: bytes of each operation that made a buffer which is held then.
    """

    size_bytes: int
    by_operation: dict[str, int]


def peak_of(operations: Sequence[Operation], *, kept: Iterable[int] = ()) -> Peak:
    """Return the peak of a graph; tensors that are `kept` are held to the end."""
    reads = Counter(itertools.chain(kept, *(operation.inputs for operation in operations)))
    buffer_of, unread = dict[int, int](), Counter[int]()
    held = dict[int, tuple[str, int]]()
    now = most = 0
    at_peak = dict(held)
    for operation in operations:
        inputs = [buffer_of[key] for key in operation.inputs if key in buffer_of]
        for key, size in operation.outputs:
            fitting = [b for b in inputs if unread[b] == 1 and held[b][1] == size]
            reused = _reused(operation.kind, inputs, fitting)
            if reused is None and operation.kind in HELD | VIEWS:
                continue
            buffer_of[key] = key if reused is None else reused
            if reused is None:
                held[key] = (operation.name, size)
                now += size
            unread[buffer_of[key]] += reads[key]
        if now > most:
            most, at_peak = now, dict(held)
        unread.subtract(inputs)
        outputs = (buffer_of[key] for key, _ in operation.outputs if key in buffer_of)
        for buffer in {*inputs, *outputs}:
            if not unread[buffer] and buffer in held:
                now -= held.pop(buffer)[1]
    by_operation = Counter[str]()
    for name, size in at_peak.values():
        by_operation[name] += size
    return Peak(size_bytes=most, by_operation=by_operation)


def _reused(kind: str, inputs: Sequence[int], fitting: Sequence[int]) -> int | None:
    """Return the buffer of an input that an output takes over, None for a new one."""
    choices = inputs if kind in VIEWS else fitting if kind in IN_PLACE else ()
    return next(iter(choices), None)
