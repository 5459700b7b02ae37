"""A sweep from its directory to its end, whether a config file or a tuner describes it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import files
from tfdist.cluster import read_environment
from tfdist.cluster.address import parse_hosts
from tfdist.cluster.settings import restarts
from tfdist.errors import EXIT_FAILED, EXIT_OK, Stopped, UsageError, require
from tfdist.files import FileLock, Held, one_line_errors
from tfdist.launch.events import SignalPipe
from tfdist.launch.fork_server import ForkTemplate
from tfdist.launch.machine import Machine, this_machine
from tfdist.launch.multihost.hosts import slurm_nodes
from tfdist.outputs.run_directory import RunDirectory, differences
from tfdist.outputs.sweep_journal import JOURNAL, LOCK, TRIALS, Journal, SweepState, Trial, fold
from tfdist.tuning.chief import KILLS_AT_MOST, POLL_S, Chief, StopRequests
from tfdist.tuning.options import RunOptions
from tfdist.tuning.results import SweepScreen, export_hparams, leaderboard, variables_of_trials
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Goal,
    LauncherRunner,
    Outcome,
    TrialHosts,
    TrialJob,
    TrialProgram,
    is_run_in,
)

if TYPE_CHECKING:  # it loads KerasTuner, and with it TensorFlow
    from tfdist.tuning.oracle import Search

logger = logging.getLogger(__name__)

RETRAINED = "best"
"""The directory in which the best trial is trained anew, in that of the sweep."""


class Sweep(ABC):
    """A sweep as requested: the search that chooses its trials, and the program these run."""

    first_seed: int | None = None
    """Of a sweep that begins and whose description has none; None to draw one."""
    max_epochs: int | None = None
    """Of a whole run, of which a trial may be a part, to be continued by another in the same
    directory; None where trials know when to end, and each has a directory of its own."""
    trackers: Collection[str] = ()
    """The packages of trackers that its trials log to."""

    def __init__(
        self, options: RunOptions, program: TrialProgram, environ: Mapping[str, str]
    ) -> None:
        self.tracked: Mapping[str, str] = {}
        """Variables by which the trials' runs there are of this sweep, once it has begun."""
        self.options = options
        self.runner = runner_of(options, program, environ)

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Return its description as JSON: a sweep that differs in it is another one.

        It may take seconds, in which the trials' imports are done as well. Raises UsageError for
        one that cannot be.
        """

    @abstractmethod
    def search(self, begun: Mapping[str, Any]) -> Search:
        """Return the search, from the journal's first line and before any trial."""

    def flags_of(self, trial: Trial, seed: int, *, is_best: bool = False) -> tuple[str, ...]:
        """Return the ``--config.field=value`` of a trial; raise UsageError where they cannot be.

        Where it is the best, they are of its values trained anew: in full, with the model saved.
        """
        return ()

    def asked_for(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return those of a trial's values that its program asks for; None if the trial tells."""
        return None

    def variables_of(self, trial: Trial, seed: int, *, is_best: bool = False) -> Mapping[str, str]:
        """Return the variables of a trial, added to its environment; `is_best` as in `flags_of`."""
        return {}

    def retraining(self, trial: Trial, begun: Mapping[str, Any]) -> TrialJob:
        """Return the job that trains the best trial's values anew."""
        return TrialJob(
            run_dir=self.options.sweep_dir / RETRAINED,
            flags=self.flags_of(trial, begun["seed"], is_best=True),
            variables={**self.tracked, **self.variables_of(trial, begun["seed"], is_best=True)},
            goal=Goal(objective=begun["objective"], direction=begun["direction"]),
        )


def run(sweep: Sweep) -> tuple[int, SweepState]:
    """Run a sweep, or go on with it; return the exit code, and what has become of it.

    Raises:
      UsageError: before anything is started.
      TfdistError: the sweep directory cannot be written.
    """
    sweep_dir = sweep.options.sweep_dir
    with one_line_errors(f"sweep directory {sweep_dir}"):
        sweep_dir.mkdir(parents=True, exist_ok=True)
    require_own(sweep_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(chief_lock(sweep_dir))
        if sweep.runner.warm is not None:
            stack.callback(sweep.runner.warm.close)
            sweep.runner.warm.start()
        description = sweep.describe()
        if sweep.options.overwrite and restarts(os.environ):
            logger.info("started again: --overwrite was for the first start, the sweep goes on")
        elif sweep.options.overwrite:
            set_aside(sweep_dir)
        journal = Journal(sweep_dir / JOURNAL, time_of_day=time.time)
        _begin_journal(sweep, journal, description)
        if sweep.trackers:
            sweep.tracked = variables_of_trials(sweep.trackers, sweep_dir, begun=journal.lines[0])
        exit_code, state = _run_trials(sweep, journal)
        if exit_code == EXIT_OK and sweep.options.retrain_best and state.ranked():
            best = state.ranked()[0]
            begin_retraining(sweep_dir, journal, state, best=best.id)
            with SignalPipe() as signals:
                job = sweep.retraining(best, state.begun)
                exit_code = retrain(sweep.runner, job, stop_requests=signals.stop_requests)
        return exit_code, state


def _run_trials(sweep: Sweep, journal: Journal) -> tuple[int, SweepState]:
    """Run the trials that are left."""
    sweep_dir, state = sweep.options.sweep_dir, fold(journal.lines)
    if state.is_complete:
        logger.info("the sweep in %s is finished; overwrite runs it again", sweep_dir)
        leaderboard(state, sweep_dir)
        return EXIT_FAILED if state.has_failed else EXIT_OK, state
    search = sweep.search(journal.lines[0])
    search.replay(journal.lines)
    search.publish()
    with SweepScreen(sweep_dir, export=export_hparams) as screen, SignalPipe() as signals:
        chief = Chief(
            sweep,
            search=search,
            journal=journal,
            runner=sweep.runner,
            observer=screen,
            stop_requests=signals.stop_requests,
        )
        screen.begin(chief.state)
        exit_code = chief.run()
        screen.end(chief.state)
    return exit_code, chief.state


def _begin_journal(sweep: Sweep, journal: Journal, now: Mapping[str, Any]) -> None:
    """Write down which sweep this is now, or make sure that it is the one that was."""
    if not journal.lines:
        seed = now["seed"] or sweep.first_seed or random.SystemRandom().randrange(1, 2**31)
        journal.add("begun", **{**now, "seed": seed})
        return
    before = fold(journal.lines).begun
    require_same(sweep.options.sweep_dir, before, now)
    if before["max_trials"] != now["max_trials"]:
        journal.add("extended", max_trials=now["max_trials"])


# The runner of the trials.


def runner_of(
    options: RunOptions, program: TrialProgram, environ: Mapping[str, str]
) -> LauncherRunner:
    """Return the runner of trials on this machine, or on the hosts of the sweep."""
    machine = this_machine(environ)
    elsewhere = None if options.is_here else _hosts_of(options, environ)
    flags = launch_flags(options, cpus=machine.cpus, elsewhere=elsewhere)
    return LauncherRunner(
        program=program.command,
        launch_flags=(*flags, *program.launch_flags),
        gpus=machine.gpus if options.is_here else (),
        slots=options.parallel_trials,
        environ=environ,
        timeout_s=options.trial_timeout_s,
        elsewhere=elsewhere,
        passes_variables=not options.is_here,
        warm=_fork_template(options, program, machine=machine, environ=environ),
    )


def _hosts_of(options: RunOptions, environ: Mapping[str, str]) -> TrialHosts | None:
    """Return the hosts of the trials; None if Ray chooses them."""
    if options.on == "ray":
        return None
    if options.hosts is not None:
        listed = parse_hosts(options.hosts)
    else:
        listed = [(node, options.parallel_trials) for node in slurm_nodes(environ)]
    hosts = Counter[str]()
    for host, trials in listed:  # a host may be listed twice
        hosts[host] += trials
    return TrialHosts(hosts=hosts, tasks=options.tasks_per_trial + (options.strategy == "ps"))


def _fork_template(
    options: RunOptions, program: TrialProgram, *, machine: Machine, environ: Mapping[str, str]
) -> ForkTemplate | None:
    """Return the process that imports once for all trials; None if a fork would break a GPU."""
    if not options.is_here or program.imports is None or machine.gpus or machine.has_gpu_driver:
        return None
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": "-1"}  # as the launcher has it
    return ForkTemplate(
        ("tensorflow", "keras", *program.imports),
        more=program.more_imports,
        environ={**quiet, **environ},
        log_path=options.sweep_dir / FORK_LOG,
    )


def launch_flags(
    options: RunOptions, *, cpus: int, elsewhere: TrialHosts | None = None
) -> list[str]:
    """Return the launcher's flags of every trial; warn if there are more tasks than CPUs.

    All hosts count as having as many CPUs as this one. A task on another host needs an address: a
    trial of one process is a multiworker job of one worker there.
    """
    flags, strategy, devices = list[str](), options.strategy, options.devices_per_worker
    if not options.is_here:
        flags += ["--on", options.on or "ssh"]
        for flag, value in (("--rsh", options.rsh), ("--env", options.env)):
            flags += [flag, value] if value is not None else []
        if strategy in ("single", "mirrored"):
            devices = 1 if strategy == "single" else devices
            strategy = "multiworker"
    flags += ["--strategy", strategy]
    flags += ["--workers", str(options.workers)] if elsewhere is None else []
    flags += ["--ps", str(options.ps)] if strategy == "ps" else []
    flags += ["--devices_per_worker", str(devices)] if devices is not None else []
    if options.on == "ray":  # each node has CPUs of its own
        return flags
    at_once = max(elsewhere.hosts.values()) if elsewhere else options.parallel_trials
    tasks = at_once * options.tasks_per_trial
    if tasks > cpus:
        text = "%d parallel trials run %d processes on %d CPUs (oversubscribed)"
        logger.warning(text, at_once, tasks, cpus)
    return [*flags, "--threads_per_task", str(max(1, cpus // tasks))]


# Retraining with a sweep's best hyperparameters at full length; keeps the model.


def begin_retraining(sweep_dir: Path, journal: Journal, state: SweepState, *, best: str) -> None:
    """Write down whose values are trained; what was trained of another is moved aside.

    A sweep that goes on may find a better trial than the one that was the best.

    Raises TfdistError where it cannot be moved.
    """
    if state.retrained == best:
        return
    before = sweep_dir / RETRAINED
    if state.retrained is not None and before.exists():
        with one_line_errors(before):
            os.replace(before, sweep_dir / f"{RETRAINED}-{state.retrained}")
    state.apply(journal.add("retrained", trial=best))


def retrain(runner: LauncherRunner, job: TrialJob, *, stop_requests: StopRequests) -> int:
    """Run the job that trains the best trial anew; return the exit code, and log how it went.

    It goes on where it stood when it is killed, or the same command is run again.
    """
    outcome: Outcome | None = runner.outcome(job)
    kills = reached = stop_signal = 0
    while not isinstance(outcome, Completed | Failed):
        if stop_signal:
            return Stopped(stop_signal).exit_code
        if kills > KILLS_AT_MOST:
            outcome = Failed(reason=f"killed {kills} times without progress")
            break
        running = runner.start(job)
        while (outcome := running.poll()) is None:
            if (requests := stop_requests()) and not stop_signal:
                stop_signal = requests[0]
                running.stop()
            runner.wait([running], POLL_S)
        done = len(runner.metrics(job.run_dir))
        kills, reached = (kills if done <= reached else 0) + 1, max(done, reached)
    if isinstance(outcome, Failed):
        logger.error("the best trial could not be trained again: %s", outcome.reason)
        return EXIT_FAILED
    path = RunDirectory(job.run_dir).model_file
    score = f"{outcome.score:.4f} in its best virtual epoch"
    logger.info("the best trial, trained again: %s; the model after its last one: %s", score, path)
    return EXIT_OK


def require_alone(where: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError in one of several tasks, each of which would run the sweep."""
    config = read_environment(environ)
    if config is not None and len(config.cluster.tasks()) > 1:
        raise UsageError(
            where,
            received=f"a call in a {config.cluster.kind} job of several tasks",
            expected="one process, which starts a job for each trial",
            fix="start it by itself, and name the strategy of the trials (--strategy, strategy=)",
            code="search-in-a-job",
        )


# The directory of a sweep: whose it is, and whether a command may go on with it.

FORK_LOG = "fork-server.log"

_SAME = (
    *("tuner", "objective", "direction", "factor"),
    *("strategy", "workers", "ps", "early_stop", "seed"),
)


def require_own(path: Path) -> None:
    """Raise UsageError where the directory holds something that is no sweep."""
    names = _names(path)
    require(
        not names or JOURNAL in names,
        f"sweep directory {path}",
        received=f"a directory with {', '.join(sorted(names)[:3])} and no {JOURNAL}",
        expected="an empty one, a new one, or that of a sweep",
        fix="give the sweep another --sweep_dir",
        code="not-a-sweep",
    )


def set_aside(path: Path) -> None:
    """Move an earlier sweep to ``old-1``, ``old-2``, ... inside it; the lock's holder calls it.

    Raises UsageError where a trial of it still runs: its processes would go on writing under these
    names.
    """
    names = _names(path)
    if JOURNAL not in names:
        return
    _require_at_rest(path)
    # The journal goes last: until then the directory is still seen as a sweep's.
    files.move_aside(path, [*sorted(names - {JOURNAL}), JOURNAL])


def _names(path: Path) -> set[str]:
    """Return the files of a sweep, without those that any start writes before it is one."""
    mine = (LOCK, FORK_LOG)
    return {name for name in os.listdir(path) if name not in mine and not name.startswith("old-")}


def _require_at_rest(path: Path) -> None:
    for run_dir in sorted((path / TRIALS).glob("*")):
        require(
            not is_run_in(run_dir),
            "--overwrite",
            received=f"it while {run_dir} is written, as by a trial whose chief was killed",
            expected="a sweep at rest",
            fix="end the trials of the earlier sweep, wait a moment for the save, try again",
            code="sweep-runs",
        )


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError where a sweep is started again with what would make it another one."""
    now = {**now, "seed": before.get("seed") if now["seed"] is None else now["seed"]}
    found = differences(_identity(before), _identity(now))
    require(
        not found,
        f"sweep directory {path}",
        received=found,
        expected="what the sweep in it began with",
        fix="give this sweep another --sweep_dir, or --overwrite to move the old one aside",
        code="another-sweep",
    )


def _identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a sweep's description, or of its journal's begin, that may not change."""
    space = [{"type": one["class_name"], **one["config"]} for one in description.get("space", ())]
    return {
        **{name: description.get(name) for name in _SAME},
        "config": description.get("config", {}),
        "search space": {f"{number} {one['name']}": one for number, one in enumerate(space)},
    }


@contextlib.contextmanager
def chief_lock(path: Path) -> Iterator[None]:
    """Hold a sweep for its one chief; raise UsageError where another process does."""
    lock = FileLock(path / LOCK)
    try:
        with one_line_errors(lock.path):
            lock.acquire()
    except Held as held:
        raise UsageError(
            f"sweep directory {path}",
            received=f"a second chief while process {held.holder} runs the sweep",
            expected="one chief",
            fix="wait for it or end it; --show prints how far it is",
            code="second-chief",
        ) from held
    with lock:
        yield
