"""What names lead to on this host, and back; nobody waits longer than the deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tfdist.preflight.facts import NameFacts, ReverseFacts

_DEADLINE_S = 5.0
_MAX_REVERSE = 4

T = TypeVar("T")


def look_up(names: Sequence[str]) -> tuple[NameFacts, ...]:
    """Returns what each name leads to here, all asked at once."""
    return tuple(
        found or NameFacts(name=name, error="no answer", took_s=_DEADLINE_S)
        for name, found in zip(names, _all_at_once(_forward, names), strict=True)
    )


def look_back(addresses: Sequence[str]) -> tuple[ReverseFacts, ...]:
    """Returns the names of addresses, of those that have one, and what these lead to."""
    found = _all_at_once(_reverse, addresses[:_MAX_REVERSE])
    return tuple(reverse for reverse in found if reverse is not None)


def _forward(name: str) -> NameFacts:
    start = time.monotonic()
    try:
        addresses, error = addresses_of(name), ""
    except OSError as refused:
        addresses, error = (), refused.strerror or str(refused)
    took_s = time.monotonic() - start
    return NameFacts(name=name, addresses=addresses, error=error, took_s=took_s)


def _reverse(address: str) -> ReverseFacts | None:
    try:
        name = socket.gethostbyaddr(address)[0]
    except OSError:
        return None
    try:
        addresses = addresses_of(name)
    except OSError:
        addresses = ()
    return ReverseFacts(address=address, name=name, addresses=addresses)


def addresses_of(name: str) -> tuple[str, ...]:
    """Returns the addresses of a name or a number; raises OSError where there is none."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no name: {error}") from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _all_at_once(ask: Callable[[str], T], names: Sequence[str]) -> list[T | None]:
    """Returns the answers that came in time; who waits for the others cannot be interrupted."""
    answers: list[T | None] = [None] * len(names)

    def one(index: int) -> None:
        answers[index] = ask(names[index])

    asking = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(names))]
    for thread in asking:
        thread.start()
    deadline_s = time.monotonic() + _DEADLINE_S
    for thread in asking:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return list(answers)
