"""`BackupAndRestore`: saves a run and resumes it at the saved step; and `ModelCheckpoint`.

Besides: the interval that `every="auto"` chooses, and the selection of the best checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import callback_state, state
from tfdist.checkpoint.publish import Publisher
from tfdist.checkpoint.saved_run import RunStore
from tfdist.checkpoint.store import Checkpoint, NothingWhole
from tfdist.errors import (
    UsageError,
    mutually_exclusive,
    require,
    require_int,
    require_number,
    require_one_of,
)
from tfdist.files import one_line_errors, replacing
from tfdist.strategy import Job, broadcast, is_chief
from tfdist.strategy.devices import threads_of_an_operation
from tfdist.strategy.native import require_engine

_LOG = logging.getLogger(__name__)
_LESS = ("loss", "error")
_MORE = ("acc", "auc", "precision", "recall", "f1", "iou", "r2", "similarity")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a checkpoint says of a run besides its arrays; everything else follows from the step.

    Attributes:
      step: steps done.
      examples: examples consumed by them.
      seed: of the run.
      stopped: a callback had asked to stop.
      fingerprint: what must not change between the attempts of a run.
    """

    step: int
    examples: int
    seed: int
    stopped: bool
    fingerprint: Mapping[str, Any]


class BackupAndRestore(keras.callbacks.Callback):
    """Saves model, optimizer, metrics and callbacks every so often; resumes at that very step.

    Given to `tfdist.fit` by every task; the chief writes and reads, so the directory need only be
    the chief's. A run that is started again with the same directory goes on; one that had come to
    its end says so and does nothing.

    Training waits while the state is copied; a thread of the chief writes the copy. One write is
    under way at a time: what is due before it has ended waits for it, and nothing is left out.

    Args:
      directory: of the checkpoints; nothing else should write there.
      every_steps: save after each so many steps.
      every_s: save when so many seconds have passed since the last time.
      every: "auto" chooses the seconds, from how long a save blocks the training and `mtbf_s`; see
        `tfdist.checkpoint.backup`.
      mtbf_s: with "auto", mean time between failures in seconds (default: a day).
      keep: how many checkpoints are kept, beside the best.
      best: name of a metric of the logs, like "val_loss"; the checkpoint at the end of the epoch
        in which it was best is kept too.
      mode: "min" or "max": which is better; "auto" goes by the name.
      exact: refuse what cannot be resumed to the same bits (see the guide on checkpoints).
      publish: directory of models to be served: a process of the chief exports each best checkpoint
        (without `best` each new one) to ``publish/NAME/VERSION`` as the run goes.
      publish_model: ``file.py:function`` that returns the built model, for one with own classes.

    It saves at the end of each (virtual) epoch as well.

    Raises:
      UsageError: an interval is not positive; the checkpoint is of another model, data, batch
        size, seed, or of a newer format; another process writes to the directory, or it cannot
        be written.
      TfdistError: the disk is full; what was saved before is untouched. Raised by the next
        `save`, or by `wait`.
    """

    found_states: Mapping[str, Any]
    """The states of callbacks in the checkpoint that `saved` has found; in the chief."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        every: str | None = None,
        mtbf_s: float | None = None,
        keep: int = 3,
        best: str | None = None,
        mode: str = "auto",
        exact: bool = False,
        publish: str | os.PathLike[str] | Publisher | None = None,
        publish_model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        fix = "leave it out, or give the interval between two checkpoints"
        if every_steps is not None:
            every_steps = require_int(
                "BackupAndRestore: every_steps", every_steps, least=1, fix=fix
            )
        if every_s is not None:
            name, unit = "BackupAndRestore: every_s", "seconds"
            every_s = require_number(name, every_s, above=0, unit=unit, fix=fix)
        needs = (
            ("mtbf_s", mtbf_s, "every", every),
            ("publish_model", publish_model, "publish", publish),
        )
        for name, value, other, beside in needs:
            require(
                value is None or beside is not None,
                f"BackupAndRestore: {name}",
                received=f"{value!r} without {other}",
                expected=f"it beside {other}",
                fix=f"add {other}, or leave {name} out",
                code="exclusive",
            )
        if every is not None:
            fix = 'write every="auto", every_steps=500 or every_s=600'
            require_one_of("BackupAndRestore: every", every, ["auto"], fix=fix)
            mutually_exclusive({"every": every, "every_s": every_s}, fix="leave every_s out")
        if mtbf_s is not None:
            name = "BackupAndRestore: mtbf_s"
            fix = "give the mean time between two failures of the job"
            mtbf_s = require_number(name, mtbf_s, above=0, unit="seconds", fix=fix)
        self._auto = None if every is None else AutoInterval(mtbf_s=mtbf_s)
        self.store = RunStore(directory, keep=keep)
        self.exact = exact
        self.best = best
        self._publisher = (
            publish
            if isinstance(publish, Publisher | None)
            else Publisher(publish, make=publish_model)
        )
        self._every_steps = every_steps
        self._every_s = every_s
        self._best = Best(best, mode)
        self._clock = clock
        self._saved_at = clock()
        self._saved_run: RunState | None = None
        self._found_step: int | None = None
        self.found_states = {}
        self._configuration: dict[str, Any] | None = None
        self._prepared = False
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[Path] | None = None

    def next_step(self, step: int) -> int | None:
        """Return the step after which it is next due, None where it does not go by steps."""
        every = self._every_steps
        return None if every is None else (step // every + 1) * every

    def due(self) -> bool:
        """True when it goes by time, its time has come, and none is being written; of the chief."""
        every_s = self._auto.interval_s if self._auto else self._every_s
        if every_s is None or self._clock() - self._saved_at < every_s:
            return False
        return self._written is None or self._written.done()

    def wants(self, step: int) -> bool:
        """Return True when a checkpoint is due after `step` by the number of steps."""
        return self._every_steps is not None and step % self._every_steps == 0

    def prepare(self) -> None:
        """Take the directory, and find out before any training whether it can be written.

        Chief only; once it has worked it does nothing until `close`. Raises as the class says.
        """
        if not self._prepared:
            self.store.prepare()
            self._prepared = True

    def saved(self) -> RunState | None:
        """What the newest checkpoint says of the run, None where there is none. Chief only.

        Where there are some and none is whole, a warning says so and the run starts over.
        """
        if self.store.newest_name() is None:
            return None
        try:
            checkpoint = self.store.read()
        except NothingWhole as error:
            _LOG.warning("%s; the run starts from its beginning", error)
            return None
        self._found_step = checkpoint.step
        self.found_states = checkpoint.meta["callbacks"]
        return _run_state(checkpoint)

    def save(self, model: keras.Model, job: Job, run: RunState, *, callbacks: Any) -> None:
        """Copy the state and have it written. A collective: every training task calls it alike.

        Raises in the chief what went wrong with the checkpoint before.
        """
        best = self._best.improved
        if run == self._saved_run and not best:
            return
        began_s = self._clock()
        if job.is_chief:
            self.wait()  # before copying: there is never more than one copy
            self.prepare()
        arrays = state.capture(model, job)
        self._saved_at = self._clock()
        self._saved_run = run
        self._best.epoch_begins()
        if not job.is_chief:
            return
        others = callbacks.callbacks
        arrays.update(callback_state.best_weights(others))
        meta = {
            **dataclasses.asdict(run),
            "variables": state.names_of(model),
            "callbacks": callback_state.get_states(others),
            "configuration": self._configuration or state.configuration_of(model),
            "place": _place(job),
            "stages": {} if job.stages is None else job.stages.chosen.state(),
        }
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written = self._writer.submit(
            self.store.write, run.step, arrays, meta=meta, best=best
        )
        self._writer.shutdown(wait=False)  # its thread ends with the write
        if self._auto:
            self._auto.saved(blocked_s=self._clock() - began_s)
            _LOG.info("%s: next save in %.3g s", self.store.directory, self._auto.interval_s)

    def pass_over(self) -> None:
        """Note that this state, of an epoch's end maybe, is not saved, and so not the best."""
        self._best.not_saved()

    def wait(self) -> None:
        """Return when everything saved is on the disk; raise what went wrong, once."""
        if self._written is not None:
            self._writer.shutdown()
            written, self._written = self._written, None
            written.result()

    def close(self) -> None:
        """Wait for a write under way and let another run write; `save` takes it again.

        An error that nobody has waited for is logged: something else is being raised.
        """
        try:
            self.wait()
        except Exception as error:
            _LOG.error("%s", error)
        if self._publisher:
            self._publisher.close()
        self.store.close()
        self._prepared = False

    def restore(self, model: keras.Model, job: Job, *, callbacks: Any) -> None:
        """Set model, optimizer, metrics and callbacks as they were saved. A collective."""
        checkpoint = self.store.read(self._found_step) if job.is_chief else None
        if checkpoint is not None:
            self._require_same(model, job, checkpoint.meta)
            state.require_shapes(model, job, checkpoint.arrays, where=self._where)
        state.restore(model, job, checkpoint.arrays if checkpoint else None)
        saved = broadcast(None if checkpoint is None else _of_all_tasks(checkpoint))
        self._saved_run = RunState(**saved["run"])
        if job.stages is not None:
            job.stages.chosen.take(saved["stages"], where=f"checkpoint {self.store.directory}")
        others = callbacks.callbacks
        callback_state.set_states(others, saved["callbacks"])
        callback_state.set_best_weights(others, saved["best_weights"])

    def on_train_begin(self, logs: Any = None) -> None:
        require_engine(self)
        self._configuration = state.configuration_of(self.model)
        if not is_chief():
            return
        self.prepare()
        if self._publisher:
            self._publisher.start(self.model, self.store.directory, best=bool(self.best))
        if self._auto:
            self._saved_at = self._clock()

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
        return f"checkpoint {self.store.directory}"

    def _require_same(self, model: keras.Model, job: Job, meta: Mapping[str, Any]) -> None:
        where = self._where
        state.require_same_variables(model, meta["variables"], where=where)
        mine = self._configuration or state.configuration_of(model)
        state.require_same_configuration(meta.get("configuration"), mine, where=where)
        before, now = meta.get("place", {}), _place(job)
        differences = [
            f"{n} {before[n]} -> {now[n]}" for n in now if before.get(n, now[n]) != now[n]
        ]
        if differences and self.exact:
            raise UsageError(
                where,
                received=f"exact=True and {', '.join(differences)}",
                expected="the same, so that the run can end with the same bits",
                fix="start it as it was started, or leave exact=True out",
                code="not-exact",
            )
        if differences:
            _LOG.info("resumed with %s: the same run, not the same bits", ", ".join(differences))


def _place(job: Job) -> dict[str, Any]:
    """On what the last bits of a run depend beside the run itself, as far as it is known."""
    place = {
        "strategy": job.kind,
        "replicas": job.num_replicas,
        "threads": threads_of_an_operation(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    if job.stages is None:
        return place
    options = job.stages.options  # all schedules sum gradients in one order
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
    return RunState(**{name: checkpoint.meta[name] for name in names})


def _of_all_tasks(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what every task has to know of a checkpoint, besides the arrays of the model."""
    arrays = checkpoint.arrays.items()
    return {
        "run": dataclasses.asdict(_run_state(checkpoint)),
        "callbacks": checkpoint.meta["callbacks"],
        "best_weights": {name: array for name, array in arrays if name.startswith("callbacks/")},
        "stages": checkpoint.meta.get("stages", {}),
    }


# Checkpoint interval from what a save costs and how often the run fails.
#
# Too many saves cost time, too few lose work. With `save_s` of blocking time for a save and a mean
# time between failures of `mtbf_s` the best time of training between two saves is, to first order,
# ``sqrt(2 save_s mtbf_s)`` (Young, "A first order approximation to the optimum checkpoint
# interval", Communications of the ACM 17 (9), 1974), and to a higher order what `daly` returns
# (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
# Generation Computer Systems 22 (3), 2006). Both take failures for independent, at a constant rate.


MOST_COST = 0.01
"""The largest part of the time that saving may cost."""
FIRST_S = 60.0
"""Until the first save, when nothing is known of its cost."""
DEFAULT_MTBF_S = 86_400.0
"""A day, if the user gives no mean time between failures."""
_NEWEST = 0.5


def daly(save_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, in seconds of training between two saves."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * save_s * mtbf_s)
    return young_s * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def interval_for(save_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, or the shortest at which saving costs `MOST_COST` if that is longer.

    Args:
      save_s: for how long a save blocks the training, not negative.
      mtbf_s: mean time between failures, positive.
    """
    return max(daly(save_s, mtbf_s), save_s * (1 / MOST_COST - 1))


class AutoInterval:
    """Interval of one run, chosen anew after each save; of the chief.

    Attributes:
      interval_s: from the end of a save to the next.
    """

    def __init__(self, *, mtbf_s: float | None = None) -> None:
        self.interval_s = FIRST_S
        self._mtbf_s = DEFAULT_MTBF_S if mtbf_s is None else mtbf_s
        self._save_s: float | None = None

    def saved(self, *, blocked_s: float) -> None:
        """Choose the next interval after a save that blocked the training for so long."""
        before = blocked_s if self._save_s is None else self._save_s
        self._save_s = before + _NEWEST * (blocked_s - before)
        self.interval_s = interval_for(self._save_s, self._mtbf_s)


# The best checkpoint by one metric, at an epoch's end or by an evaluator's lines.


class Best:
    """Follows one metric of the logs; says when it is better than it ever was.

    Args:
      name: of the metric, as in the logs; None follows nothing.
      mode: "min", "max", or "auto", which goes by the name.

    Attributes:
      improved: True between the end of an epoch that was the best so far and the next one's begin.

    Raises:
      UsageError: another mode, or "auto" with a name that does not tell.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self._name = name
        self._less = name is None or less_is_better(name, mode, where="BackupAndRestore: mode")
        self._value: float | None = None
        self._before: float | None = None
        self.improved = False
        self._warned = False

    def epoch_begins(self) -> None:
        """Forget the end of the epoch before."""
        self.improved = False

    def epoch_ends(self, logs: Mapping[str, Any]) -> None:
        """Look at an epoch's logs; raise UsageError where they can never have the metric."""
        if self._name is None or not self._is_in(logs):
            return
        value = float(logs[self._name])
        self.improved = is_better(value, self._value, less=self._less)
        if self.improved:
            self._before, self._value = self._value, value

    def not_saved(self) -> None:
        """Forget the epoch that has ended: no checkpoint is of it."""
        if self.improved:
            self.improved, self._value = False, self._before

    def get_state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to go on, as JSON."""
        return None if self._name is None else {"name": self._name, "value": self._value}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, unless that followed another metric or is no state."""
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
            fix = "name a metric that fit logs at an epoch's end"
            require_one_of("BackupAndRestore: best", name, logs, fix=fix)
        if not self._warned:
            _LOG.warning("an epoch without validation has no %s: it is not marked best", name)
            self._warned = True
        return False


def is_better(
    value: float | None, best: float | None, *, less: bool, min_delta: float = 0.0
) -> bool:
    """Return whether a metric beats the best so far by more than `min_delta`.

    None and what is not finite never do; the first value that is finite does.
    """
    if value is None or not math.isfinite(value):
        return False
    return best is None or (best - value if less else value - best) > min_delta


def less_is_better(name: str, mode: str, *, where: str) -> bool:
    """Return which way a metric gets better; UsageError at `where` where nothing tells."""
    less, more = name.endswith(_LESS), any(part in name for part in _MORE)
    if mode == "auto" and less != more:
        return less
    if mode in ("min", "max"):
        return mode == "min"
    raise UsageError(
        where,
        received=f"mode={mode!r} for {name!r}",
        expected='"min" or "max", or "auto" with a name that tells (val_loss, val_accuracy)',
        fix='say mode="min" where less of it is better, else mode="max"',
        code="unknown-direction",
    )


def best_so_far(
    lines: Sequence[Mapping[str, Any]], *, monitor: str, less: bool, min_delta: float = 0.0
) -> tuple[Mapping[str, Any] | None, int]:
    """Return an evaluator's best line, None where no metric was finite, and how many came after it.

    What is not better by more than `min_delta` is no better.

    Raises:
      UsageError: no line has the metric.
    """
    if lines and all(monitor not in line for line in lines):
        names = [name for name in lines[-1] if name.startswith("val_")]
        fix = "name a metric that the evaluation yields"
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


# `ModelCheckpoint`: Keras' own, written by the chief alone and never half.


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """What `keras.callbacks.ModelCheckpoint` does, with the same arguments, under every strategy.

    Only the chief writes. A file appears whole or not at all: it is written beside its place and
    renamed, so that a crash leaves the one before.

    Raises:
      TfdistError: the file cannot be written; one that was there before is untouched.
    """

    def set_model(self, model: keras.Model) -> None:
        """Take the model, seen through a view whose saves are atomic."""
        self._model = _Saving(model)

    def on_train_begin(self, logs: Any = None) -> None:
        require_engine(self)


class _Saving:
    """A model as `ModelCheckpoint` uses it: whatever else is asked for is the model's."""

    def __init__(self, model: keras.Model) -> None:
        self._wrapped = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def save(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save(path, **options))

    def save_weights(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save_weights(path, **options))


def save_whole(model: keras.Model, filepath: str | os.PathLike[str]) -> None:
    """Save a model as a file that appears whole or not at all; the chief calls it.

    Raises TfdistError where it cannot be written.
    """
    _whole_or_not(os.fspath(filepath), model.save)


def _whole_or_not(filepath: str, write: Any) -> None:
    with (
        one_line_errors(f"model: cannot write {filepath}"),
        replacing(Path(filepath)) as unfinished,
    ):
        write(str(unfinished))
