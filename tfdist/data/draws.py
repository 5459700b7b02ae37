"""Random numbers of an example: functions of (seed, epoch, example id), for a batch at once.

TensorFlow's stateless generators take one seed for a whole tensor, so that what an example draws
would depend on its place in the batch. Here each example has a stream of its own, a hash of the
numbers it depends on (`tfdist.data.mixing`).
"""

from __future__ import annotations

import dataclasses
import zlib

import tensorflow as tf

from tfdist.data.mixing import mix, stream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """The random numbers of one transform: one stream for each example of the batch."""

    keys: tf.Tensor  # uint64[b]

    def below(self, bound: int | tf.Tensor, *, index: int) -> tf.Tensor:
        """Return draw `index` of each example, int32[b], uniform in [0, bound); bound < 2**31."""
        high = tf.bitwise.right_shift(self._bits(index), tf.constant(32, tf.uint64))
        product = high * tf.cast(bound, tf.uint64)
        return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)

    def uniform(self, *, index: int) -> tf.Tensor:
        """Return draw `index` of each example, float32[b], uniform in [0, 1)."""
        high = tf.bitwise.right_shift(self._bits(index), tf.constant(40, tf.uint64))
        return tf.cast(high, tf.float32) * (1.0 / (1 << 24))

    def _bits(self, index: int) -> tf.Tensor:
        return stream(self.keys, tf.constant(index, tf.uint64))


def draws_for(
    name: str, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int, position: int = 0
) -> Draws:
    """Return the streams of a transform called `name`, the `position`-th of its chain."""
    salt = mix(zlib.crc32(name.encode()) + (position << 32))
    per_epoch = stream(mix(mix(seed) ^ salt), tf.cast(epoch, tf.int64))
    return Draws(keys=stream(per_epoch, tf.cast(example_ids, tf.int64)))
