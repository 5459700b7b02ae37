"""Run of a sweep, from its directory to its end."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TfdistError
from tfdist.launch.fork_server import ForkTemplate
from tfdist.launch.machine import Machine
from tfdist.outputs.run_directory import RunDirectory
from tfdist.tuning import directory
from tfdist.tuning.chief import Chief, SweepPlan
from tfdist.tuning.hosts import SweepAddress, listener_of
from tfdist.tuning.hparams_export import HParamsBoard
from tfdist.tuning.journal import Journal, SweepState, Trial, fold, read
from tfdist.tuning.options import RunOptions
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.screen import SweepScreen, leaderboard
from tfdist.tuning.serving import RunnerServer, ServingRunner
from tfdist.tuning.trial_job import Completed, Failed, Outcome, Runner, TrialJob

if TYPE_CHECKING:  # it loads TensorFlow, which a runner of the sweep does not need
    from tfdist.tuning.oracle import Search

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep as it was asked for."""

    options: RunOptions
    describe: Callable[[], Mapping[str, Any]]
    """Returns what it is, as JSON: a sweep that differs in it is another one. It may take seconds,
    in which the trials' imports are done as well. Raises UsageError for one that cannot be."""
    search_of: Callable[[Mapping[str, Any]], Search]
    """Returns who chooses, from what the journal begins with, where every trial is yet to come."""
    plan_of: Callable[[Mapping[str, Any]], SweepPlan]
    best_of: Callable[[Trial, Mapping[str, Any]], TrialJob]
    """Returns the job that trains a trial's values anew, in full."""
    runner: LauncherRunner
    first_seed: int | None = None
    """Of a sweep that begins and whose description has none; None to draw one."""
    sweep_address: SweepAddress | None = None
    """Where runners on other hosts come; None: they cannot."""


def run_sweep(sweep: Sweep) -> tuple[int, SweepState]:
    """Run a sweep, or go on with it; return the exit code, and what has become of it.

    Raises:
      UsageError: before anything is started.
      TfdistError: the sweep directory cannot be written.
    """
    sweep_dir = sweep.options.sweep_dir
    directory.make(sweep_dir)
    directory.require_own(sweep_dir)  # before the lock's file is in it, too
    with ExitStack() as stack:
        stack.enter_context(directory.chief_lock(sweep_dir))
        directory.require_own(sweep_dir)
        stack.callback(sweep.runner.close)
        if _may_have_trials(sweep):
            sweep.runner.warm_up()
        description = sweep.describe()
        if sweep.options.overwrite:
            directory.set_aside(sweep_dir)
        journal = Journal(sweep_dir / directory.JOURNAL, time_of_day=time.time)
        begin(sweep, journal, description)
        exit_code, state = _trials(sweep, journal)
        if exit_code == EXIT_OK and sweep.options.retrain_best and state.ranked():
            best = state.ranked()[0]
            begin_retraining(sweep_dir, journal, state, best=best.id)
            retraining = Retraining(sweep.runner, sweep.best_of(best, state.begun))
            with _told_to_stop(retraining):
                exit_code = retraining.run()
        return exit_code, state


def _trials(sweep: Sweep, journal: Journal) -> tuple[int, SweepState]:
    """Run the trials that are left."""
    sweep_dir, state = sweep.options.sweep_dir, fold(journal.lines)
    if state.is_complete:
        logger.info("the sweep in %s is finished; overwrite runs it again", sweep_dir)
        leaderboard(state, sweep_dir)
        return EXIT_FAILED if state.has_failed else EXIT_OK, state
    serving, exit_code = _serving(sweep), None
    try:
        search = sweep.search_of(journal.lines[0])
        search.replay(journal.lines)
        search.publish()
        board = HParamsBoard(sweep_dir)
        with SweepScreen(sweep_dir, also=board.update, beforehand=board.load) as screen:
            chief = Chief(
                sweep.plan_of(state.begun),
                search=search,
                journal=journal,
                runner=serving or sweep.runner,
                observer=screen,
            )
            screen.begin(chief.state)
            with _told_to_stop(chief):
                exit_code = chief.run()
            screen.end(chief.state)
    finally:
        if serving is not None:
            serving.close(exit_code)
    return exit_code, chief.state


def _serving(sweep: Sweep) -> ServingRunner | None:
    """Listen for runners, and report in the directory where; None where none may come."""
    sweep_address = sweep.sweep_address
    if sweep_address is None:
        return None
    listener = listener_of(sweep_address.address)
    left = directory.leave_mark(sweep.options.sweep_dir, address=sweep_address.address)
    line = RunnerServer(listener, token=sweep_address.token, terms=sweep_address.terms)
    logger.info("runners may come to %s", sweep_address.address)
    return ServingRunner(sweep.runner, line, mark=left)


def _may_have_trials(sweep: Sweep) -> bool:
    """Return False if the journal already shows the sweep finished."""
    options = sweep.options
    return options.overwrite or not fold(read(options.sweep_dir / directory.JOURNAL)).is_complete


def begin(sweep: Sweep, journal: Journal, now: Mapping[str, Any]) -> None:
    """Writes down which sweep this is now, or makes sure that it is the one that was."""
    if not journal.lines:
        seed = now["seed"] or sweep.first_seed or random.SystemRandom().randrange(1, 2**31)
        journal.add("begun", **{**now, "seed": seed})
        return
    before = fold(journal.lines).begun
    directory.require_same(sweep.options.sweep_dir, before, now)
    if before["max_trials"] != now["max_trials"]:
        journal.add("extended", max_trials=now["max_trials"])


def fork_template(
    options: RunOptions,
    *,
    machine: Machine,
    environ: Mapping[str, str],
    modules: Sequence[str],
    more: Sequence[str] = (),
) -> ForkTemplate | None:
    """Return what imports once for all trials; None where a GPU may be, which no fork survives."""
    if machine.gpus or machine.has_gpu_driver:
        return None
    log = directory.FORK_LOG
    if options.join is not None:
        log = log.replace(".", f"-{socket.gethostname()}.", 1)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": "-1"}  # as the launcher has it
    return ForkTemplate(
        ("tensorflow", "keras", *modules),
        more=more,
        environ={**quiet, **environ},
        log_path=options.sweep_dir / log,
    )


@contextmanager
def _told_to_stop(asked: Chief | Retraining) -> Iterator[None]:
    """Have signals ask for a stop, and give them back."""
    before = {
        signum: signal.signal(signum, lambda received, _: asked.stop(received))
        for signum in _STOP_SIGNALS
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def launch_flags(options: RunOptions, *, cpus: int) -> list[str]:
    """Return the launcher's flags of every trial; warn where there are more tasks than CPUs."""
    tasks = max(1, options.parallel_trials) * options.tasks_per_trial
    if tasks > cpus:
        logger.warning(
            "%d trials at once are %d processes that compute, on %d CPUs: they share them",
            options.parallel_trials,
            tasks,
            cpus,
        )
    flags = ["--strategy", options.strategy, "--workers", str(options.workers)]
    flags += ["--ps", str(options.ps)] if options.strategy == "ps" else []
    if options.devices_per_worker is not None:
        flags += ["--devices_per_worker", str(options.devices_per_worker)]
    return [*flags, "--threads_per_task", str(max(1, cpus // tasks))]


# Retraining with a sweep's best hyperparameters at full length; keeps the model.

RETRAINED = "best"
"""The directory of the run, in that of the sweep."""

_POLL_S = 0.5
_KILLS_AT_MOST = 3


def begin_retraining(sweep_dir: Path, journal: Journal, state: SweepState, *, best: str) -> None:
    """Write down whose values are trained; what was trained of another is moved aside.

    A sweep that goes on may find a better trial than the one that was the best.

    Raises TfdistError where it cannot be moved.
    """
    if state.retrained == best:
        return
    before = sweep_dir / RETRAINED
    if state.retrained is not None and before.exists():
        try:
            os.replace(before, sweep_dir / f"{RETRAINED}-{state.retrained}")
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
        """Ask for an end that the same command goes on from; a signal handler calls it."""
        self._stop_signal = signum

    def run(self) -> int:
        """Return the exit code; report how it went."""
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
