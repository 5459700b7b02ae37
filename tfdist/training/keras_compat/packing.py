"""Small gradients go to a parameter server together.

A message costs its two ends more than a tenth of a millisecond of processor, whatever is in it, and
half of a model's variables are biases.
"""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf

from tfdist.strategy.servers import server_of

_SMALL_BYTES = 2**16  # packing copies, which pays for what costs less to copy than to send


def sent_together(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns pairs of gradient and variable, the small gradients taken apart on their server.

    Their values are the same to the last bit. To be called when nothing but the update itself
    still needs the gradients: it would have to fetch them from there.
    """
    pairs = list(pairs)
    alike = collections.defaultdict(list)
    for place, (gradient, variable) in enumerate(pairs):
        if is_small(gradient) and server_of(variable) is not None:
            alike[variable.device, gradient.dtype].append(place)
    for (device, _), places in alike.items():
        if len(places) < 2:
            continue
        gradients = [pairs[place][0] for place in places]
        packed = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        with tf.device(device):
            parts = tf.split(packed, [gradient.shape.num_elements() for gradient in gradients])
            for place, gradient, part in zip(places, gradients, parts, strict=True):
                pairs[place] = tf.reshape(part, gradient.shape), pairs[place][1]
    return pairs


def is_small(value: Any) -> bool:
    """Whether a gradient, or what is read of a variable, costs less to copy than to send."""
    if not isinstance(value, tf.Tensor) or not value.shape.is_fully_defined():
        return False
    return bool(value.shape.num_elements() * value.dtype.size <= _SMALL_BYTES)
