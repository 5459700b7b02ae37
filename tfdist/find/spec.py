"""Shapes and types of a batch: as JSON, and as data of zeros."""

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


def encode_spec(spec: Any) -> Any:
    """Convert a nest of `tf.TensorSpec` to JSON values."""
    if isinstance(spec, dict):
        return {"dict": {key: encode_spec(part) for key, part in spec.items()}}
    if isinstance(spec, list | tuple):
        return {"tuple": [encode_spec(part) for part in spec]}
    return None if spec is None else [list(spec.shape), spec.dtype.name]


def decode_spec(value: Any) -> Any:
    """Convert the result of `encode_spec` back to a nest of `tf.TensorSpec`."""
    if isinstance(value, dict) and "dict" in value:
        return {key: decode_spec(part) for key, part in value["dict"].items()}
    if isinstance(value, dict):
        return tuple(map(decode_spec, value["tuple"]))
    return None if value is None else tf.TensorSpec(*value)
