"""Progress display: a bar on a terminal, elsewhere a line every ten seconds.

A task of a launcher that stands on a terminal ends its line with a carriage return, so that the
launcher shows the next one in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_EVERY_S = 10.0
_IN_PLACE_EVERY_S = 0.25
_RATE_OVER_S = 15.0
_SHOWN = ("loss", "accuracy", "val_loss", "val_accuracy")


class ProgressDisplay:
    """Shows step, examples/s, loss and the time left; the loop of the chief calls it.

    `begin`, `update` as often as the loop likes, `end`. Nothing is shown between calls.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_place: bool = False,
        every_s: float | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._in_place = in_place
        self._every_s = every_s or (_IN_PLACE_EVERY_S if in_place else _EVERY_S)
        self._bar: Progress | None = None
        self._logs: dict[str, float] = {}
        self._past: list[tuple[float, int, int]] = []
        self._shown_at: float | None = None
        self._shown_step: int | None = None

    def begin(self, *, step: int, examples: int) -> None:
        """Training starts, or goes on, at `step`."""
        self._past = [(self._clock(), step, examples)]
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[state]}"),
                console=self._console,
                expand=True,
            )
            self._bar.add_task("train", total=self._total_steps, completed=step, state="")
            self._bar.start()

    def update(self, *, step: int, examples: int, logs: Mapping[str, Any] | None = None) -> None:
        """`step` steps of `examples` examples in all are done; `logs` are the latest there are."""
        now = self._clock()
        self._logs.update({k: float(v) for k, v in (logs or {}).items() if k in _SHOWN})
        self._past.append((now, step, examples))
        # The rate is over a window, and the window keeps one point from before it.
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_OVER_S:
            self._past.pop(0)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, state=self._state())
        elif self._shown_at is None or now - self._shown_at >= self._every_s:
            self._write_line(step, now)

    def end(self) -> None:
        """Training is over, or was broken off."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._past and self._past[-1][1] != self._past[0][1]:
            if self._in_place or self._past[-1][1] != self._shown_step:
                self._write_line(self._past[-1][1], self._clock(), is_last=True)
            self._past = []

    def _write_line(self, step: int, now: float, *, is_last: bool = False) -> None:
        self._shown_at, self._shown_step = now, step
        share = 100 * step / self._total_steps
        line = f"step {step:,} of {self._total_steps:,} ({share:.0f} %)  {self._state()}"
        if not self._in_place:
            self._console.print(line, markup=False, emoji=False)
            return
        # Past rich, which takes a carriage return out of what it prints.
        self._console.file.write(line + ("\n" if is_last else "\r"))
        self._console.file.flush()

    def _state(self) -> str:
        parts = [f"{name} {number(value)}" for name, value in sorted(self._logs.items(), key=_rank)]
        (began, first_step, first_example), (now, step, example) = self._past[0], self._past[-1]
        if now > began and step > first_step:
            left_s = (self._total_steps - step) * (now - began) / (step - first_step)
            parts.insert(0, f"{(example - first_example) / (now - began):,.0f} examples/s")
            parts.append(f"{_duration(left_s)} left" if step < self._total_steps else "done")
        return "  ".join(parts)


def number(value: float) -> str:
    """Return a loss or metric as it is shown."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def _rank(log: tuple[str, float]) -> int:
    return _SHOWN.index(log[0])


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
