"""A counter-based hash of 64-bit integers, in graph operations and in Python.

The order of the examples and their augmentation are functions of a few integers. A hash of these
needs no state, is the same in every process, and works on a whole batch at once. The one used is
the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014): every bit of the input changes every bit of the output.
"""

from __future__ import annotations

import tensorflow as tf

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
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
    steps = tf.cast(counters, tf.uint64) * tf.constant(GOLDEN_GAMMA, tf.uint64)
    return mix_tensor(key + steps)


def _xor_shifted(values: tf.Tensor, *, bits: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(bits, tf.uint64))
    return tf.bitwise.bitwise_xor(values, shifted)
