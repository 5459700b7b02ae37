"""Streams are read in parts without harm to their caches, and alike in every reading."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tests.refusals import refusal
from tfdist.data import StreamSource
from tfdist.data.stream import Reading, random_states, read, serialized
from tfdist.strategy import job_of
from tfdist.training import inputs

plain = tf.autograph.experimental.do_not_convert


def values(dataset):
    return [np.asarray(value).tolist() for value in dataset.as_numpy_iterator()]


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch):
    """Without the seed of the fixture for all tests, by which TensorFlow would seed each draw."""
    monkeypatch.setattr(context.context(), "_seed", None)


def test_a_reading_that_was_dropped_leaves_its_cache_whole():
    """TensorFlow cuts it, on a busy machine above all."""
    for _ in range(40):
        dataset = tf.data.Dataset.range(256).batch(64).prefetch(4).cache()
        next(iter(read(dataset, Reading())))
        assert len(values(read(dataset, Reading()))) == 4


def test_a_truncated_file_cache_ends_the_run_with_reason(tmp_path, strategies):
    def pairs(count):
        rows = np.arange(count, dtype="float32")[:, None]
        pairs = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(1)
        return pairs.cache(str(tmp_path / "cache"))

    values(pairs(1).map(plain(lambda x, y: x)))  # what a cut cache leaves behind
    told = refusal(lambda: tfdist.fit(one_layer(strategies), pairs(4), verbose=0))
    assert told.code == "data-ended"
    assert "has 1 batches" in told.problem


def test_the_lock_of_a_file_cache_is_named(tmp_path, strategies):
    lock = tmp_path / "cache_0.lockfile"
    lock.touch()  # a program that is killed while it fills the cache leaves it
    rows = np.zeros((4, 1), "float32")
    pairs = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(1)
    cached = pairs.cache(str(tmp_path / "cache"))
    told = refusal(lambda: tfdist.fit(one_layer(strategies), cached, verbose=0))
    assert told.code == "unreadable"
    assert str(lock) in told.problem


def one_layer(strategies):
    keras.utils.set_random_seed(1)
    with strategies[1].scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_a_cache_is_filled_once_and_not_by_peeks(tmp_path):
    calls = []

    def seen(number):
        calls.append(int(number))
        return number

    numbers = tf.data.Dataset.range(3).map(
        plain(lambda n: tf.ensure_shape(tf.numpy_function(seen, [n], tf.int64), []))
    )
    cached = numbers.cache().repeat(2)
    assert next(iter(read(cached, Reading(peek=True)))) == 0
    calls.clear()
    assert values(read(cached, Reading())) == [0, 1, 2, 0, 1, 2]
    assert values(read(cached, Reading(seed=3))) == [0, 1, 2, 0, 1, 2]
    assert calls == [0, 1, 2]
    written = tf.data.Dataset.range(4).prefetch(1).snapshot(str(tmp_path / "snapshot"))
    assert next(iter(read(written, Reading(peek=True)))) == 0
    assert not (tmp_path / "snapshot").exists()
    for _ in range(2):
        assert values(read(written, Reading())) == [0, 1, 2, 3]


def inner_shuffle(number):
    return tf.data.Dataset.range(8).shuffle(8).map(plain(lambda n: n + 10 * number))


def drawing(number):
    return number + tf.random.uniform([], 0, 1000, tf.int64)


def seeded_program(dataset):
    keras.utils.set_random_seed(1)
    return dataset


UNSEEDED = {
    "shuffle": lambda: tf.data.Dataset.range(20).shuffle(20),
    "shuffle by the program's seed": lambda: seeded_program(tf.data.Dataset.range(20)).shuffle(20),
    "random": lambda: tf.data.Dataset.random().take(3),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(20), tf.data.Dataset.range(100, 120)]
    ),
    "inner shuffle": lambda: tf.data.Dataset.range(3).flat_map(plain(inner_shuffle)),
    "interleaved": lambda: tf.data.Dataset.range(3).interleave(
        plain(inner_shuffle), num_parallel_calls=2, cycle_length=2, deterministic=False
    ),
    "draws": lambda: tf.data.Dataset.range(16).map(plain(drawing)),
    "parallel draws": lambda: tf.data.Dataset.range(16).map(
        plain(drawing), num_parallel_calls=4, deterministic=False
    ),
}


@pytest.mark.parametrize("kind", UNSEEDED)
def test_unseeded_draws_follow_the_seed_of_the_run(kind):
    reading = Reading(seed=1, in_step=True)
    first, second = (values(read(UNSEEDED[kind](), reading).repeat(2)) for _ in range(2))
    assert first == second
    assert first != values(read(UNSEEDED[kind](), dataclasses.replace(reading, seed=2)).repeat(2))


def test_draws_differ_between_passes_and_between_inner_datasets():
    for kind in ("shuffle", "inner shuffle", "draws"):
        found = values(read(UNSEEDED[kind](), Reading()).repeat(2))
        half = len(found) // 2
        assert found[:half] != found[half:], kind
    inner = np.array(values(read(UNSEEDED["inner shuffle"](), Reading()))).reshape(3, 8) % 10
    assert len({tuple(row) for row in inner}) == 3


def test_parts_of_a_dataset_shuffled_once_stay_disjoint():
    """As TensorFlow's tutorials split a dataset; each part is read with the seed of its reader."""
    whole = tf.data.Dataset.range(20).shuffle(20, reshuffle_each_iteration=False)
    train = values(read(whole.skip(5).shuffle(20), Reading(seed=1)).repeat(2))
    test = values(read(whole.take(5), Reading(seed=0)).repeat(2))
    assert sorted(train[:15] + test[:5]) == list(range(20))
    assert train[:15] != train[15:]
    assert sorted(train[:15]) == sorted(train[15:])
    assert test[:5] == test[5:] != [*range(5)]


@pytest.mark.parametrize("whole", [None, 1])
def test_a_seed_of_the_user_stays(whole):
    if whole is not None:
        keras.utils.set_random_seed(whole)
    found, other = (tf.data.Dataset.range(20).shuffle(20, seed=3) for _ in range(2))
    expected = values(other)
    for seed in (1, 2):  # in each reading: a resumed run may have fewer of them before
        assert values(read(found, Reading(seed=seed))) == expected


def test_variables_and_tables_of_the_program_are_read_themselves():
    offset = tf.Variable(1, dtype=tf.int64)
    words = keras.layers.StringLookup(vocabulary=["a", "b"])
    dataset = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).map(
        plain(lambda word: words(word) + offset)
    )
    assert values(read(dataset, Reading())) == [2, 3, 1]
    offset.assign(10)
    assert values(read(dataset, Reading())) == [11, 12, 10]
    assert [handle.dtype for handle in random_states(dataset)] == [tf.resource]


def test_a_peek_draws_no_random_number_of_a_layer():
    flip = keras.layers.RandomFlip(seed=3)
    images = tf.data.Dataset.from_tensor_slices(np.ones((4, 4, 4, 1), "float32")).batch(2)
    dataset = images.map(plain(lambda x: flip(x, training=True)))
    before = flip.generator.state.numpy().tolist()
    next(iter(read(dataset, Reading(peek=True))))
    assert flip.generator.state.numpy().tolist() == before
    values(read(dataset, Reading()))
    assert flip.generator.state.numpy().tolist() != before


def test_another_process_gets_the_graph_with_the_seeds():
    spec = tf.TensorSpec([], tf.int64)
    found = []
    for _ in range(2):
        dataset = tf.data.Dataset.range(20).shuffle(20).prefetch(1).cache()
        graph = serialized(dataset, Reading(seed=4, in_step=True))
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
        found.append(values(tf.data.experimental.from_variant(variant, structure=spec)))
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(20))


def test_a_cache_filled_by_counting_follows_the_seed(strategies):
    def numbers(seed):
        drawn = tf.data.Dataset.range(8).map(lambda _: tf.random.uniform([])).cache()
        data = drawn.filter(lambda _: True).batch(4)
        length = inputs.Length(epochs=1)
        job = job_of(strategies[1])
        made = inputs.prepare(data, None, None, job=job, length=length, shuffle=True, seed=seed)
        return [part[0].tolist() for (part,) in made.dataset(0, 2).as_numpy_iterator()]

    assert numbers(1) == numbers(1) != numbers(2)


def test_a_resumed_run_repeats_an_unseeded_shuffle(strategies, tmp_path):
    def run(epochs, directory):
        seen = []

        def noted(batch, **by):
            note = tf.py_function(lambda y: seen.append(tuple(y.numpy()[:, 0])), [batch[1]], [])
            with tf.control_dependencies([note]):
                return tf.identity(batch[0]), batch[1]

        model = one_layer(strategies)
        context.context()._seed = None
        rows = np.arange(12, dtype="float32")[:, None]
        stream = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(12).batch(4)
        backup = tfdist.BackupAndRestore(directory)
        source = StreamSource(stream, transform=noted)
        tfdist.fit(model, source, epochs=epochs, verbose=0, callbacks=[backup])
        return seen

    whole = run(2, tmp_path / "whole")
    first, rest = (run(epochs, tmp_path / "parts") for epochs in (1, 2))
    assert [len(seen) for seen in (whole, first, rest)] == [6, 3, 3]
    assert len(set(first + rest)) == 6
