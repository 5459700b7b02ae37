"""Which ports the tasks of a job have: those that the user allows, and none that is taken."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.cluster import HeldPort, hold_ports, is_port_free, wishes
from tfdist.cluster.ports import as_text, parse_ports
from tfdist.errors import UsageError
from tfdist.launch.hosts import Group
from tfdist.launch.options import LaunchOptions
from tfdist.launch.plan import tasks_with_address


def with_variables(options: LaunchOptions, environ: Mapping[str, str]) -> LaunchOptions:
    """Returns the options with the ports of TFDIST_PORTS, where the flags have none."""
    told = wishes.text(environ, wishes.PORTS)
    if options.ports is not None or not told:
        return options
    return dataclasses.replace(options, ports=as_text(parse_ports(told, where=wishes.PORTS)))


def ports_of_tasks(
    options: LaunchOptions, group: Group | None, *, strategy: str
) -> Sequence[int] | None:
    """Returns the ports that tasks may have on any host of the job; None for all.

    That of the rendezvous is none of them.

    Raises:
        UsageError: they are fewer than the tasks of some host.
    """
    ports = options.port_range
    if ports is None:
        return None
    needed, meets_at = len(tasks_with_address(options, strategy)), 0
    if group is not None:
        meets_at = group.port
        needed = max(group.num_tasks(rank) for rank in range(len(group.hosts)))
    left = [port for port in ports if port != meets_at]
    if len(left) >= needed:
        return left
    also = ", and one for the rendezvous of the launchers" * (len(left) < len(ports))
    raise UsageError(
        "--ports",
        received=f"{as_text(ports)}, {len(ports)} ports",
        expected=f"{needed} or more for the tasks of a host{also}",
        fix="give a larger range: a port that is taken by something else is left out as well",
    )


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
