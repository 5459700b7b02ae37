"""Console view of a sweep: a live table or a line per change, and the leaderboard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.errors import require
from tfdist.files import is_held
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import (
    COMPLETED,
    FAILED,
    JOURNAL,
    LOCK,
    TRIALS,
    WAITING,
    SweepState,
    Trial,
    fold,
    read,
)
from tfdist.tuning import directory, exports

_SHOWN = 10
_REFRESH_S = 1.0


class SweepScreen:
    """The chief's observer: shows each change; `tick` writes `sweep.json` and calls `export`."""

    def __init__(
        self,
        sweep_dir: Path,
        *,
        console: Console | None = None,
        export: Callable[[SweepState, Path], None] | None = None,
    ) -> None:
        self._sweep_dir = sweep_dir
        self._console = console or _console()
        self._live: Live | None = None
        self._shown_at_s = 0.0
        self._export = export
        self._has_changed = False

    def __enter__(self) -> SweepScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def begin(self, state: SweepState) -> None:
        """The sweep starts, or goes on."""
        done = sum(trial.is_over for trial in state.trials.values())
        if state.trials:
            left = len(state.trials) - done
            self._say(f"going on: {done} trials have ended, {left} go on where they stood")
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._write(state)

    def changed(self, state: SweepState, trial: Trial) -> None:
        """Report what has become of a trial, where nothing shows it."""
        self._has_changed = True
        if self._live is None and (
            trial.status != WAITING or trial.reason
        ):  # not that it was asked for: it starts next
            self._say(change_line(state, trial))

    def tick(self, state: SweepState) -> None:
        """Bring the files and the live table up to date, once for all that has changed."""
        is_time = time.monotonic() - self._shown_at_s >= _REFRESH_S
        if self._live is not None and (self._has_changed or is_time):
            self._shown_at_s = time.monotonic()
            self._live.update(table(state, self._sweep_dir), refresh=True)
        if self._has_changed:
            self._write(state)

    def end(self, state: SweepState) -> None:
        """The sweep has ended or was asked to stop: the leaderboard, and the picture."""
        self._stop_live()
        self._write(state)
        path = exports.draw_plot(state, self._sweep_dir)
        leaderboard(state, self._sweep_dir, console=self._console)
        if path is not None:
            self._say(f"plot: {path}")

    def _write(self, state: SweepState) -> None:
        self._has_changed = False
        directory.write_json(self._sweep_dir / directory.SWEEP, as_json(state))
        if self._export is not None:
            self._export(state, self._sweep_dir)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False)


def leaderboard(
    state: SweepState, sweep_dir: Path, *, console: Console | None = None, is_running: bool = False
) -> None:
    """Print the best trials, those that failed, and how the sweep ended."""
    console = console or _console()
    console.print(table(state, sweep_dir, is_final=True))
    for trial in state.trials.values():
        if trial.status == FAILED:
            text = f"trial {trial.id} failed: {trial.reason}"
            console.print(text, markup=False, emoji=False)
    verdict = _verdict(state, sweep_dir, is_running=is_running)
    console.print(verdict, markup=False, emoji=False)


def table(state: SweepState, sweep_dir: Path, *, is_final: bool = False) -> Table:
    """Return the trials that run, and the best of those that have ended."""
    objective = state.begun.get("objective", "score")
    drawn = Table(box=box.SIMPLE_HEAD, title=Text(_counts(state)), title_justify="left")
    for heading in ("trial", "state", "virtual epoch", objective, "hyperparameters"):
        drawn.add_column(Text(heading), overflow="fold")
    running = [t for t in state.trials.values() if not t.is_over]
    ranked = state.ranked() if is_final else state.ranked()[:_SHOWN]
    failed = [t for t in state.trials.values() if t.status == FAILED]
    for trial in [*running, *ranked, *failed[-_SHOWN:]]:
        line = {} if trial.is_over else _last_line(trial, sweep_dir)
        score = line.get(objective) if line else trial.score
        drawn.add_row(
            trial.id,
            trial.status,
            _progress(trial, state, line),
            "" if score is None else f"{score:.4f}",
            Text(values_text(trial.hyperparameters)),  # and no markup of the table's
        )
    return drawn


def change_line(state: SweepState, trial: Trial) -> str:
    """Return one line on what has become of a trial."""
    text = f"trial {trial.id} {trial.status}"
    if trial.status == COMPLETED and trial.score is not None:
        best = state.ranked()[0]
        return f"{text}: {trial.score:.4f}; best {best.score:.4f} (trial {best.id})"
    if trial.reason and trial.status != COMPLETED:
        return f"{text}: {trial.reason}"
    return f"{text}: {values_text(trial.hyperparameters)}"


def values_text(values: Mapping[str, Any]) -> str:
    """Return ``learning_rate=0.001 optimizer=adam``."""
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


def as_json(state: SweepState) -> dict[str, Any]:
    """Return the content of `sweep.json`."""
    ranked = state.ranked()
    return {
        "status": "running" if state.finished is None else "finished",
        "reason": state.finished,
        **{k: state.begun.get(k) for k in ("tuner", "objective", "direction", "seed")},
        "max_trials": state.begun.get("max_trials"),
        "best": _trial_json(ranked[0]) if ranked else None,
        "trials": [_trial_json(trial) for trial in state.trials.values()],
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.id,
        "status": trial.status,
        "score": trial.score,
        "best_virtual_epoch": trial.best_virtual_epoch,
        "virtual_epochs": trial.until,
        "stopped_at": trial.stopped_at,
        "hyperparameters": trial.hyperparameters,
        "run_dir": f"{TRIALS}/{trial.run}",
        "starts": trial.starts,
        "reason": trial.reason,
        "last_lines": list(trial.last_lines),
        "began_at": trial.began_at,
        "ended_at": trial.ended_at,
    }


def _last_line(trial: Trial, sweep_dir: Path) -> Mapping[str, Any]:
    """Return the metrics of the last virtual epoch that a trial has done so far."""
    lines = RunDirectory(sweep_dir / TRIALS / trial.run).read_metrics()
    return lines[-1] if lines else {}


def _progress(trial: Trial, state: SweepState, line: Mapping[str, Any]) -> str:
    config = state.begun.get("config", {})
    of = trial.until or config.get("checkpoints") or config.get("epochs") or "?"
    if trial.is_over:
        stopped = f", stopped at {trial.stopped_at}" if trial.stopped_at else ""
        return f"{trial.best_virtual_epoch} of {of}{stopped}" if trial.best_virtual_epoch else ""
    step = f", step {line['step']}" if "step" in line else ""
    return f"{line.get('virtual_epoch', 0)} of {of}{step}"


def _counts(state: SweepState) -> str:
    trials = state.trials.values()
    ended, most = sum(t.is_over for t in trials), state.begun.get("max_trials")
    of = f" of {most}" if most else ""
    return f"{state.begun.get('tuner')}: {ended}{of} trials ended, {state.num_failed} failed"


def _verdict(state: SweepState, sweep_dir: Path, *, is_running: bool) -> str:
    ranked = state.ranked()
    best = f"; best {ranked[0].score:.4f}, trial {ranked[0].id}" if ranked else ""
    if state.finished is None or is_running:
        how = "its chief is running" if is_running else "the same command goes on"
        return f"not finished: {how}{best}; in {sweep_dir}"
    return f"{state.finished}{best}; in {sweep_dir}"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


# Read-only view of a finished or running sweep, from its directory alone.


def show(path: Path) -> None:
    """Print the sweep in a directory and write nothing; raise UsageError where there is none."""
    lines = read(path / JOURNAL)
    require(
        lines,
        "--show",
        received=f"{path}, where no sweep is",
        expected=f"a sweep directory, with {JOURNAL}",
        fix="give the --sweep_dir of the sweep",
        code="no-sweep",
    )
    leaderboard(fold(lines), path, is_running=is_held(path / LOCK))
