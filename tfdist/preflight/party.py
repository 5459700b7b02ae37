"""What one host does of a look at all: a step at a time, all hosts the same one at once.

What it is asked for are names of steps and which hosts are there. Addresses, ports and paths are
those that its own user gave it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tfdist.cluster import HeldPort, hold_ports
from tfdist.cluster.placement import join
from tfdist.preflight import door, machine, probing, resolving
from tfdist.preflight.door import Door
from tfdist.preflight.facts import Directory, Exchange, HostFacts, as_json
from tfdist.preflight.job import Job
from tfdist.preflight.serving import Servers
from tfdist.preflight.storage import Storage
from tfdist.preflight.work import work_s

Part = dict[str, Any]
"""Some of the fields of `HostFacts`, as JSON has them."""

_LOOPBACK = "127.0.0.1"


class Party:
    """This host. Closing it ends what it has started, and frees its ports."""

    def __init__(self, job: Job, *, environ: Mapping[str, str], shared_dir: str | None) -> None:
        self._job = job
        self._environ = environ
        self._stack = contextlib.ExitStack()
        self._held: list[HeldPort] = []
        if len(job.hosts) == 1:  # there is no other host: its tasks meet on loopback
            self._held = [self._stack.enter_context(port) for port in hold_ports(2)]
        self.door = self._stack.enter_context(
            Door(
                door.greeting(job.index, job.fingerprint),
                [*job.host.ports, *(port.port for port in self._held[:1])],
                token=job.token,
                spare=job.index == 0 and len(job.hosts) > 1,
            )
        )
        self._storage = (
            Storage(shared_dir, mark=job.fingerprint, index=job.index) if shared_dir else None
        )
        self._reached: set[tuple[int, int]] = set()
        self._cpus = 1
        self._written: Directory | None = None
        self._servers: Servers | None = None
        self.steps: Mapping[str, Callable[[Sequence[int]], Part]] = {
            "look": self._look,
            "reach": self._reach,
            "wire": self._wire,
            "work": self._work,
            "write": self._write,
            "read": self._read,
            "serve": self._serve,
            "stop": self._stop,
        }

    def __enter__(self) -> Party:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._storage is not None:
            self._storage.clean()
        self._stack.close()

    def result(self) -> Exchange:
        """Returns what came of the servers; the first host asks, once all serve."""
        assert self._servers is not None
        return self._servers.result()

    def _look(self, present: Sequence[int]) -> Part:
        names = [host.name for host in self._job.hosts]
        found = machine.look(self._environ)
        self._cpus = found.cpus
        resolved = resolving.look_up(names if len(names) > 1 else [])
        own = resolved[self._job.index].addresses if resolved else ()
        reverse = resolving.look_back([a for a in own if a in found.own_addresses])
        ports = self.door.ports[: len(self._job.host.ports)]
        return _part(
            HostFacts(
                index=self._job.index, machine=found, names=resolved, reverse=reverse, ports=ports
            ),
            "index",
            "machine",
            "names",
            "reverse",
            "ports",
        )

    def _reach(self, present: Sequence[int]) -> Part:
        job = self._job
        found = probing.reach(
            job.hosts, present=present, index=job.index, fingerprint=job.fingerprint
        )
        self._reached = {(r.host, r.port) for r in found if r.answered == r.host}
        return {"reaches": [as_json(reach) for reach in found]}

    def _wire(self, present: Sequence[int]) -> Part:
        """Measures the way to the next host that is there: each sends and takes, as in a ring."""
        job = self._job
        if self._held:
            return {"wires": [as_json(probing.measure(_LOOPBACK, self._held[0].port, host=0))]}
        after = [index for index in present if index > job.index] or list(present)
        reached = [port for other, port in sorted(self._reached) if other == after[0]]
        if not reached:
            return {}
        name = job.hosts[after[0]].name
        return {"wires": [as_json(probing.measure(name, reached[0], host=after[0]))]}

    def _work(self, present: Sequence[int]) -> Part:
        return {"work_s": work_s(self._cpus)}

    def _write(self, present: Sequence[int]) -> Part:
        if self._storage is not None:
            self._written = self._storage.write()
        return {}

    def _read(self, present: Sequence[int]) -> Part:
        if self._storage is None or self._written is None:
            return {}
        return {"directory": as_json(self._storage.read(self._written, present=present))}

    def _serve(self, present: Sequence[int]) -> Part:
        self.door.close()
        environ = self._environ
        if self._held:
            addresses, indices = [port.address for port in self._held], [0, 1]
            environ = machine.without_proxies(environ)  # as the launcher has it for such a job
        else:
            addresses = [join(host.name, host.ports[0]) for host in self._job.hosts]
            indices = [self._job.index]
        self._servers = self._stack.enter_context(Servers(addresses, environ=environ))
        for index in indices:
            self._servers.start(index)
        return {}

    def _stop(self, present: Sequence[int]) -> Part:
        """Returns why the server of this host has ended, if it has."""
        return {"failure": self._servers.failure() if self._servers else ""}


def _part(facts: HostFacts, *names: str) -> Part:
    whole = as_json(facts)
    return {name: whole[name] for name in names}
