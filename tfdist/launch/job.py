"""Running a job from beginning to end: plan it, make its directory, run it, say how it went."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from tfdist.cluster import HeldPort, hold_ports
from tfdist.launch.attempts import Job, JobRun
from tfdist.launch.isolation import isolate
from tfdist.launch.machine import this_machine
from tfdist.launch.options import LaunchOptions
from tfdist.launch.plan import decided_strategy, render, start_method
from tfdist.launch.process import raise_file_limit
from tfdist.launch.rundir import RunDir, chosen_run_dir, next_attempt
from tfdist.launch.screen import JobScreen, shows_in_place, standard_screen
from tfdist.launch.signals import SignalPipe
from tfdist.launch.target import check_program, imports_tensorflow

_FILES_PER_TASK = 5  # port, pipe, log, and two more while it is started
_OTHER_FILES = 64
_LAST_WORDS_S = 1.0


def run_job(options: LaunchOptions, *, environ: Mapping[str, str]) -> int:
    """Runs a job and returns its exit code; with ``dry_run`` prints its plan.

    Raises:
        UsageError: it cannot be run as asked; nothing has been started.
    """
    search = [os.getcwd(), *sys.path]
    check_program(options.program, search=search)
    machine = this_machine(environ)
    job = Job(
        options=options,
        strategy=decided_strategy(options, machine),
        machine=machine,
        environ=environ,
        run_dir=chosen_run_dir(options.run_dir),
        start=start_method(
            options,
            machine,
            imports_tensorflow=imports_tensorflow(options.program, search=search),
        ),
        is_terminal=shows_in_place(1, environ),
    )
    if options.isolate and not options.dry_run:
        isolate()
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


def _run(
    job: Job, ports: Sequence[HeldPort], *, run_dir: RunDir, open_files: tuple[int, int]
) -> int:
    screen = standard_screen(job.environ)
    screen.announce(f"run directory {job.run_dir}")
    with (
        SignalPipe() as signals,
        JobRun(
            job,
            ports=ports,
            run_dir=run_dir,
            screen=screen,
            signals=signals,
            open_files=open_files,
        ) as run,
    ):
        outcome = run.run()
    _last_words(screen, is_hurried=outcome.was_asked)
    return outcome.exit_code


def _last_words(screen: JobScreen, *, is_hurried: bool) -> None:
    """Waits for whoever reads the output, not for long when the job was asked to stop."""
    with contextlib.suppress(KeyboardInterrupt):
        for console in screen.consoles:
            console.drain(_LAST_WORDS_S if is_hurried else None)
