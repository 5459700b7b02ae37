"""A task's signs of life: a line a second to the launcher, and its stacks when they are asked for.

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

from tfdist.launch.rest import Rest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from tfdist.cluster.phases import Awaited

STACK_SIGNAL: int = _signal.SIGQUIT
"""Makes a task print the Python stacks of all its threads, unless its program handles it."""

_RETRY_S = 0.2
_MAX_PHASE_CHARS = 40  # so that a line is written to the pipe in one piece, or not at all
_STDERR_FD = 2


def start(notes_fd: int, *, task: str, every_s: float = 1.0) -> None:
    """Tells the launcher every `every_s` seconds what this process is doing, from now on.

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


def print_stacks_when_asked() -> None:
    """Has `STACK_SIGNAL` print the stacks to standard error, also while no Python code can run."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR_FD, all_threads=True, chain=False)


def steps_done() -> int | None:
    """Returns the steps that this process says it has done, None before its training."""
    phases = _phases()
    step = None if phases is None else phases.current().step
    return None if step is None else int(step)


def _phases() -> ModuleType | None:
    """Only if the program has imported it whole: until then there is nothing to say."""
    module = sys.modules.get("tfdist.cluster.phases")
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
    """Returns a beat as JSON, without `json`: a program may have a module of that name."""
    phase, step, since_s, first_s = "import", None, started_s, None
    awaited = None
    runtime: frozenset[int] = frozenset()
    phases = _phases()
    if phases is not None:
        state, awaited = phases.current(), phases.awaited()
        phase, step, first_s = phases.told(), state.step, state.first_step_s
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


def _awaited(awaited: Awaited | None) -> str:
    if awaited is None:
        return "null"
    first = "true" if awaited.is_first else "false"
    return f'{{"task": "{awaited.task}", "since": {awaited.since_s:.3f}, "first": {first}}}'
