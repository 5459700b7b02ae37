"""Versions of a model: histories without a process, and directories."""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.refusals import refusal
from tfdist import serve
from tfdist.serving.versions import (
    Drain,
    Model,
    Policy,
    Replica,
    StartReplica,
    find_models,
    find_versions,
    parse_policy,
)


def started(model: Model, version: int, *, first_id: int) -> Model:
    for index in range(model.replicas_wanted):
        replica = Replica(id=first_id + index, version=version, index=index)
        model = model.started(replica)
    return model


def served(version: int, replicas: int = 2) -> Model:
    """A model of which a version is served; the replicas are 1, 2 and so on."""
    model = Model(replicas_wanted=replicas).scanned({version: "a"})
    model = started(model, version, first_id=1)
    for id in range(1, replicas + 1):
        model = model.loaded(id)
    assert model.serving == version
    assert not model.actions()
    return model


def test_the_newest_version_is_started_and_served_when_all_replicas_are_ready():
    model = Model(replicas_wanted=2).scanned({1: "a", 10: "a", 9: "a"})
    assert model.actions() == [StartReplica(10, 0, 0.0), StartReplica(10, 1, 0.0)]
    model = started(model, 10, first_id=1).loaded(1)
    assert model.serving is None
    assert model.loaded(2).serving == 10


def test_a_new_version_is_loaded_beside_the_old_one_and_then_takes_over():
    model = served(1).scanned({1: "a", 2: "a"})
    assert model.actions() == [StartReplica(2, 0, 0.0), StartReplica(2, 1, 0.0)]
    model = started(model, 2, first_id=3).loaded(3)
    assert (model.serving, model.actions()) == (1, [])
    model = model.loaded(4)
    assert (model.serving, model.actions()) == (2, [Drain(1), Drain(2)])


def test_a_version_that_does_not_load_is_refused_with_its_reason():
    model = started(served(1).scanned({1: "a", 2: "a"}), 2, first_id=3)
    model = model.failed(3, "no variables")
    assert (model.serving, max(model.targets)) == (1, 1)
    assert model.actions() == [Drain(3), Drain(4)]
    states = {state.version: (state.state, state.message) for state in model.states}
    assert states == {1: ("AVAILABLE", ""), 2: ("END", "no variables")}
    assert max(model.scanned({1: "a", 2: "a"}).targets) == 1


def test_a_refused_version_is_tried_again_when_its_files_are_others():
    model = started(served(1).scanned({1: "a", 2: "a"}), 2, first_id=3)
    model = model.failed(3, "no variables").draining(3).draining(4)
    assert model.scanned({1: "a", 2: "b"}).actions() == [
        StartReplica(2, 0, 0.0),
        StartReplica(2, 1, 0.0),
    ]


def test_a_version_whose_replicas_keep_dying_while_they_load_is_refused():
    model = served(1).scanned({1: "a", 2: "a"})
    for id in (3, 4, 5):
        assert max(model.targets) == 2
        model = model.started(Replica(id=id, version=2, index=0))
        model = model.ended(id, "was killed by SIGSEGV")
    assert max(model.targets) == 1
    assert "SIGSEGV" in model.refused[2]


def test_removing_the_newest_rolls_back():
    model = served(2).scanned({1: "a"})
    assert (model.serving, max(model.targets)) == (2, 1)
    assert model.actions() == [StartReplica(1, 0, 0.0), StartReplica(1, 1, 0.0)]
    model = started(model, 1, first_id=3).loaded(3).loaded(4)
    assert (model.serving, model.actions()) == (1, [Drain(1), Drain(2)])


def test_when_all_versions_are_removed_the_last_one_goes_on():
    model = served(1).scanned({})
    assert (model.serving, max(model.targets), model.actions()) == (1, 1, [])


def test_a_dead_replica_is_replaced_and_waits_longer_each_time():
    model = served(1).ended(2, "was killed")
    waits = list[float]()
    for id in range(3, 12):
        (start,) = model.actions()
        assert isinstance(start, StartReplica)
        waits.append(start.wait_s)
        model = model.started(Replica(id=id, version=1, index=1)).ended(id, "was killed")
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.05, 30.0)
    assert (model.serving, dict(model.refused)) == (1, {})
    (start,) = model.started(Replica(id=20, version=1, index=1)).loaded(20).ended(20, "x").actions()
    assert start == StartReplica(1, 1, 0.05)


def make_version(directory: Path, version: str) -> None:
    (directory / version).mkdir(parents=True)
    (directory / version / "saved_model.pb").write_bytes(b"")


def test_versions_are_directories_that_are_numbers_and_hold_a_model(tmp_path):
    for name in ("1", "20", ".partial-3", "x4", "99999999999999999999"):
        make_version(tmp_path, name)
    (tmp_path / "5").mkdir()
    (tmp_path / "6").write_text("")
    assert set(find_versions(tmp_path)) == {1, 20}


def test_other_files_of_one_version_have_another_mark(tmp_path):
    make_version(tmp_path, "1")
    marks = [find_versions(tmp_path)]
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"more")
    marks.append(find_versions(tmp_path))
    (tmp_path / "1" / "variables").mkdir()
    (tmp_path / "1" / "variables" / "variables.index").write_bytes(b"late")
    marks.append(find_versions(tmp_path))
    assert len({mark[1] for mark in marks}) == 3


def test_a_directory_is_a_model_or_holds_models(tmp_path):
    make_version(tmp_path / "digits", "1")
    make_version(tmp_path / "letters", "1")
    (tmp_path / "empty").mkdir()
    assert set(find_models(tmp_path)) == {"digits", "letters"}
    assert set(find_models(tmp_path, "letters")) == {"letters"}
    assert find_models(tmp_path / "digits") == {"digits": tmp_path / "digits"}
    assert set(find_models(tmp_path / "digits", "d")) == {"d"}


@pytest.mark.parametrize(
    ("versions", "labels", "chosen"),
    [
        ("latest:1", [], {5}),
        ("latest:2", [], {4, 5}),
        ("all", [], {1, 3, 4, 5}),
        ("3,4,9", [], {3, 4}),
        ("latest:1", ["stable=3", "old=1"], {1, 3, 5}),
        ("4", ["stable=3", "gone=2"], {3, 4}),
    ],
)
def test_a_policy_chooses_versions(versions, labels, chosen):
    assert parse_policy(versions, labels).choose([1, 3, 4, 5]) == chosen


@pytest.mark.parametrize(
    ("versions", "label", "code"),
    [
        ("latest:0", "a=1", "not-a-policy"),
        ("newest", "a=1", "not-a-policy"),
        ("3,", "a=1", "not-a-policy"),
        ("all", "a", "not-a-label"),
        ("all", "a/b=1", "not-a-label"),
    ],
)
def test_what_is_no_policy(versions, label, code):
    assert refusal(lambda: parse_policy(versions, [label])).code == code


def test_of_two_versions_the_older_one_stays_until_the_new_one_is_ready():
    model = Model(replicas_wanted=1, policy=Policy(latest=2)).scanned({1: "a", 2: "a"})
    for version in (1, 2):
        model = started(model, version, first_id=version).loaded(version)
    assert (model.serving, model.served, model.actions()) == (2, {1, 2}, [])
    model = started(model.scanned({1: "a", 2: "a", 3: "a"}), 3, first_id=3)
    assert (model.served, model.actions()) == ({1, 2}, [])
    model = model.loaded(3)
    assert (model.serving, model.served, model.actions()) == (3, {2, 3}, [Drain(1)])


def test_a_label_that_is_moved_keeps_its_version():
    model = served(1, replicas=1).scanned({1: "a", 2: "a"})
    model = model.governed(Policy(labels={"stable": 1}))
    model = started(model, 2, first_id=2).loaded(2)
    assert (model.serving, model.served, model.actions()) == (2, {1, 2}, [])
    moved = model.governed(Policy(labels={"stable": 2}))
    assert (moved.served, moved.labels, moved.actions()) == ({2}, {"stable": 2}, [Drain(1)])


def test_a_label_names_its_old_version_until_the_new_one_is_served():
    model = served(3, replicas=1).scanned({1: "a", 2: "a", 3: "a"})
    model = model.governed(Policy(labels={"stable": 1}))
    model = started(model, 1, first_id=2).loaded(2).governed(Policy(labels={"stable": 2}))
    assert (model.served, model.labels) == ({1, 3}, {"stable": 1})
    model = started(model, 2, first_id=3).loaded(3)
    assert (model.served, model.labels, model.actions()) == ({2, 3}, {"stable": 2}, [Drain(2)])


def test_a_directory_that_may_not_be_read_is_no_model(tmp_path, monkeypatch):
    make_version(tmp_path / "m", "1")
    (tmp_path / "lost+found").mkdir()
    iterdir = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    assert find_models(tmp_path) == {"m": tmp_path / "m"}


def test_a_cluster_of_ray_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    def init(**options: object) -> None:
        raise ConnectionError("cannot reach the cluster\nat 10.0.0.1:6379")

    ray = MagicMock(init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", ray.serve)
    monkeypatch.delitem(sys.modules, "tfdist.serving.on_ray", raising=False)
    make_version(tmp_path / "m", "1")
    assert serve.main([str(tmp_path), "--on", "ray"]) == 1
    del sys.modules["tfdist.serving.on_ray"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"Ray has not deployed {tmp_path}: at 10.0.0.1:6379")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--on", "ray"], "Fix: pip install 'ray[serve]' 'tfdist[serving]'"),
        (["--on", "ray", "--token", __file__], "--token: received it with --on ray"),
        (["--on", "ray", "--rest_port", "65536"], "--rest_port: received 65536; expected a port"),
        (["--versions", "two"], "--versions: received 'two'"),
        (["--tls_cert", __file__, "--tls_key", __file__], "--tls_cert: received "),
        (["--access_log", "no/such/directory/log"], "--access_log: received no/such/directory/"),
    ],
)
def test_a_service_that_cannot_be_is_one_line(tmp_path, flags, text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert serve.main([str(tmp_path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_directory_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path, capsys):
    flags = ["--rest_port", "0", "--grpc_port", "0"]
    assert serve.main([str(tmp_path / "nothere"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothere (no such directory)" in line
