"""TFRecord files read by the number of the record."""

import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import tfrecord
from tfdist.data.tfrecord import TFRecordSource, load_index
from tfdist.errors import UsageError

FILES, RECORDS = 3, 5


def record(number):
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "pad": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"." * number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def parse(records):
    features = {
        "x": tf.io.FixedLenFeature([2], tf.float32),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }
    parsed = tf.io.parse_example(records, features)
    return parsed["x"], parsed["y"]


@pytest.fixture
def files(tmp_path):
    for file in range(FILES):
        with tf.io.TFRecordWriter(str(tmp_path / f"part-{file}.tfrecord")) as writer:
            for number in range(file * RECORDS, (file + 1) * RECORDS):
                writer.write(record(number))
    return tmp_path


@pytest.fixture(
    params=[(2**30, ""), (0, ""), (0, "file://")], ids=["in memory", "by offset", "by address"]
)
def source(request, files):
    limit, scheme = request.param
    cache = files / "cache"
    made = TFRecordSource(
        f"{scheme}{files}/part-*", parse, memory_limit_bytes=limit, cache_dir=cache
    )
    assert ("in memory" in made.describe()) == bool(limit)
    return made


def test_every_record_is_found_by_its_number(source):
    assert source.num_examples == FILES * RECORDS
    assert source.element_spec == (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
    numbers = np.random.default_rng(1).permutation(FILES * RECORDS)
    x, y = source.gather(tf.constant(numbers))
    assert np.array_equal(y, numbers)
    assert np.array_equal(x[:, 1], -numbers)


def test_no_records_and_repeated_ones(source):
    assert source.gather(tf.zeros([0], tf.int64))[0].shape == (0, 2)
    assert source.gather(tf.constant([4, 4, 14]))[1].numpy().tolist() == [4, 4, 14]


def test_records_are_read_in_a_dataset_and_on_a_worker(source):
    steps = tf.data.Dataset.range(3).map(
        lambda step: source.gather(step + tf.constant([0, 9], "int64"))
    )
    assert [y.tolist() for _, y in steps.as_numpy_iterator()] == [[0, 9], [1, 10], [2, 11]]

    @tf.function
    def on_the_worker():
        sent = next(iter(tf.data.Dataset.from_tensors(source.arrays()).repeat()))
        return source.gather(tf.constant([7, 12]), arrays=sent)

    traced = on_the_worker.get_concrete_function()
    assert not traced.captured_inputs
    assert traced()[1].numpy().tolist() == [7, 12]


def test_runs_of_records_can_be_chosen(files):
    second = str(files / "part-1.tfrecord")
    first = str(files / "part-0.tfrecord")
    spans = [(second, 3, 2), (first, 1, 1)]
    source = TFRecordSource([first, second], parse, spans=spans, cache_dir=files / "cache")
    assert source.gather(tf.range(3))[1].numpy().tolist() == [8, 9, 1]


@pytest.mark.parametrize(("begin", "count"), [(3, RECORDS), (RECORDS, 1), (-1, 2)])
def test_a_run_that_leaves_its_file_is_refused(files, begin, count):
    """Else it would have records of the next file."""
    names = [str(files / f"part-{number}.tfrecord") for number in (0, 1)]
    with pytest.raises(UsageError, match="Fix: count from 0, within the file"):
        TFRecordSource(names, parse, spans=[(names[0], begin, count)], cache_dir=files / "cache")


def test_the_index_is_kept_until_a_file_changes(files, monkeypatch):
    name = str(files / "part-0.tfrecord")
    cache = files / "cache"
    scans = []
    scan = tfrecord._scan
    monkeypatch.setattr(tfrecord, "_scan", lambda *a: scans.append(a) or scan(*a))
    assert len(load_index([name], cache_dir=cache).lengths) == RECORDS
    load_index([name], cache_dir=cache)
    assert len(scans) == 1
    with tf.io.TFRecordWriter(name) as writer:
        writer.write(record(1))
    assert len(load_index([name], cache_dir=cache).lengths) == 1
    assert len(scans) == 2
    os.utime(name, ns=(1, 1))
    load_index([name], cache_dir=cache)
    assert len(scans) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text"), "ends past the file's"),
        (b"\x05\0\0", "ends past the file's 3 bytes"),
        (b"\x05\0\0\0\0\0\0\0abcdhe", "record at byte 0 that ends past"),
        (b"", "no records"),
    ],
    ids=["gzip", "cut header", "cut record", "empty"],
)
def test_files_that_are_not_whole_are_refused(tmp_path, content, message):
    path = tmp_path / "bad.tfrecord"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        TFRecordSource(path, parse, cache_dir=tmp_path / "cache")
    assert str(path) in str(error.value)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_path_is_taken_as_it_is_and_a_directory_refused(tmp_path):
    path = tmp_path / "run [1]" / "a.tfrecord"
    path.parent.mkdir()
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(record(3))
    source = TFRecordSource(path, parse, cache_dir=tmp_path / "cache")
    assert source.gather([0])[1].numpy() == [3]
    with pytest.raises(UsageError, match="received a directory"):
        TFRecordSource(path.parent, parse)


@pytest.mark.parametrize(
    ("files", "message"), [("/none/such-*", "no such file"), ([], "received no files")]
)
def test_files_that_are_not_there_are_refused(files, message):
    with pytest.raises(UsageError, match=message):
        TFRecordSource(files, parse)


def test_examples_without_a_fixed_form_are_refused(files):
    def ragged(records):
        return tf.io.parse_example(records, {"x": tf.io.VarLenFeature(tf.float32)})["x"]

    with pytest.raises(UsageError, match="dense tensors with a batch axis"):
        TFRecordSource(files / "part-0.tfrecord", ragged, cache_dir=files / "cache")
