"""Engine of elastic jobs: a step is a sum over a fixed number of shards of the batch.

A step has two compiled functions. The first computes a shard's part of the step and changes no
variable: gradients, statistics, metric totals and logs. The second one updates the variables from
the sums over all shards. Between them, the members add the parts in one order, a binary tree over
the shards. The sums therefore do not depend on the member that computed a shard.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.data.stream import DRAWING
from tfdist.elastic.mesh import Compute, Mesh
from tfdist.elastic.shards import ALIGNMENT, Array, tree_sum
from tfdist.errors import named, require
from tfdist.strategy import Job
from tfdist.strategy.devices import threads_of_an_operation
from tfdist.strategy.group import naming_lost_peer
from tfdist.training.engines import SynchronousEngine, joined, without_substitute
from tfdist.training.feed import BatchFeed, Feed, Part
from tfdist.training.keras_compat import (
    StepTrace,
    adding_in_order,
    compiled,
    inline,
    random_key,
    tracing,
)
from tfdist.training.keras_compat.metrics import require_sums
from tfdist.training.keras_compat.reduction import no_sum_in_a_step, summed_rows
from tfdist.training.program import (
    LoopState,
    StepProgram,
    as_number,
    find_batch_axes,
    flat_logs,
    run_replica,
)
from tfdist.training.resume import require_deterministic
from tfdist.training.task_agreement import digest_is_due

_LARGE = 1 << 14
"""Elements of an array that travels alone."""


class ElasticEngine(SynchronousEngine):
    """Runs each step as a sum over the shards of its batch."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._programs: dict[StepProgram, _Shards] = {}
        self._mesh = job.ring if isinstance(job.ring, Mesh) else None

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``. A collective: every task makes the same call."""
        shards = self._programs.get(program)
        if shards is None:
            shards = self._programs[program] = _Shards(program, self._job)
        logs: dict[str, float] = {}
        numbers = tf.unstack(tf.range(first, last, dtype=tf.int64))  # constants cost 0.1 ms
        for step, number in enumerate(numbers, first):
            batches = _Batches(program, self._job, step, number)
            totals = self._total(partial(shards.part, batches))
            if shards.num_sparse:
                totals += self._joined_rows(partial(shards.rows, batches))
            if not shards.is_traced:  # a joining task gets the totals without computing a part
                shards.part(batches, 0)
            logs = shards.update(batches.step, totals)
            del totals  # their memory is used again in the next step
            batches.done()
            self._advance_alike(program, step)
        return logs

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, complete on every task. A collective."""
        shards = self._programs.setdefault(program, _Shards(program, self._job))
        for step in range(first, last):
            batches = _Batches(program, self._job, step)
            parts = self._each(partial(shards.outputs, batches), of="outputs of a step")
            if shards.structure is None:
                shards.outputs(batches, 0)
            batches.done()
            self._advance_alike(program, step)
            whole = [joined(columns) for columns in zip(*parts, strict=True)]
            yield keras.tree.pack_sequence_as(shards.structure, whole)

    def begin(self, program: StepProgram) -> LoopState | None:
        """Begin a training loop. A task that joins compiles its step, and waits for the state."""
        mesh = self._mesh
        if mesh is None or not mesh.begin_loop():
            return None
        shards = self._programs.setdefault(program, _Shards(program, self._job))
        shards.compile()
        with naming_lost_peer(self._job):
            text, *arrays = mesh.join()
        loop = json.loads(text.tobytes())
        return LoopState(loop=loop["loop"], arrays=dict(zip(loop["names"], arrays, strict=True)))

    @property
    def joining(self) -> int | None:
        """Task that waits to join the loop, in the chief."""
        mesh = self._mesh
        return mesh.knocking[0] if mesh is not None and mesh.can_admit and mesh.knocking else None

    def admit(self, task: int, state: Callable[[], LoopState]) -> None:
        """Let a task join the loop."""

        def arrays() -> list[Array]:
            found = state()
            text = json.dumps({"loop": found.loop, "names": list(found.arrays)}).encode()
            return [np.frombuffer(text, np.uint8), *found.arrays.values()]

        assert self._mesh is not None
        with naming_lost_peer(self._job):
            self._mesh.admit(task, arrays)

    def go_on(self) -> None:
        """Take part in the operations of the loop that this task has joined."""
        assert self._mesh is not None
        self._mesh.go_online()

    def say_replaceable(self, is_replaceable: bool) -> None:
        """Tell the launcher whether another task can replace the chief."""
        if self._mesh is not None:
            self._mesh.say_replaceable(is_replaceable)

    def close(self) -> None:
        """End the training loop, which no task can join from now on."""
        if self._mesh is not None:
            if not self._mesh.lost:
                self._mesh.say_replaceable(False)
            self._mesh.end_loop()

    def _advance_alike(self, program: StepProgram, step: int) -> None:
        """Record the progress, and drop digests of batches that other members do not compare.

        A member whose shards have changed reads its data again, which adds such a digest.
        """
        feed = program.feed
        if feed.direct:
            return
        for noted in [s for s in list(feed.digests) if not digest_is_due(s, first=0)]:
            del feed.digests[noted]
        if feed.ends is not None:
            feed.ends[:] = [end for end in feed.ends if end >= step]
        self._advance(program, step, step + 1)

    def _each(self, compute: Compute, *, of: str) -> list[list[Array]]:
        """Return the arrays of each shard."""
        count = self._job.num_replicas
        if self._mesh is None:
            return [list(compute(shard)) for shard in range(count)]
        with phases.waiting_for_all(), naming_lost_peer(self._job):
            return self._mesh.gather_shards(compute, count, of=of)

    def _joined_rows(self, compute: Compute) -> list[Array]:
        """Return the rows of all shards' sparse gradients, in the order of the shards."""
        parts = self._each(compute, of="sparse gradients of a step")
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)]

    def _total(self, compute: Compute) -> list[Array]:
        """Return the sums over all shards of the arrays of `compute`."""
        count, mesh = self._job.num_replicas, self._mesh
        if mesh is None:
            return tree_sum({(s, s + 1): compute(s) for s in range(count)}, 0, count)
        with phases.waiting_for_all(), naming_lost_peer(self._job):
            return mesh.sum_shards(compute, count, of="a step")


class _Batches:
    """This task's parts of a step's batch, by shard. The shards change with the members."""

    _shards_of: ClassVar[weakref.WeakKeyDictionary[Feed, tuple[int, ...]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(
        self, program: StepProgram, job: Job, step: int, number: tf.Tensor | None = None
    ) -> None:
        self._feed, self._job, self._step = program.feed, job, step
        self.step = tf.constant(step, tf.int64) if number is None else number
        self._parts: dict[int, Part] = {}
        self.rows: dict[int, list[Array]] = {}
        """Rows of sparse gradients of each computed shard: values and indices of each."""

    def part(self, shard: int) -> Part | None:
        """Return the part of a shard, or `None` if the compiled step makes it."""
        feed = self._feed
        if feed.direct:
            return None
        if shard not in self._parts:
            own = self._job.replica_ids
            if self._parts or self._shards_of.get(feed, own) != own:
                feed.close()  # its iterator has the parts of other shards
            self._shards_of[feed] = own
            self._parts |= zip(own, feed.iterator(self._step).get_next(), strict=True)
        return self._parts[shard]

    def done(self) -> None:
        """Read on from the next step."""
        if not self._feed.direct:
            self._feed.advanced_to(self._step + 1)


@dataclasses.dataclass(slots=True)
class _Layout:
    """Order of the arrays in a shard's part of a step.

    Attributes:
      optimizer: Optimizer that the step applies, `None` in an evaluation.
      variables: Variables of the gradients, in their order.
      forms: Form of each variable's gradient: "dense", "sparse", or "" for none.
      statistics: Variables that the step writes without an optimizer.
      metrics: Variables of the metrics.
      logs: Names of the logs.
      large: Numbers of the arrays that travel alone.
      small: Numbers of the arrays of each type that travel as one.
      shapes: Shape of each array.
    """

    optimizer: Any = None
    variables: Sequence[Any] = ()
    forms: Sequence[str] = ()
    statistics: Sequence[Any] = ()
    metrics: Sequence[Any] = ()
    logs: Sequence[str] = ()
    large: Sequence[int] = ()
    small: Sequence[Sequence[int]] = ()
    shapes: Sequence[tf.TensorShape] = ()

    def join(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Join the small arrays of each type, because each array costs calls in Python; in graph.

        The dense gradients come first.
        """
        self.shapes = [array.shape for array in arrays]
        small: dict[str, list[int]] = {}
        for number, array in enumerate(arrays):
            if (array.shape.num_elements() or _LARGE) < _LARGE:
                small.setdefault(array.dtype.name, []).append(number)
        self.small = list(small.values())
        self.large = sorted(set(range(len(arrays))).difference(*self.small))
        joined = [tf.concat([tf.reshape(arrays[i], [-1]) for i in g], 0) for g in self.small]
        return [*(arrays[i] for i in self.large), *joined]

    def split(self, joined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the arrays of `join`; in graph."""
        arrays = dict(zip(self.large, joined, strict=False))
        for group, array in zip(self.small, joined[len(self.large) :], strict=True):
            shapes = [self.shapes[i] for i in group]
            parts = tf.split(array, [shape.num_elements() for shape in shapes])
            arrays.update(zip(group, map(tf.reshape, parts, shapes), strict=True))
        return [arrays[i] for i in range(len(arrays))]


class _Shards:
    """The two compiled functions of a program."""

    def __init__(self, program: StepProgram, job: Job) -> None:
        require_sums(program.keras_metrics)
        self._program, self._job = program, job
        self._layout = _Layout()
        self._compute: Any = compiled(self._part)
        self._numbers = [tf.constant(shard, tf.int64) for shard in range(job.num_replicas)]
        self._apply: Callable[..., list[tf.Tensor]] | None = None
        self._predict = compiled(self._outputs)
        self.structure: Any = None
        self.is_traced = False
        model = program.function.__self__  # type: ignore[attr-defined]
        require(
            not hasattr(getattr(model, "optimizer", None), "optimizers"),
            "elastic",
            "the job cannot divide the step of a MultiOptimizer",
            fix="start the job without --elastic",
            code="elastic-step",
        )
        require(
            not program.feed.counts_fractions and not isinstance(program.feed, BatchFeed),
            "elastic",
            "the job cannot divide the batches of a PyDataset, or of a function of "
            "tf.distribute.InputContext",
            fix="pass arrays or a dataset, or start the job without --elastic",
            code="elastic-step",
        )
        self._metric_names = set(flat_logs(model.get_metrics_result()))
        if any(getattr(layer, "synchronized", False) for layer in model._flatten_layers()):
            raise no_sum_in_a_step()

    def part(self, batches: _Batches, shard: int) -> list[Array]:
        """Compute a shard's part of a step. Return the arrays that are added over the shards."""
        given = batches.part(shard)
        arguments = [batches.step, self._numbers[shard]]
        if given is not None:
            arguments.append(given)
        if not self.is_traced:
            self._trace(*arguments)
        found = [_as_numpy(array) for array in self._compute(*arguments)]
        first = len(found) - 2 * self.num_sparse
        batches.rows[shard] = found[first:]
        return found[:first]

    def rows(self, batches: _Batches, shard: int) -> list[Array]:
        """Return the rows of a shard's sparse gradients: values and indices of each."""
        if shard not in batches.rows:
            self.part(batches, shard)
        return batches.rows[shard]

    def _trace(self, *arguments: Any) -> None:
        """Trace the step. Trace it again if the batch axes of its losses are needed."""
        traced = self._compute.get_concrete_function(*arguments)
        program = self._program
        if program.batch_axes.are_wanted:
            find_batch_axes(program, self._job)
            self._compute = compiled(self._part)
            traced = self._compute.get_concrete_function(*arguments)
        if program.exact:
            require_deterministic(traced.graph)
        _require_pure(traced.graph)
        if program.feed.direct:  # the types of its arguments never change
            self._compute = _called(traced)
        self.is_traced = True

    @property
    def num_sparse(self) -> int:
        """Number of sparse gradients of a step."""
        return list(self._layout.forms).count("sparse")

    def outputs(self, batches: _Batches, shard: int) -> list[Array]:
        """Return the outputs of a shard's examples, in the order of `structure`."""
        given = batches.part(shard)
        found = self._predict(batches.step, self._numbers[shard], given)
        return [_as_numpy(array) for array in found]

    def compile(self) -> None:
        """Compile both functions with the first batch. This changes no variable."""
        batches = _Batches(self._program, self._job, 0)
        self._trace_update([*self.part(batches, 0), *self.rows(batches, 0)])

    def _trace_update(self, totals: Sequence[Array]) -> Callable[..., list[tf.Tensor]]:
        """Return the function that updates the variables from sums of these shapes and types."""
        first = len(totals) - 2 * self.num_sparse
        specs = [tf.TensorSpec(array.shape, array.dtype) for array in totals[:first]]
        specs += [tf.TensorSpec([None, *rows.shape[1:]], rows.dtype) for rows in totals[first:]]
        traced = compiled(self._update).get_concrete_function(tf.TensorSpec([], tf.int64), *specs)
        self._apply = _called(traced)
        return self._apply

    def update(self, step: tf.Tensor, totals: Sequence[Array]) -> dict[str, float]:
        """Update the variables from the sums over all shards, and return the step's logs."""
        apply = self._apply or self._trace_update(totals)
        dense = list(self._layout.forms).count("dense")
        first = sum(number < dense for number in self._layout.large)
        values = apply(step, *map(as_tensor, totals[:first]), *map(tf.constant, totals[first:]))
        return {name: as_number(v) for name, v in zip(self._layout.logs, values, strict=True)}

    def _part(
        self, step: tf.Tensor, shard: tf.Tensor, given: Part | None = None
    ) -> list[tf.Tensor]:
        """Compute a shard's part of a step; in graph."""
        program, job = self._program, self._job
        part = program.feed.at(step, shard)[0] if given is None else given
        statistics = _statistics(program)
        local = {id(v): tf.convert_to_tensor(v.value) for v in statistics}
        before = dict(local)
        local |= {id(v): tf.zeros(v.shape, v.dtype) for v in program.metrics}
        layout = _Layout(metrics=list(program.metrics))
        applied: list[tuple[Any, list[Any], Any]] = []
        found: list[Any] = []
        late: list[bool] = []

        def note(*update: Any) -> Callable[[], Any]:
            applied.append(update)
            return lambda: late.append(True)

        def in_replica() -> None:
            found.append(
                run_replica(
                    program,
                    part,
                    step=step,
                    replica=shard,
                    num_replicas=job.num_replicas,
                    local=local,
                    instead_of_update=note,
                )
            )

        job.strategy.run(in_replica)
        arrays: list[tf.Tensor] = []
        sparse: list[tf.IndexedSlices] = []
        if program.training:
            require(
                len(applied) == 1,
                "train_step",
                f"an elastic step applies {len(applied)} updates of optimizers instead of 1",
                fix="apply one optimizer once in train_step, or start the job without --elastic",
                code="elastic-step",
            )
            require(
                not late,
                "train_step",
                "the step uses the weights after their update, which an elastic job does later",
                fix="compute metrics before apply_gradients, or start the job without --elastic",
                code="elastic-step",
            )
            optimizer, grads, variables = applied[0]
            layout.optimizer, layout.variables = optimizer, variables
            layout.forms = [_form(grad) for grad in grads]
            arrays += [grad for grad in grads if isinstance(grad, tf.Tensor)]
            sparse = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
        layout.statistics = [v for v in statistics if local[id(v)] is not before[id(v)]]
        for variable in layout.statistics:
            require(
                tf.as_dtype(variable.dtype).is_floating,
                "model",
                f"the step writes {variable.path} of type {variable.dtype}, which an elastic job "
                "cannot combine",
                fix="count in a float32 weight, or start the job without --elastic",
                code="elastic-step",
            )
            wide = _wide(variable)
            arrays.append(tf.cast(local[id(variable)], wide) * tf.cast(part.share, wide))
        arrays.append(tf.cast(part.share, tf.float64))
        is_real = tf.cast(part.count > 0, tf.float32)
        for variable in layout.metrics:
            value = local[id(variable)]
            arrays.append(value * tf.cast(is_real, value.dtype))
        if program.keep_logs:
            layout.logs = sorted(found[0])
            own = set(layout.logs) - self._metric_names
            require(
                not own,
                "train_step",
                f"the step returns {named(sorted(own))}, which an elastic job cannot compute over "
                "all shards",
                fix="return only results of the model's metrics, under their names",
                code="elastic-step",
            )
            arrays += [found[0][name] for name in layout.logs]
        self._layout = layout
        arrays = layout.join(arrays)
        return arrays + [part for slices in sparse for part in (slices.values, slices.indices)]

    def _outputs(self, step: tf.Tensor, shard: tf.Tensor, given: Part | None) -> list[tf.Tensor]:
        """Compute the outputs of a shard; in graph."""
        program, job = self._program, self._job
        part = program.feed.at(step, shard)[0] if given is None else given
        options: dict[str, Any] = {"step": step, "replica": shard, "num_replicas": job.num_replicas}
        found: list[Any] = []
        job.strategy.run(lambda: found.append(run_replica(program, part, local={}, **options)))
        self.structure = keras.tree.map_structure(lambda _: 0, found[0])
        flat = [tf.convert_to_tensor(rows) for rows in keras.tree.flatten(found[0])]
        return [without_substitute(rows, count=part.count) for rows in flat]

    def _update(self, step: tf.Tensor, *totals: tf.Tensor) -> list[tf.Tensor]:
        """Update the variables, and return the logs; in graph."""
        layout, first = self._layout, len(totals) - 2 * self.num_sparse
        rest, rows = iter(layout.split(totals[:first])), iter(totals[first:])

        def in_replica() -> None:
            if layout.optimizer is None:
                return
            grads: list[Any] = []
            for form, variable in zip(layout.forms, layout.variables, strict=True):
                grads.append(next(rest) if form == "dense" else None)
                if form == "sparse":
                    values, indices = next(rows), next(rows)
                    shape = tf.constant([*variable.shape], tf.int64)
                    grads[-1] = summed_rows(tf.IndexedSlices(values, indices, shape))
            trace = StepTrace(
                num_replicas=self._job.num_replicas,
                share=1.0,
                examples=1,
                random_key=random_key(self._program.seed, step=step, replica=0),
                update_key=random_key(self._program.seed, step=step, replica=0),
                in_hook=True,
            )
            with tracing(trace):
                layout.optimizer.apply(grads, layout.variables)

        self._job.strategy.run(in_replica)
        means = [next(rest) for _ in layout.statistics]
        share = next(rest)  # the sum of rounded shares
        for variable, mean in zip(layout.statistics, means, strict=True):
            exact = mean / share if variable.ndim == 0 else mean
            variable.value.assign(tf.cast(exact, variable.dtype))
        for variable in layout.metrics:
            variable.value.assign_add(next(rest))
        return list(rest)


def _form(gradient: Any) -> str:
    if gradient is None:
        return ""
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _statistics(program: StepProgram) -> list[Any]:
    """Return the variables that a step may write without an optimizer."""
    model = getattr(program.function, "__self__", None)
    metrics = {id(v) for v in program.metrics}
    return [
        v
        for v in (model.non_trainable_variables if model is not None else ())
        if id(v) not in metrics
    ]


def _wide(variable: Any) -> tf.DType:
    """Return the type for the sum of a statistic: float64 for scalars, which may be counts."""
    is_wide = variable.ndim == 0 or variable.dtype == "float64"
    return tf.float64 if is_wide else tf.float32


def _as_numpy(tensor: tf.Tensor) -> Array:
    """Return a tensor's array, without a copy if NumPy knows the type."""
    if tensor.dtype == tf.bfloat16 or tensor.dtype == tf.string:
        return np.asarray(tensor.numpy())
    return np.asarray(memoryview(tensor))


def as_tensor(array: Array) -> tf.Tensor:
    """Return an array's tensor, without a copy if TensorFlow can use the array's memory."""
    is_known = array.dtype.kind in "fiu" and array.flags.writeable
    if is_known and array.ctypes.data % ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def _called(traced: Any) -> Callable[..., Any]:
    """Return the function, inlined if each kernel runs on one thread."""
    if threads_of_an_operation() == 1:
        return inline(traced)

    def call(*tensors: tf.Tensor) -> Any:
        with adding_in_order():
            return traced(*tensors)

    return call


def _require_pure(graph: Any) -> None:
    """Raise UsageError if a shard's computation draws without the run's seed, or writes."""
    graph_def = graph.as_graph_def(add_shapes=False)
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    found = {
        node.op
        for body in bodies
        for node in body
        if node.op in DRAWING or (node.op.startswith("Assign") and node.op.endswith("VariableOp"))
    }
    require(
        not found,
        "step",
        f"an elastic job cannot repeat the operations {named(sorted(found))}",
        fix="draw in Keras' layers, and keep counts in weights of layers",
        code="elastic-step",
    )
