"""Local runner of trials: each is a launcher process in its own group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError
from tfdist.files import one_line_errors
from tfdist.launch.fork_server import ForkTemplate
from tfdist.launch.guardian import bound_command
from tfdist.outputs.run_directory import RunDirectory, read_json
from tfdist.outputs.sweep_journal import Slot
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Killed,
    Outcome,
    RunningTrial,
    TrialJob,
    failure_of,
    outcome_of,
)

LOG = "launch.log"
"""In the directory of each trial that was ever started."""

_GRACE_S = 20.0  # more than the launcher gives its tasks
_LOCKED_AT_MOST_S = 60.0
_LAST_LINES = 20
_TAIL_BYTES = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgram:
    """The program that each trial runs, on the chief's host and on those of its runners."""

    command: tuple[str, ...]
    """What comes after the launcher's flags, such as ``-m tfdist.train --config FILE``."""
    name: str
    file: str
    args: tuple[str, ...] = ()
    """Compared, with the name and the text of the file, when a runner joins."""
    launch_flags: tuple[str, ...] = ()
    """Beside those that the options of the sweep give."""
    imports: tuple[str, ...] | None = None
    """Imported once for all trials, with TensorFlow and Keras; None: each trial imports for
    itself."""
    more_imports: tuple[str, ...] = ()
    """These too, where they can be."""


@dataclass(kw_only=True)
class LauncherRunner:
    """Runs `python -m tfdist.launch` for every trial."""

    program: Sequence[str]
    """The command of a `TrialProgram`."""
    launch_flags: Sequence[str]
    """Strategy, workers, threads."""
    gpus: Sequence[str]
    """Those of this machine, divided among `slots`."""
    slots: int
    environ: Mapping[str, str]
    """Of the trials."""
    timeout_s: float
    """A trial that does no virtual epoch for so long is ended."""
    warm: ForkTemplate | None = None
    """What the tasks are forked from, None to start each job with imports of its own."""

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        directory = RunDirectory(job.run_dir)
        return outcome_of(
            job.goal, summary=directory.read_summary(), metrics=directory.read_metrics()
        )

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return RunDirectory(run_dir).read_metrics()

    def free_slots(self, taken: Collection[Slot]) -> Iterable[Slot]:
        slots = (Slot(number=number) for number in range(self.slots))
        return [slot for slot in slots if slot not in taken]

    def start(self, job: TrialJob) -> LaunchedTrial:
        return LaunchedTrial(self, job)

    def take_over(self, job: TrialJob) -> RunningTrial:
        raise UsageError(
            "--serve",
            received=f"nothing, while trial {job.trial} is with a runner",
            expected="HOST:PORT, as before",
            fix="give it, so that the runner comes back or loses the trial",
            code="trial-elsewhere",
        )

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        ends_of(running).poll(timeout_s * 1000)

    def warm_up(self) -> None:
        """Begin with the imports that all trials share, where there is anything to begin with."""
        if self.warm is not None and self.slots:
            self.warm.start()

    def close(self) -> None:
        """End what it keeps between trials."""
        if self.warm is not None:
            self.warm.close()

    def command(self, job: TrialJob, *, fork_server: int | None = None) -> list[str]:
        """Return the launcher's command line for a trial."""
        launcher = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(job.run_dir)]
        if fork_server is not None:
            launcher += ["--fork_server", str(fork_server)]
        return [*launcher, *self.launch_flags, *self.program, *job.flags]

    def environ_of(self, job: TrialJob) -> dict[str, str]:
        """Return the environment of a trial, with its share of the GPUs."""
        environ, gpus, number = {**self.environ, **job.variables}, self.gpus, job.slot.number
        if gpus:
            mine = gpus[number :: max(1, self.slots)] or gpus[number % len(gpus) :][:1]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return environ


def ends_of(running: Iterable[Any]) -> select.poll:
    """Return a poll object that wakes when a trial here ends."""
    poll = select.poll()  # a program may have more files open than `select` can tell of
    for trial in running:
        if trial.pidfd is not None:
            poll.register(trial.pidfd, select.POLLIN)
    return poll


class LaunchedTrial:
    """The launcher of one trial: waits for its directory, starts, watches, ends."""

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
        self._is_unwanted = True
        self._end()

    def taken(self) -> None:
        """Nothing is kept."""

    def kill(self) -> None:
        """End it without the save; `poll` goes on until it has."""
        self._is_unwanted = True
        self._kill_at_s = time.monotonic()
        self._signal(signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        """Return the launcher's process id; None before it is started."""
        return self._process.pid if self._process else None

    def _outcome(self, status: int) -> Outcome:
        if outcome := self._runner.outcome(self._job):
            return outcome
        last_lines = self._last_lines()
        if self._timed_out:
            reason = f"no virtual epoch within {self._runner.timeout_s:g} s (--trial_timeout_s)"
            return Failed(reason=reason, last_lines=last_lines)
        if self._is_unwanted:
            return Killed(reason="the sweep was asked to stop")
        report = self._read_report()
        is_new = report != self._report_before
        return failure_of(status, report=report if is_new else None, last_lines=last_lines)

    def _wait_for_directory(self) -> Outcome | None:
        """Start the launcher, once what an earlier chief had started has let go, and is not done.

        Raises TfdistError where this machine cannot; another one may.
        """
        if self._is_unwanted:
            return Killed(reason="the sweep was asked to stop")
        if not self._job.is_written:
            if outcome := self._runner.outcome(self._job):
                return outcome
            self._start()
        elif time.monotonic() - self._since_s > _LOCKED_AT_MOST_S:
            return Killed(reason=f"another job runs in {self._job.run_dir}")
        return None

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(one_line_errors(self._job.run_dir))
            self._job.run_dir.mkdir(parents=True, exist_ok=True)
            self._report_before = self._read_report()
            log = stack.enter_context(open(self._log, "ab"))
            fds = [stack.enter_context(w.connect()).fileno() for w in (self._runner.warm,) if w]
            self._log_from = log.tell()
            command = self._runner.command(self._job, fork_server=fds[0] if fds else None)
            self._process = subprocess.Popen(
                bound_command(command, signum=signal.SIGTERM),  # its tasks save if the chief dies
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._runner.environ_of(self._job),
                pass_fds=fds,
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._since_s = time.monotonic()

    def _watch(self) -> None:
        """End a job that has done what was asked, that hangs, or that does not end."""
        now_s = time.monotonic()
        if self._kill_at_s is not None:
            if now_s > self._kill_at_s:
                self._signal(signal.SIGKILL)
            return
        metrics = self._runner.metrics(self._job.run_dir)
        if len(metrics) != self._seen:
            self._seen, self._since_s = len(metrics), now_s
        reached = max((line["virtual_epoch"] for line in metrics), default=0)
        last = self._job.goal.last(metrics)
        if last is not None and reached >= last:
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
        """Return report.json, None where there is none that can be read."""
        with contextlib.suppress(TfdistError):
            return read_json(self._job.run_dir / "report.json")
        return None

    def _last_lines(self) -> tuple[str, ...]:
        text = ""
        with contextlib.suppress(OSError), open(self._log, "rb") as log:  # its own may remove it
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_LAST_LINES:]
