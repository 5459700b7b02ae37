"""The address of this machine at which the other hosts of a job reach it."""

from __future__ import annotations

import errno
import ipaddress
import socket

from tfdist.cluster.address import shown
from tfdist.errors import UsageError

_ANY_PORT = 9  # nothing is sent to it


def resolve(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Returns family and address of a host; raises OSError, also for a name that is unknown.

    Of a name with both, that of IPv4: the system puts them in an order that follows from its own
    routes, and host 0 listens at one of them.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def own_address(host: str, *, other: str) -> str:
    """Returns the address of this machine, which the list of hosts calls `host`.

    Where the name leads to loopback, as it does on its own machine under Debian, it is the
    address from which `other` is reached.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    try:
        family, (address, _) = resolve(host)
    except OSError as error:
        raise _not_here(host, f"cannot be resolved: {error.strerror}") from None
    if ipaddress.ip_address(address).is_loopback:
        return _address_towards(other) or address
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            raise _not_here(host, f"is {address}, no address of this machine") from None
    return address


def is_own_address(host: str) -> bool:
    """Returns whether `host` is an address of this machine, no name and no loopback."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if address.is_loopback or address.is_unspecified:
            return False
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
    except (ValueError, OSError):
        return False
    return True


def _address_towards(other: str) -> str | None:
    """Returns the address of this machine on the way to `other`; None if that is loopback too."""
    try:
        family, (address, _) = resolve(other, _ANY_PORT)
        if ipaddress.ip_address(address).is_loopback:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, _ANY_PORT))
            return str(route.getsockname()[0])
    except OSError:
        return None


def _not_here(host: str, what: str) -> UsageError:
    return UsageError(
        "--hosts",
        received=f"{shown(host)} for this machine, which {what}",
        expected="a name that leads to this machine",
        fix="correct the name, --node_rank, or what resolves names (/etc/hosts, DNS)",
    )
