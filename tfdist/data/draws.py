"""Order of the examples, and the random numbers of each, as functions of integers.

Position `p` of the endless sequence of examples belongs to pass `p // num_examples`. Every pass is
a permutation of its own, computed by index, so that nothing is stored, any process can ask for any
position, and resuming costs nothing.

TensorFlow's stateless generators take one seed for a whole tensor, so that what an example draws
would depend on its place in the batch. Here each example has a stream of its own: a hash of the
few integers it depends on, which needs no state and is the same in every process. The hash is the
output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014): every bit of the input changes every bit of the output.
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

# With TensorFlow's usual 4 rounds neighbours stay correlated (0.4 at a million examples) and
# batches of sorted data are not balanced like random ones; from 8 on no such trace was measured.
_ROUNDS = 8
# The cipher behind RandomIndexShuffle reads only the low half-block of each of its three keys: 8
# bits for up to 65,536 examples. So the keys are three separate fields of one 64-bit hash; the raw
# seed and pass would repeat every 256 passes.
_KEY_BITS = 21


@contextlib.contextmanager
def draws_nothing() -> Iterator[None]:
    """Leave Python's random numbers as they were; Keras seeds each layer it makes from them."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


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


@tf.autograph.experimental.do_not_convert
def example_at(
    positions: tf.Tensor, *, num_examples: int, seed: int | tf.Variable, shuffle: bool
) -> tf.Tensor:
    """Return the example at each position, int64[b] -> int64[b] in [0, num_examples).

    A graph function, usable in `tf.function` and in `Dataset.map`. One call may straddle passes,
    and `b` may be 0. The permutation depends on (seed, pass, num_examples) alone; `seed` is any
    Python integer below 2**64, or a variable. Without `shuffle` every pass is in the order of the
    data.
    """
    positions = tf.cast(positions, tf.int64)
    size = tf.constant(num_examples, tf.int64)
    offsets = positions % size
    if not shuffle:
        return offsets
    keys = _keys(positions // size, seed=seed)
    # RandomIndexShuffle refuses an empty vector, and a replica's batch fraction may be empty.
    offsets = tf.concat([offsets, tf.zeros([1], tf.int64)], axis=0)
    keys = tf.concat([keys, tf.zeros([1, 3], tf.uint32)], axis=0)
    if not _is_cut_short(num_examples):
        return _permuted(offsets, keys=keys, size=size)[:-1]
    # Permute one more than there are; what lands on the one too many takes its place.
    shuffled = _permuted(offsets, keys=keys, size=size + 1)
    instead = _permuted(tf.zeros_like(offsets) + size, keys=keys, size=size + 1)
    return tf.where(shuffled == size, instead, shuffled)[:-1]


def example_at_numpy(
    positions: np.ndarray[Any, Any], *, num_examples: int, seed: int, shuffle: bool
) -> np.ndarray[Any, Any]:
    """Return what `example_at` returns, as NumPy int64[b]; run eagerly on the CPU."""
    positions = np.asarray(positions, np.int64)
    if not shuffle:
        return positions % num_examples
    with tf.init_scope(), tf.device("/CPU:0"):
        examples = example_at(
            tf.constant(positions), num_examples=num_examples, seed=seed, shuffle=True
        )
    return np.asarray(examples.numpy(), np.int64)


def _keys(passes: tf.Tensor, *, seed: int | tf.Variable) -> tf.Tensor:
    """Return the three keys of the cipher for each pass, int64[b] -> uint32[b, 3]."""
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
    """Return whether the cipher has a bit too few for this number of examples.

    RandomIndexShuffle takes log2 of the largest index as the bits it needs, which is one too few
    where that index is a power of two, and rounds up to an even number of at least 16. So 65,537
    examples, 262,145 and so on come out with one of them twice and one never.
    """
    largest = num_examples - 1
    exponent = largest.bit_length() - 1
    return exponent >= 16 and exponent % 2 == 0 and largest == 1 << exponent
