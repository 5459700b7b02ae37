"""Results of a sweep: console output, and TensorBoard's HParams.

The console shows a line per change, and at the end the leaderboard.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.files import is_held, one_line_errors
from tfdist.outputs.run_directory import RunDirectory, read_json
from tfdist.outputs.sweep_journal import (
    COMPLETED,
    FAILED,
    LOCK,
    TRIALS,
    WAITING,
    SweepState,
    Trial,
    best_trial,
    sweep_in,
)

logger = logging.getLogger(__name__)

_SHOWN = 10


class SweepScreen:
    """Observer of the chief: prints each change, and calls `export` for TensorBoard."""

    def __init__(
        self,
        sweep_dir: Path,
        *,
        console: Console | None = None,
        export: Callable[[SweepState, Path], None] = lambda state, sweep_dir: None,
    ) -> None:
        self._sweep_dir = sweep_dir
        self._console = console or _console()
        self._export = export
        self._has_changed = True

    def begin(self, state: SweepState) -> None:
        if state.trials:
            done = sum(trial.is_over for trial in state.trials.values())
            left = len(state.trials) - done
            self._say(f"resuming: {done} trials are finished, {left} continue")

    def changed(self, state: SweepState, trial: Trial) -> None:
        """Print the change of a trial."""
        self._has_changed = True
        if trial.status != WAITING or trial.reason:  # skip a new trial
            self._say(change_line(state, trial))

    def tick(self, state: SweepState) -> None:
        """Export once for all changes."""
        if self._has_changed:
            self._has_changed = False
            self._export(state, self._sweep_dir)

    def end(self, state: SweepState) -> None:
        """Export, and print the leaderboard, after the sweep has ended or stopped."""
        self.tick(state)
        leaderboard(state, self._sweep_dir, console=self._console)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False)


def leaderboard(
    state: SweepState, sweep_dir: Path, *, console: Console | None = None, is_running: bool = False
) -> None:
    """Print the ranked trials, the failed trials and the result of the sweep."""
    console = console or _console()
    console.print(table(state, sweep_dir))
    for trial in state.trials.values():
        if trial.status == FAILED:
            text = f"trial {trial.id} failed: {trial.reason}"
            console.print(text, markup=False, emoji=False)
    verdict = _verdict(state, sweep_dir, is_running=is_running)
    console.print(verdict, markup=False, emoji=False)


def table(state: SweepState, sweep_dir: Path) -> Table:
    """Return a table of the running trials, the completed trials and the last failed trials."""
    objective = state.begun.get("objective", "score")
    drawn = Table(box=box.SIMPLE_HEAD, title=Text(_counts(state)), title_justify="left")
    for heading in ("trial", "state", "virtual epoch", objective, "hyperparameters"):
        drawn.add_column(Text(heading), overflow="fold")
    running = [t for t in state.trials.values() if not t.is_over]
    failed = [t for t in state.trials.values() if t.status == FAILED]
    for trial in [*running, *state.ranked(), *failed[-_SHOWN:]]:
        line: Mapping[str, Any] = {}
        if not trial.is_over:
            lines = RunDirectory(sweep_dir / TRIALS / trial.run).read_metrics()
            line = lines[-1] if lines else {}
        score = line.get(objective) if line else trial.score
        drawn.add_row(
            trial.id,
            trial.status,
            _progress(trial, state, line),
            "" if score is None else f"{score:.4f}",
            Text(values_text(trial.hyperparameters)),  # a Text, so that rich reads no markup
        )
    return drawn


def change_line(state: SweepState, trial: Trial) -> str:
    """Return a line with the new status of a trial."""
    text = f"trial {trial.id} {trial.status}"
    if trial.status == COMPLETED and trial.score is not None:
        best = state.ranked()[0]
        return f"{text}: {trial.score:.4f}; best {best.score:.4f} (trial {best.id})"
    if trial.reason and trial.status != COMPLETED:
        return f"{text}: {trial.reason}"
    return f"{text}: {values_text(trial.hyperparameters)}"


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values as text, such as ``learning_rate=0.001 optimizer=adam``."""
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


def _progress(trial: Trial, state: SweepState, line: Mapping[str, Any]) -> str:
    config = state.begun.get("config", {})
    of = trial.until or config.get("checkpoints") or config.get("epochs") or "?"
    if trial.is_over:
        return f"{trial.best_virtual_epoch} of {of}" if trial.best_virtual_epoch else ""
    step = f", step {line['step']}" if "step" in line else ""
    return f"{line.get('virtual_epoch', 0)} of {of}{step}"


def _counts(state: SweepState) -> str:
    trials = state.trials.values()
    ended, most = sum(t.is_over for t in trials), state.begun.get("max_trials")
    of = f" of {most}" if most else ""
    return f"{state.begun.get('tuner')}: {ended}{of} trials finished, {state.num_failed} failed"


def _verdict(state: SweepState, sweep_dir: Path, *, is_running: bool) -> str:
    ranked = state.ranked()
    best = f"; best {ranked[0].score:.4f} (trial {ranked[0].id})" if ranked else ""
    if state.finished is None or is_running:
        how = "the sweep is running" if is_running else "run the same command to resume"
        return f"not finished: {how}{best}; results in {sweep_dir}"
    return f"{state.finished}{best}; results in {sweep_dir}"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


# Read-only view of a finished or running sweep. It reads only the sweep's directory.


def show(path: Path) -> None:
    """Print the sweep in a directory without changing it, or raise UsageError if there is none."""
    leaderboard(sweep_in(path, where="--show"), path, is_running=is_held(path / LOCK))


def show_best(path: Path) -> None:
    """Print the best trial's score, values, files and command. Raise UsageError without a trial."""
    state, trial = best_trial(path, where="--best")
    run = RunDirectory(path / TRIALS / trial.run)
    rows = {
        "trial": f"{trial.id}, virtual epoch {trial.best_virtual_epoch}",
        str(state.begun.get("objective")): trial.score,
        **trial.hyperparameters,
        "run": run.path,
    }
    if run.config_file.exists():  # a config file's trial: the command describes it fully
        command = (read_json(run.path / "report.json") or {}).get("job", {}).get("command")
        rows |= {"config": run.config_file} | ({"command": command} if command else {})
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


# HParams export for TensorBoard: ``tensorboard --logdir SWEEP_DIR/tensorboard``.

HPARAMS = "tensorboard"


def export_hparams(state: SweepState, sweep_dir: Path) -> None:
    """Write a directory for each ended trial, with its values, scores and status.

    Existing directories stay unchanged. Raises TfdistError if a directory cannot be written.
    """
    board = sweep_dir / HPARAMS
    with one_line_errors(board):
        for trial in state.trials.values():
            if trial.is_over and not (board / trial.id).exists():
                unfinished = board / f".{trial.id}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                _write_hparams(trial, str(state.begun.get("objective")), unfinished)
                os.replace(unfinished, board / trial.id)


def _write_hparams(trial: Trial, objective: str, path: Path) -> None:
    import tensorflow as tf  # KerasTuner has already imported it in the chief
    from tensorboard.plugins.hparams import api, api_pb2, summary

    is_done = trial.status == COMPLETED
    status = api_pb2.STATUS_SUCCESS if is_done else api_pb2.STATUS_FAILURE
    # TensorBoard shows the end minus the begin. Leave out the time between starts of the trial.
    end = trial.ended_at if trial.began_at is None else trial.began_at + trial.ran_s
    writer = tf.summary.create_file_writer(str(path))
    with writer.as_default():
        api.hparams(trial.hyperparameters, trial.id, trial.began_at)
        for line in trial.history:
            if objective in line:
                tf.summary.scalar(objective, line[objective], step=int(line["virtual_epoch"]))
        session_end = summary.session_end_pb(status, end).SerializeToString()
        tf.summary.experimental.write_raw_pb(session_end, step=0)
    writer.close()
