"""Checkpoints and models in a bucket: `memory://`, and a file system that fails."""

import logging
from pathlib import Path
from unittest.mock import Mock

import fsspec
import keras
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import tfdist
from tests.models import AtStep, Cut, bits, classifier
from tests.refusals import refusal, refused
from tfdist.checkpoint import CheckpointStore, remote
from tfdist.errors import TfdistError

RNG = np.random.RandomState(0)
X = RNG.randn(60, 4).astype("float32")
Y = RNG.randint(0, 3, 60)
URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _empty_bucket(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(remote, "_RETRY_S", 0.001)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that moves the process to a machine of a name, which has a disk of its own."""
    return lambda name: monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path / name))


def make(strategies):
    return classifier(strategies[1], lambda: keras.optimizers.Adam(0.05))


def fit(model, *more, url=URL, epochs=2, **options):
    backup = tfdist.BackupAndRestore(url, save_freq=4, **options)
    tfdist.fit(model, X, Y, batch_size=6, epochs=epochs, seed=5, verbose=0,
               callbacks=[backup, *more])  # fmt: skip
    return backup


def in_bucket(url=URL):
    """The checkpoints in the bucket, with their files."""
    system, root = fsspec.core.url_to_fs(url)
    found = [path[len(root) + 1 :].split("/") for path in system.find(root)]
    return {
        parts[0]: {p[1] for p in found if p[0] == parts[0]}
        for parts in found
        if parts[0].startswith("step-")
    }


def failing(monkeypatch, method, fails):
    """Let a method of the file system raise if `fails` of its arguments."""
    original = getattr(MemoryFileSystem, method)

    def call(self, *args, **options):
        if fails(*args):
            raise ConnectionError("bucket is unreachable")
        return original(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, method, call)


def test_a_run_resumes_bit_identically_on_another_machine(strategies, machine, monkeypatch, caplog):
    order = []
    failing(monkeypatch, "put_file", lambda local, path: order.append(path.rpartition("/")[2]))
    machine("whole")
    whole = make(strategies)
    fit(whole, url="memory://bucket/whole")
    assert order[:4] == ["arrays.bin", "manifest.json"] * 2
    machine("a")
    with pytest.raises(Cut):
        fit(make(strategies), AtStep(14))
    assert max(in_bucket()) == "step-000000012.4"
    machine("b")
    resumed = make(strategies)
    backup = fit(resumed)
    assert f"resumes at step 12 (epoch 2) from {URL}" in caplog.messages
    assert bits(resumed) == bits(whole)
    assert backup.store.steps() == [12, 16, 20][-3:]
    assert set(in_bucket()) == {f"step-{step:09d}.{n}" for step, n in ((12, 4), (16, 5), (20, 6))}
    assert all(files == {"arrays.bin", "manifest.json"} for files in in_bucket().values())


def test_training_continues_while_the_bucket_is_unreachable(
    strategies, machine, monkeypatch, caplog
):
    machine("a")
    failures = iter([True] * 5)
    failing(monkeypatch, "put_file", lambda *_: next(failures, False))
    with caplog.at_level(logging.INFO):
        fit(make(strategies), epochs=1)
    (warning,) = [r.message for r in caplog.records if "was not uploaded" in r.message]
    assert "bucket is unreachable" in warning
    assert "uploads succeed again" in caplog.text
    assert max(in_bucket()) == "step-000000010.3"


def test_the_next_start_uploads_the_last_local_checkpoint(strategies, machine, monkeypatch, caplog):
    machine("a")
    with monkeypatch.context() as broken:
        failing(broken, "put_file", lambda *_: True)
        backup = fit(make(strategies), epochs=1)
    assert backup.store.steps() == [4, 8, 10]
    (error,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert str(backup.store.directory) in error
    assert in_bucket() == {}
    fit(make(strategies), epochs=1)
    assert max(in_bucket()) == "step-000000010.3"


def test_an_unwritable_bucket_is_an_error_before_training(strategies, machine, monkeypatch, caplog):
    machine("a")
    with monkeypatch.context() as broken:
        failing(broken, "pipe_file", lambda *_: True)
        with pytest.raises(
            TfdistError, match=r"^memory://bucket/run cannot be written: Conn"
        ) as one:
            fit(make(strategies), epochs=1)
        assert "\n" not in str(one.value)
    fit(make(strategies), epochs=1)
    failing(monkeypatch, "pipe_file", lambda *_: True)
    fit(make(strategies), epochs=2)  # the local checkpoints are there
    assert "using the checkpoints in" in caplog.text


@pytest.fixture
def store(tmp_path):
    """A function that returns a store of a name and its copy in the bucket."""

    def make(name, **options):
        local = CheckpointStore(tmp_path / name, **options)
        local.prepare()
        copy = remote.RemoteCheckpoints(URL, local)
        copy.fetch()
        return local, copy

    return make


def saved(local, copy, step, *, best=False):
    copy.upload(local.write(step, {"a": np.full(3, step)}, meta={}, best=best).name)
    copy.close()


def test_a_planted_link_is_not_uploaded(store, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".writer").symlink_to(tmp_path / "secret")
    saved(*store("a"), 1)
    system, root = fsspec.core.url_to_fs(URL)
    written = [system.cat_file(f"{root}/{name}") for name in ("writer", "claims/000000001")]
    assert written == [(tmp_path / "a" / ".writer").read_bytes()] * 2
    assert b"secret" not in written
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_second_writer_is_refused(store):
    (first, copy), (second, other) = store("a"), store("b")
    saved(first, copy, 10)
    saved(second, other, 20)
    error = refusal(other.raise_error)
    assert (error.where, error.code) == (f"checkpoints in {URL}", "second-writer")
    saved(first, copy, 30)
    copy.raise_error()
    assert list(in_bucket()) == ["step-000000010.1", "step-000000030.2"]
    third, last = store("c")  # it starts after the others, and continues
    assert third.steps() == [30]
    saved(third, last, 40)
    assert max(in_bucket()) == "step-000000040.3"
    saved(first, copy, 40)
    assert refusal(copy.raise_error).code == "second-writer"


def test_local_copies_of_deleted_checkpoints_are_not_resumed(store, caplog):
    local, copy = store("a")
    for step in (1, 2):
        saved(local, copy, step)
    local.close()
    system, root = fsspec.core.url_to_fs(URL)
    system.rm(root, recursive=True)
    local, copy = store("a")
    assert local.steps() == []
    assert f"moved the local step-000000001.1, step-000000002.2 to {local.directory}" in caplog.text
    saved(local, copy, 3)
    assert list(in_bucket()) == ["step-000000003.1"]
    local.close()
    assert store("a")[0].steps() == [3]


def test_a_later_run_of_another_machine_is_continued(store, caplog):
    first, copy = store("a")
    saved(first, copy, 1)
    for step in (2, 3, 4):  # the bucket is unreachable
        first.write(step, {"a": np.full(3, step)}, meta={})
    first.close()
    second, other = store("b", keep=1)
    saved(second, other, 5)
    first, copy = store("a")
    assert first.steps() == [5]
    assert sorted(path.name for path in first.directory.glob("old-1/*")) == [
        f"step-{step:09d}.{step}" for step in (2, 3, 4)
    ]
    assert caplog.text.count("removed or continued elsewhere") == 1
    for step in (6, 7):  # no other machine continues: the local checkpoints count
        second.write(step, {"a": np.full(3, step)}, meta={})
    second.close()
    second, other = store("b", keep=1)
    assert second.steps() == [7]


def test_an_upload_that_is_slower_than_the_saves_is_complete(store, monkeypatch, caplog):
    local, copy = store("a", keep=1)

    def save_more(path, _):
        for step in (2, 3) if path.endswith("arrays.bin") else ():
            local.write(step, {"a": np.full(3, step)}, meta={})

    failing(monkeypatch, "put_file", save_more)
    saved(local, copy, 1)
    assert in_bucket() == {"step-000000001.1": {"arrays.bin", "manifest.json"}}
    assert "not uploaded" not in caplog.text
    assert local.steps() == [3]


def test_the_bucket_keeps_the_newest_checkpoints_and_the_best(store):
    local, copy = store("a", keep=2)
    for step in range(1, 6):
        saved(local, copy, step, best=step == 2)
    assert sorted(in_bucket()) == [f"step-{n:09d}.{n}" for n in (2, 4, 5)]
    with remote.local_copy(URL, best=True) as path:
        assert CheckpointStore(path).steps() == [2]


def test_only_complete_and_intact_checkpoints_are_downloaded(store, caplog):
    local, copy = store("a")
    for step in (1, 2, 3):
        saved(local, copy, step)
    system, root = fsspec.core.url_to_fs(URL)
    system.rm_file(f"{root}/step-000000003.3/manifest.json")
    system.pipe_file(f"{root}/step-000000002.2/arrays.bin", b"damaged")
    other, copy = store("b")
    assert other.steps() == [1]
    assert "step-000000002.2 is damaged" in caplog.text
    saved(other, copy, 4)
    assert "step-000000004.4" in in_bucket()


def test_the_bucket_counts_if_all_local_copies_are_damaged(strategies, machine, caplog):
    machine("a")
    first = fit(make(strategies), epochs=1)
    for arrays in first.store.directory.glob("step-*/arrays.bin"):
        arrays.write_bytes(b"x" * arrays.stat().st_size)
    fit(make(strategies), epochs=1)
    assert "no readable checkpoint" in caplog.text
    assert "the run already finished at step 10" in caplog.text


def test_models_are_written_to_and_read_from_a_bucket(strategies, machine, monkeypatch, caplog):
    machine("a")
    model = make(strategies)
    saver = tfdist.ModelCheckpoint("memory://bucket/{epoch}/m.keras")
    fit(model, saver, epochs=1, best="loss")
    for path, options in (
        ("memory://bucket/1/m.keras", {}),
        (URL, {}),
        (URL, {"best": True}),
    ):
        other = make(strategies)
        tfdist.load_weights(other, path, **options)
        np.testing.assert_equal(other.get_weights(), model.get_weights())
    before = other.get_weights()
    fit(model, saver, url="memory://bucket/second", epochs=1)  # a second fit with the callback
    tfdist.load_weights(other, "memory://bucket/1/m.keras")
    np.testing.assert_equal(other.get_weights(), model.get_weights())
    assert not np.array_equal(before[0], other.get_weights()[0])
    failing(monkeypatch, "put_file", lambda *_: True)
    tfdist.fit(
        model, X, Y, verbose=0, callbacks=[tfdist.ModelCheckpoint("memory://bucket/n.keras")]
    )
    (warning,) = [r.message for r in caplog.records if "the model is in " in r.message]
    keras.models.load_model(warning.rpartition("the model is in ")[2])


def test_an_unreadable_url_is_a_one_line_error(strategies, monkeypatch):
    model = make(strategies)
    load = tfdist.load_weights
    assert refused(lambda: load(model, URL)) == (f"checkpoints in {URL}", "no-checkpoint")
    assert refused(lambda: tfdist.BackupAndRestore("s4://b"))[1] == "unknown-value"
    monkeypatch.setattr(MemoryFileSystem, "isfile", Mock(side_effect=ConnectionError("refused")))
    with pytest.raises(
        TfdistError, match=r"^memory://m.keras cannot be read: ConnectionError: ref"
    ):
        load(model, "memory://m.keras")


def test_a_path_made_from_a_url_is_refused(tmp_path, monkeypatch, machine, strategies):
    monkeypatch.chdir(tmp_path)
    machine("here")
    model, path = make(strategies), Path(URL)
    where = ("memory:/bucket/run", "path-of-url")
    assert refused(lambda: tfdist.BackupAndRestore(path)) == where
    assert refused(lambda: tfdist.export_model(model, path)) == where
    assert refused(lambda: tfdist.load_weights(model, path)) == where
    saver = tfdist.ModelCheckpoint(path / "m.keras")
    name = "memory:/bucket/run/m.keras"
    assert refused(lambda: fit(model, saver, url=URL, epochs=1)) == (name, "path-of-url")
    assert not Path("memory:").exists()
