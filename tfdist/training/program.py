"""Step program: what a step computes on each replica; engine: what runs many of them.

A `StepProgram` is a step function over a data set; `run_replica` is one replica's part of one step,
traced once. An `Engine` runs blocks of a program's steps under one kind of strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from tensorflow.python.distribute import values_util

from tfdist.errors import UsageError, require
from tfdist.strategy import Job
from tfdist.training import keras_compat
from tfdist.training.feed import Feed, Part

if TYPE_CHECKING:
    from tfdist.ps.keras_compat import UpdateCounts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProgram:
    """Step function over a data set.

    Attributes:
      function: called with one replica's batch, in replica context; returns a dict of scalars.
      feed: where batches come from.
      seed: of every random draw in the step.
      training: True where gradients are reduced and losses weighted by the batch fraction.
      fused: True where layers take fused kernels; see `keras_compat.kernels`.
      keras_metrics: which `function` updates.
      keep_logs: True to return what `function` returned in the last step.
      exact: True to refuse operations that draw by themselves.
      max_staleness: under ps, steps of others that may come between one's reading and its writing.
      observers: note in graph which examples a step consumes; none by default.
      batch_axes: which losses of the step have an axis of the batch.
      metric_logs: logs of `function` that are computed from metrics, found when it is traced.
    """

    function: Callable[[Any], Any]
    feed: Feed
    seed: int | tf.Variable
    training: bool
    fused: bool = False
    keras_metrics: Sequence[Any] = ()
    keep_logs: bool = False
    observers: Sequence[StepObserver] = ()
    exact: bool = False
    max_staleness: int | None = None
    batch_axes: keras_compat.BatchAxes = dataclasses.field(default_factory=keras_compat.BatchAxes)
    metric_logs: keras_compat.MetricLogs = dataclasses.field(
        default_factory=keras_compat.MetricLogs
    )

    @property
    def metrics(self) -> list[Any]:
        """Keras variables that a replica with an empty batch fraction leaves as they were."""
        return [variable for metric in self.keras_metrics for variable in metric.variables]


class StepObserver(Protocol):
    """Notes in the compiled step which examples it consumes, and gets the notes of each block."""

    def rows(self, steps: tf.Tensor) -> list[tf.TensorArray]:
        """Return arrays with room for a row of each of `steps` steps; in graph, before the loop."""

    def noted(self, rows: list[Any], at: tf.Tensor, parts: Sequence[Part]) -> list[Any]:
        """Return `rows` with the parts of this task's replicas noted at row `at`; in graph."""

    def write(
        self, first: int, last: int, rows: list[Any], *, worker: int = -1, begun: int = 1
    ) -> None:
        """Take the stacked rows of the steps ``[first, last)``.

        Under ps `worker` ran them, and some worker began them `begun` times.
        """


class RunObserver(keras.callbacks.Callback):
    """Callback of `fit` that observes every step of the run."""

    def observe(self, program: StepProgram, job: Job) -> StepObserver:
        """Return the observer of the program's steps. A collective: every task calls it alike."""
        raise NotImplementedError


class Engine(Protocol):
    """Runs blocks of steps of a program. Every training task calls it alike.

    All that the loop, evaluation and `StepLoop` know of a strategy: one that runs the model in
    stages, or keeps the optimizer's state in shards, is one more class with these methods and a
    line in `engines.engine_for`. What an engine keeps elsewhere than in the model's variables it
    puts there when it is asked to, before anybody reads them. What stands here is right for one
    that keeps nothing and leaves no step under way.
    """

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``; return the last step's logs if the program keeps them.

        Returns once every step is done, or where the next block `goes_on` from here before anybody
        looks, maybe with some steps under way.
        """

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for what `run` has left under way; return the last step's logs, as `run` does."""
        return {}

    def close(self) -> None:
        """Forget what `run` has dispatched and nobody has begun; wait until the rest has ended.

        Where a training ends with an error: nothing changes the model after it.
        """
        return

    @property
    def steps_under_way(self) -> int:
        """Number of steps that `run` has left under way."""
        return 0

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs as a nest of arrays ``[examples of the step, ...]``.

        Every task yields the whole of it, in the order of the examples.
        """

    def reset_metrics(self) -> None:
        """Set to zero what the engine itself keeps of the metrics."""
        return

    def publish_metrics(self, program: StepProgram) -> None:
        """Put what the engine itself keeps of the metrics into `program.metrics`."""
        return

    def publish_state(self, program: StepProgram) -> None:
        """Put all that the engine itself keeps, metrics too, into the variables of the model.

        Before a checkpoint, and at an epoch's end, where callbacks may look at weights.
        """
        return

    def take_state(self, program: StepProgram) -> None:
        """Take over what was restored into the variables of the model, to go on from there."""
        return


def program_of(
    model: keras.Model,
    job: Job,
    method: str,
    feed: Feed,
    *,
    seed: int | tf.Variable,
    exact: bool = False,
    max_staleness: int | None = None,
) -> StepProgram:
    """Return the program of a model's ``train_step``, ``test_step`` or ``predict_step``."""
    own = any(is_own(model, name) for name in (method, "compute_metrics"))
    return StepProgram(
        function=plain(getattr(model, method), job, where=method),
        feed=feed,
        seed=seed,
        training=method == "train_step",
        fused=method == "train_step" and keras_compat.is_fused(model),
        keras_metrics=() if method == "predict_step" else tuple(model.metrics),
        keep_logs=own and method != "predict_step",
        exact=exact,
        max_staleness=max_staleness,
    )


def is_own(model: keras.Model, name: str) -> bool:
    """Return True where a method is of the model's class or set on the model, not Keras' own."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(TensorFlowTrainer, name)


def plain(function: Callable[[Any], Any], job: Job, *, where: str) -> Callable[[Any], Any]:
    """Return a step function; raise UsageError for a `tf.function` where it would be wrong.

    What a replica notes of its step, such as which of its logs are scaled, would stay inside.
    """
    several = job.num_replicas > 1 or job.kind == "ps"
    if several and isinstance(function, tf.types.experimental.PolymorphicFunction):
        raise UsageError(
            where,
            received=f"a tf.function, under strategy {job.kind}",
            expected="a plain method or function, which is compiled with the steps around it",
            fix="leave @tf.function out",
            code="compiled-step",
        )
    return function


def run_replica(
    program: StepProgram,
    part: Part,
    *,
    step: tf.Tensor,
    replica: Any,
    num_replicas: int,
    local: dict[int, tf.Tensor] | None = None,
    at_hook: Callable[[Sequence[Any]], None] | None = None,
    counts: UpdateCounts | None = None,
) -> Any:
    """Run one step on one replica, in its context; return what the step function returned.

    Logs are returned as this replica's part of a sum over the replicas.
    `local` holds the values of variables, by `id`, that the step keeps to itself: reads and writes
    of them go there. `at_hook` is called with the gradients where they enter an optimizer. `counts`
    is what optimizers have for their counts of updates.
    """
    share = part.share
    if program.feed.counts_fractions and num_replicas > 1:
        count = tf.cast(part.count, tf.float32)
        share = count / keras_compat.sum_over_replicas([count])[0]
    key_of = partial(keras_compat.random_key, program.seed, step=step)
    trace = keras_compat.StepTrace(
        num_replicas=num_replicas,
        share=share,
        examples=part.count,
        random_key=key_of(replica=replica),
        update_key=key_of(replica=0) if num_replicas > 1 else None,
        batch=part.data,
        fused=program.fused,
        local=local or {},
        at_hook=at_hook,
        counts=counts,
        batch_axes=program.batch_axes,
        sources={} if program.keep_logs and (num_replicas > 1 or local is not None) else None,
    )
    guarded = [v.value for v in program.metrics] if program.feed.may_be_empty else []
    before = [tf.identity(v) for v in guarded]
    with keras_compat.tracing(trace):
        outputs = program.function(part.data)
        if program.keep_logs:
            outputs = _logs_of(outputs)
            program.metric_logs.note(outputs, trace)
    for variable, old in zip(guarded, before, strict=True):
        variable.assign(tf.where(part.count > 0, tf.convert_to_tensor(variable), old))
    return keras_compat.logs_by_fraction(outputs, trace) if program.keep_logs else outputs


def _logs_of(outputs: Any) -> dict[str, Any]:
    """Return the logs that a step function returned, by name."""
    require(
        isinstance(outputs, dict) and outputs,
        "step",
        received=f"a {type(outputs).__name__} from a step",
        expected="a dict of one or more scalars by name",
        fix='return {"loss": loss}, for example',
        code="no-logs",
    )
    return flat_logs(outputs)


def find_batch_axes(program: StepProgram, job: Job) -> None:
    """Trace the step with two batch sizes, and note the shapes of its losses. Computes nothing."""
    feed, size = program.feed, program.feed.plan.global_batch_size
    spec = feed.batch_spec
    if not all(s is None or s.shape[1:].is_fully_defined() for s in tf.nest.flatten(spec)):
        spec = tf.nest.map_structure(
            lambda part: None if part is None else tf.type_spec_from_value(part),
            feed.first_batch(),
        )
    program.batch_axes.shapes = [
        trace_step(program.function, job, spec, rows=rows, updates=False)[0].losses
        for rows in (size, 2 * size)
    ]


def trace_step(
    function: Callable[[Any], Any], job: Job, batch_spec: Any, *, rows: int, **options: Any
) -> tuple[keras_compat.StepTrace, Exception | None]:
    """Trace a step on each replica, with so many rows for each, as if it were the only one.

    Returns the trace of the first replica, and what the step raised there. Computes nothing.
    `options` are those of the `StepTrace`.
    """
    traces: dict[int, tuple[keras_compat.StepTrace, Exception | None]] = {}

    def run(batch: Any) -> None:
        batch = tf.nest.map_structure(_of_constant_shape, batch)

        def in_replica() -> None:
            trace = keras_compat.StepTrace(
                num_replicas=1,
                share=1.0,
                examples=rows,
                random_key=tf.zeros([2], tf.int32),
                **options,
            )
            error = None
            try:
                with keras_compat.tracing(trace):
                    function(batch)
            except Exception as raised:
                error = raised
            traces[values_util.get_current_replica_id_as_int() or 0] = trace, error

        job.strategy.run(in_replica)

    batch = tf.nest.map_structure(
        lambda spec: None if spec is None else _resized(spec, rows), batch_spec
    )
    keras_compat.compiled(run).get_concrete_function(batch)
    return traces[0]


def _resized(spec: Any, rows: int) -> Any:
    """Return the spec of a batch part with so many rows."""
    shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _of_constant_shape(part: Any) -> Any:
    """Return a part whose shape TensorFlow follows through the graph, if it is sparse too."""
    if isinstance(part, tf.SparseTensor) and part.shape.is_fully_defined():
        return tf.SparseTensor(part.indices, part.values, part.shape.as_list())
    return part


def as_number(value: tf.Tensor) -> Any:
    """Return a scalar as a float, and another tensor as an array."""
    array = value.numpy()
    return float(array) if array.ndim == 0 else array


def with_metric_logs(logs: dict[str, Any], program: StepProgram, job: Job) -> dict[str, Any]:
    """Return a step's logs, in which those computed from metrics are over all replicas and steps.

    A collective, after `Engine.publish_metrics`: every task calls it alike.
    """
    found = program.metric_logs.read(job.strategy)
    return {**logs, **{name: as_number(value) for name, value in found.items()}}


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Put what a metric of many results gave among the others, as Keras does."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return flat
