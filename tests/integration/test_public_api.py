"""The public names: each resolves, and those that Keras has too take Keras' arguments."""

import inspect
import itertools
import json
import operator
import re
from pathlib import Path

import keras
import pytest

import tfdist
from tests.refusals import refusal
from tfdist import __main__ as programs
from tfdist import top
from tfdist.configs import command_line
from tfdist.errors import UsageError
from tfdist.find.learning_rate import read
from tfdist.launch import options
from tfdist.renamed import GONE, RENAMED

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


def use(old):
    """Call a name in dotted form with an argument, such as ``load_weights(path=)``."""
    name, _, argument = old.rstrip("=)").partition("(")
    operator.attrgetter(name)(tfdist)(**{argument: 1})


def test_an_old_name_is_refused_with_the_new_one():
    fixes = {old: f"write {new}" for old, new in RENAMED.items()}
    fixes |= {old: f"use {new}" for old, new in GONE.items() if "(" in old}
    for old, fix in fixes.items():
        error = refusal(lambda old=old: use(old))
        assert (error.where, error.code, error.fix) == (f"tfdist.{old}", "renamed", fix)
    with pytest.raises(TypeError, match="horizontl"):
        tfdist.data.RandomFlip(horizontl=True)
    with pytest.raises(AttributeError, match="Rescal"):
        tfdist.data.Rescal  # noqa: B018


def test_a_removed_program_flag_or_name_tells_its_replacement(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for old, new in GONE.items():
        if old.startswith("tfdist "):
            assert programs.main(old.split()[1:]) == 2
            assert capsys.readouterr().err.rstrip().endswith(f"was removed. Fix: use {new}")
        elif old.startswith("--config."):
            assert refused_by(command_line.parse, [f"{old}=1"], capsys).endswith(f"Fix: use {new}")
        elif old.startswith("--"):
            for parse in (options.parse, lambda words: top.main(words)):
                error = refused_by(parse, [f"{old}=1", "a.py"], capsys)
                assert error.endswith(f"Fix: use {new}"), error
        elif "(" not in old:
            _, of_rates, name = old.rpartition("LearningRates.")
            owner = read([1.0], [1.0], smoothing=0) if of_rates else tfdist
            with pytest.raises(AttributeError, match=re.escape(f"Fix: use {new}")):
                operator.attrgetter(name)(owner)


def refused_by(parse, words, capsys):
    """The one line of an error, which a parser raises and a program prints."""
    try:
        parse(words)
    except UsageError as error:
        return str(error)
    return capsys.readouterr().err.rstrip()


def test_each_old_name_is_on_the_migration_page():
    page = (Path(__file__).parents[2] / "docs/migrate/from_0_2.md").read_text()
    assert [old for old in (*RENAMED, *GONE) if f"| `{old}` |" not in page] == []


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
