"""Keras callbacks under every strategy: their tasks and their steps.

All tasks run the user's callbacks on the same logs, so all tasks decide alike. Callbacks that write
files run only on the chief. Batch hooks run once per step block, for the last batch of the block. A
callback that needs every batch forces blocks of one step, which are slower. A tfdist callback can
set class attributes. ``once_a_range = True``: its hooks need only the last batch of a block.
``chief_only = True``: it runs only on the chief. ``wants_block_logs = True``: it reads the logs of
blocks. Its method ``next_step(step)`` returns the next step after `step` at which a block must end,
or `None`. The engine calls ``resumed_at(step)`` with the first step of a resumed run, and
``interrupted()`` before the end of an epoch that the next run repeats.
"""

from __future__ import annotations

import contextlib
import html
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.callbacks import CallbackList
from keras.src.utils.python_utils import is_default

from tfdist.checkpoint.backup import BackupAndRestore, less_is_better
from tfdist.checkpoint.publish import PublishModel
from tfdist.errors import UsageError, require
from tfdist.strategy import Job
from tfdist.training import trackers

_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.ProgbarLogger,
)
# These classes' own batch hooks need only the last batch of a block.
_BLOCK_IS_ENOUGH = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)

_HOOKS_OF_A_TUNER = ("on_batch_begin", "on_batch_end")


class History(keras.callbacks.History):
    """Keras' `History`, which a notebook shows as a table of the last and best values."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}  # so that `spawn` can return it

    def _repr_html_(self) -> str:
        rows = ["<tr><th>metric</th><th>last</th><th>best</th></tr>"]
        for name, values in self.history.items():
            numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
            if numbers:
                best = ""
                with contextlib.suppress(UsageError):  # the better direction is unknown
                    better = min if less_is_better(name, "auto", where=name) else max
                    best = f"{better(numbers):.4g}"
                cells = html.escape(name), f"{values[-1]:.4g}", best
                rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"


def callback_list(
    callbacks: Any,
    *,
    job: Job,
    model: keras.Model,
    verbose: Any,
    epochs: int,
    steps: int | None,
) -> CallbackList:
    """Return this task's callbacks, with a progress bar on the chief."""
    given = [c for c in keras.tree.flatten(callbacks) if c is not None] if callbacks else []
    for callback in given:
        _require_callback(callback)
        _require_whole_weights(callback, job)
        _require_same_weights_in_repeated_hooks(callback, job)
    if job.is_chief:
        given = [trackers.wrapped(callback) for callback in given]
    else:
        given = [c for c in given if not _is_chiefs(c)]
    return CallbackList(
        given,
        add_progbar=job.is_chief and verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def writes_files(callback: Any) -> bool:
    """Return whether a callback saves or logs, so that a short trial run leaves it out."""
    savers = BackupAndRestore | keras.callbacks.BackupAndRestore | PublishModel
    saves = isinstance(callback, savers)
    is_writer = isinstance(callback, _WRITERS) and not isinstance(
        callback, keras.callbacks.ProgbarLogger
    )
    logs = is_writer or getattr(callback, "writes_metrics", False)
    return saves or logs or trackers.package_of(callback) is not None


def chiefs_of(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that only the chief runs."""
    return [c for c in callbacks if isinstance(c, trackers.Tracker) or _is_chiefs(c)]


def _is_chiefs(callback: keras.callbacks.Callback) -> bool:
    is_writer = isinstance(callback, _WRITERS) or getattr(callback, "chief_only", False)
    return is_writer or trackers.package_of(callback) is not None


def _require_callback(callback: Any) -> None:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise UsageError(
            "callbacks",
            "keras.callbacks.BackupAndRestore would repeat an epoch with newer weights",
            fix="use tfdist.BackupAndRestore(backup_dir), which resumes at the step",
            code="unsupported",
        )
    # Keras' CallbackList is a callback itself, and its entries would be ignored.
    if isinstance(callback, CallbackList) or not isinstance(callback, keras.callbacks.Callback):
        raise UsageError(
            "callbacks",
            f"{callback!r:.80} is not an instance of keras.callbacks.Callback",
            fix="pass instances of classes that are derived from keras.callbacks.Callback",
            code="bad-value",
        )


def _require_whole_weights(callback: keras.callbacks.Callback, job: Job) -> None:
    """Reject a pipeline callback that saves within an epoch: the chief then has only one stage."""
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.OrbaxCheckpoint)
    if saves and job.stages is not None and callback.save_freq != "epoch":
        raise UsageError(
            "callbacks",
            f"{type(callback).__name__}(save_freq={callback.save_freq}) cannot save within an "
            "epoch of a pipeline, because each task has only its own stage",
            fix="leave out save_freq, or save within an epoch with "
            "tfdist.BackupAndRestore(save_freq=500)",
            code="unsupported",
        )


def _require_same_weights_in_repeated_hooks(callback: Any, job: Job) -> None:
    """Reject a callback that changes weights between epochs of an elastic job.

    The successor of a lost chief may repeat the end of an epoch after the next epoch's begin.
    """
    swaps = isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch
    require(
        not (swaps and job.shards is not None),
        "callbacks",
        "SwapEMAWeights(swap_on_epoch=True) changes the weights between epochs, so the new chief "
        "of an elastic job could overwrite a file with other weights",
        fix="leave out swap_on_epoch, or use a strategy that is not elastic",
        code="unsupported",
    )


def wants_every_batch(callback: keras.callbacks.Callback, *, mode: str) -> bool:
    """Return True if the callback overrides a batch hook of `mode` (train, test, predict)."""
    if isinstance(callback, keras.callbacks.TensorBoard) and (
        callback._should_trace or callback.write_steps_per_second  # single batches
    ):
        return True
    kind = type(callback)
    if kind.__module__.startswith("keras_tuner.") and kind.__name__ == "TunerCallback":
        tuner, base = type(callback.tuner), sys.modules["keras_tuner"].Tuner
        return any(getattr(tuner, n) is not getattr(base, n) for n in _HOOKS_OF_A_TUNER)
    if isinstance(callback, trackers.Tracker):
        return wants_every_batch(callback.inner, mode=mode)
    hooks = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    if mode == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    return any(_sees_every_batch(callback, hook) for hook in hooks)


def _sees_every_batch(callback: keras.callbacks.Callback, hook: str) -> bool:
    if is_default(getattr(callback, hook)):
        return False
    if hook in vars(callback):  # set on the instance, as LambdaCallback does
        return True
    owner = next(c for c in type(callback).__mro__ if hook in vars(c))
    if owner in _BLOCK_IS_ENOUGH or trackers.is_of_tracker(owner):
        return False
    return not vars(owner).get("once_a_range", False)


@contextlib.contextmanager
def counting_steps(
    callbacks: Sequence[keras.callbacks.Callback], first: int, last: int
) -> Iterator[None]:
    """Set the call counter of Keras' TensorBoard to the number of steps done.

    If a write is due within the block, TensorBoard writes at its end, with the last due step.
    """
    boards = [c for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]
    done = [board._global_train_batch + last - first for board in boards]
    for board, count in zip(boards, done, strict=True):
        every = board.update_freq
        is_due = every != "epoch" and trackers.crossed(board._global_train_batch, count, every)
        board._global_train_batch = (count // every * every if is_due else count) - 1
    yield
    for board, count in zip(boards, done, strict=True):
        board._global_train_batch = count


def count_test_steps(callbacks: Sequence[keras.callbacks.Callback], steps: int) -> None:
    """Add a validation block's steps to the call counter of Keras' TensorBoard.

    The counter decides for which validations TensorBoard writes `evaluation_*_vs_iterations`.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):
            callback._global_test_batch += steps - 1  # Keras' hook adds 1


def begin_epoch(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Reset the batch number of Keras' ModelCheckpoint at the start of an epoch.

    Keras detects a new epoch by a batch number that does not increase. Step blocks can hide that.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            callback._last_batch_seen = None


def wants_logs(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Return True if some callback reads the logs of a block."""
    return any(
        isinstance(c, _BLOCK_IS_ENOUGH)
        or wants_every_batch(c, mode="train")
        or getattr(c, "wants_block_logs", False)
        for c in callbacks
    )


def steps_to_save(callback: keras.callbacks.Callback) -> int | None:
    """Return the steps to the next save of a ModelCheckpoint with `save_freq=N`, else `None`."""
    if not isinstance(callback, keras.callbacks.ModelCheckpoint) or callback.save_freq == "epoch":
        return None
    return max(1, int(callback.save_freq) - int(callback._batches_seen_since_last_saving))
