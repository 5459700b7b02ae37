"""Running a job from beginning to end: plan it, make its directory, supervise it, report."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.cluster import HeldPort, hold_ports, is_port_free
from tfdist.launch.forking import ForkStarter, shared_environment
from tfdist.launch.guard import Guard
from tfdist.launch.guardian import MARK
from tfdist.launch.machine import Machine, this_machine
from tfdist.launch.options import LaunchOptions
from tfdist.launch.plan import (
    Place,
    ProcessSpec,
    decided_strategy,
    plan,
    render,
    start_method,
    tasks_with_address,
)
from tfdist.launch.process import ExecStarter, Starter, raise_file_limit
from tfdist.launch.processes import JobProcesses
from tfdist.launch.report import Attempt, attempt_entry, earlier_attempts, write_report
from tfdist.launch.rundir import RunDir, chosen_run_dir, next_attempt
from tfdist.launch.screen import JobScreen, standard_screen
from tfdist.launch.signals import SignalPipe
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.target import check_program

_FILES_PER_TASK = 5  # port, pipe, log, and two more while it is started
_OTHER_FILES = 64
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that has been decided on, but for its ports."""

    options: LaunchOptions
    strategy: str
    machine: Machine
    environ: Mapping[str, str]
    run_dir: Path

    @property
    def num_ports(self) -> int:
        """Returns how many of its tasks need a port."""
        return len(tasks_with_address(self.options, self.strategy))

    def specs(self, ports: Sequence[HeldPort], *, attempt: int) -> tuple[ProcessSpec, ...]:
        """Returns its processes; the first is the chief's. `UsageError` if it cannot be run."""
        place = Place(
            machine=self.machine,
            environ=self.environ,
            python=sys.executable,
            run_dir=self.run_dir,
            attempt=attempt,
        )
        addresses = [port.address for port in ports]
        return plan(self.options, strategy=self.strategy, place=place, addresses=addresses)


def run_job(options: LaunchOptions, *, environ: Mapping[str, str]) -> int:
    """Runs a job and returns its exit code; with ``dry_run`` prints its plan.

    Raises:
        UsageError: it cannot be run as asked; nothing has been started.
    """
    check_program(options.program, search=[os.getcwd(), *sys.path])
    machine = this_machine(environ)
    job = Job(
        options=options,
        strategy=decided_strategy(options, machine),
        machine=machine,
        environ=environ,
        run_dir=chosen_run_dir(options.run_dir),
    )
    open_files = raise_file_limit(job.num_ports * _FILES_PER_TASK + _OTHER_FILES)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(port) for port in hold_ports(job.num_ports)]
        specs = job.specs(ports, attempt=next_attempt(job.run_dir))
        if options.dry_run:
            print(
                f"# strategy {job.strategy}, run directory {job.run_dir}\n\n{render(specs)}",
                flush=True,
            )
            return 0
        run_dir = stack.enter_context(RunDir(job.run_dir))
        return _run(job, ports, run_dir=run_dir, open_files=open_files)


def replace_taken(
    ports: Sequence[HeldPort],
    *,
    stack: contextlib.ExitStack,
    hold: Callable[[int], Sequence[HeldPort]] = hold_ports,
    is_free: Callable[[str], bool] = is_port_free,
) -> list[HeldPort]:
    """Returns `ports` with others, released with `stack`, for those that have been taken.

    Holding a port keeps away everyone who asks for any port, but not a server that insists
    on just this one.
    """
    result = list(ports)
    for index in range(len(result)):
        while not is_free(result[index].address):
            result[index] = stack.enter_context(hold(1)[0])  # the taken ones stay held as well
    return result


def _run(
    job: Job, ports: Sequence[HeldPort], *, run_dir: RunDir, open_files: tuple[int, int]
) -> int:
    logs = run_dir.start_attempt()
    screen = standard_screen(job.environ)
    screen.announce(f"run directory {job.run_dir}")
    earlier = earlier_attempts(job.run_dir)
    write_report(job.run_dir, exit_code=None, attempts=earlier)
    epoch_s = time.time() - time.monotonic()
    with SignalPipe() as signals, contextlib.ExitStack() as stack:
        specs = job.specs(replace_taken(ports, stack=stack), attempt=run_dir.attempt)
        screen.announce(f"strategy {job.strategy}: {_counted(specs)}")
        attempt = _supervise(
            specs, job=job, logs=logs, screen=screen, signals=signals, open_files=open_files
        )
    entry = attempt_entry(attempt, number=run_dir.attempt, epoch_s=epoch_s)
    try:
        write_report(job.run_dir, exit_code=attempt.exit_code, attempts=[*earlier, entry])
    except OSError as error:
        screen.say(f"{job.run_dir}/report.json: cannot be written: {error.strerror}")
    _last_words(screen, is_hurried=attempt.exit_code > 0 and attempt.first_failure is None)
    return attempt.exit_code


def _supervise(
    specs: Sequence[ProcessSpec],
    *,
    job: Job,
    logs: Path,
    screen: JobScreen,
    signals: SignalPipe,
    open_files: tuple[int, int],
) -> Attempt:
    mark = secrets.token_hex(8)
    guard = Guard(mark, environ=job.environ, say=screen.say)
    chief = specs[0].task
    try:
        starter = _starter(specs, job=job, logs=logs, mark=mark, guard=guard, open_files=open_files)
        processes = JobProcesses(
            chief=chief,
            mark=mark,
            starter=starter,
            guard=guard,
            screen=screen,
            signals=signals,
            clock=time.monotonic,
        )
        supervisor = Supervisor(
            specs,
            chief=chief,
            is_ps=job.strategy == "ps",
            grace_s=job.options.grace_s,
            processes=processes,
            screen=screen,
            clock=time.monotonic,
        )
        try:
            return supervisor.run()
        finally:
            processes.finish()
    finally:
        guard.close()


def _starter(
    specs: Sequence[ProcessSpec],
    *,
    job: Job,
    logs: Path,
    mark: str,
    guard: Guard,
    open_files: tuple[int, int],
) -> Starter:
    if start_method(job.options, job.machine) == "exec":
        return ExecStarter(clock=time.monotonic, open_files=open_files)
    fork_server = ForkStarter(
        environ={**shared_environment(specs), MARK: mark},
        log_path=logs / "fork-server.log",
        open_files=open_files,
        clock=time.monotonic,
    )
    guard.add(fork_server.pid)
    return fork_server


def _last_words(screen: JobScreen, *, is_hurried: bool) -> None:
    """Waits for whoever reads the output, not for long when the job was asked to stop."""
    with contextlib.suppress(KeyboardInterrupt):
        for console in screen.consoles:
            console.drain(_LAST_WORDS_S if is_hurried else None)


def _counted(specs: Sequence[ProcessSpec]) -> str:
    counts = Counter(spec.task.type for spec in specs)
    plural = {"worker": "workers"}
    return ", ".join(f"{n} {plural.get(t, t) if n > 1 else t}" for t, n in counts.items())
