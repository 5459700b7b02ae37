"""Callbacks that save and resume a run: `BackupAndRestore` and `ModelCheckpoint`.

The module also chooses the interval for `save_freq="auto"` and selects the best checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint import callback_state, model_state
from tfdist.checkpoint.publish import PublishModel
from tfdist.checkpoint.remote import RemoteCheckpoints, is_remote, local_directory, put
from tfdist.checkpoint.saved_run import RunStore
from tfdist.checkpoint.store import Checkpoint, NothingWhole
from tfdist.errors import UsageError, require, require_int, require_number, require_one_of
from tfdist.files import move_aside, one_line_errors, replacing
from tfdist.renamed import without_renamed
from tfdist.strategy import Job, broadcast, is_chief, run_dir
from tfdist.strategy.devices import threads_of_an_operation
from tfdist.strategy.group import sum_over_tasks
from tfdist.strategy.native import require_engine

_LOG = logging.getLogger(__name__)
_LESS = ("loss", "error")
_MORE = ("acc", "auc", "precision", "recall", "f1", "iou", "r2", "similarity")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The progress of a run, saved in a checkpoint in addition to the arrays.

    Attributes:
      step: Number of completed steps.
      examples: Number of examples in these steps.
      seed: Seed of the run.
      stopped: True if a callback asked to stop the training.
      fingerprint: Settings that must stay the same in every attempt of the run.
      seconds: Duration of the run so far.
    """

    step: int
    examples: int
    seed: int
    stopped: bool
    fingerprint: Mapping[str, Any]
    seconds: float = dataclasses.field(default=0.0, compare=False)


class BackupAndRestore(keras.callbacks.Callback):
    """Callback that saves model, optimizer, metrics and callbacks, and resumes at the saved step.

    Every task passes it to `tfdist.fit`. Only the chief reads and writes the directory, so the
    directory may be local to the chief's host. If you start a run again with the same directory,
    training resumes from the newest checkpoint. If the run already finished, tfdist logs this and
    trains no further.

    The callback saves at the end of each (virtual) epoch and at the intervals below. Training waits
    while the state is copied. Then a thread of the chief writes the copy. If a save is due during
    a write, it waits for the end of that write. No save is skipped.

    Args:
      backup_dir: Directory of the checkpoints, or a URL of fsspec, such as ``s3://bucket/run``.
        Only this callback may write there. Default: ``backup`` in `tfdist.run_dir`, and
        ``backup-N`` for the N-th such callback of a program.
      save_freq: "epoch" (default), a number of steps between two saves, or "auto". "auto" computes
        the seconds between two saves from `mtbf_s` and the time that a save blocks the training.
      double_checkpoint: True to keep at least two checkpoints.
      delete_checkpoint: Must be False (default): the checkpoints of a finished run stay.
      every_s: Seconds between two saves (default: `None`, no saves by time).
      mtbf_s: Mean time between failures in seconds for "auto" (default: a day).
      keep: Number of the newest checkpoints to keep (default: 3). The best is also kept.
      best: Name of a metric in the logs, like "val_loss". The checkpoint of the epoch with the best
        value is also kept.
      mode: "min" or "max", the better direction. "auto" (default) derives it from the name.
      exact: Reject a resume that cannot be bit-identical (see the guide on checkpoints).

    Raises:
      UsageError: An interval is not positive. The checkpoint has another model, data, batch size,
        seed, or a newer format. Another process writes to the directory.
      TfdistError: The directory cannot be written, or the disk is full. Earlier checkpoints stay
        intact. The next `save` or `wait` raises an error of the writing thread.
    """

    found_states: Mapping[str, Any]
    """States of the callbacks in the checkpoint that `saved` found (chief only)."""

    @without_renamed("BackupAndRestore")
    def __init__(
        self,
        backup_dir: str | os.PathLike[str] | None = None,
        save_freq: int | str = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = False,
        *,
        every_s: float | None = None,
        mtbf_s: float | None = None,
        keep: int = 3,
        best: str | None = None,
        mode: str = "auto",
        exact: bool = False,
    ) -> None:
        super().__init__()
        name = "BackupAndRestore: save_freq"
        if isinstance(save_freq, str):
            fix = 'use "epoch", "auto" or a number of steps, such as save_freq=500'
            require_one_of(name, save_freq, ["epoch", "auto"], fix=fix)
        else:
            fix = "pass the number of steps between two checkpoints, or leave the argument out"
            save_freq = require_int(name, save_freq, least=1, fix=fix)
        if every_s is not None:
            fix = "pass the interval between two checkpoints, or leave the argument out"
            name = "BackupAndRestore: every_s"
            every_s = require_number(name, every_s, above=0, unit="seconds", fix=fix)
            require(
                save_freq != "auto",
                name,
                'save_freq="auto" computes the interval in seconds itself',
                fix="leave out every_s",
                code="exclusive",
            )
        if mtbf_s is not None:
            name = "BackupAndRestore: mtbf_s"
            require(
                save_freq == "auto",
                name,
                f'{mtbf_s!r} has no effect if save_freq is not "auto"',
                fix='add save_freq="auto", or leave out mtbf_s',
                code="exclusive",
            )
            fix = "pass the mean time between two failures of the job"
            mtbf_s = require_number(name, mtbf_s, above=0, unit="seconds", fix=fix)
        require(
            not delete_checkpoint,
            "BackupAndRestore: delete_checkpoint",
            "if True, a restarted job would repeat a finished run",
            fix="leave it out, and delete the directory after the job",
            code="unsupported",
        )
        if backup_dir is None:
            backup_dir = _next_directory()
        self.place = os.fspath(backup_dir)
        """Directory or URL of the checkpoints, for messages."""
        keep = require_int("BackupAndRestore: keep", keep, least=1, fix="pass keep=3")
        keep = max(keep, 2) if double_checkpoint else keep
        self.remote: RemoteCheckpoints | None = None
        if is_remote(backup_dir):
            url = os.fspath(backup_dir)
            self.store = RunStore(local_directory(url), keep=keep)
            self.remote = RemoteCheckpoints(url, self.store)
        else:
            self.store = RunStore(backup_dir, keep=keep)
        self.exact = exact
        self.best = best
        self.publisher: PublishModel | None = None
        self._every_steps = None if isinstance(save_freq, str) else save_freq
        self._every_s = FIRST_S if save_freq == "auto" else every_s
        self._mtbf_s = (mtbf_s or DEFAULT_MTBF_S) if save_freq == "auto" else None
        self._save_s: float | None = None
        self._best = Best(best, mode)
        self._saved_at = time.monotonic()
        self._saved_run: RunState | None = None
        self._last_save = self._lost_save = (-1, False)  # step, and whether it was the best
        self._found_step: int | None = None
        self.found_states = {}
        self._configuration: dict[str, Any] | None = None
        self._prepared = False
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[Path] | None = None

    def next_step(self, step: int) -> int | None:
        """Return the step of the next save after `step`, or `None` without a number of steps."""
        every = self._every_steps
        return None if every is None else (step // every + 1) * every

    def due(self) -> bool:
        """Return True if the interval in seconds is over and no write is running (chief only)."""
        if self._every_s is None or time.monotonic() - self._saved_at < self._every_s:
            return False
        return self._written is None or self._written.done()

    def wants(self, step: int) -> bool:
        """Return True if `save_freq` is a number of steps and a checkpoint is due after `step`."""
        return self._every_steps is not None and step % self._every_steps == 0

    def prepare(self) -> None:
        """Lock the directory and check before training that it can be written (chief only).

        Further calls before `close` do nothing. Raises the errors listed for the class.
        """
        if not self._prepared:
            self.store.prepare()
            self._prepared = True
            if self.remote:
                try:
                    self.remote.fetch()
                except BaseException:
                    self.close()
                    raise

    def saved(self) -> RunState | None:
        """Return the run's progress in the newest checkpoint, or `None` (chief only).

        If all checkpoints are damaged, move them aside with a warning and return `None`.
        """
        names = self.store.names()
        if not names:
            return None
        try:
            checkpoint = self.store.read()
        except NothingWhole as error:
            with one_line_errors(self.store.directory):
                aside = move_aside(self.store.directory, names)
            text = "%s; moved to %s. Without another backup, the run starts at step 0"
            _LOG.warning(text, error, aside)
            if self.remote is None:
                return None
            self.prepare()  # downloads the bucket's checkpoints
            self.close()
            return self.saved() if self.store.names() else None
        self._found_step = checkpoint.step
        self.found_states = checkpoint.meta["callbacks"]
        return _run_state(checkpoint)

    def save(self, model: keras.Model, job: Job, run: RunState, *, callbacks: Any) -> str:
        """Copy the state and start to write the copy. Collective: every training task calls it.

        Return "", or in every task the reason why the state is not saved. In the chief, raises the
        error of the previous write.
        """
        best = self._best.improved or self._lost_save == (run.step, True)
        if run == self._saved_run and not best:
            return ""
        began_s, is_chief = time.monotonic(), job.is_chief  # an elastic job may change its chief
        if is_chief:
            self.wait()  # before copying, so that memory never holds two copies
            self.prepare()
        arrays = model_state.capture(model, job)
        self._saved_at = time.monotonic()
        is_elastic = job.shards is not None  # a successor may save on its own: no collective
        is_bad = (is_chief or is_elastic) and not model_state.is_finite(model, arrays)
        if not is_elastic:
            of = "a weight that is not finite"
            is_bad = bool(sum_over_tasks(job, np.array([float(is_bad)]), of=of)[0])
        if is_bad:
            return "a trainable weight or a slot of the optimizer is not finite"
        self._saved_run, self._last_save, self._lost_save = run, (run.step, best), (-1, False)
        self._best.epoch_begins()
        if not is_chief:
            return ""
        others = callbacks.callbacks
        arrays.update(callback_state.best_weights(others))
        meta = {
            **dataclasses.asdict(run),
            "variables": model_state.names_of(model),
            "callbacks": callback_state.get_states(others),
            "configuration": self._configuration or model_state.configuration_of(model),
            "place": _place(job),
            "stages": {} if job.stages is None else job.stages.chosen.state(),
        }
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written = self._writer.submit(self._write, run.step, arrays, meta=meta, best=best)
        self._writer.shutdown(wait=False)  # the thread exits after the write
        if self._mtbf_s is not None:
            self._choose_interval(time.monotonic() - began_s, mtbf_s=self._mtbf_s)
        return ""

    def _choose_interval(self, blocked_s: float, *, mtbf_s: float) -> None:
        """Compute the next interval after a save that blocked the training for `blocked_s`."""
        self._save_s = blocked_s if self._save_s is None else (self._save_s + blocked_s) / 2
        self._every_s = interval_for(self._save_s, mtbf_s)
        _LOG.info("%s: next save in %.3g s", self.store.directory, self._every_s)

    def _write(self, step: int, arrays: Any, *, meta: Mapping[str, Any], best: bool) -> Path:
        path = self.store.write(step, arrays, meta=meta, best=best)
        if self.remote:
            self.remote.upload(path.name)
        return path

    def repeat_save(self) -> None:
        """Make the next `save` write again: the lost chief may not have written its last save."""
        self._saved_run, self._lost_save = None, self._last_save

    def pass_over(self) -> None:
        """Note that the current state is not saved, so that it does not count as the best."""
        self._best.not_saved()
        self._saved_at = time.monotonic()  # else every block tries again

    def wait(self) -> None:
        """Wait until the last save is on the disk. Raise the error of that write once."""
        if self._written is not None:
            self._writer.shutdown()
            written, self._written = self._written, None
            written.result()
        if self.remote:
            self.remote.raise_error()

    def finish(self) -> None:
        """Wait until the last save is on the disk and at the URL. Raise the error of a failure."""
        self.wait()
        if self.remote:
            self.remote.close()
            self.remote.raise_error()

    def close(self) -> None:
        """Wait for a running write and release the directory. `save` locks it again.

        Logs an error of the write, because raising it could hide the error that ended the training.
        """
        try:
            self.wait()
        except Exception as error:
            _LOG.error("%s", error)
        if self.publisher:
            self.publisher.close()
        if self.remote:
            self.remote.close()
        self.store.close()
        self._prepared = False

    def restore(self, model: keras.Model, job: Job, *, callbacks: Any) -> None:
        """Restore model, optimizer, metrics and callbacks. Collective: every task calls it."""
        checkpoint = self.store.read(self._found_step) if job.is_chief else None
        if checkpoint is not None:
            self._require_same(model, job, checkpoint.meta)
            model_state.require_shapes(model, checkpoint.arrays, where=self._where)
        model_state.restore(model, job, checkpoint.arrays if checkpoint else None)
        saved = broadcast(None if checkpoint is None else _of_all_tasks(checkpoint))
        self._saved_run = RunState(**saved["run"])
        if job.stages is not None:
            job.stages.chosen.take(saved["stages"])
        others = callbacks.callbacks
        callback_state.set_states(others, saved["callbacks"])
        callback_state.set_best_weights(others, saved["best_weights"])

    def on_train_begin(self, logs: Any = None) -> None:
        require_engine(self)
        self._configuration = model_state.configuration_of(self.model)
        if not is_chief():
            return
        self.prepare()
        if self.remote:
            self.remote.resume()
        if self._mtbf_s is not None:
            self._saved_at = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._best.epoch_begins()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._best.epoch_ends(logs or {})

    def get_state(self) -> Any:
        return self._best.get_state()

    def set_state(self, state: Any) -> None:
        self._best.set_state(state)

    @property
    def _where(self) -> str:
        return f"checkpoint {self.place}"

    def _require_same(self, model: keras.Model, job: Job, meta: Mapping[str, Any]) -> None:
        where = self._where
        model_state.require_same_variables(model, meta["variables"], where=where)
        mine = self._configuration or model_state.configuration_of(model)
        model_state.require_same_configuration(meta.get("configuration"), mine, where=where)
        before, now = meta.get("place", {}), _place(job)
        differing = [n for n in now if before.get(n, now[n]) != now[n]]
        text = ", ".join(f"{n} {before[n]} -> {now[n]}" for n in differing)
        differences = model_state.printable(text)
        if differences and self.exact:
            raise UsageError(
                where,
                f"exact=True needs the setup of the saved run, but it differs: {differences}",
                fix="start the run with the same setup, or leave out exact=True",
                code="not-exact",
            )
        if differences:
            text = "resumed with another setup (%s): results may differ in the last bits"
            _LOG.info(text, differences)


_in_run_dir = itertools.count(1)


def _next_directory() -> Path:
    """Return the next directory of this process in the run directory."""
    try:
        directory, number = run_dir(), next(_in_run_dir)
    except UsageError as error:
        where, fix = "BackupAndRestore: backup_dir", f"{error.fix}, or pass a directory"
        raise UsageError(where, error.problem, fix=fix, code=error.code) from None
    return directory / ("backup" if number == 1 else f"backup-{number}")


def _place(job: Job) -> dict[str, Any]:
    """Return the known settings of the job that affect the last bits of a run's results."""
    place = {
        "strategy": job.kind.name,
        "replicas": job.num_replicas,
        "threads": threads_of_an_operation(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    if job.stages is None:
        return place
    options = job.stages.options  # all schedules sum gradients in the same order
    cut = "auto" if options.cut is None else options.cut
    return place | {
        "stages": job.stages.count,
        "pipelines": job.stages.pipelines,
        "split_size": options.split_size,
        "keep": options.keep,
        "cut": json.loads(json.dumps(dict(cut) if isinstance(cut, Mapping) else cut)),
    }


def _run_state(checkpoint: Checkpoint) -> RunState:
    names = [field.name for field in dataclasses.fields(RunState)]
    return RunState(**{name: checkpoint.meta[name] for name in names if name in checkpoint.meta})


def _of_all_tasks(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parts of a checkpoint that every task needs, except the model's arrays."""
    arrays = checkpoint.arrays.items()
    return {
        "run": dataclasses.asdict(_run_state(checkpoint)),
        "callbacks": checkpoint.meta["callbacks"],
        "best_weights": {name: array for name, array in arrays if name.startswith("callbacks/")},
        "stages": checkpoint.meta.get("stages", {}),
    }


# Checkpoint interval, computed from the cost of a save and the failure rate of the run.
#
# Frequent saves cost time, rare saves lose work. A save blocks the training for `save_s`, and
# failures are `mtbf_s` apart on average. The best interval is about ``sqrt(2 save_s mtbf_s)``
# (Young, "A first order approximation to the optimum checkpoint interval", Communications of the
# ACM 17 (9), 1974). The formula assumes independent failures at a constant rate.


MOST_COST = 0.01
"""Largest share of the run time that saves may use."""
FIRST_S = 60.0
"""Seconds until the first save. Its cost is still unknown."""
DEFAULT_MTBF_S = 86_400.0
"""Mean time between failures by default: a day."""


def interval_for(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval in seconds, or a longer interval to limit the cost to `MOST_COST`.

    Args:
      save_s: Seconds for which a save blocks the training, at least 0.
      mtbf_s: Mean time between failures in seconds, above 0.
    """
    return max(math.sqrt(2 * save_s * mtbf_s), save_s * (1 / MOST_COST - 1))


# Selection of the best checkpoint by a metric, from epoch logs or an evaluator's lines.


class Best:
    """Tracker of a metric in the logs that detects a new best value.

    Args:
      name: Name of the metric in the logs. `None` turns the tracker off.
      mode: "min", "max", or "auto", which derives the direction from the name.

    Attributes:
      improved: True from the end of an epoch with a new best value to the next epoch's begin.

    Raises:
      UsageError: The mode is unknown, or "auto" cannot derive a direction from the name.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self._name = name
        self._less = name is None or less_is_better(name, mode, where="BackupAndRestore: mode")
        self._value: float | None = None
        self._before: float | None = None
        self.improved = False
        self._warned = False

    def epoch_begins(self) -> None:
        """Reset `improved` at the begin of an epoch."""
        self.improved = False

    def epoch_ends(self, logs: Mapping[str, Any]) -> None:
        """Read an epoch's logs. Raise UsageError if they can never contain the metric."""
        if self._name is None or not self._is_in(logs):
            return
        value = float(logs[self._name])
        self.improved = is_better(value, self._value, less=self._less)
        if self.improved:
            self._before, self._value = self._value, value

    def not_saved(self) -> None:
        """Discard the value of the last epoch, which has no checkpoint."""
        if self.improved:
            self.improved, self._value = False, self._before

    def get_state(self) -> dict[str, Any] | None:
        """Return the metric's name and best value for a resumed run, as JSON."""
        return None if self._name is None else {"name": self._name, "value": self._value}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Ignore it if it has another metric or another format."""
        match state:
            case {"name": self._name, "value": int() | float() as value}:
                self._value = value

    def _is_in(self, logs: Mapping[str, Any]) -> bool:
        name = self._name
        if name in logs:
            return True
        assert name is not None
        validated = any(key.startswith("val_") for key in logs)
        if validated or not name.startswith("val_"):
            fix = "use a metric that fit logs at the end of an epoch"
            require_one_of("BackupAndRestore: best", name, logs, fix=fix)
        if not self._warned:
            _LOG.warning("an epoch without validation has no %s: the save is not marked best", name)
            self._warned = True
        return False


def is_better(
    value: float | None, best: float | None, *, less: bool, min_delta: float = 0.0
) -> bool:
    """Return whether a value is better than `best` by more than `min_delta`.

    `None`, NaN and infinity are never better. The first finite value is always better.
    """
    if value is None or not math.isfinite(value):
        return False
    return best is None or (best - value if less else value - best) > min_delta


def less_is_better(name: str, mode: str, *, where: str) -> bool:
    """Return True if lower values are better. Raise UsageError at `where` if this is unknown."""
    less, more = name.endswith(_LESS), any(part in name for part in _MORE)
    if mode == "auto" and less != more:
        return less
    if mode in ("min", "max"):
        return mode == "min"
    raise UsageError(
        where,
        f"mode={mode!r} does not tell if lower values of {name!r} are better",
        fix='pass mode="min" if lower values are better, else mode="max"',
        code="unknown-value",
    )


def best_so_far(
    lines: Sequence[Mapping[str, Any]], *, monitor: str, less: bool, min_delta: float = 0.0
) -> tuple[Mapping[str, Any] | None, int]:
    """Return an evaluator's best line and the number of lines after it.

    The best line is `None` if no value is finite. A line must be better by more than `min_delta`.

    Raises:
      UsageError: No line has the metric.
    """
    if lines and all(monitor not in line for line in lines):
        names = [name for name in lines[-1] if name.startswith("val_")]
        fix = "use a metric that the evaluation logs"
        require_one_of("Evaluator: monitor", monitor, names, fix=fix)
    best: Mapping[str, Any] | None = None
    since = 0
    for line in lines:
        before = best[monitor] if best else None
        if is_better(line.get(monitor), before, less=less, min_delta=min_delta):
            best, since = line, 0
        else:
            since += 1
    return best, since


# `ModelCheckpoint`: the callback of Keras with atomic writes, only in the chief.


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` for every strategy, with the same arguments.

    Only the chief writes. It writes a temporary file next to the target and renames it. After a
    crash the previous file is intact. If `filepath` is a URL of fsspec, the chief uploads the file.

    Raises:
      TfdistError: The file cannot be written. The previous file stays unchanged.
    """

    filepath: str
    _local = _url = ""

    def set_model(self, model: keras.Model) -> None:
        """Set the model, wrapped so that its saves are atomic."""
        if is_remote(self.filepath):
            scheme, _, path = self.filepath.partition("://")
            self._local, self._url = tempfile.mkdtemp(prefix="tfdist-"), f"{scheme}://"
            self.filepath = os.path.join(self._local, path)
        self._model: Any = _Saving(model, local=self._local, url=self._url)

    def on_train_begin(self, logs: Any = None) -> None:
        require_engine(self)


class _Saving:
    """Wrapper of a model with atomic saves. All other attributes are the model's."""

    def __init__(self, model: keras.Model, *, local: str = "", url: str = "") -> None:
        self._wrapped = model
        self._local, self._url = local, url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def save(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save(path, **options))
        self._upload(filepath)

    def save_weights(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save_weights(path, **options))
        self._upload(filepath)

    def _upload(self, filepath: str) -> None:
        if not self._url:
            return
        url = self._url + os.path.relpath(filepath, self._local)
        try:
            put(Path(filepath), url)
        except UsageError:
            raise
        except Exception as error:  # each file system has its own types of errors
            _LOG.warning("%s was not written (%s); the model is in %s", url, error, filepath)
        else:
            os.unlink(filepath)


def save_whole(model: keras.Model, filepath: str | os.PathLike[str]) -> None:
    """Save a model to a file atomically (chief only).

    Raises TfdistError if the file cannot be written.
    """
    _whole_or_not(os.fspath(filepath), model.save)


def _whole_or_not(filepath: str, write: Any) -> None:
    with (
        one_line_errors(f"model: cannot write {filepath}"),
        replacing(Path(filepath)) as unfinished,
    ):
        write(str(unfinished))
