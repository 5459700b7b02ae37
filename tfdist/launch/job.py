"""Running a job from beginning to end: plan it, make its directory, run it, say how it went."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from tfdist.cluster import HeldPort, hold_ports, tf_config, wishes
from tfdist.errors import UsageError
from tfdist.launch.across import run_across
from tfdist.launch.attempts import Job, JobRun
from tfdist.launch.console import show
from tfdist.launch.hosts import Group, decided_group, environment_of_tasks, terms
from tfdist.launch.isolation import isolate
from tfdist.launch.machine import this_machine
from tfdist.launch.options import LaunchOptions, Program
from tfdist.launch.plan import ProcessSpec, decided_strategy, render, start_method
from tfdist.launch.port_choice import ports_of_tasks, with_variables
from tfdist.launch.process import raise_file_limit
from tfdist.launch.rundir import RunDir, chosen_run_dir, next_attempt
from tfdist.launch.screen import shows_in_place, standard_screen
from tfdist.launch.signals import SignalPipe
from tfdist.launch.target import check_program, file_of_program, imports_tensorflow

_FILES_PER_TASK = 5  # port, pipe, log, and two more while it is started
_OTHER_FILES = 128


def run_job(options: LaunchOptions, *, environ: Mapping[str, str]) -> int:
    """Runs a job and returns its exit code; with ``dry_run`` prints its plan.

    Raises:
        UsageError: it cannot be run as asked; nothing has been started.
    """
    search = [_working_directory(), *sys.path]
    check_program(options.program, search=search)
    _pass_over_tf_config(options.program, environ)
    if line := wishes.legacy_keras(environ):
        _remark(line)
    options, group = decided_group(with_variables(options, environ), environ)
    job = _job(options, group, environ=environment_of_tasks(environ), search=search)
    hosts = 0 if group is None else len(group.hosts)
    open_files = raise_file_limit(job.num_ports * _FILES_PER_TASK + hosts + _OTHER_FILES)
    if group is None:
        return _run_here(job, open_files=open_files)
    if options.dry_run:
        return _show_part(job, group)
    program_file = file_of_program(options.program, search=search)
    alike = terms(options, environ, group=group, program_file=program_file)
    return run_across(job, group, terms=alike, open_files=open_files)


def _pass_over_tf_config(program: Program, environ: Mapping[str, str]) -> None:
    """Says that a TF_CONFIG in the environment is not used; refuses one that was to be.

    That is one of a job of several tasks, as a scheduler sets it: a launcher in each of its pods
    would train by itself. A task of another launcher has one in any case.
    """
    if not environ.get(tf_config.VARIABLE, "").strip():
        return
    if wishes.text(environ, wishes.CLUSTER) not in ("", "auto", "tf_config"):
        return  # the user has named another source
    told = None
    with contextlib.suppress(UsageError):  # unused, it may say what it likes
        told = tf_config.from_environ(environ)
    count = max(1, len(told.cluster.training_tasks())) + told.options.evaluator if told else 0
    if told is not None and count > 1 and "TFDIST_JOB" not in environ:
        command = f"python {'-m ' * program.is_module}{program.target}"
        raise UsageError(
            tf_config.VARIABLE,
            received=f"{told.task} of a job of {count} tasks, and the launcher",
            expected="one of the two: the launcher starts all tasks of a job itself",
            fix=f"start {command} without the launcher, or unset TF_CONFIG",
        )
    _remark("TF_CONFIG is in the environment and not used: each task gets one of this job")


def _remark(line: str) -> None:
    """Shows a line of the launcher's own before it has a screen."""
    print(f"[launch] {line}", file=sys.stderr, flush=True)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            "working directory",
            received=f"one that cannot be found ({error.strerror})",
            expected="a directory that is there, in which the tasks run",
            fix="change to one (cd)",
        ) from None


def _job(
    options: LaunchOptions,
    group: Group | None,
    *,
    environ: Mapping[str, str],
    search: Sequence[str],
) -> Job:
    machine = this_machine(environ)
    strategy = decided_strategy(options, machine)
    return Job(
        options=options,
        strategy=strategy,
        ports=ports_of_tasks(options, group, strategy=strategy),
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


def _run_here(job: Job, *, open_files: tuple[int, int]) -> int:
    if job.options.isolate and not job.options.dry_run:
        isolate()
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(port) for port in hold_ports(job.num_ports, among=job.ports)]
        specs = job.specs(ports, attempt=next_attempt(job.run_dir))
        if job.options.dry_run:
            return _show(job, specs, about="")
        run_dir = stack.enter_context(RunDir(job.run_dir))
        return _run(job, ports, run_dir=run_dir, open_files=open_files)


def _show_part(job: Job, group: Group) -> int:
    """Prints the tasks of this host."""
    cluster = group.stand_in_cluster(strategy=job.strategy, ports=job.ports)
    here = group.tasks(range(len(group.hosts)))[group.rank]
    specs = job.specs_here(cluster, here, attempt=next_attempt(job.run_dir))
    about = (
        f"# host {group.hosts[group.rank]} (rank {group.rank} of {len(group.hosts)}); names and "
        "ports stand for those that the launchers agree on\n"
    )
    return _show(job, specs, about=about)


def _show(job: Job, specs: Sequence[ProcessSpec], *, about: str) -> int:
    head = f"# strategy {job.strategy}, run directory {job.run_dir}\n{about}"
    show(f"{head}\n{render(specs)}")
    return 0


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
    screen.last_words(is_hurried=outcome.was_asked)
    return outcome.exit_code
