"""Heartbeat of a task: a line a second to the launcher, and stack dumps on request.

A program may take as long as it likes before and after its training, so that time alone says
nothing there. But one that waits for time, a file, a connection, a terminal or another process
sleeps in a call that says so. Where no thread does, and none has run since, nothing inside will
ever go on: that is a deadlock, and `Rest` says since when. What cannot be read counts as going on.

Every task imports this before its program, so it imports nothing but what is built into Python:
`signal` alone would cost milliseconds, and `threading` must first be imported by the main thread.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import faulthandler
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import ModuleType

    from tfdist.phases import PendingWork

STACK_SIGNAL: int = _signal.SIGQUIT
"""Makes a task print the Python stacks of all its threads, unless its program handles it."""

_RETRY_S = 0.2
_MAX_PHASE_CHARS = 40  # so that a line is written to the pipe in one piece, or not at all
_STDERR_FD = 2


def start(notes_fd: int, *, task: str, every_s: float = 1.0) -> None:
    """Tell the launcher every `every_s` seconds what this process is doing, from now on.

    The thread ends when nobody listens any more. It never holds up the program: while the pipe
    is full it writes nothing. It blocks every signal, as these are the program's.
    """
    try:
        # The same pipe opened again: whether writing waits is then this descriptor's alone, and
        # not that of the other tasks and the launcher, who share `notes_fd`.
        fd = os.open(f"/proc/self/fd/{notes_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody listens
        return
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    try:
        _thread.start_new_thread(_beat, (fd, _identity(fd), task, every_s))
    except RuntimeError:  # no thread to be had: without the pipe it is not expected to speak
        os.close(fd)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def print_stacks_on_request() -> None:
    """Have `STACK_SIGNAL` print the stacks to standard error, also while no Python code can run."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR_FD, all_threads=True, chain=False)


def steps_done() -> int | None:
    """Return the steps that this process says it has done, None before its training."""
    phases = _phases()
    step = None if phases is None else phases.current().step
    return None if step is None else int(step)


def _phases() -> ModuleType | None:
    """Only if the program has imported it whole: until then there is nothing to say."""
    module = sys.modules.get("tfdist.phases")
    return module if hasattr(module, "entered") else None


def _beat(fd: int, pipe: tuple[int, int] | None, task: str, every_s: float) -> None:
    started_s, rest = time.monotonic(), Rest()
    due_s = started_s + every_s
    while True:
        # Tasks of one machine beat together: the launcher wakes up once for all, and a step that
        # they do together is interrupted once.
        due_s = -(-due_s // every_s) * every_s
        time.sleep(max(0.0, due_s - time.monotonic()))
        while True:
            if _identity(fd) != pipe:  # closed by the program: the number may be another file's
                return
            try:
                os.write(fd, _line(task, started_s, rest))
                break
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:  # the launcher is gone
                return
        due_s = max(due_s + every_s, time.monotonic())


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _line(task: str, started_s: float, rest: Rest) -> bytes:
    """Return a beat as JSON, without `json`: a program may have a module of that name."""
    phase, step, since_s, first_s = "import", None, started_s, None
    awaited = None
    runtime: frozenset[int] = frozenset()
    phases = _phases()
    if phases is not None:
        state, awaited = phases.current(), phases.awaited()
        phase, step, first_s = phases.reported(), state.step, state.first_step_s
        since_s = max(state.since_s, started_s)  # it may have been imported before the fork
        runtime = phases.of_runtime()
    now_s, rest_s = time.monotonic(), None
    if phases is None or phase in phases.UNTIMED:
        rest_s = rest.since_s(now_s, but=(_thread.get_native_id(),), runtime=runtime)
    name = phase if phase.isidentifier() and phase.isascii() else "other"
    return (
        f'{{"task": "{task}", "beat": {{"phase": "{name[:_MAX_PHASE_CHARS]}", '
        f'"step": {"null" if step is None else int(step)}, "since": {since_s:.3f}, '
        f'"first_step": {_moment(first_s)}, "rest": {_moment(rest_s)}, '
        f'"awaited": {_awaited(awaited)}}}, '
        f'"at": {now_s:.3f}}}\n'
    ).encode()


def _moment(at_s: float | None) -> str:
    return "null" if at_s is None else f"{at_s:.3f}"


def _awaited(awaited: PendingWork | None) -> str:
    if awaited is None:
        return "null"
    first = "true" if awaited.is_first else "false"
    return f'{{"task": "{awaited.task}", "since": {awaited.since_s:.3f}, "first": {first}}}'


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
        """Return since when, None if it goes on.

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
    """Return whether a thread is in a wait without an end, for a thread of its own process."""
    if call[0] != _FUTEX:
        return False
    operation, timeout = int(call[_OPERATION], 16), int(call[_TIMEOUT], 16)
    is_private = bool(operation & _PRIVATE)
    return is_private and operation & ~(_PRIVATE | _CLOCK) in _WAITS and not timeout


def _turns(status: bytes) -> bytes:
    """Return the lines that count how often the thread has run, voluntarily and not."""
    return status[status.index(b"\nvoluntary_ctxt_switches") :]


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read() or b""
