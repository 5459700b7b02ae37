"""Shapes and types of a batch, and data of zeros in these shapes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data.resolve import as_source
from tfdist.data.source import spec_of_batches


def spec_of(x: Any, y: Any) -> Any:
    """Return the nest of `tf.TensorSpec` of a batch of the data, with any batch size."""
    return spec_of_batches(as_source(x, y))


def zeros(spec: Any, batch_size: int) -> tuple[Any, Any, Any]:
    """Return x, y and sample weights of zeros or empty strings, `None` for each missing part."""

    def make(part: Any) -> Any:
        return part if part is None else tf.zeros((batch_size, *part.shape[1:]), part.dtype).numpy()

    data = tf.nest.map_structure(make, spec)
    x, y, weight = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
    return x, y, weight
