"""Order of examples: a seeded permutation for each pass over the data.

Position `p` of the endless sequence of examples belongs to pass `p // num_examples`. Every pass is
a permutation of its own, computed by index, so that nothing is stored, any process can ask for any
position, and resuming costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.draws import mix, stream

# With TensorFlow's usual 4 rounds neighbours stay correlated (0.4 at a million examples) and
# batches of sorted data are not balanced like random ones; from 8 on no such trace was measured.
_ROUNDS = 8
# The cipher behind RandomIndexShuffle reads only the low half-block of each of its three keys: 8
# bits for up to 65,536 examples. So the keys are three separate fields of one 64-bit hash; the raw
# seed and pass would repeat every 256 passes.
_KEY_BITS = 21


@tf.autograph.experimental.do_not_convert
def example_at(positions: tf.Tensor, *, num_examples: int, seed: int, shuffle: bool) -> tf.Tensor:
    """Return the example at each position, int64[b] -> int64[b] in [0, num_examples).

    A graph function, usable in `tf.function` and in `Dataset.map`. One call may straddle passes,
    and `b` may be 0. The permutation depends on (seed, pass, num_examples) alone; `seed` is any
    Python integer below 2**64. Without `shuffle` every pass is in the order of the data.
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


def _keys(passes: tf.Tensor, *, seed: int) -> tf.Tensor:
    """Return the three keys of the cipher for each pass, int64[b] -> uint32[b, 3]."""
    hashed = stream(mix(seed), passes)
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
