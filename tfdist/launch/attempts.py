"""A job from its first attempt to its last: what lives on between them, and the report."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tfdist.cluster import ClusterSpec, HeldPort, Task, hold_ports
from tfdist.errors import EXIT_FAILED, TfdistError, UsageError
from tfdist.launch.machine import Machine
from tfdist.launch.options import LaunchOptions, StartMethod
from tfdist.launch.plan import Place, ProcessSpec, plan, plan_here, tasks_with_address
from tfdist.launch.port_choice import replace_taken
from tfdist.launch.processes import JobProcesses
from tfdist.launch.report import (
    Attempt,
    attempt_entry,
    earlier_attempts,
    reserve_room,
    restart_seconds,
    signal_name,
    write_report,
)
from tfdist.launch.restarts import RestartPolicy
from tfdist.launch.rundir import RunDir, not_writable
from tfdist.launch.screen import JobScreen
from tfdist.launch.signals import STOP_SIGNALS, SignalPipe, exit_code_for
from tfdist.launch.supervised import Screen
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.team import Team
from tfdist.launch.team_processes import TeamProcesses, TeamScreen
from tfdist.launch.watchdog import Watchdog
from tfdist.launch.workshop import Workshop


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that has been decided on, but for its ports."""

    options: LaunchOptions
    strategy: str
    machine: Machine
    environ: Mapping[str, str]
    run_dir: Path
    start: StartMethod = "exec"
    """How the tasks are started."""
    is_terminal: bool = False
    """Whether what the tasks print is shown on a terminal."""
    ports: Sequence[int] | None = None
    """Those that its tasks may have; None for any."""

    @property
    def num_ports(self) -> int:
        """Returns how many of its tasks need a port."""
        return len(tasks_with_address(self.options, self.strategy))

    def specs(self, ports: Sequence[HeldPort], *, attempt: int) -> tuple[ProcessSpec, ...]:
        """Returns its processes; the first is the chief's. `UsageError` if it cannot be run."""
        addresses = [port.address for port in ports]
        place = self._place(attempt)
        return plan(self.options, strategy=self.strategy, place=place, addresses=addresses)

    def specs_here(
        self, cluster: ClusterSpec, here: Sequence[Task], *, attempt: int
    ) -> tuple[ProcessSpec, ...]:
        """Returns the processes of the tasks that are on this host, of a job on several."""
        place = self._place(attempt)
        return plan_here(
            self.options, strategy=self.strategy, place=place, cluster=cluster, here=here
        )

    def _place(self, attempt: int) -> Place:
        return Place(
            machine=self.machine,
            environ=self.environ,
            python=sys.executable,
            run_dir=self.run_dir,
            attempt=attempt,
            is_terminal=self.is_terminal,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job has ended: its exit code, and whether it was told to."""

    exit_code: int
    was_asked: bool


class JobRun:
    """Runs a job as often as it is worth it; a context manager that leaves no process behind.

    The guardian, the fork server and the ports live from the first attempt to the last.
    """

    def __init__(
        self,
        job: Job,
        *,
        ports: Sequence[HeldPort],
        run_dir: RunDir,
        screen: JobScreen,
        signals: SignalPipe,
        open_files: tuple[int, int],
        team: Team | None = None,
    ) -> None:
        self._job = job
        self._team = team
        self._ports = list(ports)
        self._run_dir = run_dir
        self._screen = screen
        self._signals = signals
        self._hold = partial(hold_ports, among=job.ports)
        if ports:
            self._hold = partial(self._hold, host=ports[0].host)
        self._stack = contextlib.ExitStack()
        self._workshop = Workshop(
            environ=job.environ,
            start=job.start,
            fork_server=job.options.fork_server,
            screen=screen,
            signals=signals,
            open_files=open_files,
        )
        self._epoch_s = time.time() - time.monotonic()
        self._entries = earlier_attempts(job.run_dir)
        self._policy = RestartPolicy(
            max_restarts=job.options.max_restarts, window_s=job.options.restart_window_s
        )

    def __enter__(self) -> JobRun:
        self._stack.enter_context(self._workshop)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self) -> Outcome:
        """Runs the attempts; the report is written after each.

        Raises:
            UsageError: the run directory cannot be written to; nothing has been started.
        """
        logs = self._run_dir.start_attempt()
        try:
            self._room = self._stack.enter_context(reserve_room(self._job.run_dir))
            write_report(self._job.run_dir, exit_code=None, attempts=self._entries)
        except OSError as error:
            raise not_writable(self._job.run_dir, error) from None
        try:
            return self._run_from(logs)
        except (OSError, TfdistError) as error:  # of the launcher's own
            self._write(getattr(error, "exit_code", EXIT_FAILED))
            raise

    def _run_from(self, logs: Path) -> Outcome:
        before: Attempt | None = None
        while True:
            attempt = self._run_attempt(logs, is_first=before is None)
            self._report(attempt, before=before)
            ended = self._hindrance() if attempt.restart else None
            next_logs = self._next_logs(attempt) if ended is None else None
            if next_logs is None:
                was_asked = attempt.exit_code > 0 and attempt.first_failure is None
                code = attempt.exit_code if ended is None else ended
                self._write(code)
                return Outcome(exit_code=code, was_asked=was_asked or ended is not None)
            self._write(None)
            logs, before = next_logs, attempt

    def _run_attempt(self, logs: Path, *, is_first: bool) -> Attempt:
        self._workshop.check()
        self._ports = replace_taken(self._ports, stack=self._stack, hold=self._hold)
        specs = self._specs()
        if is_first:
            self._screen.announce(f"strategy {self._job.strategy}: {_counted(specs)}")
        options, chief = self._job.options, specs[0].task
        is_ps = self._job.strategy == "ps"
        processes, screen = self._processes(specs, logs=logs)
        watchdog = Watchdog(
            hang_timeout_s=options.hang_timeout_s or math.inf,
            startup_timeout_s=options.startup_timeout_s,
            is_ps=is_ps,
            chief=chief,
            state_of=processes.state_of,
            can_speak=processes.can_speak,
            is_held_up=lambda: self._screen.out.is_full,
        )
        supervisor = Supervisor(
            specs,
            chief=chief,
            is_ps=is_ps,
            grace_s=options.grace_s,
            min_workers=options.min_workers,
            policy=self._policy,
            watchdog=watchdog,
            processes=processes,
            screen=screen,
            clock=time.monotonic,
        )
        try:
            return supervisor.run()
        finally:
            processes.finish()

    def _specs(self) -> tuple[ProcessSpec, ...]:
        attempt = self._run_dir.attempt
        if self._team is None:
            return self._job.specs(self._ports, attempt=attempt)
        return self._team.specs(
            partial(self._job.specs_here, attempt=attempt),
            ports=self._ports,
            attempt=attempt,
            run_dir=self._job.run_dir,
        )

    def _processes(
        self, specs: Sequence[ProcessSpec], *, logs: Path
    ) -> tuple[JobProcesses | TeamProcesses, Screen]:
        team = self._team
        here = specs if team is None else [s for s in specs if not team.host_of[s.task]]
        local = self._workshop.processes(
            here, chief=specs[0].task, fork_log=logs / "fork-server.log"
        )
        if team is None:
            return local, self._screen
        processes = TeamProcesses(local, team, screen=self._screen)
        return processes, TeamScreen(self._screen, processes)

    def _hindrance(self) -> int | None:
        """Returns what the job ends with if something is in the way of another attempt."""
        asked = self._asked()
        try:
            if asked is None and self._team is not None:
                asked = self._team.gather()
        except TfdistError as error:
            self._screen.say(f"not started again: {error}")
            return error.exit_code
        return None if asked is None else exit_code_for(asked)

    def _asked(self) -> int | None:
        """Returns the signal by which somebody asked the job to stop between two attempts."""
        came = [signum for signum in self._signals.read() if signum in STOP_SIGNALS]
        if not came:
            return None
        self._screen.say(f"{signal_name(came[0])}: not started again")
        return came[0]

    def _next_logs(self, attempt: Attempt) -> Path | None:
        """Returns where the next attempt writes; None if there is to be none."""
        failure = attempt.first_failure
        if not attempt.restart or failure is None:
            return None
        try:
            logs = self._run_dir.next_attempt()
        except UsageError as error:
            self._screen.say(f"not started again: {error}")
            return None
        self._policy.restarted(failure)
        self._screen.say(f"started again as attempt {self._run_dir.attempt} ({attempt.restart})")
        return logs

    def _report(self, attempt: Attempt, *, before: Attempt | None) -> None:
        if before is not None:
            self._entries[-1]["restart_s"] = restart_seconds(before, attempt)
        entry = attempt_entry(
            attempt,
            number=self._run_dir.attempt,
            epoch_s=self._epoch_s,
            hosts=self._screen.hosts,
        )
        self._entries.append(entry)

    def _write(self, exit_code: int | None) -> None:
        if exit_code is not None:  # the last one, for which the disk may have become too full
            self._room.close()
        try:
            write_report(self._job.run_dir, exit_code=exit_code, attempts=self._entries)
        except OSError as error:
            path = self._job.run_dir / "report.json"
            self._screen.say(f"{path}: cannot be written: {error.strerror}")


def _counted(specs: Sequence[ProcessSpec]) -> str:
    counts = Counter(spec.task.type for spec in specs)
    plural = {"worker": "workers"}
    return ", ".join(f"{n} {plural.get(t, t) if n > 1 else t}" for t, n in counts.items())
