"""Streams of batches: a `tf.data.Dataset`, or a function that makes a dataset for each task.

tfdist reads the first batch for its shape. A resumed run skips earlier steps. A stopped run does
not read to the end. Every task of a job reads the dataset and uses its part of each batch. Three
features of a graph then cause wrong data without an error. `read` returns a changed copy:

- **Caches.** If an iterator is dropped while it fills a cache, TensorFlow cancels the datasets
  below the cache. A cancelled prefetch reports "end of sequence". A failed function drops its
  element. The cache or snapshot then treats the truncated data as complete (see
  docs/upstream/tensorflow-cache-after-prefetch.md). In the copy, `_guarded` prevents this: a
  cancelled read never reaches the end. The user's own iterators use other memory caches.
- **Draws without their own seed**, like `shuffle(n)`. The copy sets their seeds from the run's
  seed. All tasks and all attempts of a run then see the same batches. If a shuffle has
  its own seed, each read starts with the same order. The order of
  `shuffle(n, reshuffle_each_iteration=False)` is the same in all runs and evaluations.
- **Order that depends on timing** (`deterministic=False`, draws in a parallel map). With several
  tasks, the order is made deterministic and a parallel map with draws runs one call at a time.

The user's dataset is unchanged. If its graph cannot be copied, tfdist reads the original.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.none_tensor import NoneTensorSpec

from tfdist.data.source import Nest, Source, Transform
from tfdist.errors import UsageError

_LOG = logging.getLogger(__name__)
_LARGE_BYTES = 2**16
_IGNORE_STATE = 1  # tf.data's ExternalStatePolicy.IGNORE
_SEED_OF_SPLITS = 0
_STRIPPED = "/device::0"  # TensorFlow rejects a `py_function` with this stripped device
_COPIES = itertools.count()
_MOST = 2**31 - 1
_plain = tf.autograph.experimental.do_not_convert
_PYTHON_OPERATIONS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_CACHES = frozenset({"CacheDataset", "CacheDatasetV2", "SnapshotDataset", "SnapshotDatasetV2"})
_PARALLEL_MAPS = frozenset({"ParallelMapDataset", "ParallelMapDatasetV2"})
_PARALLEL_INTERLEAVES = frozenset(f"ParallelInterleaveDatasetV{n}" for n in (2, 3, 4))
_MOST_SEED, _DRAWN = 2**31 - 1, 4096
_ASSIGNING = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
# Position of the first of two seed inputs, and of the generator's state (0: no such input).
_SEEDED_DATASETS = {
    "ShuffleDataset": (2, 0),
    "ShuffleDatasetV3": (2, 4),
    "ShuffleAndRepeatDataset": (2, 0),
    "ShuffleAndRepeatDatasetV2": (2, 5),
    "RandomDataset": (0, 0),
    "RandomDatasetV2": (0, 2),
}
# Operations that draw from a state of the process or of a `tf.random.Generator`. Checkpoints do not
# contain this state. Keras' layers and tfdist's data draw from the run's seed and the step instead.
DRAWING = frozenset(
    (
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
        *("ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2"),
        *("RandomShuffle", "RandomCrop", "Multinomial", "NonDeterministicInts"),
        *("SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
        *("UniformCandidateSampler", "LogUniformCandidateSampler", "AllCandidateSampler"),
        *("LearnedUnigramCandidateSampler", "FixedUnigramCandidateSampler"),
        *("ThreadUnsafeUnigramCandidateSampler", "StatefulRandomBinomial", "StatefulUniform"),
        *("StatefulUniformInt", "StatefulUniformFullInt", "StatefulStandardNormal"),
        *("StatefulStandardNormalV2", "StatefulTruncatedNormal", "RngReadAndSkip", "RngSkip"),
        "Timestamp",
    )
)


class _BatchSource(Source):
    """Base class of streams. `_whole` is the dataset that a job of one task reads."""

    _whole: tf.data.Dataset

    @property
    def num_batches(self) -> int | None:
        """Number of batches in a pass, or `None` if unknown or infinite."""
        return self._cardinality if self._cardinality >= 0 else None

    @property
    def is_endless(self) -> bool:
        """True if the dataset's cardinality is infinite (`repeat()` without a count)."""
        return self._cardinality == tf.data.INFINITE_CARDINALITY

    @functools.cached_property
    def _cardinality(self) -> int:
        with tf.init_scope():  # a feed may call this while it traces a function
            return int(self._whole.cardinality())

    @functools.cached_property
    def element_spec(self) -> Nest:
        """Nest of specs of one example: the specs of a batch without the first axis."""
        return tf.nest.map_structure(_without_batch_axis, self.batched_spec)

    @property
    def batched_spec(self) -> Nest:
        """Specs of a batch, as the dataset defines them."""
        return self._whole.element_spec


class StreamSource(_BatchSource):
    """A `tf.data.Dataset` of batches, shuffled and batched by the user.

    A resumed run reads and skips the batches of earlier steps. The resume is exact if the dataset
    yields the same batches each time. Raises `UsageError` if its elements are not batches.
    """

    kind = "stream, tf.data.Dataset"

    def __init__(self, dataset: tf.data.Dataset, *, transform: Transform | None = None) -> None:
        self._whole = _of_batches(dataset)
        self.transform = transform

    def dataset_for(self, context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Return the dataset. Every task reads the whole dataset and uses its part of a batch."""
        return self._whole


class InputFunctionSource(_BatchSource):
    """A function of `tf.distribute.InputContext` that returns the batches of one task.

    The function selects a task's data. Every training task calls it. To find the shapes, tfdist
    calls it again with an InputContext of one input pipeline.
    """

    def __init__(
        self,
        function: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        *,
        transform: Transform | None = None,
    ) -> None:
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self.kind = f"stream, input function {self._name}"
        self.transform = transform

    def dataset_for(self, context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Return the function's dataset for this context. Raise `UsageError` for other results."""
        dataset = self._function(context or tf.distribute.InputContext())
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                self._name,
                f"the input function returns a {type(dataset).__name__}, not a tf.data.Dataset",
                fix="return a tf.data.Dataset of batches (fit passes an InputContext)",
                code="unsupported-data",
            )
        return dataset

    @functools.cached_property
    def _whole(self) -> tf.data.Dataset:
        with tf.init_scope():
            return _of_batches(self.dataset_for())


def captured_resources(dataset: Any) -> Iterator[tf.Tensor]:
    """Yield the variables and tables that a dataset's functions capture, inputs first."""
    for parent in getattr(dataset, "_inputs", list)():
        yield from captured_resources(parent)
    for wrapper in getattr(dataset, "_functions", list)():
        for tensor in getattr(getattr(wrapper, "function", None), "captured_inputs", ()):
            if tensor.dtype == tf.resource:
                yield tensor


def _of_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    for leaf in tf.nest.flatten(dataset.element_spec):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape.rank == 0:
            raise UsageError(
                "tf.data.Dataset",
                f"the elements {dataset.element_spec} are not batches, because a part is a scalar",
                fix="end the dataset with .batch(global_batch_size)",
                code="unsupported-data",
            )
    return dataset


def _without_batch_axis(spec: Any) -> Any:
    if isinstance(spec, NoneTensorSpec):
        return None
    if isinstance(spec, tf.TensorSpec):
        shape = spec.shape[1:] if spec.shape.rank is not None else spec.shape
        return tf.TensorSpec(shape, spec.dtype)
    return spec


# Reads in parts, from a rewritten copy of the graph.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Options for a read of a dataset.

    Attributes:
      seed: Seed for draws without a seed (default: 0).
      in_step: True if several tasks read the dataset and must see the same batches.
      peek: True for a read of the first batch that must not change caches, snapshots or variables.
    """

    seed: int = 0
    in_step: bool = False
    peek: bool = False


def read(dataset: tf.data.Dataset, reading: Reading) -> tf.data.Dataset:
    """Return a copy of `dataset` that can be read in parts (see the module's docstring).

    Each call restarts the draws of the graph. All copies of a dataset share its memory caches.
    Call this function eagerly.
    """
    graph = _graph_of(dataset)
    if graph is None:
        return dataset
    return _with_its_length(graph.dataset(reading), graph)


def serialized(dataset: tf.data.Dataset, reading: Reading) -> tf.Tensor:
    """Return the graph of `read` as a string, for another process."""
    graph = _graph_of(dataset)
    if graph is not None:
        return tf.constant(graph.rewritten(reading).SerializeToString())
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, strip_device_assignment=True
    )


def python_operation(dataset: tf.data.Dataset) -> str | None:
    """Return the name of an operation of this dataset that runs Python code, or `None`.

    The operation runs only in the process that created it. The result is also `None` if the graph
    cannot be copied.
    """
    graph = _graph_of(dataset)
    return None if graph is None else python_operation_of(graph.definition)


def python_operation_of(graph: Any) -> str | None:
    """Return the name of an operation of a `GraphDef` that runs Python code, or `None`."""
    operations = (node.op for body in _bodies(graph) for node in body.nodes)
    return next((name for name in operations if name in _PYTHON_OPERATIONS), None)


def random_states(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Return the handles of the integer variables that functions of a dataset capture.

    These are the states of `keras.random.SeedGenerator` and `tf.random.Generator`.
    """
    found: dict[int, tf.Tensor] = {}
    for handle in captured_resources(dataset):
        dtype = _dtype_of_variable(handle)
        if dtype is not None and dtype.is_integer:
            found[id(handle)] = handle
    return list(found.values())


class _StreamGraph:
    """Graph of a dataset, with the large tensors, tables and caches that its copies share."""

    def __init__(self, dataset: tf.data.Dataset, definition: Any) -> None:
        self.dataset_of_user = dataset  # keeps its Python functions and tables alive
        self.spec = dataset.element_spec
        self.definition = definition
        self._made: dict[Reading, Callable[[], tf.Tensor]] = {}
        self._shared = _resources(dataset, definition)
        self._caches: dict[str, tf.Tensor] = {}
        self._large = _large_constants(definition)

    def dataset(self, reading: Reading) -> tf.data.Dataset:
        with tf.init_scope(), tf.device("/CPU:0"):
            make = self._made.get(reading)
            if make is None:
                make = self._made[reading] = self._function(
                    self.rewritten(reading), with_variables=not reading.peek
                )
            dataset = tf.data.experimental.from_variant(make(), structure=self.spec)
        dataset._tfdist_owner = self  # a reader keeps functions and caches alive
        return dataset

    def rewritten(self, reading: Reading) -> Any:
        """Return the `GraphDef` for a reading. It is the same in every task of a job."""
        graph = type(self.definition)()
        graph.CopyFrom(self.definition)
        for body in _bodies(graph):
            if reading.peek:
                _leave_out_caches(body)
            else:
                _guard_caches(body, graph.library)
        bodies = _bodies(graph)
        numbers, splits = itertools.count(), itertools.count()
        for body in bodies:
            for node in list(body.nodes):
                if body.depth == 0 and _shuffles_once(node):
                    _seed(node, body, seed=_SEED_OF_SPLITS, numbers=splits)
                else:
                    _seed(node, body, seed=reading.seed, numbers=numbers)
        if reading.in_step:
            drawing = _drawing_functions(graph)
            for body in bodies:
                for node in list(body.nodes):
                    _put_in_order(node, body, drawing=drawing)
        _rename_functions(bodies)
        return graph

    def _function(self, graph: Any, *, with_variables: bool) -> Callable[[], tf.Tensor]:
        """Compile a function that creates a dataset from the graph.

        The function captures large tensors, caches and, with `with_variables`, variables. A peek
        uses copies of the variables, so that it does not advance random generators.
        """
        end = next(node for node in graph.node if node.op == "_Retval")
        output = end.input[0]
        graph.node.remove(end)
        shared = {
            name: handle
            for name, handle in self._shared.items()
            if with_variables or _dtype_of_variable(handle) is None
        }
        given = {**shared, **self._large, **self._own_caches(graph)}
        kept = [node for node in graph.node if f"{node.name}:0" not in given]
        del graph.node[:]
        graph.node.extend(kept)

        for function in graph.library.function:
            context.context().add_function_def(function)
            weakref.finalize(self, _forget_function, function.signature.name)

        @tf.function(autograph=False)
        def make() -> tf.Tensor:
            here = tf.compat.v1.get_default_graph()
            inputs = {name: here.capture(tensor) for name, tensor in given.items()}
            output_name = output if ":" in output else f"{output}:0"
            found = tf.graph_util.import_graph_def(
                graph, input_map=inputs, return_elements=[output_name], name=""
            )
            return found[0]

        return make.get_concrete_function()

    def _own_caches(self, graph: Any) -> dict[str, tf.Tensor]:
        """Connect each memory cache of the graph to a cache of this object."""
        found = {}
        for node in graph.node:
            if node.op == "CacheDatasetV2":
                if node.name not in self._caches:
                    memory, deleter = tf.raw_ops.AnonymousMemoryCache()
                    self._caches[node.name] = memory
                    self._caches[f"{node.name}/deleter"] = deleter
                node.input[2] = f"{node.name}/memory"
                found[f"{node.name}/memory:0"] = self._caches[node.name]
        return found


class _Body:
    """Nodes of the graph or of a function in it.

    `depth` is 0 for the graph and 1 for a function that a dataset in the graph calls. If a
    function of depth 1 creates a dataset, functions of this dataset have depth 2.
    """

    def __init__(self, nodes: Any, *, function: Any = None, depth: int = 0) -> None:
        self.nodes = nodes
        self.function = function
        self.depth = depth
        self.by_name = {node.name: node for node in nodes}

    def producer(self, reference: str) -> Any:
        """Return the node of an input, or `None` if the input is an argument of the function."""
        return self.by_name.get(reference.split(":")[0])

    def add(self, operation: str, *, like: str, output: str = "output") -> tuple[Any, str]:
        """Add a node. Return the node and the name of its output."""
        name = f"{like}/tfdist_{len(self.nodes)}"
        node = self.by_name[name] = self.nodes.add(name=name, op=operation)
        return node, name if self.function is None else f"{name}:{output}:0"

    def constant(self, like: str, value: Any, dtype: tf.DType = tf.int64) -> str:
        """Add a constant and return the name of its output."""
        node, name = self.add("Const", like=like)
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return name

    def draw(self, like: str, seeds: tuple[int, int]) -> str:
        """Add an operation that draws a new seed at each call. Return the name of its output."""
        bounds = (
            self.constant(like, [], tf.int32),
            self.constant(like, 1),
            self.constant(like, _MOST),
        )
        node, name = self.add("RandomUniformInt", like=like)
        node.input.extend(bounds)
        node.attr["T"].type = tf.int32.as_datatype_enum
        node.attr["Tout"].type = tf.int64.as_datatype_enum
        node.attr["seed"].i, node.attr["seed2"].i = seeds
        return name

    def become(self, node: Any, operation: str, inputs: Sequence[str]) -> None:
        """Replace the operation of a node. Keep the attributes that the new operation has."""
        node.op = operation
        node.input[:] = inputs
        known = {attribute.name for attribute in op_def_registry.get(operation).attr}
        for name in set(node.attr) - known:
            del node.attr[name]


def _forget_function(name: str) -> None:
    if context.context().has_function(name):
        context.context().remove_function(name)


def _graph_of(dataset: tf.data.Dataset) -> _StreamGraph | None:
    """Return the graph of a dataset, built at the first call, or `None` if it cannot be copied."""
    if not hasattr(dataset, "_tfdist_graph"):
        found = None
        try:
            with tf.init_scope():
                text = tf.raw_ops.DatasetToGraphV2(
                    input_dataset=dataset._variant_tensor,
                    external_state_policy=_IGNORE_STATE,
                    strip_device_assignment=True,
                )
                definition = tf.compat.v1.GraphDef.FromString(text.numpy())
            for node in (n for body in _bodies(definition) for n in body.nodes):
                if node.device == _STRIPPED:
                    node.device = ""
            found = _StreamGraph(dataset, definition)
        except (tf.errors.OpError, ValueError, NotImplementedError, _NotMatchedError) as error:
            _LOG.info("cannot copy the graph of %s: %s", type(dataset).__name__, error)
        dataset._tfdist_graph = found
    graph: _StreamGraph | None = dataset._tfdist_graph
    return graph


class _NotMatchedError(Exception):
    """Error for a dataset that captures more or fewer resources than its graph contains."""


def _with_its_length(dataset: tf.data.Dataset, graph: _StreamGraph) -> tf.data.Dataset:
    """Make a read fail if it ends before the dataset's cardinality, as with a truncated cache."""
    count = int(graph.dataset_of_user.cardinality())
    skips = any(node.op == "IgnoreErrorsDataset" for node in graph.definition.node)
    if count < 0 or skips:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def _bodies(graph: Any) -> list[_Body]:
    """Return the graph and its functions in the order of first use, the same in all tasks."""
    functions = {function.signature.name: function for function in graph.library.function}
    bodies = [_Body(graph.node)]
    seen: set[str] = set()
    for body in bodies:  # the loop appends to the list
        for node in body.nodes:
            depth = body.depth + ("Dataset" in node.op)
            for name in _called(node):
                if name in functions and name not in seen:
                    seen.add(name)
                    function = functions[name]
                    bodies.append(_Body(function.node_def, function=function, depth=depth))
    return bodies


def _called(node: Any) -> Iterator[str]:
    yield node.op  # a call by name
    for key in sorted(node.attr):
        value = node.attr[key]
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def _rename_functions(bodies: Sequence[_Body]) -> None:
    """Rename the functions: for known names, TensorFlow would use the functions it already has."""
    number = next(_COPIES)
    names = {
        body.function.signature.name: f"{body.function.signature.name}_tfdist_{number}"
        for body in bodies
        if body.function is not None
    }
    for body in bodies:
        if body.function is not None:
            body.function.signature.name = names[body.function.signature.name]
        for node in body.nodes:
            node.op = names.get(node.op, node.op)
            for value in node.attr.values():
                if value.HasField("func"):
                    value.func.name = names.get(value.func.name, value.func.name)
                for function in value.list.func:
                    function.name = names.get(function.name, function.name)


def _leave_out_caches(body: _Body) -> None:
    for node in list(body.nodes):
        if node.op in _CACHES:
            everything = body.constant(node.name, -1)
            body.become(node, "TakeDataset", [node.input[0], everything])


def _guard_caches(body: _Body, library: Any) -> None:
    for cache in [node for node in body.nodes if node.op in _CACHES]:
        types, shapes = cache.attr["output_types"].list, cache.attr["output_shapes"].list
        functions = _guarded(
            tuple(types.type), tuple(shape.SerializeToString() for shape in shapes.shape)
        )
        known = {function.signature.name for function in library.function}
        library.function.extend(f for f in functions if f.signature.name not in known)
        call, name = body.add("PartitionedCall", like=cache.name)
        call.input.append(cache.input[0])
        for key in ("Tin", "Tout"):
            call.attr[key].list.type.append(tf.variant.as_datatype_enum)
        call.attr["f"].func.name = functions[0].signature.name
        cache.input[0] = name


@functools.cache
def _guarded(types: Sequence[int], shapes: Sequence[bytes]) -> Sequence[Any]:
    """Return the definitions of a dataset function and of its own functions, this function first.

    The function appends an empty dataset that calls a function. In a cancelled read this call
    always fails. The cancelled read therefore never reaches the end.
    """
    spec = tuple(
        tf.TensorSpec(TensorShapeProto.FromString(shape), tf.as_dtype(dtype))
        for dtype, shape in zip(types, shapes, strict=True)
    )

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.variant)])
    def guarded(variant: tf.Tensor) -> tf.Tensor:
        dataset = tf.data.experimental.from_variant(variant, structure=spec)
        none = tf.data.Dataset.range(2**62).take_while(_plain(lambda _: tf.constant(False)))
        end = none.flat_map(_plain(lambda _: dataset.take(0)))
        return tf.data.experimental.to_variant(dataset.concatenate(end))

    with tf.init_scope():
        made = guarded.get_concrete_function()
    return made.function_def, *made.graph.as_graph_def().library.function


def _seed(node: Any, body: _Body, *, seed: int, numbers: Iterator[int]) -> None:
    """Set seeds in a node that draws without a seed.

    If a function creates the dataset, each call gets a new seed. Nodes of depth 2 or more are
    unchanged: with fixed seeds they would repeat their draws in each of these datasets.
    """
    if body.depth > 1:
        return
    if node.op in _SEEDED_DATASETS:
        at, generator = _SEEDED_DATASETS[node.op]
        if generator:  # a new generator: the user's keeps its state between reads
            _, name = body.add("DummySeedGenerator", like=node.name, output="handle")
            node.input[generator] = name
        values = [_value_of(body.producer(reference)) for reference in node.input[at : at + 2]]
        if values != [0, 0] and not (body.depth == 0 and _is_of_program(node, values)):
            return
        for i, value in enumerate(_seeds(seed, next(numbers))):
            node.input[at + i] = (
                body.draw(node.name, _seeds(value, next(numbers)))
                if body.depth
                else body.constant(node.name, value)
            )
    elif _draws_without_seed(node):
        node.attr["seed"].i, node.attr["seed2"].i = _seeds(seed, next(numbers))


def _is_of_program(node: Any, seeds: Sequence[int | None]) -> bool:
    """Return whether the seeds come from `tf.random.set_seed`: all fits have the same order."""
    whole, own = seeds
    if whole is None or whole != context.global_seed() or _shuffles_once(node):
        return False
    return own in _drawn_by_tensorflow(whole)


@functools.lru_cache(maxsize=4)
def _drawn_by_tensorflow(seed: int) -> frozenset[int]:
    """Return the first seeds that TensorFlow draws for operations without a seed."""
    numbers = random.Random(seed)
    return frozenset(numbers.randint(0, _MOST_SEED) for _ in range(_DRAWN))


def _shuffles_once(node: Any) -> bool:
    """Return whether a node shuffles in the same order each time (no reshuffle).

    `take` and `skip` may split this order into training and validation data. Runs and evaluations
    have different seeds. With a fixed order, the training and validation data stay disjoint.
    """
    again = "reshuffle_each_iteration"
    return again in node.attr and not node.attr[again].b


def _draws_without_seed(node: Any) -> bool:
    if node.op not in DRAWING:
        return False
    seeds = {"seed", "seed2"}
    takes = seeds <= {attribute.name for attribute in op_def_registry.get(node.op).attr}
    return takes and all(node.attr[name].i == 0 for name in seeds)


def _seeds(seed: int, number: int) -> tuple[int, int]:
    drawn = np.random.SeedSequence((seed, number)).generate_state(2)
    first, second = (int(value >> 1) or 1 for value in drawn)
    return first, second


def _value_of(node: Any) -> int | None:
    if node is None or node.op != "Const":
        return None
    return int(tf.make_ndarray(node.attr["value"].tensor))


def _put_in_order(node: Any, body: _Body, *, drawing: set[str]) -> None:
    """Make the order of a node's elements and draws deterministic."""
    if "deterministic" in node.attr and node.attr["deterministic"].s:
        node.attr["deterministic"].s = b"true"
    if drawing.isdisjoint(_called(node)):
        return
    if node.op in _PARALLEL_MAPS:
        node.input[len(_data_inputs(node)) - 1] = body.constant(node.name, 1)
    elif node.op in _PARALLEL_INTERLEAVES:
        # Inputs: dataset, arguments of the function, cycle length, block length.
        count = 1 + len(node.attr["Targuments"].list.type) + 2
        body.become(node, "InterleaveDataset", node.input[:count])


def _data_inputs(node: Any) -> list[str]:
    return [reference for reference in node.input if not reference.startswith("^")]


def _drawing_functions(graph: Any) -> set[str]:
    """Return the functions that draw from a state, directly or through other functions."""
    functions = {function.signature.name: function for function in graph.library.function}

    @functools.cache
    def draws(name: str) -> bool:
        if name in DRAWING or name in _ASSIGNING:
            return True
        nodes = functions[name].node_def if name in functions else ()
        return any(draws(called) for node in nodes for called in _called(node))

    return {name for name in functions if draws(name)}


def _large_constants(definition: Any) -> dict[str, tf.Tensor]:
    """Return the large tensors of a graph, so that its copies share them."""
    found = {}
    for node in definition.node:
        if node.op != "Const" or node.ByteSize() < _LARGE_BYTES:
            continue
        with tf.init_scope(), tf.device("/CPU:0"):
            found[f"{node.name}:0"] = tf.constant(tf.make_ndarray(node.attr["value"].tensor))
        # The definition keeps its tensors, because ps workers get the whole graph.
    return found


def _resources(dataset: tf.data.Dataset, definition: Any) -> dict[str, tf.Tensor]:
    """Return the variable or table of this process for each resource input of the graph.

    Without this mapping, a reader would use the copies in the serialized graph and miss changes.
    """
    inputs = [
        reference for node in definition.node for reference in _resource_arguments(node, definition)
    ]
    handles = list(captured_resources(dataset))
    if len(inputs) != len(handles):
        raise _NotMatchedError(f"{len(handles)} captured resources, {len(inputs)} in the graph")
    return {
        name if ":" in name else f"{name}:0": handle
        for name, handle in zip(inputs, handles, strict=True)
    }


def _resource_arguments(node: Any, definition: Any) -> Iterator[str]:
    """Yield the inputs of a node that are resource arguments of its functions."""
    arguments = [
        dtype
        for key in sorted(node.attr)
        if key.endswith("arguments")
        for dtype in node.attr[key].list.type
    ]
    if tf.resource.as_datatype_enum not in arguments:
        return
    producers = {other.name: other for other in definition.node}
    for reference in _data_inputs(node):
        producer = producers[reference.split(":")[0]]
        made = {tf.resource.as_datatype_enum} & {
            producer.attr[key].type for key in ("T", "dtype") if key in producer.attr
        }
        if made:
            yield reference


def _dtype_of_variable(handle: tf.Tensor) -> tf.DType | None:
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)
