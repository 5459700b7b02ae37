"""Phase and step of this process, read by the heartbeat.

The training thread enters a phase, and a heartbeat thread sends it to the launcher. Without a
launcher no heartbeat is sent, and entering a phase costs a microsecond.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = (
    "import",
    "rendezvous",
    "barrier",
    "join",
    "serve",
    "trace",
    "step",
    "save",
    "validate",
    "callback",
    "done",
)
"""Phases of a task, in the order in which it first enters them.

In ``rendezvous``, ``step``, ``save`` and ``validate`` a task may wait for other tasks. ``callback``
is user code between two ranges of steps. ``import`` and ``done`` (before and after training) and
``serve`` (a worker or ps that executes a chief's work) have no time limit. In ``barrier`` a task
waits for other tasks, which may be in a phase without limit. In ``join`` a task waits to become a
member of an elastic job. No other task waits for it until it gets the state.
"""

SUM = "sum"
"""Phase reported instead of a phase in `_WITH_SUMS` while the task is in a sum over all tasks. A
task that has not reached the sum delays the others."""

_WITH_SUMS = ("trace", "step", "save", "validate")

UNTIMED = ("import", "done")
"""Phases that run the program's own code, without a time limit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseState:
    """Phase and step of a task.

    Attributes:
      phase: One of `PHASES`.
      step: Optimizer steps done, `None` before the training loop.
      since_s: `time.monotonic` when the phase was entered or `step` last changed.
      first_step_s: `time.monotonic` after the first steps of this process, `None` before.
    """

    phase: str = "import"
    step: int | None = None
    since_s: float = 0.0
    first_step_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PendingWork:
    """The oldest work unit that this process has dispatched and that has not finished.

    Attributes:
      task: Task that runs the work unit, such as ``worker-1``.
      since_s: `time.monotonic` when it was dispatched.
      is_first: Whether it is the first work unit of this task, which takes longer.
    """

    task: str
    since_s: float
    is_first: bool


_state = PhaseState(since_s=time.monotonic())
_lock = threading.Lock()
_awaited: PendingWork | None = None
_is_at_sum = False


def current() -> PhaseState:
    """Return phase and step of this process (thread-safe)."""
    return _state


def awaited() -> PendingWork | None:
    """Return the work unit that this process waits for, or `None` (thread-safe)."""
    return _awaited


def set_pending_work(oldest: PendingWork | None) -> None:
    """Set the work unit that this process waits for, or `None`. The dispatching code calls it."""
    global _awaited
    _awaited = oldest


def set_at_sum(is_at_sum: bool) -> None:
    """Set whether this process is in a sum over the tasks. Any thread may call it."""
    global _is_at_sum
    _is_at_sum = is_at_sum


def reported() -> str:
    """Return the phase for heartbeats, `SUM` during a sum over the tasks (thread-safe)."""
    phase = _state.phase
    return SUM if _is_at_sum and phase in _WITH_SUMS else phase


def enter(phase: str, *, step: int | None = None) -> None:
    """Set the phase of this process, and the number of steps done if it is known.

    Only the training thread calls it, because other threads do not represent the process.
    Entering the current phase again reports progress.
    """
    global _state
    with _lock:
        now_s, before = time.monotonic(), _state
        first = before.first_step_s
        if first is None and step is not None and before.step is not None and step > before.step:
            first = now_s
        _state = PhaseState(
            phase=phase,
            step=before.step if step is None else step,
            since_s=now_s,
            first_step_s=first,
        )


def go_on() -> None:
    """Report progress in the current phase, from another thread than the training thread."""
    global _state
    with _lock:
        _state = dataclasses.replace(_state, since_s=time.monotonic())


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """Enter ``barrier`` for the block if the current phase is in `UNTIMED`."""
    if _state.phase not in UNTIMED:
        yield
        return
    with entered("barrier"):
        yield


@contextmanager
def entered(phase: str) -> Iterator[None]:
    """Enter a phase for the block, then return to the phase before, also after an error."""
    before = _state.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)
