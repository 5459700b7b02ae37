"""Random numbers of an example: functions of (seed, epoch, example id), for a batch at once.

TensorFlow's stateless generators take one seed for a whole tensor, so that what an example draws
would depend on its place in the batch. Here each example has a stream of its own: a hash of the
few integers it depends on, which needs no state and is the same in every process. The hash is the
output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014): every bit of the input changes every bit of the output.
"""

from __future__ import annotations

import dataclasses
import zlib

import tensorflow as tf

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return the hash of one Python integer (taken modulo 2**64), in [0, 2**64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def mix_tensor(values: tf.Tensor) -> tf.Tensor:
    """Return the hash of each element, uint64[...] -> uint64[...]; equals `mix` bit for bit."""
    values = _xor_shifted(values, bits=30) * tf.constant(_MULTIPLIER_1, tf.uint64)
    values = _xor_shifted(values, bits=27) * tf.constant(_MULTIPLIER_2, tf.uint64)
    return _xor_shifted(values, bits=31)


def stream(key: int | tf.Tensor, counters: tf.Tensor) -> tf.Tensor:
    """Return draw number `counters` of the stream `key`: uint64[...].

    `key` is a Python integer or a uint64 tensor that broadcasts against `counters` (any integer
    type). Distinct counters of one key never collide: the map is a bijection of the counter.
    """
    if isinstance(key, int):
        key = tf.constant(key & _MASK, tf.uint64)
    steps = tf.cast(counters, tf.uint64) * tf.constant(_GOLDEN_GAMMA, tf.uint64)
    return mix_tensor(key + steps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """The random numbers of one transform: one stream for each example of the batch."""

    keys: tf.Tensor  # uint64[b]

    def below(self, bound: int | tf.Tensor, *, index: int) -> tf.Tensor:
        """Return draw `index` of each example, int32[b], uniform in [0, bound); bound < 2**31."""
        bits = stream(self.keys, tf.constant(index, tf.uint64))
        high = tf.bitwise.right_shift(bits, tf.constant(32, tf.uint64))
        product = high * tf.cast(bound, tf.uint64)
        return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)


def draws_for(
    name: str, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int, position: int = 0
) -> Draws:
    """Return the streams of a transform called `name`, the `position`-th of its chain."""
    salt = mix(zlib.crc32(name.encode()) + (position << 32))
    per_epoch = stream(mix(mix(seed) ^ salt), tf.cast(epoch, tf.int64))
    return Draws(keys=stream(per_epoch, tf.cast(example_ids, tf.int64)))


def _xor_shifted(values: tf.Tensor, *, bits: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(bits, tf.uint64))
    return tf.bitwise.bitwise_xor(values, shifted)
