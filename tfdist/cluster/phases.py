"""What this process is doing right now, for whoever watches over it.

The program enters a phase; a thread beside it tells the launcher. Without a launcher nobody reads
it, and entering a phase costs a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = ("import", "rendezvous", "serve", "trace", "step", "save", "validate", "callback", "done")
"""What a task does, in the order in which it first does it.

In ``rendezvous``, ``step``, ``save`` and ``validate`` it may wait for other tasks; ``callback`` is
code of the user's own between two ranges of steps. In ``import`` and ``done``, before and after the
training, and in ``serve``, as a worker or ps that a chief gives work to, it may take its time.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """The oldest piece of work that this process has given to another and that is not done.

    Attributes:
      task: who has it, as ``worker-1``.
      since_s: `time.monotonic` when it was given.
      is_first: whether it is the first that this task has been given, which takes longer.
    """

    task: str
    since_s: float
    is_first: bool


_state = PhaseState(since_s=time.monotonic())
_awaited: Awaited | None = None


def current() -> PhaseState:
    """Returns where this process stands; safe in any thread."""
    return _state


def awaited() -> Awaited | None:
    """Returns what this process waits for; safe in any thread."""
    return _awaited


def say_awaited(oldest: Awaited | None) -> None:
    """Says what this process waits for, None for nothing; for whoever hands out the work."""
    global _awaited
    _awaited = oldest


def enter(phase: str, *, step: int | None = None) -> None:
    """Says that this process has begun a phase, and how many steps are done if that is known.

    For the thread that trains: what a thread beside it does is not what the process is doing.
    Entering the phase that it is in says that work goes on.
    """
    global _state
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


@contextmanager
def entered(phase: str) -> Iterator[None]:
    """Enters a phase and goes back to the one before at the end, also after an error."""
    before = _state.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)
