"""TFRecord files read by the number of the record."""

import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusal
from tfdist.data import TFRecordSource, cache, tfrecord
from tfdist.data.tfrecord import load_index
from tfdist.errors import TfdistError

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


def write(path, numbers):
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            writer.write(record(number))
    return str(path)


@pytest.fixture
def files(tmp_path):
    for file in range(FILES):
        numbers = range(file * RECORDS, (file + 1) * RECORDS)
        write(tmp_path / f"part-{file}.tfrecord", numbers)
    return tmp_path


@pytest.fixture(
    params=[(2**30, ""), (0, ""), (0, "file://")], ids=["in memory", "by offset", "by address"]
)
def source(request, files):
    limit, scheme = request.param
    cache = files / "cache"
    path = f"{scheme}{files}/part-*"
    return TFRecordSource(path, parse, memory_limit_bytes=limit, cache_dir=cache)


def test_every_record_is_found_by_its_number(source):
    assert source.num_examples == FILES * RECORDS
    assert source.element_spec == (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int64))
    numbers = np.random.default_rng(1).permutation(FILES * RECORDS)
    x, y = source.gather(tf.constant(numbers))
    assert np.array_equal(y, numbers)
    assert np.array_equal(x[:, 1], -numbers)
    assert source.gather(tf.zeros([0], tf.int64))[0].shape == (0, 2)
    assert source.gather(tf.constant([4, 4, 14]))[1].numpy().tolist() == [4, 4, 14]


def test_records_are_read_in_a_dataset_and_on_workers(source):
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


def test_spans_select_records_within_their_files(files):
    first, second = (str(files / f"part-{number}.tfrecord") for number in (0, 1))

    def chosen(*spans):
        return TFRecordSource([first, second], parse, spans=spans, cache_dir=files / "cache")

    source = chosen((second, 3, 2), (first, 1, 1))
    assert source.gather(tf.range(3))[1].numpy().tolist() == [8, 9, 1]
    for begin, count in ((3, RECORDS), (RECORDS, 1), (-1, 2)):
        told = refusal(lambda begin=begin, count=count: chosen((first, begin, count)))
        assert told.code == "out-of-range"


def test_the_index_is_kept_until_a_file_changes(files, monkeypatch):
    name = str(files / "part-0.tfrecord")
    cache = files / "cache"
    scans = []
    scan = tfrecord._scan
    monkeypatch.setattr(tfrecord, "_scan", lambda *a: scans.append(a) or scan(*a))
    assert len(load_index([name], cache_dir=cache).lengths) == RECORDS
    load_index([name], cache_dir=cache)
    assert len(scans) == 1
    write(files / "part-0.tfrecord", [1])
    assert len(load_index([name], cache_dir=cache).lengths) == 1
    assert len(scans) == 2
    os.utime(name, ns=(1, 1))
    load_index([name], cache_dir=cache)
    assert len(scans) == 3


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"text"), b"\x05\0\0", b"\x05\0\0\0\0\0\0\0abcdhe", b"", None, "directory"],
    ids=["gzip", "cut header", "cut record", "empty", "none", "directory"],
)
def test_files_that_are_not_whole_are_refused(tmp_path, content):
    path = tmp_path / "bad.tfrecord"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    told = refusal(lambda: TFRecordSource(path, parse, cache_dir=tmp_path / "cache"))
    assert (told.where, told.code) == (str(path), "unreadable")
    assert not list((tmp_path / "cache").glob(".partial-*"))


def test_a_path_with_brackets_is_not_a_pattern(tmp_path):
    path = tmp_path / "run [1]" / "a.tfrecord"
    write(path, [3])
    source = TFRecordSource(path, parse, cache_dir=tmp_path / "cache")
    assert source.gather([0])[1].numpy() == [3]
    assert refusal(lambda: TFRecordSource([], parse)).code == "unreadable"


def test_an_impossible_cache_directory_is_a_one_line_error(files):
    cache = files / "part-0.tfrecord" / "cache"
    with pytest.raises(TfdistError, match=f"index of .* in {cache}: Not a directory"):
        TFRecordSource(files / "part-1.tfrecord", parse, cache_dir=cache)


def test_examples_without_a_fixed_form_are_refused(files):
    def ragged(records):
        return tf.io.parse_example(records, {"x": tf.io.VarLenFeature(tf.float32)})["x"]

    path = files / "part-0.tfrecord"
    told = refusal(lambda: TFRecordSource(path, ragged, cache_dir=files / "cache"))
    assert told.code == "unsupported-data"


def give_away(path, monkeypatch):
    """Root can; another user becomes somebody else instead."""
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    else:
        os.chown(path, 4711, -1, follow_symlinks=False)


def own_by_another(home, monkeypatch):
    give_away(home / ".cache" / "tfdist", monkeypatch)


def open_to_others(home, monkeypatch):
    (home / ".cache" / "tfdist").chmod(0o777)


def open_above(home, monkeypatch):
    (home / ".cache").chmod(0o777)


def lose_home(home, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Python's answer without one


@pytest.mark.parametrize("spoil", [None, own_by_another, open_to_others, open_above, lose_home])
def test_an_index_from_another_user_is_not_used(files, monkeypatch, spoil):
    monkeypatch.setenv("HOME", str(files))
    monkeypatch.chdir(files)
    names = [str(files / "part-0.tfrecord")]
    assert len(load_index(names).lengths) == RECORDS
    private = files / ".cache" / "tfdist"
    assert private.stat().st_mode & 0o777 == 0o700
    (planted,) = private.glob("*.npz")
    np.savez(planted, file_numbers=[0], offsets=[0], lengths=[1])
    before = sorted(os.listdir(files))
    if spoil:
        spoil(files, monkeypatch)
    assert len(load_index(names).lengths) == (RECORDS if spoil else 1)
    assert sorted(os.listdir(files)) == before
    assert cache.private_cache_dir() == (None if spoil else private)


def test_a_link_from_another_user_is_no_private_cache(tmp_path, monkeypatch):
    """As in /tmp, if that is HOME: the link is another user's, the directory behind it is mine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine" / "tfdist").mkdir(parents=True)
    (tmp_path / ".cache").symlink_to(tmp_path / "mine")
    assert cache.private_cache_dir() == tmp_path / ".cache" / "tfdist"
    give_away(tmp_path / ".cache", monkeypatch)
    assert cache.private_cache_dir() is None
