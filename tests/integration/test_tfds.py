"""TFDS: prepared once per job, read by index; and the digits, a real builder without download."""

import os
import random
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets
from sklearn.datasets import load_digits

from tests import forked_python
from tests.refusals import refusal
from tfdist.data import TFRecordSource, tfds
from tfdist.data.cache import exclusive
from tfdist.errors import StartupTimeout, TfdistError

pytestmark = pytest.mark.slow

PREPARE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from tfdist.data import tfds
source = tfds.from_tfds("tfdist_digits", "test", data_dir=sys.argv[1])
print("examples", source.num_examples)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder where the digits are prepared as TFRecords."""
    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    tfds.prepare("tfdist_digits", data_dir=folder)
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def everything(source):
    return tf.nest.map_structure(np.asarray, source.gather(np.arange(source.num_examples)))


@pytest.fixture(scope="module")
def splits(data_dir):
    return {
        split: everything(tfds.from_tfds("tfdist_digits", split, data_dir=data_dir))
        for split in ("train", "test")
    }


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("split", ["test", "train[10%:35%]+test", "train[:7]"])
def test_beyond_the_limit_files_are_read_by_index(data_dir, split):
    in_memory = tfds.from_tfds("tfdist_digits", split, data_dir=data_dir)
    by_index = tfds.from_tfds("tfdist_digits", split, data_dir=data_dir, memory_limit_bytes=0)
    assert isinstance(by_index, TFRecordSource)
    for ours, theirs in zip(everything(by_index), everything(in_memory), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("limit", [2**30, 0])
def test_examples_are_converted_one_by_one(data_dir, limit):
    def convert(example):
        image = tf.image.resize(tf.cast(example["image"], tf.float32), (4, 4))
        return {"image": image, "label": example["label"]}

    source = tfds.from_tfds(
        "tfdist_digits", "test", data_dir=data_dir, convert=convert, memory_limit_bytes=limit
    )
    assert source.element_spec["image"] == tf.TensorSpec([4, 4, 1], tf.float32)
    assert source.gather([0, 5])["image"].shape == (2, 4, 4, 1)


def test_three_processes_prepare_once(tmp_path):
    """Without the lock two of three crash on a rename (tensorflow/datasets)."""
    with open(tmp_path / "said", "ab") as said:
        program = ("-c", PREPARE, str(tmp_path / "data"))
        started = [forked_python.Program(*program, stdout=said, stderr=said) for _ in range(3)]
    try:
        codes = [process.wait(180) for process in started]
    finally:
        for process in started:
            process.kill()
    whole = (tmp_path / "said").read_text()
    assert codes == [0, 0, 0], whole
    assert whole.count("examples 355") == 3, whole
    assert whole.count("preparing dataset tfdist_digits in") == 1, whole


def test_a_timeout_while_preparing_names_the_other_process(tmp_path, caplog):
    caplog.set_level("INFO", logger="tfdist")
    with (
        exclusive(tmp_path / ".tfdist-tfdist_digits.lock", purpose="held", timeout_s=1),
        pytest.raises(StartupTimeout, match=f"preparing dataset .*: process {os.getpid()}"),
    ):
        tfds.from_tfds("tfdist_digits", "test", data_dir=tmp_path, prepare_timeout_s=0.05)
    assert f"waiting for process {os.getpid()}" in caplog.text


def of_no_fixed_shape(example):
    return example["image"][: tf.cast(example["label"], tf.int32)], example["label"]


def test_examples_of_no_fixed_shape_are_refused(data_dir):
    options = {"data_dir": data_dir, "convert": of_no_fixed_shape}
    told = refusal(lambda: tfds.from_tfds("tfdist_digits", "test", **options))
    assert told.code == "shapes-differ"


def test_unknown_datasets_and_splits_are_a_one_line_error(data_dir):
    told = refusal(lambda: tfds.from_tfds("tfdist_digit", "train", data_dir=data_dir))
    assert "did you mean 'tfdist_digits'" in told.problem
    with pytest.raises(TfdistError, match=r"^dataset tfdist_digits: .*tran.*train.*test") as raised:
        tfds.from_tfds("tfdist_digits", "tran", data_dir=data_dir)
    assert "\n" not in str(raised.value)


def test_a_dataset_without_a_supervised_pair_asks_for_convert(tmp_path):
    with tensorflow_datasets.testing.mock_data(num_examples=12, data_dir=str(tmp_path)):
        told = refusal(lambda: tfds.from_tfds("coco/2017", "train"))
    assert told.code == "unsupported-data"


def test_the_splits_hold_every_digit_once_and_repeatably(splits, tmp_path):
    (train, train_labels), (test, test_labels) = splits["train"], splits["test"]
    assert (train.shape, test.shape) == ((1442, 8, 8, 1), (355, 8, 8, 1))
    assert train.dtype == np.uint8
    labels = [*train_labels.tolist(), *test_labels.tolist()]
    ours = sorted(zip([image.tobytes() for image in [*train, *test]], labels, strict=True))
    original = load_digits()
    pixels = [image.astype(np.uint8).tobytes() for image in original.images]
    assert ours == sorted(zip(pixels, original.target.tolist(), strict=True))
    counts, of_test = (np.bincount(each, minlength=10) for each in (labels, test_labels))
    assert np.all(np.abs(of_test / counts - 0.2) < 0.01)
    state = random.getstate()
    again = everything(tfds.from_tfds("tfdist_digits", "test", data_dir=tmp_path))
    assert random.getstate() == state, "the run that prepares has initial weights of its own"
    assert np.array_equal(again[0], test)
    assert np.array_equal(again[1], test_labels)


def test_a_missing_scikit_learn_gives_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    told = refusal(lambda: tfds.from_tfds("tfdist_digits", "train", data_dir=tmp_path))
    assert told.code == "missing-package"
