"""Trial jobs: a trial's settings, the runner and the outcomes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist.cluster.address import join
from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PEER_MISSING,
    EXIT_STOPPED,
    EXIT_USAGE,
    TfdistError,
    UsageError,
)
from tfdist.files import is_held, one_line_errors
from tfdist.launch.fork_server import FORK_SERVER, ForkTemplate
from tfdist.launch.guardian import bound_command
from tfdist.options import TRIAL
from tfdist.outputs.run_directory import COUNTERS, DONE, RunDirectory, read_json

logger = logging.getLogger(__name__)


class TrialFailed(BaseException):
    """Failure of a trial. `except Exception` does not catch it. Its `__cause__` is the error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Room for one trial."""

    number: int = 0
    """Number of the slot on its host, from 0. It selects the trial's share of the GPUs."""
    host: str | None = None
    """Name of the host in ``--hosts``, or `None` if it runs on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """Everything needed to run or resume a trial."""

    run_dir: Path
    flags: tuple[str, ...]
    """``--config.field=value`` flags of the trial."""
    goal: Goal
    slot: Slot = field(default_factory=Slot)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to add for the trial."""
    trial: str = ""

    @property
    def is_written(self) -> bool:
        """Return whether another job writes to this trial's run or checkpoint directory."""
        assignment = read_assignment(self.variables)
        own = {Path(assignment.checkpoints).parent} if assignment else set()
        return any(map(is_run_in, {self.run_dir} | own))


def is_run_in(run_dir: Path) -> bool:
    """Return whether a job holds a run directory's lock or writes its checkpoints."""
    return is_held(run_dir / "logs" / ".lock") or RunDirectory(run_dir).is_written


# Assignment of a trial to the user's program: one environment variable that holds JSON.


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Trial of a sweep that a process of the user's program runs."""

    sweep_dir: str
    """Absolute path of the sweep. If a program has several searches, the path selects a search."""
    trial: str
    run_dir: str
    checkpoints: str
    """Path of the checkpoints of this trial, or of the trial that it continues."""
    values: Mapping[str, Any]
    seed: int
    backup_every_steps: int | None = None

    def encode(self) -> dict[str, str]:
        """Return the assignment as an environment variable."""
        return {TRIAL: json.dumps(asdict(self))}

    def belongs_to(self, sweep_dir: Path) -> bool:
        """Return whether the trial belongs to the sweep in this directory."""
        return Path(self.sweep_dir) == sweep_dir.absolute()


def read_assignment(environ: Mapping[str, str]) -> Assignment | None:
    """Return the trial assigned to this process, or `None` if no sweep started the process."""
    text = environ.get(TRIAL)
    return Assignment(**json.loads(text)) if text else None


# Outcome of a trial, read from the files of its job.


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """Outcome of a trial that reached its goal, with the finite metrics of each virtual epoch."""

    history: tuple[Mapping[str, float], ...]
    score: float
    best_virtual_epoch: int
    hyperparameters: Mapping[str, Any] | None = None
    """Hyperparameters that the program read, or `None` if the program did not report them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """Outcome of a job that an external event ended. The sweep can restart the trial."""

    reason: str
    has_started: bool = True
    """Whether its host was ready in time. If not, the trial is not the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Outcome of a trial that failed. The sweep does not restart it."""

    reason: str
    last_lines: tuple[str, ...] = ()


Outcome = Completed | Killed | Failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Objective of a trial, its direction (``max`` or ``min``) and its last virtual epoch."""

    objective: str
    direction: str
    until: int | None = None


def outcome_of(
    goal: Goal, *, summary: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]
) -> Completed | Failed | None:
    """Return the outcome of a trial that has reached its goal, otherwise `None`.

    A program can report a score itself, as the ``result`` in its summary.
    """
    reached = max((line["virtual_epoch"] for line in metrics), default=0)
    is_done = summary is not None and summary.get("status") == DONE
    if not is_done and (goal.until is None or reached < goal.until):
        return None
    summary = summary or {}
    if is_done and "result" in summary:
        counted = [summary["result"]]
    else:
        counted = [m for m in metrics if goal.until is None or m["virtual_epoch"] <= goal.until]
    outcome = _scored(goal, counted)
    if isinstance(outcome, Failed):
        return outcome
    return replace(outcome, hyperparameters=summary.get("hyperparameters"))


def failure_of(
    exit_code: int,
    *,
    report: Mapping[str, Any] | None,
    last_lines: Sequence[str],
) -> Killed | Failed:
    """Return the reason why a job ended before its goal.

    `exit_code` is from the launcher, negative if a signal killed the launcher.
    `report` is this start's report.json or None. `last_lines` is the end of the launcher's output.
    """
    if exit_code < 0:
        return Killed(reason=f"the launcher was killed by signal {-exit_code}")
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return Killed(reason=f"stopped by a signal (exit code {exit_code})")
    if exit_code == EXIT_OK:
        reason = "the program exited before the trial was done (exit code 0)"
        return Failed(reason=reason, last_lines=tuple(last_lines))
    attempts = (report or {}).get("attempts") or [{}]
    failure = attempts[-1].get("first_failure") or {}
    cause = failure.get("cause")
    if not cause:
        reason = last_lines[-1] if last_lines else f"exit code {exit_code}"
        if exit_code == EXIT_PEER_MISSING and report is None:  # Ray has no room
            return Killed(reason=reason, has_started=False)
        return Failed(reason=reason, last_lines=tuple(last_lines))
    reason = f"{failure.get('task')}: {cause}"
    if exit_code == EXIT_PEER_MISSING or _was_killed(attempts[-1], failure.get("task")):
        return Killed(reason=reason)
    return Failed(reason=reason, last_lines=tuple(failure.get("last_lines") or last_lines))


def _scored(goal: Goal, metrics: Sequence[Mapping[str, Any]]) -> Completed | Failed:
    if metrics and not any(goal.objective in line for line in metrics):
        there = ", ".join(sorted(set(metrics[-1]) - COUNTERS))
        return Failed(reason=f"the trial reports {there}, not {goal.objective}")
    history = tuple(_finite(line) for line in metrics)
    scores = [(line[goal.objective], line) for line in history if goal.objective in line]
    if not scores:
        return Failed(reason=f"{goal.objective} was never finite")
    score, line = (max if goal.direction == "max" else min)(scores, key=lambda pair: pair[0])
    return Completed(history=history, score=score, best_virtual_epoch=int(line["virtual_epoch"]))


def _finite(line: Mapping[str, Any]) -> dict[str, float]:
    names = [name for name in line if name not in COUNTERS]
    return {
        name: line[name]
        for name in ("virtual_epoch", *names)
        if isinstance(line[name], (int, float)) and math.isfinite(line[name])
    }


def _was_killed(attempt: Mapping[str, Any], task: object) -> bool:
    """Return whether SIGKILL ended the task that failed first, for example when out of memory."""
    records = [record for record in attempt.get("tasks", ()) if record.get("task") == task]
    return bool(records) and records[-1].get("signal") == "SIGKILL"


# The runner: each trial is a launcher process on this machine in its own process group.

LOG = "launch.log"
"""Name of the launcher's log in the run directory of each started trial."""

_GRACE_S = 20.0  # longer than the launcher's grace period for its tasks
_LOCKED_AT_MOST_S = 60.0
_LOST_HOST_S = 60.0
_LAST_LINES = 20
_TAIL_BYTES = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgram:
    """Program that each trial runs."""

    command: tuple[str, ...]
    """Arguments after the launcher's flags, such as ``-m tfdist.train --config FILE``."""
    launch_flags: tuple[str, ...] = ()
    """Launcher flags in addition to the flags from the sweep's options."""
    imports: tuple[str, ...] | None = None
    """Modules to import once for all trials, in addition to TensorFlow and Keras.
    If `None`, each trial imports its modules itself."""
    more_imports: tuple[str, ...] = ()
    """Further modules to import once. The fork server skips a module that cannot be imported."""


@dataclass(kw_only=True)
class TrialHosts:
    """Hosts of a sweep. The launcher's agents run each trial on one of these hosts.

    A host that cannot start a job gets no more trials. A lost host gets none for a while. Without
    this rule, such a host would always be free first and fail every trial of the sweep.
    """

    hosts: Mapping[str, int]
    """Number of parallel trials on each host, by host name."""
    tasks: int
    """Number of tasks of a trial."""
    _closed_until: dict[str, float] = field(default_factory=dict)
    _why: str = ""

    def slots(self) -> list[Slot]:
        """Return the slots of the open hosts: the first slot of each host, then each second slot.

        Raises UsageError if all hosts are closed for good. The user can resume the sweep later.
        """
        if list(self._closed_until.values()).count(math.inf) == len(self.hosts):
            raise UsageError(
                "--hosts",
                f"no host can start a trial ({self._why})",
                fix="repair a host, and run the same command again to resume the sweep",
                code="no-hosts",
            )
        now_s = time.monotonic()
        slots = [
            Slot(number=number, host=host)
            for host, count in self.hosts.items()
            if self._closed_until.get(host, 0.0) <= now_s
            for number in range(count)
        ]
        return sorted(slots, key=lambda slot: slot.number)

    def flags(self, slot: Slot) -> list[str]:
        """Return the launcher's flags that start a trial on its host."""
        assert slot.host is not None
        return ["--hosts", join(slot.host, self.tasks)]

    def close(self, host: str, exit_code: int, why: str) -> None:
        """Close a host for `_LOST_HOST_S` seconds if it was lost, otherwise for good."""
        if self._closed_until.get(host) == math.inf:
            return
        if exit_code == EXIT_PEER_MISSING:
            self._closed_until[host] = time.monotonic() + _LOST_HOST_S
            logger.warning("%s: no trials on this host for %g s: %s", host, _LOST_HOST_S, why)
        else:
            self._closed_until[host], self._why = math.inf, why
            logger.warning("%s: no more trials on this host: %s", host, why)


@dataclass(kw_only=True)
class LauncherRunner:
    """Runner that starts `python -m tfdist.launch` for every trial."""

    program: Sequence[str]
    """Command of a `TrialProgram`."""
    launch_flags: Sequence[str]
    """Launcher flags for the strategy, the workers and the threads."""
    gpus: Sequence[str]
    """GPUs of this machine, divided among `slots`."""
    slots: int
    environ: Mapping[str, str]
    """Environment of the trials."""
    timeout_s: float
    """Seconds after which a trial fails if it completes no virtual epoch."""
    elsewhere: TrialHosts | None = None
    """Hosts of the trials. If `None`, `launch_flags` select the machine (default: this machine)."""
    passes_variables: bool = False
    """Whether to pass the names of variables to the launcher, for trials on other machines."""
    warm: ForkTemplate | None = None
    """Process from which tasks are forked. If `None`, each job imports its modules itself."""

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        """Return the outcome of a trial that has already reached its goal, otherwise `None`."""
        directory = RunDirectory(job.run_dir)
        return outcome_of(
            job.goal, summary=directory.read_summary(), metrics=directory.read_metrics()
        )

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return RunDirectory(run_dir).read_metrics()

    def free_slots(self, taken: Collection[Slot]) -> list[Slot]:
        here = [Slot(number=number) for number in range(self.slots)]
        slots = here if self.elsewhere is None else self.elsewhere.slots()
        return [slot for slot in slots if slot not in taken]

    def start(self, job: TrialJob) -> LaunchedTrial:
        return LaunchedTrial(self, job)

    def wait(self, running: Iterable[Any], timeout_s: float) -> None:
        """Wait until a trial's launcher exits, at most `timeout_s` seconds."""
        poll = select.poll()  # `select` cannot watch descriptors above 1023
        for trial in running:
            if trial.pidfd is not None:
                poll.register(trial.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def command(self, job: TrialJob) -> list[str]:
        launcher = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(job.run_dir)]
        if self.elsewhere is not None:
            launcher += self.elsewhere.flags(job.slot)
        if self.passes_variables and job.variables:
            launcher += ["--env", ",".join(sorted(job.variables))]
        return [*launcher, *self.launch_flags, *self.program, *job.flags]

    def environ_of(self, job: TrialJob) -> dict[str, str]:
        """Return the environment of a trial, with its share of the GPUs."""
        environ, gpus, number = {**self.environ, **job.variables}, self.gpus, job.slot.number
        if gpus:
            mine = gpus[number :: max(1, self.slots)] or gpus[number % len(gpus) :][:1]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return environ


class LaunchedTrial:
    """Launcher process of one trial. It starts as soon as the trial's directory is free."""

    def __init__(self, runner: LauncherRunner, job: TrialJob) -> None:
        self._runner = runner
        self._job = job
        self._log = job.run_dir / LOG
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0
        self._report_before: dict[str, Any] | None = None
        self._since_s = time.monotonic()
        self._seen = -1
        self._kill_at_s: float | None = None
        self._is_unwanted = False
        self._timed_out = False
        self.pidfd: int | None = None
        if not job.is_written:
            self._start()

    def poll(self) -> Outcome | None:
        """Return the trial's outcome, or `None` while the trial runs."""
        if self._process is None:
            return self._wait_for_directory()
        status = self._process.poll()
        if status is None:
            self._watch()
            return None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return self._outcome(status)

    def stop(self) -> None:
        """Tell the trial to save and exit. `poll` returns `None` until the trial has exited."""
        self._is_unwanted = True
        self._end()

    def _outcome(self, status: int) -> Outcome:
        if outcome := self._runner.outcome(self._job):
            return outcome
        last_lines = self._last_lines()
        if self._timed_out:
            reason = f"no virtual epoch within {self._runner.timeout_s:g} s (--trial_timeout_s)"
            return Failed(reason=reason, last_lines=last_lines)
        if self._is_unwanted:
            return Killed(reason="the sweep is stopping")
        report = self._read_report()
        is_new = report != self._report_before
        elsewhere, host = self._runner.elsewhere, self._job.slot.host
        is_lost = status == EXIT_PEER_MISSING or (status == EXIT_USAGE and not is_new)
        if elsewhere is not None and host is not None and is_lost:
            why = last_lines[-1] if last_lines else f"exit code {status}"
            elsewhere.close(host, status, why)
            return Killed(reason=why, has_started=is_new)
        return failure_of(status, report=report if is_new else None, last_lines=last_lines)

    def _wait_for_directory(self) -> Outcome | None:
        """Start the launcher once an earlier chief's job has released the directory.

        Raises TfdistError if this machine cannot start a process.
        """
        if self._is_unwanted:
            return Killed(reason="the sweep is stopping")
        if not self._job.is_written:
            if outcome := self._runner.outcome(self._job):
                return outcome
            self._start()
        elif time.monotonic() - self._since_s > _LOCKED_AT_MOST_S:
            return Killed(reason=f"another job is running in {self._job.run_dir}")
        return None

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(one_line_errors(self._job.run_dir))
            self._job.run_dir.mkdir(parents=True, exist_ok=True)
            self._report_before = self._read_report()
            log = stack.enter_context(open(self._log, "ab"))
            fds = [stack.enter_context(w.connect()).fileno() for w in (self._runner.warm,) if w]
            self._log_from = log.tell()
            server = {FORK_SERVER: str(fds[0])} if fds else {}
            command = self._runner.command(self._job)
            self._process = subprocess.Popen(
                bound_command(command),  # its tasks save if the chief dies
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._runner.environ_of(self._job), **server},
                pass_fds=fds,
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._since_s = time.monotonic()

    def _watch(self) -> None:
        """Stop a job that has reached its goal or hangs. Kill a job that does not stop."""
        now_s = time.monotonic()
        if self._kill_at_s is not None:
            if now_s > self._kill_at_s:
                self._signal(signal.SIGKILL)
            return
        metrics = self._runner.metrics(self._job.run_dir)
        if len(metrics) != self._seen:
            self._seen, self._since_s = len(metrics), now_s
        reached = max((line["virtual_epoch"] for line in metrics), default=0)
        until = self._job.goal.until
        if until is not None and reached >= until:
            self._end()
        elif now_s - self._since_s > self._runner.timeout_s:
            self._timed_out = True
            self._end()

    def _end(self) -> None:
        if self._process is not None and self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + _GRACE_S
            self._signal(signal.SIGTERM)

    def _signal(self, signum: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signum)

    def _read_report(self) -> dict[str, Any] | None:
        with contextlib.suppress(TfdistError):
            return read_json(self._job.run_dir / "report.json")
        return None

    def _last_lines(self) -> tuple[str, ...]:
        text = ""
        with contextlib.suppress(OSError), open(self._log, "rb") as log:  # the trial may delete it
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_LAST_LINES:]
