"""The digits: a real TFDS builder that needs no download."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tfdist.data.digits
from tfdist.data import tfds
from tfdist.errors import UsageError

IN_A_FRESH_PROCESS = """
import tensorflow_datasets
import tfdist.data.digits
dataset, info = tensorflow_datasets.load(
    "tfdist_digits", split="train", as_supervised=True, with_info=True)
image, label = next(iter(dataset))
print(len(dataset), image.shape, image.dtype.name, info.features["label"].num_classes)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorflow_datasets")


@pytest.fixture(scope="module")
def splits(data_dir):
    found = {}
    for split in ("train", "test"):
        source = tfds.load("tfdist_digits", split, data_dir=data_dir)
        x, y = source.gather(np.arange(source.num_examples))
        found[split] = (np.asarray(x), np.asarray(y))
    return found


def test_both_splits_hold_every_digit_of_scikit_learn_once(splits):
    from sklearn.datasets import load_digits

    images = np.concatenate([splits["train"][0], splits["test"][0]])
    labels = np.concatenate([splits["train"][1], splits["test"][1]])
    assert images.shape == (1797, 8, 8, 1)
    assert images.dtype == np.uint8
    assert images.max() == 16
    original = load_digits()
    ours = sorted(zip([image.tobytes() for image in images], labels.tolist(), strict=True))
    pixels = [image.astype(np.uint8).tobytes() for image in original.images]
    assert ours == sorted(zip(pixels, original.target.tolist(), strict=True))


def test_about_a_fifth_of_each_digit_is_for_testing(splits):
    train, test = (np.bincount(splits[split][1], minlength=10) for split in ("train", "test"))
    assert (len(splits["train"][0]), len(splits["test"][0])) == (1442, 355)
    assert np.all(np.abs(test / (train + test) - 0.2) < 0.01)


def test_the_splits_are_the_same_every_time(splits, tmp_path):
    again = tfds.load("tfdist_digits", "test", data_dir=tmp_path)
    x, y = again.gather(np.arange(again.num_examples))
    assert np.array_equal(x, splits["test"][0])
    assert np.array_equal(y, splits["test"][1])


def test_tfds_load_works_in_a_fresh_process_and_writes_nothing_into_the_package(tmp_path):
    package = Path(tfdist.data.digits.__file__).parent
    before = sorted(path.name for path in package.iterdir())
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFDS_DATA_DIR": str(tmp_path / "data"),
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1442 (8, 8, 1) uint8 10"
    assert (tmp_path / "data" / "tfdist_digits" / "1.0.0").is_dir()
    assert sorted(path.name for path in package.iterdir()) == before


def test_without_scikit_learn_the_line_to_type_is_given(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r'pip install "tfdist\[digits\]"'):
        tfds.load("tfdist_digits", "train", data_dir=tmp_path)
