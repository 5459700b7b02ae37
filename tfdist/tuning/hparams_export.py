"""HParams export for TensorBoard: ``tensorboard --logdir SWEEP_DIR/tensorboard``.

A directory for each trial that has ended, with its values, its end, and the objective at each
virtual epoch. Written with what TensorBoard ships, so no operation of TensorFlow's is run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.tuning.journal import COMPLETED, SweepState, Trial

NAME = "tensorboard"


class HParamsBoard:
    """Writes down the trials that have ended; what is there already is left as it is."""

    def __init__(self, sweep_dir: Path) -> None:
        self._path = sweep_dir / NAME

    def load(self) -> None:
        """Load what `update` writes with, which takes a moment the first time."""
        import tensorboard.plugins.hparams.api
        import tensorboard.plugins.scalar.summary_v2
        import tensorboard.summary.writer.event_file_writer  # noqa: F401

    def update(self, state: SweepState) -> None:
        """Bring the directory up to date. Raises TfdistError where it cannot be written."""
        ended = [trial for trial in state.trials.values() if trial.is_over]
        missing = [trial for trial in ended if not (self._path / trial.id).exists()]
        if not missing:
            return
        objective = str(state.begun.get("objective"))
        try:
            if not (self._path / "experiment").exists():
                self._write("experiment", [(0, _experiment(state, objective))], at=time.time())
            for trial in missing:
                summaries = _summaries(trial, objective)
                self._write(trial.id, summaries, at=trial.ended_at or time.time())
        except OSError as error:
            raise TfdistError(f"{self._path}: {error.strerror or error}") from error

    def _write(self, name: str, summaries: Iterable[tuple[int, Any]], *, at: float) -> None:
        """Write an event file in a directory that appears whole."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        unfinished = self._path / f".{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        writer = EventFileWriter(str(unfinished))
        for step, summary in summaries:
            event = event_pb2.Event(wall_time=at, step=step)
            event.summary.ParseFromString(summary.SerializeToString())  # TensorFlow's, maybe
            writer.add_event(event)
        writer.close()
        os.replace(unfinished, self._path / name)


def _experiment(state: SweepState, objective: str) -> Any:
    from tensorboard.plugins.hparams import api

    space = [entry["config"]["name"] for entry in state.begun.get("space", ())]
    return api.hparams_config_pb(
        hparams=[api.HParam(name) for name in dict.fromkeys(space)],
        metrics=[api.Metric(objective, display_name=objective)],
    )


def _summaries(trial: Trial, objective: str) -> list[tuple[int, Any]]:
    from tensorboard.plugins.hparams import api, api_pb2, summary
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    is_done = trial.status == COMPLETED
    status = api_pb2.STATUS_SUCCESS if is_done else api_pb2.STATUS_FAILURE
    return [
        (
            0,
            api.hparams_pb(_plain(trial.hyperparameters), trial.id, trial.began_at),
        ),
        *(
            (int(line["virtual_epoch"]), scalar_pb(objective, line[objective]))
            for line in trial.history
            if objective in line
        ),
        (0, summary.session_end_pb(status, trial.ended_at)),
    ]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as HParams takes them."""
    kinds = (bool, int, float, str)
    return {name: v if isinstance(v, kinds) else str(v) for name, v in values.items()}
