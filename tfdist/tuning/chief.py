"""Chief of a sweep: requests trials from the search, runs them, and journals each change.

A trial has four events: ``asked`` (before its files exist), ``started`` (before its job starts),
``killed`` (its job will restart) and ``ended`` (once). If a chief dies between two events, the
next chief finds the trial in the journal. The next chief resumes the trial's job from its
checkpoint. If the trial has reached its goal, the chief only records the outcome.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.errors import EXIT_FAILED, EXIT_OK, Stopped, UsageError
from tfdist.launch.live import LIVE_FILE
from tfdist.outputs.sweep_journal import RUNNING as BEGUN
from tfdist.outputs.sweep_journal import TRIALS, Journal, Trial, fold
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Goal,
    Killed,
    LaunchedTrial,
    LauncherRunner,
    Outcome,
    Slot,
    TrialJob,
)

if TYPE_CHECKING:  # the module imports KerasTuner and TensorFlow
    from tfdist.tuning.oracle import Search
    from tfdist.tuning.results import SweepScreen
    from tfdist.tuning.sweep import Sweep

logger = logging.getLogger(__name__)

POLL_S = 0.5
KILLS_AT_MOST = 3
"""Maximum number of consecutive kills of a trial that completes no virtual epoch."""

StopRequests = Callable[[], Sequence[int]]
"""Function that returns the stop signals received since the last call."""


class Chief:
    """Chief of one sweep. Call `run` once."""

    def __init__(
        self,
        sweep: Sweep,
        *,
        search: Search,
        journal: Journal,
        runner: LauncherRunner,
        observer: SweepScreen,
        stop_requests: StopRequests = tuple,
    ) -> None:
        self._sweep = sweep
        self._search = search
        self._journal = journal
        self._runner = runner
        self._observer = observer
        self._stop_requests = stop_requests
        self.state = fold(journal.lines)
        self._running: dict[str, tuple[TrialJob, LaunchedTrial]] = {}
        trials = self.state.trials.values()
        self._left = {trial.id for trial in trials if trial.status == BEGUN}
        """Trials that an earlier chief started and did not finish."""
        self._no_more = False
        self._ask_again = True
        self._stop_signal = 0
        self._unpublished: list[str] = []

    def run(self) -> int:
        """Run trials until all have ended or a signal stops the sweep. Return the exit code.

        After a stop, the same command resumes the sweep. Too many failed trials end the sweep.
        """
        try:
            while not self._is_to_stop() and not self._too_many_failed():
                self._fill()
                self._publish()
                self._observer.tick(self.state)
                if self._is_done():
                    how = "failed" if self.state.has_failed else "finished"
                    self._finish(f"all trials {how}", is_complete=True)
                    return EXIT_FAILED if self.state.has_failed else EXIT_OK
                self._wait_for_ends()
        finally:
            self._stop_all()
            self._publish()
        if self._stop_signal:
            return Stopped(self._stop_signal).exit_code
        reason = f"stopped after {self.state.num_failed} failed trials (--max_failed_trials)"
        self._finish(reason, is_complete=False)
        return EXIT_FAILED

    def _is_to_stop(self) -> bool:
        if requests := self._stop_requests():
            self._stop_signal = self._stop_signal or requests[0]
        return self._stop_signal != 0

    def _is_done(self) -> bool:
        """Return whether no trial is running or waiting and the search has no more trials."""
        can_ask = self._ask_again and not self._no_more
        return not (self._running or can_ask or self._waiting())

    def _fill(self) -> None:
        """Start trials in all free slots. Journal each start first."""
        for slot in self._runner.free_slots({job.slot for job, _ in self._running.values()}):
            job = self._prepare(slot)
            if job is None:
                break
            self._running[job.trial] = job, self._runner.start(job)
            self._unpublished.append(job.trial)
            self._changed(job.trial)

    def _prepare(self, slot: Slot) -> TrialJob | None:
        """Journal the start of the next trial and return its job. Record finished trials."""
        while not self._too_many_failed():
            trial = self._waiting() or self._next_trial()
            if trial is None:
                return None
            try:
                job = self._job(trial, slot=slot)
            except UsageError as error:
                self._end(trial, Failed(reason=str(error)))
                continue
            if outcome := self._runner.outcome(job):
                self._end(trial, outcome)
                continue
            line = self._journal.add("started", trial=trial.id, **self._ran_until(trial))
            self.state.apply(line)
            return job
        return None

    def _ran_until(self, trial: Trial) -> dict[str, float]:
        """Return the journal field with the last sign of life of an earlier chief's job."""
        if trial.id not in self._left or trial.started_at is None:
            return {}
        self._left.discard(trial.id)
        sign = trial.started_at
        with contextlib.suppress(OSError):  # the launcher updates this file continuously
            sign = max(sign, (self._run_dir(trial) / LIVE_FILE).stat().st_mtime)
        return {"ran_until": round(sign, 3)}

    def _waiting(self) -> Trial | None:
        """Return a trial that is neither over nor running, such as one of an earlier chief."""
        left = (trial for trial in self.state.trials.values() if not trial.is_over)
        return next((trial for trial in left if trial.id not in self._running), None)

    def _next_trial(self) -> Trial | None:
        """Request another trial from the search. After IDLE, first wait for a trial to end."""
        if self._no_more or not self._ask_again:
            return None
        answer = self._search.ask()
        run, until = self._run_and_budget(answer.trial, answer.values or {})
        more: dict[str, Any] = {"run": run, "until": until}
        more["hyperparameters"] = answer.values and self._sweep.asked_for(answer.values)
        self.state.apply(self._journal.add("asked", **answer._asdict(), **more))
        self._no_more = answer.status == STOPPED
        self._ask_again = answer.status != IDLE
        if answer.status != RUNNING or answer.trial is None:
            return None
        return self._changed(answer.trial)

    def _run_and_budget(
        self, name: str | None, values: Mapping[str, Any]
    ) -> tuple[str | None, int | None]:
        """Return the run directory's name for a trial, and the virtual epoch to pause it after.

        Hyperband's values include the id of the trial that the new trial continues.
        """
        whole = self._sweep.max_epochs
        if whole is None:
            return name, None
        until = values.get("tuner/epochs")
        is_cut = until is not None and until < whole
        past = self.state.trials.get(values.get("tuner/trial_id") or "")
        return past.run if past else name, until if is_cut else None

    def _job(self, trial: Trial, *, slot: Slot) -> TrialJob:
        goal = Goal(
            objective=self.state.begun["objective"],
            direction=self.state.begun["direction"],
            until=trial.until,
        )
        seed = self.state.begun["seed"]
        return TrialJob(
            run_dir=self._run_dir(trial),
            flags=self._sweep.flags_of(trial, seed),
            variables=self._sweep.variables_of(trial, seed),
            goal=goal,
            slot=slot,
            trial=trial.id,
        )

    def _run_dir(self, trial: Trial) -> Path:
        return self._sweep.options.sweep_dir / TRIALS / trial.run

    def _wait_for_ends(self, *, is_stopping: bool = False) -> None:
        """Wait at most `POLL_S` seconds and record the trials that have ended.

        While the sweep is stopping, record only trials that have reached their goal.
        """
        self._runner.wait([running for _, running in self._running.values()], POLL_S)
        for name, (_, running) in list(self._running.items()):
            if outcome := running.poll():
                del self._running[name]
                if isinstance(outcome, Completed) or not is_stopping:
                    self._record(self.state.trials[name], outcome)

    def _record(self, trial: Trial, outcome: Outcome) -> None:
        if not isinstance(outcome, Killed):
            self._end(trial, outcome)
            return
        reached = len(self._runner.metrics(self._run_dir(trial)))
        kills = (trial.kills if reached <= trial.reached else 0) + outcome.has_started
        if kills > KILLS_AT_MOST:
            reason = f"killed {kills} times without progress (last: {outcome.reason})"
            self._end(trial, Failed(reason=reason))
            return
        line = self._journal.add(
            "killed", trial=trial.id, reason=outcome.reason, kills=kills, reached=reached
        )
        self.state.apply(line)
        self._changed(trial.id)

    def _end(self, trial: Trial, outcome: Completed | Failed) -> None:
        status = "COMPLETED" if isinstance(outcome, Completed) else "FAILED"
        fields: dict[str, Any] = dict.fromkeys(("score", "best_virtual_epoch"))
        fields |= {"history": [], "reason": "", "last_lines": [], **asdict(outcome)}
        fields |= self._ran_until(trial)
        line = self._journal.add("ended", trial=trial.id, status=status, **fields)
        self.state.apply(line)
        self._search.tell(line)
        self._unpublished.append(trial.id)
        self._ask_again = True
        self._changed(trial.id)

    def _changed(self, name: str) -> Trial:
        trial = self.state.trials[name]
        self._observer.changed(self.state, trial)
        return trial

    def _publish(self) -> None:
        """Write KerasTuner's files for all trials that started or ended since the last call."""
        if self._unpublished:
            self._search.publish(self._unpublished)
            self._unpublished = []

    def _too_many_failed(self) -> bool:
        most = self._sweep.options.max_failed_trials
        return most is not None and self.state.num_failed >= most

    def _stop_all(self) -> None:
        """Tell all trials to save and exit, and wait for them."""
        if self._running:
            logger.info("stopping: saving %d running trials", len(self._running))
        for _, running in self._running.values():
            running.stop()
        while self._running:
            self._wait_for_ends(is_stopping=True)

    def _finish(self, reason: str, *, is_complete: bool) -> None:
        self.state.apply(self._journal.add("finished", reason=reason, is_complete=is_complete))


RUNNING, IDLE, STOPPED = "RUNNING", "IDLE", "STOPPED"
"""KerasTuner's names of the statuses."""


class NextTrial(NamedTuple):
    """Trial to run, IDLE (ask again after a trial has ended) or STOPPED (no trial is left)."""

    status: str
    trial: str | None = None
    values: Mapping[str, Any] | None = None
