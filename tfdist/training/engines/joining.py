"""Concatenation of the outputs of replicas and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
)


def joined(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts: an array, and as under Keras ragged where their shapes differ.

    Numbers are stacked. Rows that come ragged or sparse stay so.
    """
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, tf.RaggedTensor) for part in parts):
        return tf.concat(parts, axis=0)
    arrays = all(isinstance(part, np.ndarray) for part in parts)
    if arrays and len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    tensors = [part if tf.is_tensor(part) else tf.convert_to_tensor(part) for part in parts]
    return convert_to_np_if_not_ragged(potentially_ragged_concat(tensors))


def without_substitute(rows: Any, *, count: tf.Tensor) -> Any:
    """Leave out the example that pads an empty batch fraction; in graph."""
    return rows[: tf.cast(count > 0, tf.int64) * tf.int64.max]
