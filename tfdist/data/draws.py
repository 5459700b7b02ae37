"""Order of the examples and their random numbers, as functions of integers.

Position `p` of the endless sequence of examples belongs to pass `p // num_examples`. Each pass is a
different permutation, computed by index. The order needs no memory, every process can compute every
position, and a resume is free.

TensorFlow's stateless generators use a seed for a whole tensor. The draws of an example would
depend on its place in the batch. Here each example has its own stream, a hash of a few integers.
The hash needs no state and is the same in every process. It is the output function of SplitMix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). Every input bit
affects every output bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

# With TensorFlow's default of 4 rounds, neighbours are correlated (0.4 for a million examples) and
# batches of sorted data are unbalanced. With 8 or more rounds, measurements show neither effect.
_ROUNDS = 8
# The cipher of RandomIndexShuffle reads only the low half-block of each of its three keys: 8 bits
# for up to 65,536 examples. With the raw seed and pass as keys, the order would repeat every 256
# passes. Therefore the keys are three separate fields of a 64-bit hash.
_KEY_BITS = 21


@contextlib.contextmanager
def draws_nothing() -> Iterator[None]:
    """Restore the state of Python's `random` after the block: Keras seeds new layers from it."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def mix(value: int) -> int:
    """Return the hash of a Python integer (modulo 2**64), in [0, 2**64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def mix_tensor(values: tf.Tensor) -> tf.Tensor:
    """Return the hash of each element, uint64[...] -> uint64[...], equal to `mix`."""
    values = _xor_shifted(values, bits=30) * tf.constant(_MULTIPLIER_1, tf.uint64)
    values = _xor_shifted(values, bits=27) * tf.constant(_MULTIPLIER_2, tf.uint64)
    return _xor_shifted(values, bits=31)


def stream(key: int | tf.Tensor, counters: tf.Tensor) -> tf.Tensor:
    """Return draw number `counters` of the stream `key`: uint64[...].

    `key` is a Python integer or a uint64 tensor that broadcasts against `counters` (any integer
    type). Two counters never have the same draw for one key, because the map is a bijection.
    """
    if isinstance(key, int):
        key = tf.constant(key & _MASK, tf.uint64)
    steps = tf.cast(counters, tf.uint64) * tf.constant(_GOLDEN_GAMMA, tf.uint64)
    return mix_tensor(key + steps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Random numbers of a transform, with a stream per example of the batch."""

    keys: tf.Tensor  # uint64[b]

    def below(self, bound: int | tf.Tensor, *, index: int) -> tf.Tensor:
        """Return draw `index` of each example: int32[b], uniform in [0, bound), bound < 2**31."""
        bits = stream(self.keys, tf.constant(index, tf.uint64))
        high = tf.bitwise.right_shift(bits, tf.constant(32, tf.uint64))
        product = high * tf.cast(bound, tf.uint64)
        return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)


def draws_for(
    name: str, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int, position: int = 0
) -> Draws:
    """Return the streams of the transform `name` at `position` in its `Compose`."""
    salt = mix(zlib.crc32(name.encode()) + (position << 32))
    per_epoch = stream(mix(mix(seed) ^ salt), tf.cast(epoch, tf.int64))
    return Draws(keys=stream(per_epoch, tf.cast(example_ids, tf.int64)))


def _xor_shifted(values: tf.Tensor, *, bits: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(bits, tf.uint64))
    return tf.bitwise.bitwise_xor(values, shifted)


@tf.autograph.experimental.do_not_convert
def example_at(
    positions: tf.Tensor, *, num_examples: int, seed: int | tf.Variable, shuffle: bool
) -> tf.Tensor:
    """Return the index of the example at each position, int64[b] -> int64[b] in [0, num_examples).

    Works in `tf.function` and in `Dataset.map`. The positions of a call may belong to several
    passes, and `b` may be 0. The permutation depends only on (seed, pass, num_examples). `seed` is
    a Python integer below 2**64 or a variable. Without `shuffle`, every pass has the data's order.
    """
    positions = tf.cast(positions, tf.int64)
    size = tf.constant(num_examples, tf.int64)
    offsets = positions % size
    if not shuffle:
        return offsets
    keys = _keys(positions // size, seed=seed)
    # RandomIndexShuffle rejects an empty vector, but a replica's batch fraction may be empty.
    offsets = tf.concat([offsets, tf.zeros([1], tf.int64)], axis=0)
    keys = tf.concat([keys, tf.zeros([1, 3], tf.uint32)], axis=0)
    if not _is_cut_short(num_examples):
        return _permuted(offsets, keys=keys, size=size)[:-1]
    # Permute num_examples + 1 indices, so that the cipher has enough bits. If a position gets the
    # extra index, num_examples, use the index at position num_examples instead.
    shuffled = _permuted(offsets, keys=keys, size=size + 1)
    instead = _permuted(tf.zeros_like(offsets) + size, keys=keys, size=size + 1)
    return tf.where(shuffled == size, instead, shuffled)[:-1]


def example_at_numpy(
    positions: np.ndarray[Any, Any], *, num_examples: int, seed: int, shuffle: bool
) -> np.ndarray[Any, Any]:
    """Run `example_at` eagerly on the CPU and return the result as NumPy int64[b]."""
    positions = np.asarray(positions, np.int64)
    if not shuffle:
        return positions % num_examples
    with tf.init_scope(), tf.device("/CPU:0"):
        examples = example_at(
            tf.constant(positions), num_examples=num_examples, seed=seed, shuffle=True
        )
    return np.asarray(examples.numpy(), np.int64)


def _keys(passes: tf.Tensor, *, seed: int | tf.Variable) -> tf.Tensor:
    """Return the three cipher keys of each pass, int64[b] -> uint32[b, 3]."""
    key = mix_tensor(tf.cast(seed, tf.uint64)) if isinstance(seed, tf.Variable) else mix(seed)
    hashed = stream(key, passes)
    mask = tf.constant((1 << _KEY_BITS) - 1, tf.uint64)
    shifts = tf.constant([0, _KEY_BITS, 2 * _KEY_BITS], tf.uint64)
    fields = tf.bitwise.right_shift(hashed[:, None], tf.broadcast_to(shifts, [1, 3]))
    return tf.cast(tf.bitwise.bitwise_and(fields, mask), tf.uint32)


def _permuted(offsets: tf.Tensor, *, keys: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.RandomIndexShuffle(
        index=offsets, seed=keys, max_index=size - 1, rounds=_ROUNDS
    )


def _is_cut_short(num_examples: int) -> bool:
    """Return whether the cipher uses too few bits for this number of examples.

    RandomIndexShuffle uses log2 of the largest index as the number of bits, rounded up to an even
    number of at least 16. This is too small if the index is a power of two. For example, the order
    of 65,537 or 262,145 examples would contain an example twice and miss another.
    """
    largest = num_examples - 1
    exponent = largest.bit_length() - 1
    return exponent >= 16 and exponent % 2 == 0 and largest == 1 << exponent
