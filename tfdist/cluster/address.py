"""Validation of task addresses (``host:port``), and parsers of lists of hosts."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
import reprlib
from collections.abc import Iterator, Sequence

from tfdist.errors import UsageError

_HOST = re.compile(r"\[[0-9A-Za-z:.%_-]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_MAX_HOST_CHARS, _MAX_LABEL_CHARS = 253, 63


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 2
_short.maxlist = _short.maxdict = _short.maxtuple = 3


def shown(value: object) -> str:
    """Return any `value` as one short line for an error message."""
    return _short.repr(value)


def check_address(address: object, *, where: str) -> tuple[str, int]:
    """Return a key that is equal for two addresses that two servers cannot both use.

    A server listens on every interface of its machine, so all names of this machine
    (``localhost``, ``127.0.0.2``, ``[::1]``) have the same key.

    Raises:
        UsageError: `address` is not ``host:port``. The message names the wrong part.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    key = _host_key(host) if _HOST.fullmatch(host) else None
    wanted = "a valid host name or IP address"
    if key is not None:
        if re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65_535:
            return key, int(port)
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


def _host_key(host: str) -> str | None:
    """Return the host in canonical spelling, or `None` if `host` is not valid."""
    is_ipv6 = host[0] == "["
    if is_ipv6 or host.replace(".", "").isdigit():
        kind = ipaddress.IPv6Address if is_ipv6 else ipaddress.IPv4Address
        try:
            address = kind(host.strip("[]"))
        except ValueError:
            return None
        address = getattr(address, "ipv4_mapped", None) or address
        return "localhost" if address.is_loopback or address.is_unspecified else str(address)
    if len(host) > _MAX_HOST_CHARS or ".." in host:
        return None
    if max(map(len, host.split("."))) > _MAX_LABEL_CHARS:
        return None
    return host.lower().removesuffix(".")


# Parsers of host lists: schedulers' node lists, and tfdist's lists with slots, ``a:2,n[1-4]:8``.
#
# A node list has the format ``n[001-010,12],login,rack[1-2]node[3-4]-ib``.
# `expand_hosts` returns the names of Slurm in Slurm's order. It also accepts text after a bracket,
# as in ``n[1-2]-ib``, which Slurm rejects. Intel MPI and DNS names use such text.

MAX_HOSTS = 1 << 20
"""Most names in a list. A longer list is an error, raised before it uses memory."""

_MAX_SLOTS = 1024  # a larger number is probably a port
_ELEMENT = re.compile(r"(?:[^,\[\]]++|\[[^\[\]]*+\])++")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGES = re.compile(r"[0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NOT_RANGES = "needs numbers and ranges in brackets, as in [1-3,7]"
_TOO_MANY = f"has more than {MAX_HOSTS} names"


def expand_hosts(text: str, *, where: str) -> list[str]:
    """Return the names in a node list, in order and with repeated names.

    The numbers of a range have at least as many digits as its first number. The order of
    several brackets is Slurm's: in ``[a][b][c]``, c varies fastest, then a, then b.

    Raises:
        UsageError: `text` is not a node list. The message starts with `where`.
    """
    text = text.strip()
    if re.search(r"[\s()]", text):
        raise _bad_node_list(text, where, "contains a space or a parenthesis")
    names: list[str] = []
    for element in split_hosts(text, where=where):
        names += _names(element, where) if "[" in element else [element]
        if len(names) > MAX_HOSTS:
            raise _bad_node_list(text, where, _TOO_MANY)
    return names


def split_hosts(text: str, *, where: str) -> Iterator[str]:
    """Yield the parts of a list, split at commas outside brackets."""
    end = -1
    for match in _ELEMENT.finditer(text):
        if match.start() != end + 1 or (end >= 0 and text[end] != ","):
            break
        yield match[0]
        end = match.end()
    if end != len(text):
        raise _bad_node_list(text, where, "has an unpaired bracket or an empty name")


def expand_counts(text: str, *, where: str) -> list[int]:
    """Return the number for each node of a list. For example, ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNT.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= MAX_HOSTS - len(counts):
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
    for part in list(split_hosts(value.strip(), where=where)):
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
    if ":" in names and not names.startswith("["):
        fix = "write host:slots, and an IPv6 address in brackets, as in [fd00::1]:2"
        raise _bad_hosts(part, where, "is neither host nor host:slots", fix)
    count = int(number) if re.fullmatch("[0-9]{1,6}", number) else 0
    if not names or not 1 <= count <= _MAX_SLOTS:
        fix = "write the number of tasks on the host after the colon, as in host:2, and no port"
        problem = f"does not name a host with 1 to {_MAX_SLOTS} slots"
        raise _bad_hosts(part, where, problem, fix)
    return names, count


def _bad_hosts(part: str, where: str, problem: str, fix: str) -> UsageError:
    return UsageError(where, f"{shown(part)} {problem}", fix=fix, code="bad-value")


def _names(element: str, where: str) -> list[str]:
    """Return the names of one element with brackets, such as ``rack[1-2]node[3-4]-ib``."""
    begin, *parts = _BRACKETS.split(element)
    brackets = [_numbers(inside, where) for inside in parts[::2]]
    if math.prod(map(len, brackets)) > MAX_HOSTS:
        raise _bad_node_list(element, where, _TOO_MANY)
    *outer, last = zip(brackets, parts[1::2], strict=True)
    begins = [begin]
    for numbers, after in outer:
        begins = [f"{begin}{number}{after}" for number in numbers for begin in begins]
    numbers, end = last
    return [f"{begin}{number}{end}" for begin, number in itertools.product(begins, numbers)]


def _numbers(inside: str, where: str) -> list[str]:
    """Return the numbers of one bracket, such as ``1-3,07``, with leading zeros."""
    if not _RANGES.fullmatch(inside):
        raise _bad_node_list(f"[{inside}]", where, _NOT_RANGES)
    made: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if first > last:
            raise _bad_node_list(f"[{inside}]", where, _NOT_RANGES)
        if last - first >= MAX_HOSTS - len(made):
            raise _bad_node_list(f"[{inside}]", where, _TOO_MANY)
        made += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return made


def _bad_node_list(text: str, where: str, problem: str) -> UsageError:
    return UsageError(
        where,
        f"the node list {shown(text)} {problem}",
        fix="write a list such as n[001-010,12],login",
        code="bad-value",
    )
