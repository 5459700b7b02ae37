"""Sources: what users pass, by index or as a stream."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import sparse

from tests.refusals import refusal, refused
from tfdist.data import arrays
from tfdist.data.arrays import ArraySource
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.resolve import as_source, check_supported
from tfdist.data.source import batch_spec, lean_options
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.errors import UsageError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3))
Y = np.arange(20)


class Squares:
    """A map-style collection without `__getitems__`."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.full([2], index / 2), index * index


class Batches(keras.utils.PyDataset):
    """Three batches, the last one smaller."""

    def __init__(self):
        super().__init__(workers=3)
        self.ended = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        size = 4 if index < 2 else 1
        return np.zeros((size, 2), np.float32), np.full(size, index)

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


def test_arrays_follow_floatx():
    keras.config.set_floatx("float64")
    try:
        assert ArraySource(X.astype(np.float32)).element_spec.dtype == tf.float64
    finally:
        keras.config.set_floatx("float32")


def test_arrays_equal_what_keras_array_adapter_gives():
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    y, weight = Y[:, None].astype(np.uint8), RNG.random(20)
    adapter = ArrayDataAdapter((X, Y > 3), y, sample_weight=weight, batch_size=20)
    theirs = next(iter(adapter.get_tf_dataset()))
    ours = ArraySource((X, Y > 3), y, sample_weight=weight).gather(np.arange(20))
    tf.nest.assert_same_structure(ours, theirs)
    for mine, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other)


def test_gather_takes_any_order_repeats_and_nothing():
    source = ArraySource(X, Y)
    x, y = source.gather(tf.constant([7, 7, 0], tf.int64))
    assert np.array_equal(y, [7, 7, 0])
    assert np.array_equal(x, X[[7, 7, 0]].astype(np.float32))
    empty, _ = source.gather(tf.zeros([0], tf.int64))
    assert empty.shape == (0, 3)


def test_a_graph_captures_the_arrays_and_does_not_hold_a_copy():
    source = ArraySource(np.zeros([1000, 1000], np.float32))
    traced = tf.function(source.gather).get_concrete_function(tf.TensorSpec([None], tf.int64))
    assert len(traced.graph.as_graph_def().SerializeToString()) < 10_000
    assert len(traced.captured_inputs) == 1


def test_arrays_sent_to_another_process_are_all_that_is_read():
    source = ArraySource({"a": X}, Y, sample_weight=None)
    sent = next(iter(tf.data.Dataset.from_tensors(source.arrays()).repeat()))
    doubled = tf.nest.map_structure(lambda leaf: leaf * 2, sent)
    _, y = source.gather(tf.constant([5], tf.int64), arrays=doubled)
    assert y.numpy() == [10]


def test_strings_and_missing_targets_pass():
    source = ArraySource(np.array(["a", "bb"]), None, sample_weight=None)
    assert source.gather([1]).numpy() == [b"bb"]
    assert ArraySource(np.array(["a", "bb"], object)).element_spec.dtype == tf.string


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
        (lambda: ArraySource(X, Y[:19]), "data", "lengths-differ"),
        (lambda: ArraySource({"a": X, "b": X[:3]}), "data", "lengths-differ"),
        (lambda: ArraySource(X[:0]), "data", "lengths-differ"),
        (lambda: ArraySource(X, 3), "y", "not-an-array"),
        (lambda: ArraySource(np.float32(1)), "x", "not-an-array"),
        (lambda: ArraySource(np.array([1, "a"], object)), "x", "mixed-objects"),
        (lambda: ArraySource(np.array(["2026-01-01"], "datetime64[D]")), "x", "not-numbers"),
        (lambda: ArraySource(np.zeros(3, "f4, i4")), "x", "not-numbers"),
        (lambda: PythonSource(np.zeros(3, "datetime64[D]")), "example 0", "not-numbers"),
        (lambda: ArraySource(tf.ragged.constant([[1], [1, 2]])), "x", "not-dense"),
        (lambda: ArraySource(sparse.eye(3)), "x", "not-dense"),
        (lambda: ArraySource(X, (Y, Y), sample_weight=(Y,)), "sample_weight", "structures-differ"),
        (lambda: ArraySource(X, (Y, Y), sample_weight=X), "sample_weight", "structures-differ"),
    ],
)
def test_bad_arrays_are_refused(make, where, code):
    assert refused(make) == (where, code)


# Arrays in files


@pytest.mark.parametrize("dtype", ["f8", "bool", "i1", "c8"])
def test_a_memory_map_is_read_from_its_own_file(tmp_path, dtype):
    values = (X * 2).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    array = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource(array, Y)
    assert "1 of 2 arrays mapped" in source.describe()
    x, _ = source.gather([3, 19])
    assert np.array_equal(x, values[[3, 19]].astype("f4" if dtype == "f8" else dtype))


@pytest.mark.parametrize(
    ("view", "dtype"),
    [(np.s_[2:], "f8"), (np.s_[::2], "f8"), (np.s_[:, 1:], "f8"), (np.s_[:], ">f8")],
    ids=["unaligned", "strided", "columns", "foreign byte order"],
)
def test_a_view_that_cannot_be_mapped_is_read_into_memory(tmp_path, view, dtype):
    np.save(tmp_path / "x.npy", X.astype(dtype))
    source = ArraySource(np.load(tmp_path / "x.npy", mmap_mode="r")[view])
    assert "in memory" in source.describe()
    assert np.array_equal(source.gather([0, 4]), X[view][[0, 4]].astype(np.float32))


def test_a_view_at_a_multiple_of_64_bytes_is_mapped_where_it_is(tmp_path):
    data = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    data.tofile(tmp_path / "x.bin")
    view = np.memmap(tmp_path / "x.bin", np.float32, "r", shape=(64, 32))[16:48]
    file = arrays.of_memmap(view)
    assert file == arrays.MappedFile(
        path=str(tmp_path / "x.bin"), dtype=tf.float32, shape=(32, 32), offset_bytes=16 * 128
    )
    assert np.array_equal(file.tensor(), data[16:48])


def test_private_changes_of_a_memory_map_are_kept(tmp_path):
    X.tofile(tmp_path / "x.bin")
    array = np.memmap(tmp_path / "x.bin", np.float64, "c", shape=X.shape)
    array[3] = 7
    source = ArraySource(array)
    assert np.array_equal(source.gather([3]), np.full([1, 3], 7))


def test_arrays_that_no_message_to_a_ps_worker_carries_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    check_supported(ArraySource(mapped, Y, memory_limit_bytes=Y.nbytes), "ps")
    large = ArraySource(X, Y, memory_limit_bytes=Y.nbytes)
    check_supported(large, "multiworker")
    with pytest.raises(UsageError, match=r"np\.load\(file, mmap_mode='r'\)") as error:
        check_supported(large, "ps")
    assert error.value.code == "too-large"


def test_a_mapped_file_is_sent_as_the_operation_that_maps_it(tmp_path):
    X.astype(np.float32).tofile(tmp_path / "x.bin")
    source = ArraySource(np.memmap(tmp_path / "x.bin", np.float32, "r", shape=X.shape))

    @tf.function
    def on_the_worker():
        dataset = tf.data.Dataset.from_tensors(source.arrays()).repeat()
        return source.gather(tf.constant([4]), arrays=next(iter(dataset)))

    traced = on_the_worker.get_concrete_function()
    assert not traced.captured_inputs
    assert np.array_equal(traced(), X[[4]].astype(np.float32))


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


def test_constant_folding_still_copies_a_mapped_file(tmp_path):
    """When this fails, `_immutable_const` no longer needs its attribute."""
    size_mb = 256
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(size_mb << 20)
    before = anonymous_memory_mb()

    @tf.function
    def plain():
        return tf.raw_ops.ImmutableConst(
            dtype=tf.uint8, shape=[size_mb << 20], memory_region_name=str(tmp_path / "x.bin")
        )

    held = plain()
    assert anonymous_memory_mb() - before > size_mb // 2
    assert held[5] == 0


# Python


def test_a_collection_is_read_by_index():
    source = PythonSource(Squares())
    assert source.num_examples == 6
    assert source.element_spec == (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
    x, y = source.fetch(np.array([5, 1]))
    assert x.tolist() == [[2.5, 2.5], [0.5, 0.5]]
    assert x.dtype == np.float32
    assert y.tolist() == [25, 1]


def test_a_collection_with_getitems_is_asked_once_for_a_batch():
    class Many(Squares):
        asked = ()

        def __getitems__(self, indices):
            self.asked = indices
            return [self[index] for index in indices]

    many = Many()
    assert PythonSource(many).fetch(np.array([2, 3]))[1].tolist() == [4, 9]
    assert many.asked == [2, 3]


def test_examples_are_converted_and_may_hold_strings():
    source = PythonSource(Squares(), convert=lambda example: {"text": str(example[1])})
    assert source.element_spec == {"text": tf.TensorSpec([], tf.string)}
    assert source.fetch(np.array([3]))["text"].tolist() == ["9"]


def test_examples_of_different_shapes_are_named():
    class Uneven(Squares):
        def __getitem__(self, index):
            return np.zeros(index + 1)

    with pytest.raises(UsageError, match=r"example 4: received shape \(5,\)"):
        PythonSource(Uneven()).fetch(np.array([0, 4]))


def test_examples_whose_numbers_the_first_one_s_type_would_cut_are_named():
    targets = [0, 1, 0.5]  # as of a ratio whose first ones are whole
    source = PythonSource([(np.zeros(2), target) for target in targets])
    assert source.fetch(np.array([0, 1]))[1].tolist() == [0, 1]
    with pytest.raises(UsageError, match="example 2: received numbers of float64; expected int64"):
        source.fetch(np.array([1, 2]))
    source = PythonSource([(np.zeros(2), target) for target in reversed(targets)])
    assert source.fetch(np.array([0, 1, 2]))[1].tolist() == [0.5, 1, 0]


@pytest.mark.parametrize(("first", "later"), [(np.uint8(1), np.uint16(300)), (1, np.uint64(2**63))])
def test_examples_whose_numbers_do_not_fit_the_first_one_s_type_are_named(first, later):
    images = [np.full(2, first), np.full(2, first).astype(later.dtype), np.full(2, later)]
    source = PythonSource(images)
    assert source.fetch(np.array([0, 1])).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(UsageError, match="example 2: received numbers of uint"):
        source.fetch(np.array([2]))


def test_examples_of_other_parts_than_the_first_are_named():
    """Else the value of one key would be taken for that of another."""
    source = PythonSource([{"a": 1, "b": 2}, {"a": 1, "c": 3}])
    with pytest.raises(UsageError, match=r"example 1: .*'c'.*; expected .*'b'") as error:
        source.fetch(np.array([0, 1]))
    assert error.value.code == "structures-differ"


@pytest.mark.parametrize(
    ("later", "code"),
    [
        (({"a": np.zeros(4), "c": np.zeros(4)}, np.arange(4)), "structures-differ"),
        (({"a": np.zeros(4), "b": np.zeros(4)}, np.arange(4) / 2), "types-differ"),
    ],
)
def test_a_later_batch_of_a_py_dataset_that_would_be_cut_or_mixed_up_is_refused(later, code):
    class Changing(Batches):
        def __getitem__(self, index):
            return later if index == 2 else ({"a": np.ones(4), "b": np.zeros(4)}, np.arange(4))

    source = PyDatasetSource(Changing())
    assert refused(lambda: source.fetch_batch(2)) == ("Changing[2]", code)


def test_a_py_dataset_gives_whole_batches():
    dataset = Batches()
    source = PyDatasetSource(dataset)
    assert (source.num_batches, source.num_examples, source.workers) == (3, None, 3)
    assert source.element_spec == (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
    assert source.fetch_batch(2)[1].tolist() == [2]
    source.on_epoch_end()
    assert dataset.ended == 1


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (3, "not-a-batch"),
        ((tf.sparse.eye(2), np.zeros(2)), "not-dense"),
        ((tf.ragged.constant([[1], [2, 3]]), np.zeros(2)), "not-dense"),
    ],
)
def test_a_py_dataset_that_gives_no_batch_is_refused(batch, code):
    class Wrong(Batches):
        def __getitem__(self, index):
            return batch

    assert refused(lambda: PyDatasetSource(Wrong())) == ("Wrong[0]", code)


# Streams


def test_a_dataset_of_batches_is_a_stream():
    source = as_source(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    assert isinstance(source, StreamSource)
    assert source.num_batches == 3
    assert source.element_spec == (tf.TensorSpec([3], tf.float64), tf.TensorSpec([], tf.int64))
    assert not source.is_endless
    batches = tf.data.Dataset.from_tensor_slices(Y).batch(2)
    assert StreamSource(batches.repeat()).is_endless
    assert StreamSource(batches.repeat()).num_batches is None
    filtered = StreamSource(batches.filter(lambda batch: True))
    assert not filtered.is_endless
    assert filtered.num_batches is None


def test_a_dataset_of_single_examples_is_refused():
    with pytest.raises(UsageError, match=r"\.batch\(global_batch_size\)"):
        StreamSource(tf.data.Dataset.from_tensor_slices((X, Y)))


def test_an_input_function_is_called_with_the_context_of_its_task():
    batches = tf.data.Dataset.from_tensor_slices(Y).batch(5)

    def for_task(context):
        return batches.shard(context.num_input_pipelines, context.input_pipeline_id)

    source = as_source(for_task)
    assert isinstance(source, InputFunctionSource)
    context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    assert next(source.dataset_for(context).as_numpy_iterator())[0] == 5
    assert source.num_batches == 4
    assert source.element_spec == tf.TensorSpec([], tf.int64)


def test_an_input_function_must_return_a_dataset():
    source = as_source(lambda context: X)
    with pytest.raises(UsageError, match="ndarray from the input function"):
        source.dataset_for()


# What fit is given


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (X, ArraySource),
        ({"a": X, "b": Y}, ArraySource),
        (tf.constant(X), ArraySource),
        (Squares(), PythonSource),
        (Batches(), PyDatasetSource),
        (tf.data.Dataset.from_tensors(X), StreamSource),
    ],
    ids=["array", "dict", "tensor", "collection", "PyDataset", "Dataset"],
)
def test_each_kind_is_recognised(x, kind):
    source = as_source(x)
    assert type(source) is kind
    assert as_source(source) is source
    assert batch_spec(source.element_spec) is not None
    assert "\n" not in source.describe()


def generated():
    yield X, Y


DATASET = tf.data.Dataset.from_tensors(X)


@pytest.mark.parametrize(
    ("x", "more", "where", "code"),
    [
        *((x, {}, "x", "unsupported-data") for x in (None, [1, 2], "mnist", "", generated)),
        (generated(), {}, "x", "unsupported-data"),
        (DATASET, {"y": Y}, "y", "exclusive"),
        (DATASET, {"sample_weight": Y}, "sample_weight", "exclusive"),
        (Batches(), {"y": Y}, "y", "exclusive"),
        (Squares(), {"y": Y}, "y", "exclusive"),
        (ArraySource(X), {"y": Y}, "y", "exclusive"),
        ([(np.zeros(4), np.zeros(1))] * 100, {}, "data", "lengths-differ"),
    ],
)
def test_what_is_no_data_is_refused(x, more, where, code):
    assert refused(lambda: as_source(x, **more)) == (where, code)


def test_the_name_of_a_dataset_leads_to_the_source_for_it():
    assert "tfdist.data.load" in refusal(lambda: as_source("cifar10")).fix


def from_generator():
    signature = tf.TensorSpec([2], tf.int32)
    made = tf.data.Dataset.from_generator(lambda: iter([[1, 2]]), output_signature=signature)
    return made.map(lambda value: value + 1).prefetch(1)


def through_py_function():
    def plus_one(value):
        return tf.py_function(lambda v: v + 1, [value], tf.int64)

    return (
        tf.data.Dataset.range(4)
        .batch(2)
        .interleave(lambda value: tf.data.Dataset.from_tensors(value).map(plus_one))
    )


@pytest.mark.parametrize(
    "source",
    [
        PythonSource(Squares()),
        PyDatasetSource(Batches()),
        StreamSource(from_generator()),
        StreamSource(through_py_function()),
        InputFunctionSource(lambda context: from_generator()),
    ],
    ids=["collection", "PyDataset", "from_generator", "py_function", "input function"],
)
def test_python_is_refused_under_ps_with_the_reason(source):
    for strategy in ("single", "mirrored", "multiworker"):
        check_supported(source, strategy)
    assert refusal(lambda: check_supported(source, "ps")).code == "python-under-ps"


def with_a_layer(layer, value):
    data = tf.data.Dataset.from_tensors(tf.constant(value)).map(layer)
    return StreamSource(data.interleave(tf.data.Dataset.from_tensors).prefetch(1))


def test_layers_with_variables_in_the_data_are_refused_under_ps_with_the_reason():
    dense, lookup = keras.layers.Dense(2), keras.layers.IntegerLookup(vocabulary=[1, 2])
    dense.build((None, 3))
    for source in (with_a_layer(dense, [[1.0, 2.0, 3.0]]), with_a_layer(lookup, [[1, 2]])):
        check_supported(source, "single")
        assert refusal(lambda s=source: check_supported(s, "ps")).code == "variables-under-ps"
    scaled = keras.layers.Normalization(mean=1.0, variance=2.0)
    check_supported(with_a_layer(scaled, [[1.0]]), "ps")


@pytest.mark.parametrize(
    "source",
    [
        ArraySource(X, Y),
        StreamSource(tf.data.Dataset.range(9).shuffle(9).batch(2).map(lambda v: v + 1)),
        InputFunctionSource(lambda context: tf.data.Dataset.range(9).batch(2)),
    ],
    ids=["arrays", "Dataset", "input function"],
)
def test_graphs_are_taken_under_ps(source):
    check_supported(source, "ps")
