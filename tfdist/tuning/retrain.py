"""Training the best hyperparameters of a sweep anew, for the full length, and keeping the model."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from tfdist.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TfdistError
from tfdist.outputs.run_directory import RunDirectory
from tfdist.tuning.journal import Journal
from tfdist.tuning.results import Completed, Failed, Outcome
from tfdist.tuning.state import SweepState
from tfdist.tuning.trial_job import Runner, TrialJob

logger = logging.getLogger(__name__)

NAME = "best"
"""The directory of the run, in that of the sweep."""

_POLL_S = 0.5
_KILLS_AT_MOST = 3


def begin(sweep_dir: Path, journal: Journal, state: SweepState, *, best: str) -> None:
    """Writes down whose values are trained; what was trained of another is moved aside.

    A sweep that goes on may find a better trial than the one that was the best.

    Raises TfdistError where it cannot be moved.
    """
    if state.retrained == best:
        return
    before = sweep_dir / NAME
    if state.retrained is not None and before.exists():
        try:
            os.replace(before, sweep_dir / f"{NAME}-{state.retrained}")
        except OSError as error:
            raise TfdistError(f"{before}: {error.strerror or error}") from error
    state.apply(journal.add("retrained", trial=best))


class Retraining:
    """One job, which goes on where it stood when it is killed or the command is run again."""

    def __init__(self, runner: Runner, job: TrialJob) -> None:
        self._runner = runner
        self._job = job
        self._stop_signal = 0

    def stop(self, signum: int) -> None:
        """Asks for an end that the same command goes on from; a signal handler calls it."""
        self._stop_signal = signum

    def run(self) -> int:
        """Returns the exit code; says how it went."""
        outcome: Outcome | None = self._runner.outcome(self._job)
        kills = 0
        while not isinstance(outcome, Completed | Failed):
            if self._stop_signal:
                return EXIT_INTERRUPTED if self._stop_signal == signal.SIGINT else EXIT_STOPPED
            if kills > _KILLS_AT_MOST:
                outcome = Failed(reason=f"killed {kills} times")
                break
            outcome = self._attempt()
            kills += 1
        if isinstance(outcome, Failed):
            logger.error("the best trial could not be trained again: %s", outcome.reason)
            return EXIT_FAILED
        path = RunDirectory(self._job.run_dir).model_file
        logger.info("the best trial, trained again: %.4f; %s", outcome.score, path)
        return EXIT_OK

    def _attempt(self) -> Outcome:
        running = self._runner.start(self._job)
        is_told = False
        while (outcome := running.poll()) is None:
            if self._stop_signal and not is_told:
                running.stop()
                is_told = True
            self._runner.wait([running], _POLL_S)
        return outcome
