"""Files for TensorBoard: scalars, `train/loss` beside `validation/loss`, and a profile of steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class ScalarWriter:
    """Writes event files into a directory; the chief makes one. TensorFlow loads on first use."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the logs of a step under Keras' names: ``val_loss`` as ``validation/loss``."""
        import tensorflow as tf

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._directory)
        with self._writer.as_default():
            for name, value in scalars.items():
                tf.summary.scalar(tag(name), value, step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tag(name: str) -> str:
    """Return where TensorBoard shows a log of this name."""
    if name.startswith("val_"):
        return f"validation/{name.removeprefix('val_')}"
    return name if name in ("learning_rate", "examples_per_second") else f"train/{name}"


class StepProfiler:
    """Records from step `first` up to step `last`, in whole ranges of steps, in the chief.

    Under ps it sees the chief alone: what it dispatches, and when.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, first: int, last: int, profiler: Any = None
    ) -> None:
        self._directory = os.fspath(directory)
        self._first = first
        self._last = last
        self._given = profiler
        self._running: Any = None
        self._done = False

    def next_step(self, step: int) -> int | None:
        """The step after `step` at which a range should end, None where it does not matter."""
        return next((edge for edge in (self._first, self._last) if edge > step), None)

    def before(self, step: int) -> None:
        """A range begins at `step`."""
        if self._done or self._running is not None or step < self._first:
            return
        logger.info("profiling from step %d to %d, into %s", step, self._last, self._directory)
        self._running = self._given or _tensorflow_profiler()
        self._running.start(self._directory)

    def after(self, step: int) -> None:
        """A range ended before `step`."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """End the recording, also after an error."""
        if self._running is not None:
            self._running.stop()
            self._running, self._done = None, True


def _tensorflow_profiler() -> Any:
    import tensorflow as tf

    return tf.profiler.experimental
