"""Files for TensorBoard: scalars, `train/loss` beside `validation/loss`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


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
