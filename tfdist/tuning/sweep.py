"""Sweep runs: the directory and the trials, for config files and for tuners."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import files
from tfdist.cluster import KINDS, read_environment
from tfdist.cluster.address import parse_hosts
from tfdist.cluster.settings import restarts
from tfdist.errors import EXIT_FAILED, EXIT_OK, UsageError, require
from tfdist.files import FileLock, LockedError, one_line_errors
from tfdist.launch.events import SignalPipe
from tfdist.launch.fork_server import ForkTemplate
from tfdist.launch.machine import Machine, this_machine
from tfdist.launch.multihost.hosts import slurm_nodes
from tfdist.outputs.run_directory import differences
from tfdist.outputs.sweep_journal import JOURNAL, LOCK, TRIALS, Journal, SweepState, Trial, fold
from tfdist.tuning.chief import Chief
from tfdist.tuning.options import RunOptions
from tfdist.tuning.results import SweepScreen, export_hparams, leaderboard
from tfdist.tuning.trial_job import LauncherRunner, TrialHosts, TrialProgram, is_run_in

if TYPE_CHECKING:  # the module imports KerasTuner and TensorFlow
    from tfdist.tuning.oracle import Search

logger = logging.getLogger(__name__)


class Sweep(ABC):
    """Sweep as requested: the search that chooses its trials, and the program that they run."""

    first_seed: int | None = None
    """Seed of a new sweep if its description has no seed (default: `None`, draw a seed)."""
    max_epochs: int | None = None
    """Virtual epochs of a full-length trial. The trial may continue in a shorter trial's directory.
    `None` if the program chooses the length of a trial. Each trial then has its own directory."""

    def __init__(
        self, options: RunOptions, program: TrialProgram, environ: Mapping[str, str]
    ) -> None:
        self.options = options
        self.runner = runner_of(options, program, environ)

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Return the description as JSON. A sweep with another description is another sweep.

        The call can take seconds. The fork server imports the trials' modules meanwhile. Raises
        UsageError if the description is invalid.
        """

    @abstractmethod
    def search(self, begun: Mapping[str, Any]) -> Search:
        """Return a search without trials, from the journal's first line."""

    def flags_of(self, trial: Trial, seed: int) -> tuple[str, ...]:
        """Return the ``--config.field=value`` flags of a trial. Raise UsageError if invalid."""
        return ()

    def asked_for(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the values that a trial's program reads, `None` if only the program knows them."""
        return None

    def variables_of(self, trial: Trial, seed: int) -> Mapping[str, str]:
        """Return environment variables to add for a trial."""
        return {}


def run(sweep: Sweep) -> tuple[int, SweepState]:
    """Run or resume a sweep. Return the exit code and the sweep's state.

    Raises:
      UsageError: The sweep is invalid, or no host can start trials.
      TfdistError: The sweep directory cannot be written.
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
            logger.info("restarted: ignoring --overwrite and resuming the sweep")
        elif sweep.options.overwrite:
            set_aside(sweep_dir)
        journal = Journal(sweep_dir / JOURNAL, time_of_day=time.time)
        _begin_journal(sweep, journal, description)
        return _run_trials(sweep, journal)


def _run_trials(sweep: Sweep, journal: Journal) -> tuple[int, SweepState]:
    sweep_dir, state = sweep.options.sweep_dir, fold(journal.lines)
    if state.is_complete:
        logger.info("the sweep in %s is finished (pass overwrite to run it again)", sweep_dir)
        leaderboard(state, sweep_dir)
        return EXIT_FAILED if state.has_failed else EXIT_OK, state
    search = sweep.search(journal.lines[0])
    search.replay(journal.lines)
    search.publish()
    screen = SweepScreen(sweep_dir, export=export_hparams)
    with SignalPipe() as signals:
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
    """Journal the description of a new sweep. For an old sweep, check that it is the same."""
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
    """Return the runner that starts trials on this machine or on the sweep's hosts."""
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
    """Return the hosts of the trials, or `None` if Ray chooses them."""
    if options.on == "ray":
        return None
    if options.hosts is not None:
        listed = parse_hosts(options.hosts)
    else:
        listed = [(node, options.parallel_trials) for node in slurm_nodes(environ)]
    hosts = Counter[str]()
    for host, trials in listed:  # a host may be listed twice
        hosts[host] += trials
    return TrialHosts(hosts=hosts, tasks=options.tasks_per_trial + options.kind.has_servers)


def _fork_template(
    options: RunOptions, program: TrialProgram, *, machine: Machine, environ: Mapping[str, str]
) -> ForkTemplate | None:
    """Return the process that imports once for all trials, or `None` if trials cannot be forked."""
    if not options.is_here or program.imports is None or machine.gpus or machine.has_gpu_driver:
        return None
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": "-1"}  # as in the launcher
    return ForkTemplate(
        ("tensorflow", "keras", *program.imports),
        more=program.more_imports,
        environ={**quiet, **environ},
        log_path=options.sweep_dir / FORK_LOG,
    )


def launch_flags(
    options: RunOptions, *, cpus: int, elsewhere: TrialHosts | None = None
) -> list[str]:
    """Return the launcher's flags for every trial. Warn if there are more tasks than CPUs.

    The function assumes that all hosts have as many CPUs as this one. A task on another host needs
    an address, so a trial with one process runs there as a multiworker job with one worker.
    """
    flags, kind, devices = list[str](), options.kind, options.devices_per_worker
    if not options.is_here:
        flags += ["--on", options.on or "ssh"]
        for flag, value in (("--rsh", options.rsh), ("--env", options.env)):
            flags += [flag, value] if value is not None else []
        if kind.is_one_process:
            devices = 1 if kind.has_one_device else devices
            kind = KINDS["multiworker"]
    flags += ["--strategy", kind.name]
    flags += ["--workers", str(options.workers)] if elsewhere is None else []
    flags += ["--ps", str(options.num_ps)] if kind.has_servers else []
    flags += ["--devices_per_worker", str(devices)] if devices is not None else []
    if options.on == "ray":  # Ray assigns the CPUs of its nodes
        return flags
    at_once = max(elsewhere.hosts.values()) if elsewhere else options.parallel_trials
    tasks = at_once * options.tasks_per_trial
    if tasks > cpus:
        text = "%d parallel trials run %d processes on %d CPUs (oversubscribed)"
        logger.warning(text, at_once, tasks, cpus)
    return [*flags, "--threads_per_task", str(max(1, cpus // tasks))]


def require_alone(where: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError in a job with several tasks, because each task would run the sweep."""
    config = read_environment(environ)
    if config is not None and len(config.cluster.tasks()) > 1:
        raise UsageError(
            where,
            f"each task of this {config.cluster.kind} job would run the search",
            fix="start it as one process, and pass the trials' strategy (--strategy, strategy=)",
            code="search-in-a-job",
        )


# The directory of a sweep: which sweep owns it, and whether a command can resume that sweep.

FORK_LOG = "fork-server.log"

_REMOVED = ("gradient_accumulation_steps", 1)  # a field with its default, in older journals
_SAME = ("tuner", "objective", "direction", "factor", "strategy", "workers", "ps", "seed")


def require_own(path: Path) -> None:
    """Raise UsageError if the directory has files but no journal of a sweep."""
    names = _names(path)
    require(
        not names or JOURNAL in names,
        f"sweep directory {path}",
        f"the directory is not a sweep: it has {', '.join(sorted(names)[:3])}, but no {JOURNAL}",
        fix="pass another --sweep_dir",
        code="not-a-run",
    )


def set_aside(path: Path) -> None:
    """Move an earlier sweep into ``old-1``, ``old-2``, ... The caller must hold the lock.

    Raises UsageError if a trial of that sweep still runs, because its processes would write to
    the old paths.
    """
    names = _names(path)
    if JOURNAL not in names:
        return
    _require_at_rest(path)
    # Move the journal last: until then, `require_own` still recognizes a sweep directory.
    files.move_aside(path, [*sorted(names - {JOURNAL}), JOURNAL])


def _names(path: Path) -> set[str]:
    """Return the names of a sweep's files, without the lock, the fork log and moved sweeps."""
    mine = (LOCK, FORK_LOG)
    return {name for name in os.listdir(path) if name not in mine and not name.startswith("old-")}


def _require_at_rest(path: Path) -> None:
    for run_dir in sorted((path / TRIALS).glob("*")):
        require(
            not is_run_in(run_dir),
            "--overwrite",
            f"a trial of the earlier sweep still writes to {run_dir}",
            fix="stop the trials of the earlier sweep, wait until they have saved, and try again",
            code="second-writer",
        )


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError if the description now differs from the description in the journal."""
    now = {**now, "seed": before.get("seed") if now["seed"] is None else now["seed"]}
    found = differences(_identity(before), _identity(now))
    require(
        not found,
        f"sweep directory {path}",
        f"the directory has a sweep with other settings: {found}",
        fix="pass another --sweep_dir, or --overwrite to move the old sweep aside",
        code="another-run",
    )


def _identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a sweep's description that must not change when a sweep resumes."""
    space = [{"type": one["class_name"], **one["config"]} for one in description.get("space", ())]
    return {
        **{name: description.get(name) for name in _SAME},
        "config": {k: v for k, v in description.get("config", {}).items() if (k, v) != _REMOVED},
        "search space": {f"{number} {one['name']}": one for number, one in enumerate(space)},
    }


@contextlib.contextmanager
def chief_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a sweep's chief, or raise UsageError if another process holds it."""
    lock = FileLock(path / LOCK)
    try:
        with one_line_errors(lock.path):
            lock.acquire()
    except LockedError as held:
        raise UsageError(
            f"sweep directory {path}",
            f"process {held.holder} already runs this sweep",
            fix="wait until that process exits, or stop it (--show prints its progress)",
            code="second-writer",
        ) from held
    with lock:
        yield
