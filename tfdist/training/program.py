"""Step program: a step function, its data, and its metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training import keras_compat
from tfdist.training.feed import Part

if TYPE_CHECKING:
    from tfdist.audit.recorder import Recorder
    from tfdist.ps.keras_compat import UpdateCounts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProgram:
    """A step function over a data set.

    Attributes:
      function: called with one replica's batch, in replica context; returns a dict of scalars.
      feed: where batches come from.
      seed: of every random draw in the step.
      training: True where gradients are reduced and losses weighted by the batch fraction.
      metrics: Keras variables that a replica with an empty batch fraction leaves as they were.
      keras_metrics: whose variables these are.
      keep_logs: True to return what `function` returned in the last step.
      exact: True to refuse operations that draw by themselves.
      max_staleness: under ps, steps of others that may come between one's reading and its writing.
      recorder: notes in graph which examples a step consumes; None to leave it out of the graph.
    """

    function: Callable[[Any], Any]
    feed: Any
    seed: int
    training: bool
    metrics: Sequence[Any] = ()
    keras_metrics: Sequence[Any] = ()
    keep_logs: bool = False
    recorder: Recorder | None = None
    exact: bool = False
    max_staleness: int | None = None


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
    trace = keras_compat.StepTrace(
        num_replicas=num_replicas,
        share=share,
        examples=part.count,
        random_key=keras_compat.random_key(program.seed, step=step, replica=replica),
        batch=part.data,
        training=program.training,
        local=local or {},
        at_hook=at_hook,
        counts=counts,
    )
    guarded = [v.value for v in program.metrics] if program.feed.may_be_empty else []
    before = [tf.identity(v) for v in guarded]
    with keras_compat.tracing(trace):
        outputs = program.function(part.data)
    for variable, old in zip(guarded, before, strict=True):
        variable.assign(tf.where(part.count > 0, tf.convert_to_tensor(variable), old))
    if not program.keep_logs:
        return outputs
    return keras_compat.logs_by_fraction(flat_logs(_require_logs(outputs)), trace)


def _require_logs(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, dict) and outputs:
        return outputs
    raise UsageError(
        "step",
        received=f"a {type(outputs).__name__} with nothing in it from a step"
        if isinstance(outputs, dict)
        else f"a {type(outputs).__name__} from a step",
        expected="a dict of scalars by name",
        fix='return {"loss": loss}, for example',
    )


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Put what a metric of many results gave among the others, as Keras does."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return flat
