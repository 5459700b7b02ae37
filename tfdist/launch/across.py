"""A job on several hosts from beginning to end, as the launcher of one of them runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from tfdist.cluster import HeldPort, hold_ports, placement
from tfdist.errors import EXIT_FAILED, TfdistError, UsageError
from tfdist.launch.attempts import Job, JobRun
from tfdist.launch.hosts import Group
from tfdist.launch.node import Node
from tfdist.launch.rundir import RunDir
from tfdist.launch.screen import JobScreen, standard_screen
from tfdist.launch.signals import SignalPipe, exit_code_for
from tfdist.launch.team import Team
from tfdist.launch.workshop import Workshop
from tfdist.rendezvous.hub import Hub, listen
from tfdist.rendezvous.interface import own_address
from tfdist.rendezvous.member import Joining


def run_across(
    job: Job, group: Group, *, terms: Mapping[str, str], open_files: tuple[int, int]
) -> int:
    """Runs this host's part of a job and returns the exit code of the whole.

    `terms` must be the same on all hosts.

    Raises:
        TfdistError: the hosts do not come together, or not alike; no task has been started.
    """
    screen = standard_screen(job.environ)
    other = group.hosts[1] if not group.rank else group.hosts[0]
    own = own_address(group.hosts[group.rank], other=other)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        held = hold_ports(group.num_tasks(group.rank), host=own, among=job.ports)
        ports = [stack.enter_context(port) for port in held]
        part = _Part(
            job=job, group=group, terms=terms, own=own, ports=ports, screen=screen, signals=signals
        )
        run = part.follow if group.rank else part.lead
        code = run(stack, open_files=open_files)
    screen.last_words(is_hurried=code != 0)
    return code


class _Part:
    """One host's part of a job."""

    def __init__(
        self,
        *,
        job: Job,
        group: Group,
        terms: Mapping[str, str],
        own: str,
        ports: Sequence[HeldPort],
        screen: JobScreen,
        signals: SignalPipe,
    ) -> None:
        self._job = job
        self._group = group
        self._terms = terms
        self._own = own
        self._ports = ports
        self._screen = screen
        self._signals = signals

    def lead(self, stack: contextlib.ExitStack, *, open_files: tuple[int, int]) -> int:
        """Runs the job, as host 0."""
        job, group = self._job, self._group
        hub = self._hub()
        team = Team(
            group,
            hub,
            options=job.options,
            strategy=job.strategy,
            screen=self._screen,
            signals=self._signals,
        )
        code, why = EXIT_FAILED, "the launcher of host 0 has failed"
        try:
            asked = team.gather()
            why = ""
            if asked is not None:
                code = exit_code_for(asked)
                return code
            self._screen.announce(team.roll_call(own=self._own, terms=self._terms))
            code = self._run(team, open_files=open_files)
        except TfdistError as error:
            code, why = error.exit_code, str(error)
            raise
        finally:
            team.end(code, why=why)
        return code

    def follow(self, stack: contextlib.ExitStack, *, open_files: tuple[int, int]) -> int:
        """Does what host 0 says, as any other host."""
        job, group = self._job, self._group
        workshop = Workshop(
            environ=job.environ,
            start=job.start,
            fork_server=job.options.fork_server,
            screen=self._screen,
            signals=self._signals,
            open_files=open_files,
        )
        joining = Joining(
            group.hosts[0],
            group.port,
            source=self._own,
            token=group.token,
            rank=group.rank,
            terms=self._terms,
            timeout_s=job.options.host_timeout_s,
            clock=time.monotonic,
        )
        with workshop:
            return Node(
                job,
                group,
                joining,
                ports=self._ports,
                workshop=workshop,
                screen=self._screen,
                signals=self._signals,
                stack=stack,
            ).run()

    def _hub(self) -> Hub:
        group = self._group
        try:
            listener = listen(self._own, group.port, num_hosts=len(group.hosts))
        except OSError as error:
            raise UsageError(
                "--rendezvous_port",
                received=f"{placement.join(self._own, group.port)} ({error.strerror})",
                expected="a port of this host that is free",
                fix="end what listens there, or give all hosts another port",
            ) from None
        return Hub(
            listener,
            token=group.token,
            terms=self._terms,
            num_ranks=len(group.hosts),
            timeout_s=self._job.options.host_timeout_s,
            clock=time.monotonic,
        )

    def _run(self, team: Team, *, open_files: tuple[int, int]) -> int:
        job = self._job
        with (
            RunDir(job.run_dir) as run_dir,
            JobRun(
                job,
                ports=self._ports,
                run_dir=run_dir,
                screen=self._screen,
                signals=self._signals,
                open_files=open_files,
                team=team,
            ) as run,
        ):
            self._screen.announce(f"run directory {job.run_dir}")
            return run.run().exit_code
