"""Display of a run: progress and result on a terminal, scalars in TensorBoard.

On a terminal the progress line is updated in place. Elsewhere, also under the launcher, a line is
printed every ten seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_EVERY_S = 10.0
_IN_PLACE_EVERY_S = 0.25
_RATE_OVER_S = 15.0
_CLEAR_REST = "\x1b[K"
_SHOWN = ("loss", "accuracy", "val_loss", "val_accuracy")


class ProgressDisplay:
    """Progress display of the chief's loop: step, examples/s, loss and time left.

    Call `begin`, then `update` any number of times, then `end`. It prints only during calls.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._every_s = _IN_PLACE_EVERY_S if self._is_terminal else _EVERY_S
        self._logs: dict[str, float] = {}
        self._past: list[tuple[float, int, int]] = []
        self._shown_at: float | None = None
        self._shown_step: int | None = None

    def begin(self, *, step: int, examples: int) -> None:
        """Start the display when training starts or resumes at `step`."""
        self._past = [(self._clock(), step, examples)]

    def update(self, *, step: int, examples: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report that `step` steps of `examples` examples in total are done, with latest `logs`."""
        now = self._clock()
        self._logs.update({k: float(v) for k, v in (logs or {}).items() if k in _SHOWN})
        self._past.append((now, step, examples))
        # The rate covers a window of time. Keep one point from before the window.
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_OVER_S:
            self._past.pop(0)
        if self._shown_at is None or now - self._shown_at >= self._every_s:
            self._write_line(step, now)

    def end(self) -> None:
        """Print the last line when training ends or is interrupted."""
        first, last = (self._past[i][1] if self._past else None for i in (0, -1))
        if last is not None and last != first and (self._is_terminal or last != self._shown_step):
            self._write_line(last, self._clock(), is_last=True)
        self._past = []

    def _write_line(self, step: int, now: float, *, is_last: bool = False) -> None:
        self._shown_at, self._shown_step = now, step
        percent = 100 * step / self._total_steps
        line = f"step {step:,} of {self._total_steps:,} ({percent:.0f} %)  {self._state()}"
        if self._is_terminal:
            line = line[: shutil.get_terminal_size().columns - 1] + _CLEAR_REST
        self._stream.write(line + ("\r" if self._is_terminal and not is_last else "\n"))
        self._stream.flush()

    def _state(self) -> str:
        shown = sorted(self._logs, key=_SHOWN.index)
        parts = [f"{name} {_number(self._logs[name])}" for name in shown]
        (began, first_step, first_example), (now, step, example) = self._past[0], self._past[-1]
        if now > began and step > first_step:
            left_s = (self._total_steps - step) * (now - began) / (step - first_step)
            parts.insert(0, f"{(example - first_example) / (now - began):,.0f} examples/s")
            parts.append(f"{_duration(left_s)} left" if step < self._total_steps else "done")
        return "  ".join(parts)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def show_result(summary: Mapping[str, Any], *, run_dir: str) -> None:
    """Print the result of a run. `summary.json` has more figures."""
    resumed, speed = summary.get("resumed_from_step"), summary.get("examples_per_second")
    rows = {
        "result": summary["status"],
        "steps": f"{summary['steps']:,}" + (f" (resumed from {resumed:,})" if resumed else ""),
        **{
            name: "not finite" if value is None else _number(value)
            for name, value in summary["metrics"].items()
        },
        "examples/s": speed and f"{speed:,.0f}",
    }
    if steps_of := summary.get("worker_steps"):
        total = max(sum(steps_of.values()), 1)
        rows["steps by"] = ", ".join(f"{name} {n / total:.0%}" for name, n in steps_of.items())
    if ages := summary.get("staleness"):
        rows["staleness"] = _staleness(ages)
    if twice := summary.get("steps_applied_twice"):
        rows["applied twice"] = f"{twice} steps"
    rows |= {"weights": f"sha256 {summary['weights_sha256'][:16]}", "run directory": run_dir}
    width = max(map(len, rows))
    for name, value in rows.items():
        if value:
            print(f"  {name:<{width}}  {value}", flush=True)


def _staleness(ages: Mapping[str, int]) -> str:
    """Return ``0: 71%, 1: 20%, 2-3: 9%``: shares of the steps by their staleness."""
    total = sum(ages.values())
    bins: dict[str, int] = {}
    for age, count in sorted((int(age), count) for age, count in ages.items()):
        low = 1 << age.bit_length() >> 1
        name = str(age) if age < 2 else f"{low}-{2 * low - 1}"
        bins[name] = bins.get(name, 0) + count
    return ", ".join(f"{name}: {count / total:.0%}" for name, count in bins.items())


# Files for TensorBoard: scalars, `train/loss` beside `validation/loss`.


class ScalarWriter:
    """Writer of TensorBoard event files, used by the chief. TensorFlow is imported on first use."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the logs of a step under Keras' tags: ``val_loss`` as ``validation/loss``."""
        import tensorflow as tf

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._directory)
        metadata = tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for name, value in scalars.items():
                # tf.summary.scalar is equivalent, but needs the package tensorboard.
                tensor = tf.cast(value, tf.float32)
                tf.summary.write(tag(name), tensor, step=step, metadata=metadata)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tag(name: str) -> str:
    """Return TensorBoard's tag for a log name."""
    if name.startswith("val_"):
        return f"validation/{name.removeprefix('val_')}"
    return name if name in ("learning_rate", "examples_per_second") else f"train/{name}"
