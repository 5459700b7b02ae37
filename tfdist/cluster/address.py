"""Validation of task addresses (``host:port``), and parsers of lists of hosts."""

from __future__ import annotations

import ipaddress
import re
import reprlib
from collections.abc import Sequence

from tfdist.errors import UsageError

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|{_LABEL}(?:\.{_LABEL})*\.?")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 2
_short.maxlist = _short.maxdict = _short.maxtuple = 3


def shown(value: object) -> str:
    """Return any `value` as one short line for an error message."""
    return _short.repr(value)


def check_address(address: object, *, where: str) -> tuple[str, int]:
    """Return the host, in lower case, and the port of an address.

    Raises:
        UsageError: `address` is not ``host:port``. The message names the wrong part.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    wanted = "a valid host name or IP address"
    if _HOST.fullmatch(host):
        if re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65_535:
            return host.lower().removesuffix("."), int(port)
        wanted = "a port from 1 to 65535"
    raise UsageError(
        where,
        f"{shown(address)} is not host:port with {wanted}",
        fix='write an address, as in "host:2222" or "[fd00::1]:2222"',
        code="bad-value",
    )


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without the brackets of IPv6, and the port of a valid address."""
    check_address(address, where="address")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback IP address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def join(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"


# Parsers of host lists: schedulers' node lists, and tfdist's lists with slots, ``a:2,n[1-4]:8``.
#
# A node list has the format ``n[001-010,12],login,rack[1-2]node[3-4]-ib``.
# `expand_hosts` returns the names of Slurm in Slurm's order. It also accepts text after a bracket,
# as in ``n[1-2]-ib``, which Slurm rejects. Intel MPI and DNS names use such text.

_MAX_SLOTS = 1024  # a larger number is probably a port
_MAX_RANGE = 1 << 20  # a longer one is an error, found before it uses memory
_RANGES = r"\[[0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*+\]"
_PART = re.compile(rf"(?:[^,\[\]\s()]++|{_RANGES})++")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")


def expand_hosts(text: str, *, where: str) -> list[str]:
    """Return the names in a node list, in order and with repeated names.

    The numbers of a range have at least as many digits as its first number. The order of
    several brackets is Slurm's: in ``[a][b][c]``, c varies fastest, then a, then b.

    Raises:
        UsageError: `text` is not a node list. The message starts with `where`.
    """
    names: list[str] = []
    for part in _split(text):
        begin, *rest = re.split(r"\[([^\]]*)\]", part) if _PART.fullmatch(part) else [""]
        begins, numbers, end = [begin], [""], ""
        for inside, after in zip(rest[::2], rest[1::2], strict=True):
            begins = [f"{begin}{number}{end}" for number in numbers for begin in begins]
            numbers, end = _numbers(inside), after
        found = [f"{begin}{number}{end}" for begin in begins for number in numbers]
        if not all(found) or not found:
            raise UsageError(
                where,
                f"the node list {shown(text)} has a wrong part, {shown(part)}",
                fix="write a list such as n[001-010,12],login",
                code="bad-value",
            )
        names += found
    return names


def _split(text: str) -> list[str]:
    """Return the parts of a list, split at commas outside brackets."""
    return re.split(r",(?![^\[\]]*\])", text.strip())


def _numbers(inside: str) -> list[str]:
    """Return the numbers of one bracket, such as ``1-3,07``, or [] if a range is wrong."""
    made: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= last - first < _MAX_RANGE:
            return []
        made += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return made


def expand_counts(text: str, *, where: str) -> list[int]:
    """Return the number for each node of a list. For example, ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNT.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or not times:
            raise UsageError(
                where,
                f"{shown(text)} does not give a number for each node, as 2(x3),1 does",
                fix=f"correct {shown(part)}, or start the job again",
                code="bad-value",
            )
        counts += [int(match[1])] * times
    return counts


def parse_hosts(value: str, *, where: str = "--hosts") -> list[tuple[str, int]]:
    """Return the hosts and slots of ``host:slots,host,n[1-3]:slots`` (default: one slot).

    Hosts may be node lists (`expand_hosts`). IPv6 addresses keep their brackets. A repeated
    host keeps its slots at each position.
    """
    made: list[tuple[str, int]] = []
    for part in _split(value):
        names, slots = _slots(part, where)
        is_ipv6 = names.startswith("[") and ":" in names
        hosts = [names] if is_ipv6 else expand_hosts(names, where=where)
        for host in hosts:
            check_address(f"{host}:1", where=where)
        made += [(host, slots) for host in hosts]
    return made


def ranks_of(listed: Sequence[tuple[str, int]]) -> list[str]:
    """Return the host of each rank. Each host has one rank for each slot, in order."""
    return [host for host, slots in listed for _ in range(slots)]


def _slots(part: str, where: str) -> tuple[str, int]:
    """Split ``names:slots``. An IPv6 address in brackets may contain colons."""
    names, colon, number = part.strip().rpartition(":")
    if not colon or number.endswith("]"):
        names, number = part.strip(), "1"
    count = int(number) if re.fullmatch("[0-9]{1,6}", number) else 0
    is_bare_ipv6 = ":" in names and not names.startswith("[")
    if not names or is_bare_ipv6 or not 1 <= count <= _MAX_SLOTS:
        raise UsageError(
            where,
            f"{shown(part)} is not a host with 1 to {_MAX_SLOTS} slots",
            fix="write a host and its number of tasks, as in host:2 or [fd00::1]:2, and no port",
            code="bad-value",
        )
    return names, count
