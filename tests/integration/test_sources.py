"""Sources: what users pass, by index or as a stream."""

import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import sparse

from tests.refusals import refusal, refused
from tfdist.cluster import KINDS
from tfdist.data import (
    ArraySource,
    PyDatasetSource,
    PythonSource,
    as_source,
    check_supported,
    lean_options,
)
from tfdist.data.arrays import of_memmap
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import IndexedFeed, Order

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3))
Y = np.arange(20)
DATASET = tf.data.Dataset.from_tensors(X)


class Squares:
    """A map-style collection without `__getitems__`."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.full([2], index / 2), index * index


class Batches(keras.utils.PyDataset):
    """Three batches, the last one smaller, if no others are given."""

    def __init__(self, *batches):
        super().__init__(workers=3)
        self.batches = batches or tuple(
            (np.zeros((size, 2), np.float32), np.full(size, i)) for i, size in enumerate((4, 4, 1))
        )
        self.ended = 0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def on_epoch_end(self):
        self.ended += 1


def anonymous_memory_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) // 1024


# Arrays in memory


def test_arrays_are_packed_and_converted_as_keras_does():
    source = ArraySource({"a": X, "b": X.astype(np.float16)}, [Y, X], sample_weight=np.ones(20))
    x, y, weight = source.element_spec
    assert {name: spec.dtype for name, spec in x.items()} == {"a": tf.float32, "b": tf.float32}
    assert y == (tf.TensorSpec([], tf.int64), tf.TensorSpec([3], tf.float32))
    assert weight == (tf.TensorSpec([], tf.float32),) * 2  # one for each output
    assert isinstance(ArraySource(X).element_spec, tf.TensorSpec)
    assert len(ArraySource([X, X]).element_spec) == 1
    assert len(ArraySource(X, Y, sample_weight=np.ones(20)).element_spec) == 3
    assert ArraySource(np.array(["a", "bb"])).gather([1]).numpy() == [b"bb"]
    assert ArraySource(np.array(["a", "bb"], object)).element_spec.dtype == tf.string
    keras.config.set_floatx("float64")
    try:
        assert ArraySource(X.astype(np.float32)).element_spec.dtype == tf.float64
    finally:
        keras.config.set_floatx("float32")


def test_arrays_equal_the_array_adapter_of_keras():
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    y, weight = Y[:, None].astype(np.uint8), RNG.random(20)
    adapter = ArrayDataAdapter((X, Y > 3), y, sample_weight=weight, batch_size=20)
    theirs = next(iter(adapter.get_tf_dataset()))
    ours = ArraySource((X, Y > 3), y, sample_weight=weight).gather(np.arange(20))
    tf.nest.assert_same_structure(ours, theirs)
    for mine, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other)


def test_a_graph_captures_arrays_without_copying_them():
    source = ArraySource(np.zeros([1000, 1000], np.float32))
    traced = tf.function(source.gather).get_concrete_function(tf.TensorSpec([None], tf.int64))
    assert len(traced.graph.as_graph_def().SerializeToString()) < 10_000
    assert len(traced.captured_inputs) == 1
    assert source.gather(tf.zeros([0], tf.int64)).shape == (0, 1000)


def test_pandas_is_converted_as_keras_does():
    """Keras gives a Series the shape (n, 1); pandas itself is not needed, nor imported."""
    frame = type("DataFrame", (), {"to_numpy": lambda self: X, "__array__": None})
    series = type("Series", (), {"to_numpy": lambda self: Y, "__array__": None})
    frame.__module__ = series.__module__ = "pandas.core"
    x, y = ArraySource(frame(), series()).element_spec
    assert x == tf.TensorSpec([3], tf.float32)
    assert y == tf.TensorSpec([1], tf.int64)


@pytest.mark.parametrize(
    ("make", "where", "code"),
    [
        (lambda: ArraySource(X, Y[:19]), "data", "shapes-differ"),
        (lambda: ArraySource({"a": X, "b": X[:3]}), "data", "shapes-differ"),
        (lambda: ArraySource(X[:0]), "data", "shapes-differ"),
        (lambda: ArraySource(X, 3), "y", "unsupported-data"),
        (lambda: ArraySource(np.float32(1)), "x", "unsupported-data"),
        (lambda: ArraySource(tf.ragged.constant([[1], [1, 2]])), "x", "unsupported-data"),
        (lambda: ArraySource(sparse.eye(3)), "x", "unsupported-data"),
    ],
)
def test_bad_arrays_are_refused(make, where, code):
    assert refused(make) == (where, code)


# Arrays in files


@pytest.mark.parametrize(
    ("dtype", "view", "is_mapped"),
    [
        *((dtype, np.s_[:], True) for dtype in ("f8", "bool", "i1", "c8")),
        ("f8", np.s_[8:], True),  # at a multiple of 64 bytes
        ("f8", np.s_[2:], False),
        ("f8", np.s_[::2], False),
        ("f8", np.s_[:, 1:], False),
        (">f8", np.s_[:], False),
    ],
)
def test_a_memory_map_is_read_from_its_own_file(tmp_path, dtype, view, is_mapped):
    values = (X * 2).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    array = np.load(tmp_path / "x.npy", mmap_mode="r")[view]
    assert (of_memmap(array) is not None) == is_mapped
    source = ArraySource(array)
    expected = values[view][[0, 9]].astype("f4" if "f8" in dtype else dtype)
    assert np.array_equal(source.gather([0, 9]), expected)


def test_private_changes_of_a_memory_map_are_kept(tmp_path):
    X.tofile(tmp_path / "x.bin")
    array = np.memmap(tmp_path / "x.bin", np.float64, "c", shape=X.shape)
    array[3] = 7
    source = ArraySource(array)
    assert np.array_equal(source.gather([3]), np.full([1, 3], 7))


def test_a_mapped_file_is_not_copied_into_memory(tmp_path):
    """Constant folding of `ImmutableConst`, and the default rewriting of datasets, copy it."""
    size_mb = 256
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(size_mb << 20)
    array = np.memmap(tmp_path / "x.bin", np.uint8, "r", shape=(size_mb << 10, 1024))
    tf.zeros([1]) + 1
    before = anonymous_memory_mb()
    source = ArraySource(array)
    steps = tf.data.Dataset.range(20).map(lambda step: source.gather(tf.stack([step, step + 1000])))
    assert len(list(steps.with_options(lean_options()))) == 20
    assert anonymous_memory_mb() - before < size_mb // 4


# Python


def test_a_collection_is_read_by_index():
    class Many(Squares):
        asked = ()

        def __getitems__(self, indices):
            self.asked = indices
            return [self[index] for index in indices]

    for examples in (Squares(), Many()):
        source = PythonSource(examples)
        assert source.num_examples == 6
        assert source.element_spec == (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
        x, y = source.fetch(np.array([5, 1]))
        assert x.tolist() == [[2.5, 2.5], [0.5, 0.5]]
        assert x.dtype == np.float32
        assert y.tolist() == [25, 1]
    assert examples.asked == [5, 1]


def test_the_threads_of_an_iterator_keep_its_replicas():
    """The shards of an elastic job's worker change with the workers, and may change back."""
    job = types.SimpleNamespace(replica_ids=(0,), num_replicas=2, num_tasks=1)
    plan = EpochPlan.uniform(epochs=10, examples=20, global_batch_size=4)
    order = Order(examples=20, shuffle=False)
    feed = IndexedFeed(PythonSource(Y), plan, job=job, seed=0, order=order)
    found = feed.iterator(0)
    job.replica_ids = (1,)
    parts = [part.data.numpy().tolist() for (part,) in (found.get_next() for _ in range(30))]
    feed.close()
    assert parts == [[4 * i, 4 * i + 1] for i in range(5)] * 6


def test_converted_examples_may_hold_strings_and_numbers():
    source = PythonSource(Squares(), convert=lambda example: {"text": str(example[1])})
    assert source.element_spec == {"text": tf.TensorSpec([], tf.string)}
    assert source.fetch(np.array([3]))["text"].tolist() == ["9"]
    assert PythonSource([(X, 0.5), (X, 1)]).fetch(np.array([0, 1]))[1].tolist() == [0.5, 1]
    images = PythonSource([np.full(2, 1, np.uint8), np.full(2, 1, np.uint16)])
    assert images.fetch(np.array([0, 1])).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("first", "later", "code"),
    [
        (np.zeros(1), np.zeros(2), "shapes-differ"),
        (0, 0.5, "shapes-differ"),  # a ratio whose first ones are whole
        (np.full(2, 1, np.uint8), np.full(2, 300, np.uint16), "shapes-differ"),
        (1, np.uint64(2**63), "shapes-differ"),
        ({"a": 1, "b": 2}, {"a": 1, "c": 3}, "shapes-differ"),
    ],
)
def test_an_example_that_would_lose_data_is_named(first, later, code):
    source = PythonSource([first, later])
    assert refused(lambda: source.fetch(np.array([0, 1]))) == ("example 1", code)


AB = ({"a": np.ones(4), "b": np.zeros(4)}, np.arange(4))


@pytest.mark.parametrize(
    ("batches", "code"),
    [
        (((tf.sparse.eye(2), np.zeros(2)),), "unsupported-data"),
        (((tf.ragged.constant([[1], [2, 3]]), np.zeros(2)),), "unsupported-data"),
        ((AB, AB, ({"a": np.zeros(4), "c": np.zeros(4)}, np.arange(4))), "shapes-differ"),
        ((AB, AB, (AB[0], np.arange(4) / 2)), "shapes-differ"),
    ],
)
def test_a_bad_last_batch_of_a_pydataset_is_refused(batches, code):
    last = len(batches) - 1
    found = refused(lambda: PyDatasetSource(Batches(*batches)).fetch_batch(last))
    assert found == (f"Batches[{last}]", code)


# What fit is given


def generated():
    yield X, Y


@pytest.mark.parametrize(
    ("x", "more", "where", "code"),
    [
        *((x, {}, "x", "unsupported-data") for x in (None, [1, 2], "", generated, generated())),
        (DATASET, {"y": Y}, "y", "exclusive"),
        (DATASET, {"sample_weight": Y}, "sample_weight", "exclusive"),
        (Batches(), {"y": Y}, "y", "exclusive"),
        (Squares(), {"y": Y}, "y", "exclusive"),
        (ArraySource(X), {"y": Y}, "y", "exclusive"),
        ([(np.zeros(4), np.zeros(1))] * 100, {}, "data", "shapes-differ"),
        (tf.data.Dataset.from_tensor_slices((X, Y)), {}, "tf.data.Dataset", "unsupported-data"),
    ],
)
def test_unsupported_data_are_refused(x, more, where, code):
    assert refused(lambda: as_source(x, **more)) == (where, code)


def test_errors_name_the_source_for_the_data():
    assert "tfdist.data.from_tfds" in refusal(lambda: as_source("cifar10")).fix
    assert refused(as_source(lambda context: X).dataset_for) == ("<lambda>", "unsupported-data")


# Under ps


def from_generator():
    signature = tf.TensorSpec([2], tf.int32)
    made = tf.data.Dataset.from_generator(lambda: iter([[1, 2]]), output_signature=signature)
    return made.map(lambda value: value + 1).prefetch(1)


def through_py_function():
    def plus_one(value):
        return tf.py_function(lambda v: v + 1, [value], tf.int64)

    def inner(value):
        return tf.data.Dataset.from_tensors(value).map(plus_one)

    return tf.data.Dataset.range(4).batch(2).interleave(inner)


def with_a_layer(layer, value):
    data = tf.data.Dataset.from_tensors(tf.constant(value)).map(layer)
    return data.interleave(tf.data.Dataset.from_tensors).prefetch(1)


def with_weights():
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    return with_a_layer(dense, [[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (Squares, "unsupported-data"),
        (Batches, "unsupported-data"),
        (from_generator, "unsupported-data"),
        (through_py_function, "unsupported-data"),
        (lambda: lambda context: from_generator(), "unsupported-data"),
        (with_weights, "unsupported-data"),
        (
            lambda: with_a_layer(keras.layers.IntegerLookup(vocabulary=[1, 2]), [[1, 2]]),
            "unsupported-data",
        ),
        (lambda: with_a_layer(keras.layers.Normalization(mean=1.0, variance=2.0), [[1.0]]), None),
        (lambda: X, None),
        (lambda: tf.data.Dataset.range(9).shuffle(9).batch(2).map(lambda v: v + 1), None),
        (lambda: lambda context: tf.data.Dataset.range(9).batch(2), None),
    ],
)
def test_sources_unreadable_by_ps_workers_are_refused_under_ps(make, code):
    source = as_source(make())
    for strategy in ("single", "mirrored", "multiworker"):
        check_supported(source, KINDS[strategy])
    if code is None:
        check_supported(source, KINDS["ps"])
    else:
        assert refusal(lambda: check_supported(source, KINDS["ps"])).code == code
