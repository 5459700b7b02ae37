"""Resuming of stopped runs: their saved state, messages, and compatibility checks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.state import states_of
from tfdist.checkpoint.store import SecondWriter
from tfdist.cluster import JobOptions
from tfdist.data.stream import DRAWING, InputFunctionSource, StreamSource
from tfdist.errors import StartupTimeout, UsageError, named
from tfdist.strategy import Job, broadcast
from tfdist.training.epochs import EpochPlan

if TYPE_CHECKING:
    from tfdist.training.feed import Feed
    from tfdist.training.loop import RunPlan

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.5


def saved_run(backups: Sequence[BackupAndRestore], job: Job) -> RunState | None:
    """Return what the first backup's newest checkpoint says, in every task. A collective.

    Finds out at once, in the chief, whether every backup can write; raises as
    `BackupAndRestore.prepare`, and StartupTimeout where the attempt before goes on writing.
    """
    if not backups:
        return None
    saved = None
    if job.is_chief:
        for backup in backups:
            _acquire(backup, job)
            backup.close()  # until the training begins: what comes before it may be refused
        saved = backups[0].saved()
    state = broadcast(None if saved is None else dataclasses.asdict(saved))
    return None if state is None else RunState(**state)


def _acquire(backup: BackupAndRestore, job: Job) -> None:
    """Take the backup's directory; a later attempt waits until the one before has released it.

    A scheduler that calls a node down starts the job elsewhere, and the tasks there may live on
    for as long as they save.
    """
    options = job.config.options if job.config else JobOptions()
    deadline_s = time.monotonic() + options.startup_timeout_s
    is_logged = False
    while True:
        try:
            return backup.prepare()
        except SecondWriter as error:
            if options.attempt == 1:
                raise
            if time.monotonic() >= deadline_s:
                waited = f"waited {options.startup_timeout_s:g} s for the attempt before"
                raise StartupTimeout(f"{waited}: {error}") from error
            if not is_logged:
                _LOG.warning("waiting for the attempt before to end: %s", error)
            is_logged = True
        time.sleep(_AGAIN_S)


def first_step_and_epoch(plan: RunPlan) -> tuple[int, int]:
    """Return the next step of a run, and the first epoch whose end is still to come."""
    epochs, saved = plan.feed.plan, plan.saved
    first = epochs.step_starts[min(plan.initial_epoch, epochs.num_epochs)]
    if saved is not None:
        first = saved.step
    epoch = epochs.epoch_of(first) if first < epochs.total_steps else epochs.num_epochs
    if logs_before_validation(saved) is not None:
        epoch -= 1
    elif saved is not None and saved.stopped and first > epochs.step_starts[epoch]:
        epoch += 1  # a callback had stopped it in the middle; its hooks have been called
    return first, epoch


def fingerprint(feed: Feed) -> dict[str, Any]:
    """Return what must stay the same in all attempts: which examples a step consumes."""
    return {
        "global_batch_size": feed.plan.global_batch_size,
        "examples_in_the_data": feed.order.examples,
        "shuffle": feed.order.shuffle,
        "data": type(feed.source).__name__,
    }


def epoch_at(step: int, plan: EpochPlan) -> dict[str, Any]:
    """Return which epoch a step belongs to: callbacks and History have counted those before it."""
    epoch = plan.epoch_of(step)
    return {"epoch": epoch + 1, "first_example_of_the_epoch": plan.example_starts[epoch]}


def require_resumable(plan: RunPlan, *, job: Job) -> None:
    """Refuse what cannot be resumed as asked. Every task calls it.

    Raises:
      UsageError: exact=True, and the data are a stream or the job is asynchronous; or what differs
        between the saved run and this one. A run may be made longer: its examples so far must be
        those of the plan.
    """
    require_exact(plan.backups, plan.feed, job=job)
    saved, epochs = plan.saved, plan.feed.plan
    if saved is None:
        return
    before = {**saved.fingerprint, "seed": saved.seed, "examples_so_far": saved.examples}
    so_far = {"examples_so_far": epochs.examples_before(saved.step), **epoch_at(saved.step, epochs)}
    now = {**fingerprint(plan.feed), "seed": plan.seed, **so_far}
    differences = [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in now
        if before.get(name) != now[name]
    ]
    if differences:
        raise UsageError(
            "BackupAndRestore",
            received=f"a checkpoint of another run: {', '.join(differences)}",
            expected="the data, batch size, seed and epochs that it was saved with",
            fix="use another directory, or start from its weights with initial_weights",
            code="another-run",
        )


# Message of a stopped run, and the logs it keeps of an epoch not yet validated.
#
# Validation sets the metrics to zero, so that after it has begun a checkpoint cannot say any more
# how the training of the epoch went. Its logs are kept beside, and a resumed run validates from the
# beginning.


NOTHING_LEFT = (
    "the run had come to its end at step %d, and nothing is left to do: checkpoints in %s; "
    "a new run needs another directory"
)
_KEY = "logs_before_validation"


def stop_message(signum: int, *, step: int, saved_step: int | None, has_backup: bool) -> str:
    """Return the one line that the chief logs and `Stopped` carries."""
    stopped = f"stopped by {signal.Signals(signum).name} at step {step}"
    if not has_backup:
        return f"{stopped}; nothing is saved, as there is no tfdist.BackupAndRestore"
    if saved_step is None:
        return f"{stopped}; there was nothing to save yet"
    if saved_step != step:
        stopped += f", state of step {saved_step} saved"
    else:
        stopped += ", state saved"
    return f"{stopped}; run the same command again to go on"


def kept_logs(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what to put into `RunState.fingerprint` so that `logs_before_validation` finds it."""
    if logs is None:
        return {}
    return {_KEY: {name: np.asarray(value).tolist() for name, value in logs.items()}}


def logs_before_validation(saved: RunState | None) -> dict[str, Any] | None:
    """Return the logs of an epoch whose validation was broken off, None where none was."""
    logs = None if saved is None else saved.fingerprint.get(_KEY)
    if logs is None:
        return None
    return {n: np.asarray(v) if isinstance(v, list) else v for n, v in logs.items()}


def may_break_off(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Return whether the state is that of the training in the middle of a validation.

    One who has put other weights in their place cannot be asked for the very bits back, and
    stateful layers go on from batch to batch.
    """
    swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)
    return not (swaps or states_of(model))


def reason_not_to_save(model: keras.Model, metrics: Mapping[str, Any]) -> str:
    """Return why a state is not worth saving, by the metrics of its epoch; empty where it is.

    Data to validate on may give a loss that is not finite to the best of weights: then these tell.
    """
    loss = metrics.get("loss", 0.0)
    if not np.isfinite(loss):
        return f"the loss is {loss}"
    if np.isfinite(metrics.get("val_loss", 0.0)):
        return ""
    weights = [np.asarray(weight) for weight in model.get_weights()]
    return "" if all(np.isfinite(w).all() for w in weights) else "a weight is not finite"


# Obstacles to bit-exact resuming, refused by `BackupAndRestore(exact=True)`.


_OPS_SHOWN = 3


_CHOICES = "stages.json"


@contextlib.contextmanager
def keeping_choices(plan: RunPlan, *, job: Job) -> Iterator[None]:
    """Have the cut and the like written beside the checkpoints when they are chosen. A collective.

    So a run that is killed before its first checkpoint goes on with the same ones.
    """
    if job.stages is None:
        yield
        return
    chosen = job.stages.chosen
    chosen.counted = any(backup.exact for backup in plan.backups)
    if chosen.counted:
        chosen.cuts.clear()  # an evaluation before may have timed one
    found: dict[str, Any] = {}
    if job.is_chief:
        chosen.files = [backup.store.directory / _CHOICES for backup in plan.backups]
        found = chosen.read()
    chosen.take(broadcast(found), where=_CHOICES)
    if chosen.state() != found:
        chosen.keep()
    try:
        yield
    finally:
        chosen.files = []


def require_exact(backups: Sequence[BackupAndRestore], feed: Feed, *, job: Job) -> None:
    """Log once that a run resumes by replay; under exact=True it is refused. Every task calls it.

    Raises:
      UsageError: exact=True, and the data are a stream or the job is asynchronous.
    """
    stream = isinstance(feed.source, StreamSource | InputFunctionSource)
    if any(backup.exact for backup in backups):
        if job.kind == "ps":
            raise _refused(
                f"strategy {job.kind}",
                expected="strategy single, mirrored, multiworker or pipeline, whose steps have one "
                "order and are searched for draws of their own",
            )
        if job.stages is not None and job.stages.options.split_size == "auto":
            raise _refused(
                'split_size="auto", which goes by measured times',
                expected="a number of examples, or none for the default",
            )
        if stream:
            raise _refused(
                f"{feed.source.describe()}, which a resumed run can only read again",
                expected="data by index: arrays, TFRecord files, TFDS, or a sequence",
            )
    elif backups and stream and job.is_chief:
        _LOG.info(
            "%s: a resumed run reads it again up to its step (replay), which gives the same "
            "bits only where the stream gives the same batches",
            feed.source.describe(),
        )


def require_deterministic(graph: Any) -> None:
    """Raise UsageError that names the operations of a traced step that draw by themselves.

    Args:
      graph: the `tf.Graph` of a block of steps, with all functions it calls. Python code inside
        (`tf.py_function`) is not looked into.
    """
    graph_def = graph.as_graph_def(add_shapes=False)
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    found = sorted({f"{n.op} ({n.name})" for body in bodies for n in body if n.op in DRAWING})
    if found:
        raise _refused(
            f"a step that draws from no seed of the run: {named(found, most=_OPS_SHOWN)}",
            expected="random draws by Keras' layers, or with a keras.random.SeedGenerator",
        )


def _refused(received: str, *, expected: str) -> UsageError:
    return UsageError(
        "BackupAndRestore(exact=True)",
        received=received,
        expected=expected,
        fix="change it, or leave exact=True out and resume to a like run, not to the same bits",
        code="not-exact",
    )
