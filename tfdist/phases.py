"""Progress register of this process: its phase and step, read by the heartbeat.

The program enters a phase; a thread beside it tells the launcher. Without a launcher nobody reads
it, and entering a phase costs a microsecond.
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
    "serve",
    "trace",
    "step",
    "save",
    "validate",
    "callback",
    "done",
)
"""What a task does, in the order in which it first does it.

In ``rendezvous``, ``step``, ``save`` and ``validate`` it may wait for other tasks; ``callback`` is
code of the user's own between two ranges of steps. In ``import`` and ``done``, before and after the
training, and in ``serve``, as a worker or ps that a chief gives work to, it may take its time; in
``barrier`` it waits there for others, who may.
"""

SUM = "sum"
"""What a task says instead of one of `_WITH_SUMS` while it is at a sum over the tasks: who is not
there holds the others up."""

_WITH_SUMS = ("trace", "step", "save", "validate")

UNTIMED = ("import", "done")
"""Phases that are a program's own code, which takes as long as it takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseState:
    """Where a task stands.

    Attributes:
      phase: one of `PHASES`.
      step: optimizer steps done, None before the training loop.
      since_s: `time.monotonic` when the phase was entered or `step` last changed.
      first_step_s: `time.monotonic` when this process had done its first steps, None before.
    """

    phase: str = "import"
    step: int | None = None
    since_s: float = 0.0
    first_step_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PendingWork:
    """The oldest work unit that this process has dispatched and that is not done.

    Attributes:
      task: who has it, as ``worker-1``.
      since_s: `time.monotonic` when it was given.
      is_first: whether it is the first that this task has been given, which takes longer.
    """

    task: str
    since_s: float
    is_first: bool


_state = PhaseState(since_s=time.monotonic())
_lock = threading.Lock()
_awaited: PendingWork | None = None
_is_at_sum = False


def current() -> PhaseState:
    """Return where this process stands; safe in any thread."""
    return _state


def awaited() -> PendingWork | None:
    """Return what this process waits for; safe in any thread."""
    return _awaited


def set_pending_work(oldest: PendingWork | None) -> None:
    """Report what this process waits for, None for nothing; for whoever dispatches the work."""
    global _awaited
    _awaited = oldest


def set_at_sum(is_at_sum: bool) -> None:
    """Report whether this process is at a sum over the tasks; from whatever thread is."""
    global _is_at_sum
    _is_at_sum = is_at_sum


def reported() -> str:
    """Return the phase that heartbeats carry: a sum over tasks is one; safe in any thread."""
    phase = _state.phase
    return SUM if _is_at_sum and phase in _WITH_SUMS else phase


def enter(phase: str, *, step: int | None = None) -> None:
    """Report that this process has begun a phase, and how many steps are done if that is known.

    For the thread that trains: what a thread beside it does is not what the process is doing.
    Entering the phase that it is in says that work goes on.
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
    """Report that what this process is in goes on; for a thread beside the one that entered it."""
    global _state
    with _lock:
        _state = dataclasses.replace(_state, since_s=time.monotonic())


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """Enter ``barrier`` where nothing else says that this process may wait for the others."""
    if _state.phase not in UNTIMED:
        yield
        return
    with entered("barrier"):
        yield


@contextmanager
def entered(phase: str) -> Iterator[None]:
    """Enter a phase and go back to the one before at the end, also after an error."""
    before = _state.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)
