"""Step programs and the interface of engines.

A `StepProgram` is a step function over a data set. `run_replica` computes one replica's part of one
step, and is traced once. An `Engine` runs step blocks of a program under one kind of strategy.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf
from keras.src.models.model import Trainer
from tensorflow.python.distribute import values_util

from tfdist.errors import UsageError, require
from tfdist.kinds import load
from tfdist.strategy import Job
from tfdist.training import keras_compat
from tfdist.training.feed import Feed, Part

if TYPE_CHECKING:
    from tfdist.ps.keras_compat import UpdateCounts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProgram:
    """Step function over a data set.

    Attributes:
      function: step function, called in replica context with one replica's batch.
      feed: source of the batches.
      seed: seed of every random draw in the step.
      training: True to reduce gradients, and to weight losses by the batch fraction.
      fused: True to use fused kernels in layers (see `keras_compat.kernels`).
      keras_metrics: Keras metrics that `function` updates.
      keep_logs: True to return the last step's result of `function`, a dict of scalars.
      exact: True to reject operations that draw random numbers without the run's seed.
      max_staleness: under ps, maximum number of updates by others between a step's read and write.
      observers: observers that record in graph the examples of each step (default: none).
      batch_axes: losses of the step that have a batch axis.
      metric_logs: logs of `function` that are computed from metrics, found during the trace.
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
        """Keras variables that must not change on a replica with an empty batch fraction."""
        return [variable for metric in self.keras_metrics for variable in metric.variables]


class StepObserver(Protocol):
    """Records the examples of each step in the compiled step, and receives each block's records."""

    def rows(self, steps: tf.Tensor) -> list[tf.TensorArray]:
        """Return arrays with room for `steps` rows. In graph, before the loop."""

    def noted(self, rows: list[Any], at: tf.Tensor, parts: Sequence[Part]) -> list[Any]:
        """Return `rows` with this task's replica parts recorded at row `at`. In graph."""

    def write(
        self, first: int, last: int, rows: list[Any], *, worker: int = -1, begun: int = 1
    ) -> None:
        """Store the stacked rows of the steps ``[first, last)``.

        Under ps, `worker` ran these steps. `begun` counts how often workers started them.
        """


class RunObserver(keras.callbacks.Callback, abc.ABC):
    """Callback of `fit` that observes every step of the run."""

    @abc.abstractmethod
    def observe(self, program: StepProgram, job: Job) -> StepObserver:
        """Return the observer of the program's steps. A collective."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """State of a training loop before a block, for a task that joins.

    Attributes:
      loop: JSON values of the loop.
      arrays: variables and other arrays by name.
    """

    loop: dict[str, Any]
    arrays: dict[str, Any]


class Engine(Protocol):
    """Runs step blocks of a program. Every training task makes the same calls.

    This is the whole interface between a kind of strategy and the loop, evaluation and `StepLoop`.
    `tfdist.kinds` names the class of each kind. An engine may keep state outside the
    model's variables. It then writes the state to these variables when a method requests it. The
    defaults suit an engine that keeps no state and returns only after all steps are done.
    """

    def __init__(self, job: Job) -> None:
        """Make the engine of a job, in each training task."""

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``. Return the last step's logs if the program keeps them.

        Returns after all steps are done. If `goes_on` is true, the next block follows directly,
        and some steps may still be running on return.
        """

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for running steps, and return the last step's logs like `run`."""
        return {}

    def close(self) -> None:
        """Drop dispatched steps that have not started, and wait for the others to end.

        Called at the end of `fit`, also after an error: later the model must not change.
        """

    def begin(self, program: StepProgram) -> LoopState | None:
        """Begin a training loop. Return the state of the loop that this task joins, else `None`."""
        return None

    @property
    def joining(self) -> int | None:
        """In the chief of an elastic job, the task that waits to join the loop."""
        return None

    def admit(self, task: int, state: Callable[[], LoopState]) -> None:
        """Let a task join the loop, which then calls `state`."""

    def go_on(self) -> None:
        """Take part in the operations of the loop that this task has joined."""

    def say_replaceable(self, is_replaceable: bool) -> None:
        """Tell the launcher whether another task can replace the chief."""

    @property
    def steps_under_way(self) -> int:
        """Number of steps from `run` that are still running."""
        return 0

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs as a nest of arrays ``[examples of the step, ...]``.

        Every task yields all outputs, in the order of the examples.
        """

    def reset_metrics(self) -> None:
        """Reset the engine's own metric state to zero."""

    def publish_metrics(self, program: StepProgram) -> None:
        """Write the engine's own metric state to `program.metrics`."""

    def publish_state(self, program: StepProgram) -> None:
        """Write all of the engine's own state, with metrics, to the model's variables.

        Called before a checkpoint, and at the end of an epoch, when callbacks may read weights.
        """

    def take_state(self, program: StepProgram) -> None:
        """Load the engine's own state from the model's restored variables."""

    @staticmethod
    def creating_slots(optimizer: Any, job: Job) -> AbstractContextManager[None]:
        """Return a context in which the optimizer creates its variables."""
        return nullcontext()

    @staticmethod
    def is_of_scope(variable: Any, job: Job) -> bool:
        """Return whether a variable was created in the strategy's scope."""
        return bool(job.strategy.extended.variable_created_in_scope(variable))

    @staticmethod
    def log_built(model: keras.Model, job: Job) -> None:
        """Log the placement of a model whose variables were created just now."""

    @staticmethod
    def lost_task(error: tf.errors.OpError, job: Job) -> str:
        """Return the task whose loss caused the error, "" for another cause."""
        return ""

    @staticmethod
    def worker_steps(job: Job) -> dict[str, int]:
        """Return the steps of each worker, if workers run their own steps."""
        return {}

    @staticmethod
    def summary(model: keras.Model, job: Job) -> dict[str, Any]:
        """Return JSON values that only this kind adds to the summary of a run."""
        return {}


def engine_class(job: Job) -> type[Engine]:
    """Return the engine of the job's kind. Only a job of this kind imports the engine's package."""
    found: type[Engine] = load(job.kind.engine)
    return found


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
    """Return True if the model or its class overrides Keras' method."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(Trainer, name)


def plain(function: Callable[[Any], Any], job: Job, *, where: str) -> Callable[[Any], Any]:
    """Return a step function. Reject a `tf.function` if several replicas or ps run it.

    Values that a replica records during a step, such as scaled logs, would stay inside it.
    """
    if job.is_replicated and isinstance(function, tf.types.experimental.PolymorphicFunction):
        raise UsageError(
            where,
            f"strategy {job.kind} cannot run a step that is a tf.function",
            fix="remove @tf.function (tfdist compiles the step)",
            code="unsupported",
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
    instead_of_update: Callable[[Any, list[Any], Any], Callable[[], Any]] | None = None,
) -> Any:
    """Run one step on one replica, in its context, and return the step function's result.

    Logs are returned as this replica's term of a sum over the replicas.
    `local` maps the `id` of a variable to a value that the step keeps private: reads and writes of
    the variable use that value. `at_hook` is called with the gradients at the gradient hook.
    `counts` holds the optimizers' update counts. `instead_of_update` gets each optimizer with its
    weighted gradients and variables, and the step does not apply them.
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
        instead_of_update=instead_of_update,
        batch_axes=program.batch_axes,
        sources={} if program.keep_logs and (num_replicas > 1 or local is not None) else None,
    )
    guarded = (
        [v.value for v in program.metrics] if program.feed.may_be_empty and local is None else []
    )
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
    """Return a step function's logs by name."""
    require(
        isinstance(outputs, dict) and outputs,
        "step",
        f"the step returned a {type(outputs).__name__} without named scalars",
        fix='return a dict, such as {"loss": loss}',
        code="bad-value",
    )
    return flat_logs(outputs)


def find_batch_axes(program: StepProgram, job: Job) -> None:
    """Trace the step with two batch sizes, without running it, and record its losses' shapes."""
    size = program.feed.plan.global_batch_size
    program.batch_axes.shapes = [
        trace_of(program.function, job, program.feed, rows=rows).losses for rows in (size, 2 * size)
    ]


def trace_of(
    function: Callable[[Any], Any], job: Job, feed: Feed, *, rows: int
) -> keras_compat.StepTrace:
    """Trace a step with `rows` rows on each replica, as if it were the only replica.

    Does not run the step or update variables. Returns the first replica's trace, up to an error.
    """
    batch_spec = feed.batch_spec
    if not all(s is None or s.shape[1:].is_fully_defined() for s in tf.nest.flatten(batch_spec)):
        batch_spec = tf.nest.map_structure(
            lambda part: None if part is None else tf.type_spec_from_value(part), feed.first_batch()
        )
    traces: dict[int, keras_compat.StepTrace] = {}

    def run(batch: Any) -> None:
        batch = tf.nest.map_structure(_of_constant_shape, batch)

        def in_replica() -> None:
            trace = keras_compat.bare_trace(rows, updates=False)
            traces[values_util.get_current_replica_id_as_int() or 0] = trace
            with contextlib.suppress(Exception), keras_compat.tracing(trace):
                function(batch)

        with inlined_functions():
            job.strategy.run(in_replica)

    batch = tf.nest.map_structure(
        lambda spec: None if spec is None else resized(spec, rows), batch_spec
    )
    keras_compat.compiled(run).get_concrete_function(batch)
    return traces[0]


@contextlib.contextmanager
def inlined_functions() -> Iterator[None]:
    """Run the bodies of the program's tf.functions in the trace.

    The step would use a function again that was compiled in a trace without updates.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def resized(spec: Any, rows: int) -> Any:
    """Return the spec of a batch part with `rows` rows."""
    shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _of_constant_shape(part: Any) -> Any:
    """Return a part with a static shape, also for a sparse tensor."""
    if isinstance(part, tf.SparseTensor) and part.shape.is_fully_defined():
        return tf.SparseTensor(part.indices, part.values, part.shape.as_list())
    return part


def as_number(value: tf.Tensor) -> Any:
    """Return a scalar as a float, and another tensor as an array."""
    array = value.numpy()
    return float(array) if array.ndim == 0 else array


def with_metric_logs(logs: dict[str, Any], program: StepProgram, job: Job) -> dict[str, Any]:
    """Return a step's logs, with logs computed from metrics taken over all replicas and steps.

    A collective. Call it after `Engine.publish_metrics`.
    """
    found = program.metric_logs.read(job.strategy)
    return {**logs, **{name: as_number(value) for name, value in found.items()}}


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs with the results of multi-result metrics as entries of their own, as in Keras."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return flat
