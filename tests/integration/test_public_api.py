"""The public names: each resolves, and those that Keras has too take Keras' arguments."""

import inspect
import itertools
import json
from pathlib import Path

import keras
import pytest

import tfdist
from tests.refusals import refusal

KERAS = {
    tfdist.fit: keras.Model.fit,
    tfdist.evaluate: keras.Model.evaluate,
    tfdist.predict: keras.Model.predict,
    tfdist.load_weights: keras.Model.load_weights,
    tfdist.BackupAndRestore: keras.callbacks.BackupAndRestore,
    tfdist.ModelCheckpoint: keras.callbacks.ModelCheckpoint,
    tfdist.data.Normalization: keras.layers.Normalization,
    tfdist.data.RandomCrop: keras.layers.RandomCrop,
    tfdist.data.RandomFlip: keras.layers.RandomFlip,
    tfdist.data.Rescaling: keras.layers.Rescaling,
}
OTHER_DEFAULTS = {
    ("BackupAndRestore", "backup_dir"): None,  # in the run directory
    ("BackupAndRestore", "delete_checkpoint"): False,  # a finished run is not repeated
    ("RandomCrop", "height"): None,  # the image's own
    ("RandomCrop", "width"): None,
}


@pytest.mark.parametrize("name", tfdist.__all__)
def test_every_public_name_is_found(name):
    assert getattr(tfdist, name) is getattr(tfdist, name)


@pytest.mark.parametrize("ours", KERAS, ids=lambda ours: ours.__name__)
def test_keras_like_functions_keep_the_argument_order_of_keras(ours):
    def arguments(function):
        parameters = inspect.signature(function).parameters.values()
        return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]

    mine = [p for p in arguments(ours) if p.name != "model"]
    for expected, found in zip(arguments(KERAS[ours]), mine, strict=True):
        default = OTHER_DEFAULTS.get((ours.__name__, expected.name), expected.default)
        assert (found.name, found.default) == (expected.name, default)


def test_a_misspelled_name_is_an_attribute_error():
    with pytest.raises(TypeError, match="horizontl"):
        tfdist.data.RandomFlip(horizontl=True)
    with pytest.raises(AttributeError, match="Rescal"):
        tfdist.data.Rescal  # noqa: B018


def test_a_backup_without_a_path_uses_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.checkpoint.backup._in_run_dir", itertools.count(1))
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    assert tfdist.run_dir() == tmp_path
    backups = [tfdist.BackupAndRestore() for _ in range(3)]
    names = [backup.store.directory.relative_to(tmp_path).name for backup in backups]
    assert names == ["backup", "backup-2", "backup-3"]
    monkeypatch.delenv("TFDIST_RUN_DIR")
    config = {
        "cluster": {"worker": ["127.0.0.1:2222"]},
        "task": {"type": "worker", "index": 0},
        "tfdist": {"run_dir": "runs/a"},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert tfdist.run_dir() == Path("runs/a")
    monkeypatch.delenv("TF_CONFIG")
    for action in (tfdist.run_dir, tfdist.BackupAndRestore):
        error = refusal(action)
        assert (error.code, "TFDIST_RUN_DIR" in error.fix) == ("no-run-dir", True)
