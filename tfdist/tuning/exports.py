"""What a sweep leaves for others: a plot, TensorBoard's HParams, a tracker's parent run."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tfdist.files import one_line_errors
from tfdist.outputs.sweep_journal import COMPLETED, SweepState, Trial
from tfdist.report.sweep import coordinates
from tfdist.tuning.directory import PLOT

# Plot of a sweep: scores, the effect of each hyperparameter, parallel coordinates.

logger = logging.getLogger(__name__)

_POINTS, _BEST = "#1f5fa8", "#d1661a"
_COLUMNS = 4
_MOST_EFFECTS = 8


def draw_plot(state: SweepState, sweep_dir: Path) -> Path | None:
    """Draw the completed trials of a sweep as a PNG in its directory; return its path.

    Returns None, and says so in the log, where matplotlib is not installed, no trial is there, or
    the picture cannot be drawn or written: it is no reason for a sweep that is done to fail.
    """
    path = sweep_dir / PLOT
    if not state.scores:
        logger.info("no plot: no trial was completed")
        return None
    try:
        _figure(state).savefig(path)
    except ImportError:
        logger.info("no plot: matplotlib is missing; pip install 'tfdist[plots]'")
        return None
    except Exception as error:
        logger.warning("no plot: %s: %s", type(error).__name__, error)
        return None
    return path


def _figure(state: SweepState) -> Any:
    from matplotlib.figure import Figure  # made by hand: neither pyplot nor a display is touched

    names = state.varied[:_MOST_EFFECTS]
    rows = -(-len(names) // _COLUMNS)
    figure = Figure(figsize=(13.0, 6.8 + 2.7 * rows), dpi=130, layout="constrained")
    grid = figure.add_gridspec(rows + 2, _COLUMNS, height_ratios=[1.2, *[1.0] * rows, 1.2])
    _draw_scores(figure.add_subplot(grid[0, :]), state)
    for number, name in enumerate(names):
        place = grid[1 + number // _COLUMNS, number % _COLUMNS]
        _draw_effect(figure.add_subplot(place), state, name)
    _draw_parallel(figure.add_subplot(grid[rows + 1, :]), state)
    title = f"{_literal(state.begun['tuner'])} search, {len(state.scores)} trials"
    figure.suptitle(title, fontsize=12)
    return figure


def _draw_scores(axes: Any, state: SweepState) -> None:
    best, numbers = state.best_so_far, range(1, len(state.scores) + 1)
    axes.plot(numbers, state.scores, "o", color=_POINTS, ms=5, label="trial")
    axes.step(numbers, best, where="post", color=_BEST, label=f"best so far, {best[-1]:.4g}")
    axes.set_xlabel("completed trials, in the order in which they were asked for")
    axes.set_ylabel(_literal(state.begun["objective"]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9)
    _plain_axes(axes)


def _draw_effect(axes: Any, state: SweepState, name: str) -> None:
    known = [trial for trial in state.ranked() if name in trial.hyperparameters]
    values = [trial.hyperparameters[name] for trial in known]
    scores = [trial.score for trial in known]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        pairs = sorted(zip(map(_literal, values), scores, strict=True))
        values, scores = map(list, zip(*pairs, strict=True))
    axes.plot(values, scores, "o", color=_POINTS, ms=4.5, alpha=0.8)
    if name in state.on_log_scale:
        axes.set_xscale("log")
    axes.set_xlabel(_literal(name))
    axes.set_ylabel(_literal(state.begun["objective"]))
    _plain_axes(axes)


def _draw_parallel(axes: Any, state: SweepState) -> None:
    """Draw a line for each trial through its values, the better the stronger, the best on top."""
    found, lines = coordinates(state, most=_MOST_EFFECTS)
    for number, axis in enumerate(found):
        axes.axvline(number, color="#bbbbbb", lw=0.8, zorder=0)
        for height, text in axis.ticks:
            where = {"va": "center", "fontsize": 7, "color": "#444444"}
            axes.text(number + 0.02, height, _literal(text), **where)
    for rank, line in reversed([*enumerate(lines)]):
        look = {"color": _POINTS if rank else _BEST, "alpha": 1.0 - 0.7 * rank / len(lines)}
        points = [(x, height) for x, height in enumerate(line) if height is not None]
        axes.plot(*zip(*points, strict=True), "-o", ms=4, lw=1.3, **look)
    axes.set_xticks(range(len(found)), [_literal(axis.name) for axis in found])
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _literal(text: object) -> str:
    """Return a text as matplotlib shows it as it is, and no formula."""
    return str(text).replace("$", r"\$")


def _plain_axes(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


# HParams export for TensorBoard: ``tensorboard --logdir SWEEP_DIR/tensorboard``.
#
# A directory for each trial that has ended, with its values, its end, and the objective at each
# virtual epoch. Written with what TensorBoard ships, so no operation of TensorFlow's is run.

HPARAMS = "tensorboard"


def export_hparams(state: SweepState, sweep_dir: Path) -> None:
    """Write the trials that have ended; what is there already is left as it is.

    Raises TfdistError where it cannot be written.
    """
    path = sweep_dir / HPARAMS
    ended = [trial for trial in state.trials.values() if trial.is_over]
    objective = str(state.begun.get("objective"))
    with one_line_errors(path):
        for trial in ended:
            if not (path / trial.id).exists():
                summaries = _summaries(trial, objective)
                _write_events(path, trial.id, summaries, at=trial.ended_at or time.time())


def _write_events(path: Path, name: str, summaries: Iterable[tuple[int, Any]], at: float) -> None:
    """Write an event file in a directory that appears whole."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    unfinished = path / f".{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    writer = EventFileWriter(str(unfinished))
    for step, summary in summaries:
        event = event_pb2.Event(wall_time=at, step=step)
        event.summary.ParseFromString(summary.SerializeToString())  # TensorFlow's, maybe
        writer.add_event(event)
    writer.close()
    os.replace(unfinished, path / name)


def _summaries(trial: Trial, objective: str) -> list[tuple[int, Any]]:
    from tensorboard.plugins.hparams import api, api_pb2, summary
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    is_done = trial.status == COMPLETED
    status = api_pb2.STATUS_SUCCESS if is_done else api_pb2.STATUS_FAILURE
    return [
        (
            0,
            api.hparams_pb(trial.hyperparameters, trial.id, trial.began_at),
        ),
        *(
            (int(line["virtual_epoch"]), scalar_pb(objective, line[objective]))
            for line in trial.history
            if objective in line
        ),
        (0, summary.session_end_pb(status, trial.ended_at)),
    ]


# One run of a tracker above those of a sweep's trials, by variables that MLflow and W&B read.

OF_TRACKERS = frozenset({"WANDB_RUN_GROUP", "MLFLOW_RUN_CONTEXT"})
"""The variables that trials may have beside their assignment."""

MLFLOW_FILE = "mlflow-run"
"""In the sweep's directory: the id of its run in MLflow."""


def variables_of_trials(
    packages: Collection[str], sweep_dir: Path, *, begun: Mapping[str, Any]
) -> Mapping[str, str]:
    """Return the variables that make the runs of trials children of one, also after a restart.

    Args:
      packages: the trackers that the trials log to, of which ``mlflow`` and ``wandb`` can.
      sweep_dir: of the sweep.
      begun: the first line of its journal.
    """
    variables = {}
    if "wandb" in packages:
        digest = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()
        variables["WANDB_RUN_GROUP"] = f"{sweep_dir.name}-{digest[:8]}"
    if "mlflow" in packages:
        try:
            tags = {"mlflow.parentRunId": _begun_in_mlflow(sweep_dir)}
            variables["MLFLOW_RUN_CONTEXT"] = json.dumps(tags)
        except Exception as error:
            from tfdist.training import trackers  # which loads TensorFlow

            trackers.warn("MLflow: the sweep has no run of its own", error)
    return variables


def _begun_in_mlflow(sweep_dir: Path) -> str:
    """Return the run that the sweep has begun with: the active one, or a new one."""
    mlflow: Any = importlib.import_module("mlflow")
    file = sweep_dir / MLFLOW_FILE
    if file.exists():
        from tfdist.training import trackers

        run = file.read_text()
        trackers.resume_in_mlflow(run)
        return run
    begun = mlflow.active_run() or mlflow.start_run(run_name=sweep_dir.name)
    file.write_text(begun.info.run_id)
    return str(begun.info.run_id)
