"""Saved state of stopped runs, checks before a run is resumed, and messages."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.model_state import printable, states_of
from tfdist.checkpoint.store import SecondWriter
from tfdist.cluster import JobOptions
from tfdist.data.stream import DRAWING, InputFunctionSource, StreamSource
from tfdist.errors import StartupTimeout, UsageError, named
from tfdist.options import LAUNCHED
from tfdist.strategy import Job, broadcast
from tfdist.training.epochs import EpochPlan

if TYPE_CHECKING:
    from tfdist.training.feed import Feed
    from tfdist.training.loop import RunPlan

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.5


def saved_run(backups: Sequence[BackupAndRestore], job: Job) -> tuple[RunState | None, int]:
    """Return the saved state with the largest step, and the index of its backup. A collective.

    Of several such states, the first backup's state counts. The chief first checks that every
    backup can write. This raises the errors of `BackupAndRestore.prepare`, and StartupTimeout if
    the previous attempt keeps writing.
    """
    if not backups:
        return None, 0
    found: tuple[Any, int] = (None, 0)
    if job.is_chief:
        for backup in backups:
            is_first = job.config is None or job.config.options.attempt == 1
            acquire(backup, job, previous="" if is_first else "the previous attempt")
            backup.close()  # training opens it again, after checks that may reject the run
        states = [backup.saved() for backup in backups]
        steps = [-1 if state is None else state.step for state in states]
        newest = steps.index(max(steps))
        saved = states[newest]
        found = None if saved is None else dataclasses.asdict(saved), newest
    state, newest = broadcast(found)
    return None if state is None else RunState(**state), newest


def acquire(backup: BackupAndRestore, job: Job, *, previous: str) -> None:
    """Acquire the backup's directory. Wait until `previous` releases it, if there is one.

    If a scheduler or the launcher declares a node lost, its tasks may keep running until they have
    saved.
    """
    options = job.config.options if job.config else JobOptions()
    deadline_s = time.monotonic() + options.startup_timeout_s
    is_logged = False
    while True:
        try:
            return backup.prepare()
        except SecondWriter as error:
            if not previous:
                raise
            if time.monotonic() >= deadline_s:
                waited = f"waited {options.startup_timeout_s:g} s for {previous}"
                raise StartupTimeout(f"{waited}: {error}") from error
            if not is_logged:
                _LOG.warning("waiting for %s to exit: %s", previous, error)
            is_logged = True
        time.sleep(_AGAIN_S)


def first_step_and_epoch(plan: RunPlan) -> tuple[int, int]:
    """Return the next step of a run, and its first unfinished epoch."""
    epochs, saved = plan.feed.plan, plan.saved
    first = epochs.step_starts[min(plan.initial_epoch, epochs.num_epochs)]
    if saved is not None:
        first = saved.step
    epoch = epochs.epoch_of(first) if first < epochs.total_steps else epochs.num_epochs
    if logs_before_validation(saved) is not None:
        epoch -= 1
    elif saved is not None and saved.stopped and first > epochs.step_starts[epoch]:
        epoch += 1  # a callback stopped this epoch early, and its end hooks have run
    return first, epoch


def fingerprint(feed: Feed) -> dict[str, Any]:
    """Return the settings that must be equal in all attempts: they set each step's examples."""
    return {
        "global_batch_size": feed.plan.global_batch_size,
        "examples_in_the_data": feed.order.examples,
        "shuffle": feed.order.shuffle,
        "data": type(feed.source).__name__,
        "class_weight": feed.class_weights,
    }


def epoch_at(step: int, plan: EpochPlan) -> dict[str, Any]:
    """Return the epoch of a step. It must stay the same, because callbacks have counted epochs."""
    epoch = plan.epoch_of(step)
    return {"epoch": epoch + 1, "first_example_of_the_epoch": plan.example_starts[epoch]}


def require_resumable(plan: RunPlan, *, job: Job) -> None:
    """Reject a run that cannot be resumed as requested. Every task calls it.

    Raises:
      UsageError: exact=True with a stream or an asynchronous job, or a setting differs between the
        saved run and this one. A run may become longer if its examples so far are the same.
    """
    require_exact(plan.backups, plan.feed, job=job)
    saved, epochs = plan.saved, plan.feed.plan
    if saved is None:
        return
    so_far = {"examples_so_far": epochs.examples_before(saved.step), **epoch_at(saved.step, epochs)}
    now = {**fingerprint(plan.feed), "seed": plan.seed, **so_far}
    before = {"class_weight": now["class_weight"], **saved.fingerprint}  # 0.2 did not save it
    before |= {"seed": saved.seed, "examples_so_far": saved.examples}
    differences = [
        f"{name} {before.get(name)!s:.80} -> {now[name]!s:.80}"
        for name in now
        if before.get(name) != now[name]
    ]
    if differences:
        raise UsageError(
            "BackupAndRestore",
            f"the checkpoint belongs to another run: {printable(', '.join(differences))}",
            fix="use another directory, or start from the saved weights with initial_weights",
            code="another-run",
        )


# Message of a stopped run, and the saved logs of an epoch before its validation.
#
# Validation resets the metrics, so a later checkpoint has lost the training metrics of the epoch.
# The checkpoint therefore keeps the epoch's logs separately. A resumed run repeats the whole
# validation.


RESUMES = "resumes at step %(step)d (epoch %(epoch)d) from %(directory)s"
NOTHING_LEFT = (
    "the run already finished at step %(step)d (checkpoints in %(directory)s). To start a new run, "
    "use another directory"
)
_KEY = "logs_before_validation"


def stop_message(signum: int, *, step: int, saved_step: int | None, has_backup: bool) -> str:
    """Return the line that the chief logs and that `Stopped` has as its message."""
    stopped = f"stopped by {signal.Signals(signum).name} at step {step}"
    if not has_backup:
        return f"{stopped}; no state saved, because fit has no tfdist.BackupAndRestore"
    if saved_step is None:
        return f"{stopped}; no state saved yet"
    if saved_step != step:
        stopped += f", state of step {saved_step} saved"
    else:
        stopped += ", state saved"
    # A launcher prints the command, with the run directory.
    return stopped if LAUNCHED in os.environ else f"{stopped}; run the same command again to resume"


def kept_logs(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry for `RunState.fingerprint` that `logs_before_validation` reads."""
    if logs is None:
        return {}
    return {_KEY: {name: np.asarray(value).tolist() for name, value in logs.items()}}


def logs_before_validation(saved: RunState | None) -> dict[str, Any] | None:
    """Return the logs of an epoch with an interrupted validation, else `None`."""
    logs = None if saved is None else saved.fingerprint.get(_KEY)
    if logs is None:
        return None
    return {n: np.asarray(v) if isinstance(v, list) else v for n, v in logs.items()}


def may_break_off(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Return whether the model's state stays equal to the training state during a validation.

    The state changes if a callback swaps in other weights, because swapping back may change bits.
    The state also changes if stateful layers change from batch to batch.
    """
    swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)
    return not (swaps or states_of(model))


def reason_not_to_save(model: keras.Model, metrics: Mapping[str, Any]) -> str:
    """Return why a state is not saved, based on its epoch's metrics, or "" to save it.

    A `val_loss` that is not finite can be caused by the data, so the weights decide then.
    """
    loss = metrics.get("loss", 0.0)
    if not np.all(np.isfinite(loss)):
        return f"loss is {loss}"
    if np.all(np.isfinite(metrics.get("val_loss", 0.0))):
        return ""
    weights = [np.asarray(weight) for weight in model.get_weights()]
    return "" if all(np.isfinite(w).all() for w in weights) else "a weight is not finite"


# Obstacles to bit-exact resuming, rejected by `BackupAndRestore(exact=True)`.


_OPS_SHOWN = 3


def require_exact(backups: Sequence[BackupAndRestore], feed: Feed, *, job: Job) -> None:
    """Log once that a run resumes by replay, or reject it under exact=True. Every task calls it.

    Raises:
      UsageError: exact=True with a stream, an asynchronous job, or measured pipeline options.
    """
    stream = isinstance(feed.source, StreamSource | InputFunctionSource)
    if any(backup.exact for backup in backups):
        if not job.kind.is_synchronous:
            raise _refused(
                "the steps of strategy ps have no fixed order",
                fix="use strategy single, mirrored, multiworker or pipeline",
            )
        place = job.stages
        if place is not None and (
            place.options.split_size == "auto"
            or (place.count > 1 and place.options.cut in (None, "auto"))
        ):
            raise _refused(
                'cut="auto" and split_size="auto" depend on measured times',
                fix="name the layers of the cut, as the log of another run has them, and pass a "
                "number as split_size",
            )
        if stream:
            raise _refused(
                f"a resumed run can only replay the data ({feed.source.describe()})",
                fix="use data by index (arrays, TFRecord files, TFDS, or a sequence)",
            )
    elif backups and stream and job.is_chief:
        _LOG.info(
            "%s: a resumed run reads the stream again up to its step (replay); its results are "
            "bit-identical only if the stream returns the same batches",
            feed.source.describe(),
        )


def require_deterministic(graph: Any) -> None:
    """Raise UsageError with the operations of a traced step that draw without the run's seed.

    Args:
      graph: `tf.Graph` of a step block, with all functions it calls. Python code inside
        (`tf.py_function`) is not checked.
    """
    graph_def = graph.as_graph_def(add_shapes=False)
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    found = sorted({f"{n.op} ({n.name})" for body in bodies for n in body if n.op in DRAWING})
    if found:
        raise _refused(
            f"the step draws without a seed of the run: {named(found, most=_OPS_SHOWN)}",
            fix="draw in Keras' layers, or with a keras.random.SeedGenerator",
        )


def _refused(problem: str, *, fix: str) -> UsageError:
    return UsageError(
        "BackupAndRestore(exact=True)",
        problem,
        fix=f"{fix}, or leave out exact=True (results may then differ after a resume)",
        code="not-exact",
    )
