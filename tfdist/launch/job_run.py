"""Run of a job: plan, run directory, attempts and exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster import Task, settings, tf_config
from tfdist.cluster.ports import PortPool
from tfdist.errors import EXIT_FAILED, TfdistError, UsageError
from tfdist.files import write_json
from tfdist.launch.agent import lock_host
from tfdist.launch.diagnosis import Watchdog
from tfdist.launch.ending import (
    SPAWN,
    closing_lines,
    command_of,
    continued_run,
    resume_command,
    shown,
)
from tfdist.launch.events import (
    STOP_CODES,
    Message,
    SignalPipe,
    StopRequest,
    decode,
    encode,
    exit_code_for,
    request_name,
)
from tfdist.launch.isolation import isolate, reach
from tfdist.launch.live import LIVE_FILE, LiveStatus, metrics_server
from tfdist.launch.machine import this_machine
from tfdist.launch.membership import Membership
from tfdist.launch.multihost.agents import Hub, PipeAgent, shell_of
from tfdist.launch.multihost.host_agreement import passed_variables, versions_of_hosts
from tfdist.launch.multihost.hosts import (
    Group,
    HostPart,
    certificate,
    decided_group,
    own_address,
    refuse_launchers_in_a_step,
    refuse_several_launchers,
    terms,
)
from tfdist.launch.multihost.leader import Team
from tfdist.launch.multihost.node import Node
from tfdist.launch.multihost.pipe import Pipe
from tfdist.launch.options import LaunchOptions, Program, check_program, imports_tensorflow
from tfdist.launch.plan import JobDescription, decided_kind, divide_gpus, render, start_method
from tfdist.launch.processes import JobProcesses, LocalProcesses
from tfdist.launch.run_dir import (
    REPORT_FILE,
    RunDir,
    attempt_entry,
    chosen_run_dir,
    description_of_job,
    earlier_attempts,
    next_attempt,
    not_writable,
)
from tfdist.launch.screen import JobScreen, standard_screen
from tfdist.launch.state import JobState, RestartPolicy
from tfdist.launch.supervisor import Supervisor
from tfdist.options import CLUSTER, LAUNCHED, RESTARTS, UNCOUNTED_RESTARTS

_READ = (CLUSTER, RESTARTS, UNCOUNTED_RESTARTS)


def run_job(
    options: LaunchOptions,
    *,
    environ: Mapping[str, str],
    fork_server: int | None = None,
    screen: JobScreen | None = None,
) -> int:
    """Run a job and return its exit code. With ``dry_run``, only print the plan.

    If `fork_server` is set, it is the socket of the server that forks the tasks. `screen` replaces
    the standard screen of a job on this machine.

    Raises:
        UsageError: The options are invalid for this job. No task was started.
    """
    search = [os.getcwd(), *sys.path]
    check_program(options.program)
    _check_tf_config(options.program, environ)
    is_here = options.where == "local" and options.hosts is None
    if options.program.target != SPAWN:  # any process may call tfdist.spawn
        refuse_several_launchers(environ, is_here=is_here)
    unread = [n for n in settings.NAMES if n not in _READ and settings.text(environ, n)]
    if unread:
        _remark(f"{', '.join(unread)}: ignored, because the launcher reads only its flags")
    if (run_dir := continued_run(options, environ)) and options.verbosity >= 0:
        _remark(f"continuing {shown(run_dir)}")
    run_dir, given = run_dir or chosen_run_dir(options.run_dir, environ), options
    group = None
    if is_here:
        refuse_launchers_in_a_step(environ)
    else:
        options, group = decided_group(options, environ)
    job = _described(options, group, environ, run_dir=run_dir, search=search)
    job = dataclasses.replace(job, given=given)
    if group is not None:
        return _run_on_hosts(job, group, search=search)
    if options.dry_run:
        return _show(job)
    divide_gpus(job, job.local_tasks)  # raises before the run directory exists
    if not options.isolate:  # an existing server is outside the job's network
        job = dataclasses.replace(job, fork_server=fork_server)
    return _run(job, screen or standard_screen(environ, verbosity=options.verbosity))


def serve(first: Message, pipe: Pipe) -> int:
    """Run this host's tasks as an agent. `first` is the launcher's first message.

    Raises:
        UsageError: The job cannot run on this host.
    """
    options, group = decode(LaunchOptions, first["options"]), decode(Group, first["group"])
    environ, search = dict(os.environ), [os.getcwd(), *sys.path]
    check_program(options.program)
    lock = lock_host(first["run_dir"], group.hosts[group.rank], within_s=options.grace_s, pipe=pipe)
    job = _described(options, group, environ, run_dir=Path(first["run_dir"]), search=search)
    host = group.hosts[group.rank]
    own = first["at"] or _address_of_agent(host, environ, launcher=first["from"])
    return _run_on_hosts(job, group, search=search, own=own, pipe=pipe, hold=(lock,))


def _address_of_agent(host: str, environ: Mapping[str, str], *, launcher: str) -> str:
    """Return this host's address, found by its name or from the ssh connection.

    The host cannot resolve a name that exists only in the launcher's ~/.ssh/config.
    """
    client, _, server, *_ = [*environ.get("SSH_CONNECTION", "").split(), "", "", ""][:4]
    try:
        return own_address(host, other=client or launcher)
    except UsageError:
        if server:
            return server
        raise


def _described(
    options: LaunchOptions,
    group: Group | None,
    environ: Mapping[str, str],
    *,
    run_dir: Path,
    search: Sequence[str],
) -> JobDescription:
    """Return this host's part of a job. `group` is `None` for a job on this machine."""
    machine = this_machine(environ)
    has_tasks = group is None or group.num_tasks(group.rank) > 0
    is_imported = has_tasks and imports_tensorflow(options.program, search=search)
    start = start_method(options, machine, imports_tensorflow=is_imported)
    return JobDescription(
        options=options,
        kind=decided_kind(options, machine),
        ports=settings.ports_of(options),
        machine=machine,
        environ=environ,
        run_dir=run_dir,
        start=start if has_tasks else "exec",
    )


def _check_tf_config(program: Program, environ: Mapping[str, str]) -> None:
    """Report that the launcher ignores TF_CONFIG, or raise UsageError if it lists several tasks.

    A scheduler sets TF_CONFIG in each pod, and one launcher per pod would train separate models.
    A task of another launcher also has a TF_CONFIG, which is only reported.
    """
    if not environ.get(tf_config.VARIABLE, "").strip():
        return
    if settings.text(environ, CLUSTER) not in ("", "auto", "tf_config"):
        return  # TFDIST_CLUSTER names another source than TF_CONFIG
    config = None
    with contextlib.suppress(UsageError):  # an ignored TF_CONFIG may be invalid
        config = tf_config.from_environ(environ)
    count = max(1, len(config.cluster.training_tasks())) + config.options.evaluator if config else 0
    if config is not None and count > 1 and LAUNCHED not in environ:
        command = f"python {'-m ' * program.is_module}{program.target}"
        raise UsageError(
            tf_config.VARIABLE,
            f"this process is {config.task} of a job with {count} tasks, but the launcher would "
            "start all tasks again",
            fix=f"start {command} without the launcher, or unset TF_CONFIG",
            code="nested-launcher",
        )
    _remark("TF_CONFIG: ignored, because the launcher sets it for each task")


def _remark(line: str) -> None:
    print(f"[launch] {line}", file=sys.stderr, flush=True)


def _show(job: JobDescription) -> int:
    with PortPool(job.num_local_addresses, among=job.ports) as pool:
        addresses = [port.address for port in pool.renewed()]
    specs = job.specs(job.local_attempt(addresses, number=next_attempt(job.run_dir)))
    head = f"# strategy {job.kind}, run directory {job.run_dir}"
    print(f"{head}\n\n{render(specs)}", flush=True)
    return 0


def _run(job: JobDescription, screen: JobScreen) -> int:
    network = isolate(job.environ) if job.options.isolate else ""
    with (
        PortPool(job.num_local_addresses, among=job.ports) as ports,
        SignalPipe() as signals,
        LocalProcesses(job, ports=ports, screen=screen, signals=signals) as processes,
    ):
        if not network and job.kind.has_tensorflow_servers:
            network = reach(port.port for port in ports.renewed())
        with RunDir(job.run_dir) as run_dir:
            screen.announce(f"run directory {job.run_dir}")
            run = JobRun(job, processes, screen=screen, run_dir=run_dir, warning=network)
            code = run.run()
    screen.drain(is_hurried=code in STOP_CODES)
    return code


def _run_on_hosts(  # noqa: D417
    job: JobDescription,
    group: Group,
    *,
    search: Sequence[str],
    own: str = "",
    pipe: Pipe | None = None,
    hold: Sequence[int] = (),
) -> int:
    """Run this host's part of a job on several hosts. Return the exit code of the whole job.

    Args:
      search: Directories in which the program's module is searched for.
      own: Address of this host (default: found automatically).
      pipe: Connection of an agent to its launcher, or `None` in the launcher.
      hold: File descriptors to close after the last task has exited.

    Raises:
        TfdistError: A host is missing or its terms differ. No task was started.
    """
    screen = standard_screen(job.environ, verbosity=job.options.verbosity)
    own = own or group.hosts[0]
    if pipe is None:
        is_here = group.num_tasks(0) > 0
        own = own_address(own, other=group.hosts[1]) if is_here else socket.gethostname()
    with (
        PortPool(group.num_tasks(group.rank), host=own, among=job.ports) as ports,
        SignalPipe() as signals,
        JobProcesses(job, screen=screen, signals=signals, hold=hold) as processes,
    ):
        part = HostPart(
            job=job,
            group=group,
            own=own,
            terms=terms(job.environ, program=job.options.program, search=search),
            ports=ports,
            screen=screen,
            processes=processes,
        )
        code = _lead(part) if pipe is None else Node(part, pipe).run()
    screen.drain(is_hurried=pipe is not None or code in STOP_CODES)
    return code


def _lead(part: HostPart) -> int:
    pem = certificate() if part.job.kind.is_elastic else None
    team, screen, run_path = Team(part, _hub(part), pem=pem), part.screen, part.job.run_dir
    code = EXIT_FAILED
    with contextlib.ExitStack() as stack:
        is_new = not os.path.exists(run_path)
        # Lock it first: new agents would kill the agents of a job that runs there.
        run_dir = stack.enter_context(RunDir(run_path))
        try:
            if (stop_signal := team.gather()) is not None:
                code = exit_code_for(stop_signal)
            else:
                screen.announce(team.roll_call())
                screen.announce(f"run directory {run_path}")
                code = JobRun(part.job, team, screen=screen, run_dir=run_dir).run()
        except TfdistError as error:
            code = error.exit_code
            raise
        finally:
            team.end(code)
            if is_new and not run_dir.attempt:
                run_dir.discard()
    return code


def _hub(part: HostPart) -> Hub:
    job, group, out = part.job, part.group, part.screen.out
    options, environ = job.options, job.environ
    hosts = {rank: host for rank, host in enumerate(group.hosts) if rank}
    shell = shell_of(options.where, options.rsh)
    names = options.env.split(",") if options.env else ()

    def first(rank: int) -> Message:
        return {
            "module": __name__,
            "cwd": os.getcwd(),
            "env": passed_variables(environ, names),
            "run_dir": str(job.run_dir),
            "options": encode(options),
            "group": encode(dataclasses.replace(group, rank=rank)),
            "from": part.own,
        }

    def start(rank: int) -> PipeAgent:
        return PipeAgent(
            hosts[rank],
            shell,
            first(rank),
            startup_timeout_s=options.startup_timeout_s,
            show=out.pass_on,
            say=part.screen.say,
            may_read=lambda: not out.is_full,
        )

    return Hub(hosts, start, terms=part.terms, say=part.screen.say)


class JobRun:
    """Run of a job: one attempt after the other, until one succeeds or the job must not restart.

    All attempts share the guardian, the fork server and the ports.
    """

    def __init__(
        self,
        job: JobDescription,
        processes: Team | LocalProcesses,
        *,
        screen: JobScreen,
        run_dir: RunDir,
        warning: str = "",
    ) -> None:
        self._job = job
        self._warning = warning
        self._screen = screen
        self._processes = processes
        self._run_dir = run_dir
        self._report_file = job.run_dir / REPORT_FILE
        self._entries = earlier_attempts(job.run_dir)
        description = description_of_job(job.kind.name, argv=sys.orig_argv)
        self._description = {**description, **command_of(job.given)}
        self._policy = RestartPolicy(
            max_restarts=job.options.max_restarts, window_s=job.options.restart_window_s
        )

    def run(self) -> int:
        """Run the attempts and return the exit code, with no process left running.

        The report is written after each attempt. The last lines of output describe the result.

        Raises:
            TfdistError: The run directory is not writable. No task was started.
        """
        with contextlib.ExitStack() as stack:
            if (port := self._job.options.metrics_port) is not None:
                stack.enter_context(metrics_server(port, self._job.run_dir / LIVE_FILE))
                self._screen.announce(f"metrics at http://127.0.0.1:{port}/metrics")
            logs = self._run_dir.start_attempt()
            try:
                self._write_report(None)
            except OSError as error:
                raise not_writable(self._job.run_dir, error) from None
            began_s = time.monotonic()
            try:
                code = self._run_from(logs)
            except (OSError, TfdistError) as error:  # of the launcher, not of a task
                self._write(getattr(error, "exit_code", EXIT_FAILED))
                self._screen.drain(is_hurried=True)
                raise
            lines = closing_lines(
                self._job.run_dir,
                exit_code=code,
                seconds=time.monotonic() - began_s,
                resume=resume_command(self._job.given, self._job.run_dir),
            )
            if code or not self._screen.is_quiet:
                self._screen.say("\n".join(lines))
            return code

    def _run_from(self, logs: Path) -> int:
        restarts = 0
        attempt = self._run_attempt(logs, restarts=restarts)
        while isinstance(following := self._following(attempt), Path):
            self._write(None)
            restarts += 1
            attempt = self._run_attempt(following, restarts=restarts)
        self._write(following)
        return following

    def _run_attempt(self, logs: Path, *, restarts: int) -> JobState:
        """Run one attempt, add its entry to the report, and return its final state."""
        options, kind, number = self._job.options, self._job.kind, self._run_dir.attempt
        tasks = self._processes.begin_attempt(number, restarts=restarts)
        if not restarts:
            self._screen.announce(f"strategy {kind}: {_counted(tasks)}")
            self._screen.out.say(self._warning)
        watchdog = Watchdog(
            hang_timeout_s=options.hang_timeout_s or math.inf,
            startup_timeout_s=options.startup_timeout_s,
            has_servers=kind.has_servers,
            chief=tasks[0],
            state_of=self._processes.state_of,
            is_held_up=lambda: self._screen.out.is_full,
        )
        state = JobState(
            job_tasks=tasks,
            logs=logs,
            has_servers=kind.has_servers,
            grace_s=options.grace_s,
            min_workers=options.min_workers,
            membership=Membership(expected=options.workers) if kind.is_elastic else None,
            policy=self._policy,
            watchdog=watchdog,
            now_s=time.monotonic(),
        )
        live = LiveStatus(
            self._job.run_dir,
            logs=logs,
            attempt=number,
            strategy=kind.name,
            epoch_s=_epoch_s,
            hosts=self._screen.hosts,
            is_here=self._processes.is_here,
        )
        supervisor = Supervisor(
            state,
            processes=self._processes,
            screen=self._screen,
            clock=time.monotonic,
            observe=live.see,
        )
        try:
            supervisor.run()
        finally:
            self._processes.finish()
        entry = attempt_entry(
            state,
            number=number,
            epoch_s=_epoch_s(),
            last_lines=self._screen.last_lines,
            stacks=supervisor.stacks,
            hosts=self._screen.hosts,
        )
        self._entries.append(entry)
        return state

    def _following(self, attempt: JobState) -> Path | int:
        """Return the next attempt's log directory, or the exit code if the job is over."""
        if not attempt.restart or attempt.failure is None:
            return attempt.exit_code
        for event in self._processes.wait(0):
            if isinstance(event, StopRequest):
                self._screen.say(f"{request_name(event.signum)}: not restarting")
                return exit_code_for(event.signum)
        try:
            stop_signal = self._processes.gather()
        except TfdistError as error:
            return self._not_again(error, error.exit_code)
        if stop_signal is not None:
            return exit_code_for(stop_signal)
        try:
            logs = self._run_dir.start_attempt()
        except TfdistError as error:
            return self._not_again(error, attempt.exit_code)
        self._policy.restarted(attempt.failure)
        self._screen.say(f"restarting as attempt {self._run_dir.attempt} ({attempt.restart})")
        return logs

    def _not_again(self, error: TfdistError, exit_code: int) -> int:
        self._screen.say(f"not restarting: {error}")
        return exit_code

    def _write(self, exit_code: int | None) -> None:
        if "versions" not in self._description:  # slow, so not at the start
            self._description["versions"] = versions_of_hosts()
        try:
            self._write_report(exit_code)
        except OSError as error:
            self._screen.say(f"cannot write {self._report_file}: {error.strerror}")

    def _write_report(self, exit_code: int | None) -> None:
        """Write the report atomically. `exit_code` is `None` while the job runs."""
        content: dict[str, object] = {"exit_code": exit_code, "job": self._description}
        content["attempts"] = self._entries
        if isinstance(self._processes, LocalProcesses) and self._processes.control:
            content["control"] = self._processes.control
        # Do not wait for the disk: meanwhile other hosts would consider the launcher lost.
        write_json(self._report_file, content, durable=False, private=True)


def _epoch_s() -> float:
    """Return the time of day at which the monotonic clock was 0."""
    return time.time() - time.monotonic()


def _counted(tasks: Sequence[Task]) -> str:
    counts = Counter(task.type for task in tasks)
    return ", ".join(f"{n} {t}{'s' * (t == 'worker' and n > 1)}" for t, n in counts.items())
