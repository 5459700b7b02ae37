"""Whether a process has come to rest: each of its threads sleeps until another of them wakes it.

A program may take as long as it likes before and after its training, so that time alone says
nothing there. But one that waits for time, a file, a connection, a terminal or another process
sleeps in a call that says so. Where no thread does, and none has run since, nothing inside will
ever go on: that is a deadlock. What cannot be read counts as going on.

Imported by every task before its program, so it imports nothing but what is built into Python.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

# Numbers of calls, as /proc/<pid>/task/<tid>/syscall has them before the arguments.
_FUTEX, _SLEEP, _EPOLL = {
    "x86_64": (b"202", b"230", (b"232", b"281")),
    "aarch64": (b"98", b"115", (b"22",)),
}.get(os.uname().machine, (b"unknown", b"unknown", ()))
_OPERATION, _TIMEOUT = 2, 4  # places of a futex call's arguments
_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_PRIVATE, _CLOCK = 0x80, 0x100  # without the first another process may wake it
_HOUSEKEEPING_S, _HOUSEKEEPING = 1.0, 0.05  # of the processor: so much, and this part of the time

Asleep = tuple[tuple[int, bytes], ...]


class Rest:
    """Notices since when a process has been at rest; to be asked about once a second.

    Args:
      process: its directory in /proc.
      cpu_s: the time of the processor that it has had.
    """

    def __init__(
        self, process: str = "/proc/self", *, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._process = process
        self._cpu_s = cpu_s
        self._asleep: Asleep | None = None
        self._since_s = self._worked_s = 0.0

    def since_s(
        self, now_s: float, *, but: Collection[int] = (), runtime: Collection[int] = ()
    ) -> float | None:
        """Returns since when, None if it goes on.

        The threads `but` do not count. Those of a `runtime` wake up now and then, to hear peers or
        by the clock: they may, as long as they hardly work.
        """
        asleep, cpu_s = self._all_asleep(but, runtime), self._cpu_s()
        allowed_s = _HOUSEKEEPING_S + _HOUSEKEEPING * (now_s - self._since_s)
        if asleep is None or asleep != self._asleep or cpu_s - self._worked_s > allowed_s:
            self._asleep, self._since_s, self._worked_s = asleep, now_s, cpu_s
        return None if asleep is None else self._since_s

    def _all_asleep(self, but: Collection[int], runtime: Collection[int]) -> Asleep | None:
        """Each thread with how often it has run, None unless all sleep until they are woken."""
        found = []
        try:
            for name in os.listdir(f"{self._process}/task"):
                thread, number = f"{self._process}/task/{name}", int(name)
                if number in but:
                    continue
                call = _read(f"{thread}/syscall").split()
                if number in runtime and _keeps_house(call):
                    continue
                if not _waits_for_another(call):
                    return None
                found.append((number, _turns(_read(f"{thread}/status"))))
        except (OSError, ValueError, IndexError):  # no such file, or a thread that has just ended
            return None
        return tuple(found)


def _keeps_house(call: Sequence[bytes]) -> bool:
    """Whether a thread of a runtime runs, waits or sleeps, in a way that Python's do not sleep."""
    is_asleep = call[0] == _SLEEP and call[1:3] == [b"0x0", b"0x0"]  # `nanosleep`, as C has it
    return is_asleep or call[0] in (b"running", _FUTEX, *_EPOLL)


def _waits_for_another(call: Sequence[bytes]) -> bool:
    """Whether a thread is in a wait without an end, for a thread of its own process."""
    if call[0] != _FUTEX:
        return False
    operation, timeout = int(call[_OPERATION], 16), int(call[_TIMEOUT], 16)
    is_private = bool(operation & _PRIVATE)
    return is_private and operation & ~(_PRIVATE | _CLOCK) in _WAITS and not timeout


def _turns(status: bytes) -> bytes:
    """The lines that count how often the thread has run, voluntarily and not."""
    return status[status.index(b"\nvoluntary_ctxt_switches") :]


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read() or b""
