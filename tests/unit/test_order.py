"""The order of the examples: permutations by index."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import example_at, example_at_numpy
from tfdist.data.draws import mix, mix_tensor, stream


def order(positions, *, n, seed=1, shuffle=True):
    return example_at_numpy(np.asarray(positions), num_examples=n, seed=seed, shuffle=shuffle)


def one_pass(n, *, seed=1, number=0):
    return order(np.arange(n) + number * n, n=n, seed=seed)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1437, 65_536, 65_537, 262_145])
def test_every_pass_is_a_permutation(n):
    for number in (0, 1, 1000):
        assert np.array_equal(np.sort(one_pass(n, number=number)), np.arange(n))


def test_tensorflow_loses_an_example_at_powers_of_two():
    """When this fails, `_is_cut_short` can go."""
    n = 65_537
    alone = tf.raw_ops.RandomIndexShuffle(
        index=tf.range(n, dtype=tf.int64), seed=tf.ones([n, 3], tf.uint32), max_index=n - 1
    )
    assert len(np.unique(alone.numpy())) == n - 1


def test_a_large_set_is_addressed_by_index():
    n = 2**33
    positions = np.concatenate([np.arange(1000), n // 2 + np.arange(1000), n - 1 - np.arange(1000)])
    examples = order(positions, n=n)
    assert len(np.unique(examples)) == len(positions)
    assert examples.min() >= 0
    assert n // 2 < examples.max() < n


def test_a_call_may_straddle_passes_or_be_empty():
    n = 10
    passes = np.concatenate([one_pass(n, number=number) for number in range(3)])
    for positions in (np.arange(5, 27), np.array([29, 0, 7, 7, 13]), np.zeros(0, np.int64)):
        assert np.array_equal(order(positions, n=n), passes[positions])


def test_passes_and_seeds_differ_in_every_bit():
    assert {tuple(one_pass(2, number=number)) for number in range(20)} == {(0, 1), (1, 0)}
    passes = {tuple(one_pass(100, number=number)) for number in range(300)}
    assert len(passes) == 300  # the raw cipher keys would repeat after 256
    seeds = [0, 1, *(2**bit for bit in range(1, 64)), 2**63 - 1]
    assert len({tuple(one_pass(100, seed=seed)) for seed in seeds}) == len(seeds)


def test_the_order_depends_only_on_seed_pass_and_size():
    first = order(np.arange(100), n=1000, seed=5)
    order(np.arange(77), n=333, seed=9)
    tf.random.set_seed(4)
    assert np.array_equal(order(np.arange(100), n=1000, seed=5), first)
    # Fixed for ever: a checkpoint resumes in the order it was written in.
    assert first[:8].tolist() == [349, 475, 424, 440, 875, 964, 764, 422]


def test_without_shuffle_the_order_equals_the_data():
    assert order(np.arange(12), n=5, shuffle=False).tolist() == [*range(5), *range(5), 0, 1]


def test_graph_and_numpy_agree():
    n, b = 777, 64

    @tf.function
    def in_graph(step):
        positions = step * b + tf.range(b, dtype=tf.int64)
        return example_at(positions, num_examples=n, seed=11, shuffle=True)

    dataset = tf.data.Dataset.range(30).map(in_graph)
    for step, examples in enumerate(dataset.as_numpy_iterator()):
        expected = order(np.arange(step * b, (step + 1) * b), n=n, seed=11)
        assert np.array_equal(examples, expected)


def test_the_hash_equals_splitmix64_in_graph_and_python():
    # The published test vector: seed 1234567.
    start, gamma = 1234567, 0x9E3779B97F4A7C15
    drawn = [mix(start + (i + 1) * gamma) for i in range(3)]
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    values = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    hashed = mix_tensor(tf.constant(values, tf.uint64)).numpy().tolist()
    assert hashed == [mix(value) for value in values]
    assert stream(5, tf.constant([3], tf.int64)).numpy()[0] == mix(5 + 3 * gamma)
