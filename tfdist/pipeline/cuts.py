"""Cuts of a functional or Sequential model into stages that share its layers and weights.

The module finds the possible cuts, chooses the fastest cuts by the measured times of the parts, and
divides the stages of ``recompute`` into segments, which saves memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tfdist.errors import UsageError, named, require, require_one_of
from tfdist.pipeline.schedule import (
    Pass,
    Timeline,
    balanced,
    passes,
    require_enough,
    runs,
    timeline,
)
from tfdist.training import keras_compat

_LOG = logging.getLogger(__name__)
_ROUNDS = 3
_MOST_TENSORS = 2
_MOST_SEGMENTS = 8
_PLACES_A_STAGE = 8
_LEADS = (0.0, 0.5, 1.0)

MOST_DRAWS = 2**30
"""First draw number that no seed generator uses."""
LossOfOutputs = Callable[[list[tf.Tensor]], tf.Tensor]
"""Scalar loss of the model's flat outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CutPoint:
    """Possible cut after the node at `position`, and the tensors that cross it."""

    position: int
    name: str  # name of the layer before the cut
    num_tensors: int
    example_bytes: int  # in both directions. An unknown length counts as 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelPart:
    """Stage of a model.

    Attributes:
      module: Keras model of the stage, which shares the layers of the whole model. It maps a flat
        list of `received` and `inputs` to a flat list of new tensors.
      received: Symbolic tensors from the previous stage.
      inputs: Indices of the model's inputs that this stage reads.
      sent: Symbolic tensors for the next stage. In the last stage, the model's outputs.
      sources: Index of each tensor of `sent` in the list of `received`, `inputs` and the outputs
        of `module`. Some tensors only pass through.
      nodes: Keras' nodes of the calls of its layers.
      draws: Numbers of the random draws of each seed generator, by its `id`. The numbers are unique
        in the model and do not depend on the cut.
    """

    index: int
    is_last: bool
    module: keras.Model
    received: tuple[Any, ...]
    inputs: tuple[int, ...]
    sent: tuple[Any, ...]
    sources: tuple[int, ...]
    nodes: tuple[Any, ...]
    draws: Mapping[int, range]

    @property
    def work(self) -> str:
        """Return a text that is equal for parts with equal layers and shapes, except names."""
        return repr([self.index == 0, *map(_work, self.nodes)])


class LayerGraph:
    """Calls of layers of a built model, in topological order.

    Attributes:
      functional: Functional model with the graph: the model, or the inner model of a Sequential.
        Models inside the model are replaced by their layers.
      nodes: Keras' nodes. A layer that is called twice has two nodes.

    Raises:
      UsageError: the model has no graph of layers, or has a layer with ``stateful=True``.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        functional = _graph_inside(model)
        if functional is None:
            is_sequential = isinstance(model, keras.Sequential)
            state = "is not built" if is_sequential else "has its own call"
            raise UsageError(
                f"model {model.name!r}",
                f"the {type(model).__name__} {state}, so tfdist cannot divide it into stages",
                fix="build the model from keras.Input and layers, or use another strategy",
                code="no-cut",
            )
        functional, self._inside = _in_place(functional)
        by_depth = functional._nodes_by_depth  # `operations` has a single call per layer
        nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        self.nodes: list[Any] = [node for node in nodes if not node.is_input]
        self._inputs = [node for node in nodes if node.is_input]
        self.functional = functional
        self.inputs: list[Any] = list(functional.inputs)
        self.outputs: list[Any] = list(functional.outputs)
        self._users: dict[int, list[int]] = {}  # nodes that use each variable, by its `id`
        for i, node in enumerate(self.nodes):
            for variable in _variables(node.operation):
                self._users.setdefault(id(variable), []).append(i)
        self._made_by = {id(t): i for i, n in enumerate(self.nodes) for t in n.output_tensors}
        layers = [layer for node in self.nodes for layer in _layers_of(node.operation)]
        generators = dict.fromkeys(
            id(g) for layer in layers for g in getattr(layer, "_seed_generators", ())
        )
        self._draws = {
            key: range(first, MOST_DRAWS, len(generators))
            for first, key in enumerate(generators, 1)
        }
        stateful = [layer.name for layer in layers if getattr(layer, "stateful", False)]
        require(
            not stateful,
            f"layer {next(iter(stateful), '')!r}",
            "strategy pipeline does not support stateful=True",
            fix="leave out stateful, or use another strategy",
            code="unsupported-layer",
        )

    @property
    def digest(self) -> str:
        """Digest of the model's layer types, output shapes and trainable flags."""
        calls = [
            [type(node.operation).__name__, [t.shape for t in node.output_tensors]]
            + [variable.trainable for variable in _variables(node.operation)]
            for node in self.nodes
        ]
        return hashlib.sha256(repr(calls).encode()).hexdigest()[:16]

    def places(self) -> list[CutPoint]:
        """Return the possible cuts in order. If the same tensors cross several, keep the first."""
        found: list[CutPoint] = []
        before: set[int] = set()
        for position in range(len(self.nodes) - 1):
            tensors = self.crossing(position)
            ids = {id(t) for t in tensors}
            if ids == before or not self._may_be_cut(position, tensors):
                continue
            before = ids
            found.append(
                CutPoint(
                    position=position,
                    name=self.nodes[position].operation.name,
                    num_tensors=len(tensors),
                    example_bytes=sum(map(_example_bytes, tensors)),
                )
            )
        return found

    def widest_share(self) -> str:
        """Return a text about layers far apart that share a variable, "" if there are none."""
        users = self._users
        key = max(users, key=lambda key: users[key][-1] - users[key][0], default=None)
        if key is None or users[key][0] == users[key][-1]:
            return ""
        nodes = [self.nodes[i] for i in users[key]]
        path = next(v.path for v in _variables(nodes[0].operation) if id(v) == key)
        names = dict.fromkeys(repr(node.operation.name) for node in nodes)
        if len(names) == 1:
            return f"layer {named(names)} is called {len(nodes)} times with {path!r}"
        return f"layers {named(names)} share {path!r} and must be in the same stage"

    def behind_layers(self, names: Sequence[str]) -> list[int]:
        """Return the positions of cuts after the last call of each named layer.

        For the name of an inner model, the cut is after the last layer of the inner model.
        """
        last = {
            name: i
            for i, node in enumerate(self.nodes)
            for name in (*self._inside.get(id(node.output_tensors[0]), ()), node.operation.name)
        }
        for name in names:
            fix = "name the last layer of each stage but the last"
            require_one_of("cut", name, last, fix=fix)
        return sorted(last[name] for name in names)

    def crossing(self, position: int) -> list[Any]:
        """Return the tensors computed up to a node and used after the node."""
        needed = {id(t): t for node in self.nodes[position + 1 :] for t in node.input_tensors}
        needed.update((id(t), t) for t in self.outputs)
        made_by = self._made_by
        return [t for key, t in needed.items() if made_by.get(key, len(self.nodes)) <= position]

    def cut(self, positions: Sequence[int]) -> list[ModelPart]:
        """Return the stages between cuts after these nodes, in order.

        Raises:
          UsageError: a cut is not possible, or a stage has no trainable weights.
        """
        for position in positions:
            if not self._may_be_cut(position, self.crossing(position)):
                name = self.nodes[position].operation.name
                raise UsageError(
                    "cut",
                    f"a cut behind {name!r} would separate layers with shared weights, separate "
                    "calls of one layer, or cross a ragged or sparse tensor",
                    fix=f"cut behind {named(repr(place.name) for place in self.places())}",
                    code="no-cut",
                )
        stages = runs(positions, len(self.nodes))
        empty = [k for k, run in enumerate(stages) if not self.is_trainable(run)]
        require(
            not empty,
            "cut",
            f"stage {next(iter(empty), 0)} of {len(stages)} has no trainable weights",
            fix="cut elsewhere, or use fewer stages",
            code="no-cut",
        )
        return self.divided(positions)

    def divided(self, positions: Sequence[int]) -> list[ModelPart]:
        """Return the parts between cuts after these nodes, without checks."""
        crossing = [self.crossing(position) for position in positions]
        received, sent = [[], *crossing], [*crossing, self.outputs]
        with _graph_kept([*self.nodes, *self._inputs]):
            return [
                self._part(k, self.nodes[run], received=received[k], sent=sent[k])
                for k, run in enumerate(runs(positions, len(self.nodes)))
            ]

    def _part(
        self, k: int, mine: Sequence[Any], *, received: list[Any], sent: list[Any]
    ) -> ModelPart:
        used = {id(t) for t in [t for node in mine for t in node.input_tensors] + sent}
        inputs = tuple(i for i, t in enumerate(self.inputs) if id(t) in used)
        given = [*received, *(self.inputs[i] for i in inputs)]
        # Leave out tensors that only pass through, because Keras cannot clone such a graph.
        made = {id(t): t for t in sent if not any(t is g for g in given)}
        places = {id(t): i for i, t in enumerate([*given, *made.values()])}
        return ModelPart(
            index=k,
            is_last=sent is self.outputs,
            module=keras.Model(
                one_or_list(given),
                one_or_list(list(made.values())),
                name=f"{self.model.name}_stage{k}",
            ),
            received=tuple(received),
            inputs=inputs,
            sent=tuple(sent),
            sources=tuple(places[id(t)] for t in sent),
            nodes=tuple(mine),
            draws=self._draws,
        )

    def is_trainable(self, run: slice) -> bool:
        """Return whether a slice of nodes has trainable weights."""
        return any(v.trainable for n in self.nodes[run] for v in _variables(n.operation))

    def _may_be_cut(self, position: int, tensors: Sequence[Any]) -> bool:
        """Return whether these tensors may cross a cut after a node.

        If a layer made one of the tensors and is called again after the cut, Keras would confuse
        the second call with the part's input (`clone_graph_nodes`).
        """
        makers = {id(t._keras_history.operation) for t in tensors}
        behind = {id(node.operation) for node in self.nodes[position + 1 :]}
        divided = any(users[0] <= position < users[-1] for users in self._users.values())
        is_dense = not any(t.sparse or t.ragged for t in tensors)
        return is_dense and not divided and not makers & behind


def made_bytes(nodes: Sequence[Any]) -> int:
    """Return the size in bytes of the layer calls' outputs for one example."""
    return sum(_bytes(tensor) for node in nodes for tensor in node.output_tensors)


def has_mask(tensor: Any) -> bool:
    return getattr(tensor, "_keras_mask", None) is not None


def _graph_inside(operation: Any) -> Any:
    """Return the functional model that a model's call computes, `None` if there is none."""
    if getattr(type(operation), "call", None) is keras.Sequential.call:
        return getattr(operation, "_functional", None)
    has_graph = getattr(type(operation), "call", None) is Functional.call
    return operation if has_graph and hasattr(operation, "_nodes_by_depth") else None


def _in_place(functional: Any) -> tuple[Any, dict[int, tuple[str, ...]]]:
    """Return a graph in which each inner model is replaced by the calls of its layers.

    Also return, by the `id` of a call's output, the names of the models around it, outermost first.
    """
    inside: dict[int, tuple[str, ...]] = {}

    def run(graph: Any, given: list[Any], around: tuple[str, ...]) -> Any:
        def placed(operation: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                inner = _graph_inside(operation)
                flat = None if inner is None else _inputs_of_call(inner, args, kwargs)
                if flat is not None:
                    return run(inner, flat, (*around, operation.name))
                # Drop the arguments that Keras added, so that it adds the current masks.
                made = operation(*args, **{k: v for k, v in kwargs.items() if _says_more(k, v)})
                inside.update((id(t), around) for t in keras.tree.flatten(made))
                return made

            return call

        return graph._run_through_graph(given, operation_fn=placed)

    if not any(map(_graph_inside, functional.operations)):
        return functional, inside
    outputs = run(functional, functional.inputs, ())
    try:
        return Functional(functional._inputs_struct, outputs, name=functional.name), inside
    except ValueError:  # Keras rejects two layers with one name
        return functional, {}


@contextlib.contextmanager
def _graph_kept(nodes: Sequence[Any]) -> Iterator[None]:
    """Undo the changes that `keras.Model` makes to a graph when it copies a part.

    Keras adds nodes to the layers, and sets the history of the part's `Input` tensors to these
    nodes (`clone_graph_nodes`). Afterwards Keras could not save the model of the graph.
    """
    histories = [(tensor, tensor._keras_history) for node in nodes for tensor in node.outputs]
    operations = {id(node.operation): node.operation for node in nodes}.values()
    lists = [
        getattr(op, name) for op in operations for name in ("_inbound_nodes", "_outbound_nodes")
    ]
    sizes = list(map(len, lists))
    try:
        yield
    finally:
        for tensor, history in histories:
            tensor._keras_history = history
        for nodes_of_one, size in zip(lists, sizes, strict=True):
            del nodes_of_one[size:]


def _says_more(name: str, value: Any) -> bool:
    """Return whether a call's argument is neither `training` nor an empty mask."""
    leaves = keras.tree.flatten([value])
    return name != "training" and not ("mask" in name and leaves.count(None) == len(leaves))


def _inputs_of_call(inner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the flat inputs of a model's call, `None` if the call has other arguments."""
    flat = keras.tree.flatten(list(args))
    plain = len(args) == 1 and not any(_says_more(k, v) for k, v in kwargs.items())
    plain = plain and len(flat) == len(inner.inputs)
    keys = [sorted(x) if isinstance(x, dict) else None for x in (*args, inner._inputs_struct)]
    if not plain or keys[0] != keys[1]:
        return None
    pairs = zip(flat, inner.inputs, strict=True)
    same = all(x.dtype == y.dtype and len(x.shape) == len(y.shape) for x, y in pairs)
    return flat if same else None


def _variables(operation: Any) -> list[Any]:
    return list(getattr(operation, "variables", ()))


def _work(node: Any) -> tuple[Any, ...]:
    config = {"name": node.operation.name}
    with contextlib.suppress(Exception):  # a layer without a config differs from all others
        config = dict(node.operation.get_config(), name=None)
    shapes = [t.shape for t in (*node.input_tensors, *node.output_tensors)]
    return type(node.operation).__name__, config, shapes


def _layers_of(operation: Any) -> list[Any]:
    inner = getattr(operation, "_flatten_layers", lambda **_: ())
    return [operation, *inner(include_self=False)]


def _example_bytes(tensor: Any) -> int:
    return _bytes(tensor) * (2 if "float" in tensor.dtype else 1)  # integers have no gradient


def _bytes(tensor: Any) -> int:
    """Return the size of one example in bytes, with 1 for an unknown length."""
    return math.prod(size or 1 for size in tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size


def one_or_list(tensors: list[Any]) -> Any:
    """Return the single tensor, or the list. A list of length 1 makes a model's call warn."""
    return tensors[0] if len(tensors) == 1 else tensors


# Cut by the measured times of a model's parts.


def possible_places(graph: LayerGraph, *, num_stages: int) -> list[CutPoint]:
    """Return the places crossed by a single tensor, or by at most two if there are few places.

    Raises:
      UsageError: the model has fewer such places than cuts.
    """
    every = graph.places()
    places = [place for place in every if place.num_tensors <= _MOST_TENSORS]
    with_weights = _with_weights(graph, places)
    reason, fix = "", "use fewer stages"
    if shared := graph.widest_share():
        reason, fix = f": {shared}", f"give each layer its own weights, or {fix}"
    elif wide := [repr(place.name) for place in every if place.num_tensors > _MOST_TENSORS]:
        reason = f": more than {_MOST_TENSORS} tensors cross behind {named(wide, most=3)}"
        fix = f"name the places with PipelineOptions(cut=[...]), or {fix}"
    elif not all(with_weights):
        reason = ", each with trainable weights on both sides"
    require_enough(with_weights, stages=num_stages, reason=reason, fix=fix)
    narrow = [place for place in places if place.num_tensors == 1]
    is_enough = sum(_with_weights(graph, narrow)) > _PLACES_A_STAGE * num_stages
    return narrow if is_enough else places


def chosen_places(
    graph: LayerGraph,
    places: Sequence[CutPoint],
    *,
    num_stages: int,
    rows: int,
    micros: int,
    schedule: str = "1f1b",
    keep: str = "tape",
    inputs: Sequence[Any] | None = None,
    loss_of: LossOfOutputs | None = None,
) -> list[CutPoint]:
    """Return the cuts with the fastest step, and log them.

    Under 1F1B the first stages wait less than the last stages at the start and the end of a step,
    so they get more work. The timing does not change weights.

    Args:
      graph: Graph of the model.
      places: Possible cuts.
      num_stages: Number of stages.
      rows: Examples in a micro-batch, used for the timing.
      micros: Number of micro-batches in a step.
      schedule: Schedule of the passes (default: ``1f1b``).
      keep: With ``recompute``, do not time whole stages, which saves memory (default: ``tape``).
      inputs: Flat inputs of the model with `rows` rows (default: zeros and noise).
      loss_of: Loss of the flat outputs, timed in the last stage (default: no loss).
    """
    positions = [place.position for place in places]
    trainable = _with_weights(graph, places)
    orders = [
        passes(schedule, stage=stage, stages=num_stages, micros=micros)
        for stage in range(num_stages)
    ]
    flat = [_example(tensor, rows) for tensor in graph.inputs] if inputs is None else list(inputs)
    parts = _computed(graph, positions, flat)
    # Both directions: float tensors also send gradients back.
    weights = [
        sum(t.shape.num_elements() * t.dtype.size * (1 + t.dtype.is_floating) for t in received)
        for received in (part.received for part in parts[1:])
    ]
    seconds = _seconds(parts, rows, loss_of)
    chosen, _ = _fastest_cut(seconds, weights, trainable, orders, micros)
    # The ends of parts take extra time, which grows with their tensors. To correct the times,
    # time whole stages. With `recompute` a whole stage's activations may not fit into memory.
    if keep != "recompute":
        stages = _computed(graph, [positions[i] for i in chosen], flat)
        whole = _seconds(stages, rows, loss_of)
        for run, measured in zip(runs(chosen, len(seconds)), whole, strict=True):
            factor = measured / sum(seconds[run])
            seconds[run] = [factor * each for each in seconds[run]]
    chosen, step = _fastest_cut(seconds, weights, trainable, orders, micros)
    _LOG.info(
        "cut behind %s: %s s for a micro-batch of %d%s; with %d micro-batches the stages wait "
        "%.0f %% of the time",
        ", ".join(places[i].name for i in chosen),
        " + ".join(f"{sum(seconds[run]):.4g}" for run in runs(chosen, len(seconds))),
        rows,
        *("" if loss_of is None else " with its loss", micros, 100 * step.bubble),
    )
    return [places[i] for i in chosen]


def _fastest_cut(
    seconds: Sequence[float],
    crossing_bytes: Sequence[int],
    trainable: Sequence[bool],
    orders: Sequence[Sequence[Pass]],
    micros: int,
) -> tuple[tuple[int, ...], Timeline]:
    """Return the indices of the fastest cuts, and the timeline of their step."""
    found = []
    for share in _LEADS:
        lead = share / micros
        cut = balanced(seconds, crossing_bytes, stages=len(orders), trainable=trainable, lead=lead)
        each = [sum(seconds[run]) for run in runs(cut, len(seconds))]
        found.append((cut, timeline(orders, forward_s=each, backward_s=[2 * s for s in each])))
    return min(found, key=lambda one: one[1].makespan_s)


def _with_weights(graph: LayerGraph, places: Sequence[CutPoint]) -> list[bool]:
    """Return whether each sequence of layers between two places has trainable weights."""
    bounds = [0, *(place.position + 1 for place in places), len(graph.nodes)]
    return [graph.is_trainable(slice(*ends)) for ends in itertools.pairwise(bounds)]


class _Computed(NamedTuple):
    """Part of the model, with its input and output tensors for a batch."""

    part: ModelPart
    given: list[Any]
    made: list[Any]

    @property
    def received(self) -> list[tf.Tensor]:
        return self.given[: len(self.part.received)]

    @property
    def work(self) -> Any:
        """Return a key that is equal for parts with equal passes."""
        return self.part.work, self.part.is_last, repr([tuple(t.shape) for t in self.given])


def _computed(
    graph: LayerGraph, positions: Sequence[int], inputs: Sequence[Any]
) -> list[_Computed]:
    """Return the parts between the positions, computed in sequence."""
    found: list[_Computed] = []
    values: dict[int, Any] = {}
    for part in graph.divided(positions):
        given = [values[id(t)] for t in part.received] + [inputs[i] for i in part.inputs]
        with keras.StatelessScope():  # discards state updates
            made = keras.tree.flatten(part.module(one_or_list(given), training=False))
        for tensor in made:
            with contextlib.suppress(AttributeError):  # timing uses no masks
                del tensor._keras_mask
        values = {id(t): [*given, *made][i] for t, i in zip(part.sent, part.sources, strict=True)}
        found.append(_Computed(part, given, made))
    return found


def _seconds(parts: Sequence[_Computed], rows: int, loss_of: LossOfOutputs | None) -> list[float]:
    """Return the seconds of each part's two passes.

    Equal parts, such as the blocks of a transformer, are timed once.
    """
    passes_of = {
        each.work: _both_passes(each, rows, loss_of if each.part.is_last else None)
        for each in parts
    }
    for both, given in passes_of.values():  # compiles
        both(*given)
    # In rounds, because a machine is sometimes slower for all parts.
    rounds = [{each: _timed(*call) for each, call in passes_of.items()} for _ in range(_ROUNDS)]
    return [min(seconds[each.work] for seconds in rounds) for each in parts]


def _timed(both: Callable[..., Any], given: Sequence[Any]) -> float:
    start = time.perf_counter()
    both(*given)
    return time.perf_counter() - start


def _both_passes(
    computed: _Computed, rows: int, loss_of: LossOfOutputs | None
) -> tuple[Any, tuple[Any, ...]]:
    """Return the compiled function of both passes of a part, and its arguments."""
    part, given, made = computed
    module, count = part.module, len(part.received)
    floats = [i for i, t in enumerate(made) if t.dtype.is_floating]

    @keras_compat.compiled
    def both(given: list[tf.Tensor], gradients: list[tf.Tensor] | None) -> list[tf.Tensor]:
        received = [x for x in given[:count] if x.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():  # discards state updates
            tape.watch(received)
            # With the trace, layers compute as in the stages.
            trace = keras_compat.bare_trace(rows, fused=keras_compat.is_fused(module))
            with keras_compat.tracing(trace):
                outputs = tf.nest.flatten(module(one_or_list(given), training=True))
                if loss_of is None:
                    outputs = [outputs[i] for i in floats]
                else:
                    outputs = [loss_of([[*given, *outputs][i] for i in part.sources])]
        values = [variable.value for variable in module.trainable_variables]
        sources = [*values, *received] if outputs else []  # there may be only integers
        found = tape.gradient(outputs, sources, output_gradients=gradients)
        return [*outputs, *(tf.convert_to_tensor(g) for g in found if g is not None)]

    ends = [_noise(made[i].shape, made[i].dtype) for i in floats] if loss_of is None else None
    return both, (given, ends)


def _example(tensor: Any, rows: int) -> tf.Tensor:
    shape = [rows, *(size or 1 for size in tensor.shape[1:])]
    if tf.as_dtype(tensor.dtype).is_floating:
        return _noise(shape, tensor.dtype)
    return tf.zeros(shape, tensor.dtype)


def _noise(shape: Any, dtype: Any) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed=[0, 0], dtype=dtype)


# Segments of stages under `recompute`: memory holds the activations of a single segment.


def segments_of(
    graph: LayerGraph, positions: Sequence[int], *, kept: Sequence[int]
) -> list[list[ModelPart]]:
    """Return the segments of each stage that need the least memory.

    A stage holds the inputs of its segments for `kept` micro-batches, and the outputs of a
    segment's layers.
    """
    stages = zip(runs(positions, len(graph.nodes)), kept, strict=True)
    inner = [_inner(graph, run, most) for run, most in stages]
    parts = iter(graph.divided(sorted([*positions, *itertools.chain(*inner)])))
    return [list(itertools.islice(parts, len(cuts) + 1)) for cuts in inner]


def _inner(graph: LayerGraph, run: slice, kept: int) -> list[int]:
    last = run.stop - 1
    places = [
        place
        for place in graph.places()
        if run.start <= place.position < last and place.num_tensors <= _MOST_TENSORS
    ]
    ends = [run.start, *(place.position + 1 for place in places), run.stop]
    made = [made_bytes(graph.nodes[low:high]) for low, high in itertools.pairwise(ends)]
    crossing = [place.example_bytes for place in places]
    found = []
    for count in range(1, min(_MOST_SEGMENTS, len(made)) + 1):
        cut = balanced(made, crossing, stages=count)
        largest = max(sum(made[run]) for run in runs(cut, len(made)))
        held = kept * sum(crossing[i] for i in cut) // 2  # the bytes count both directions
        found.append((largest + held, cut))
    return [places[i].position for i in min(found)[1]]
