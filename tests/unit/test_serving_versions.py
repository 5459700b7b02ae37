"""Versions of a model: histories without a process, and directories."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.refusals import refusal
from tfdist import serve
from tfdist.serving.versions import Model, Policy, find_models, find_versions, parse_policy


def plan(model: Model, first_id: int = 1) -> tuple[Model, list[tuple[int, int]], list[int]]:
    """The model as planned, version and index of the replicas to start, and those to drain."""
    model, starts, drains = model.plan(itertools.count(first_id))
    return model, [(one.version, one.index) for one in starts], drains


def served(version: int, replicas: int = 2) -> Model:
    """A model of which a version is served; the replicas are 1, 2 and so on."""
    model, *_ = plan(Model(replicas_wanted=replicas).scanned({version: "a"}))
    for id in range(1, replicas + 1):
        model = model.loaded(id)
    assert model.status.serving == version
    assert plan(model)[1:] == ([], [])
    return model


def test_the_newest_version_is_started_and_served_when_all_replicas_are_ready():
    model = Model(replicas_wanted=2).scanned({1: "a", 10: "a", 9: "a"})
    model, starts, _ = plan(model)
    assert starts == [(10, 0), (10, 1)]
    assert model.loaded(1).status.serving is None
    assert model.loaded(1).loaded(2).status.serving == 10


def test_a_new_version_is_loaded_beside_the_old_one_and_then_takes_over():
    model, starts, drains = plan(served(1).scanned({1: "a", 2: "a"}), 3)
    assert (starts, drains) == ([(2, 0), (2, 1)], [])
    model = model.loaded(3)
    assert (model.status.serving, *plan(model)[1:]) == (1, [], [])
    model = model.loaded(4)
    assert (model.status.serving, *plan(model)[1:]) == (2, [], [1, 2])


def test_a_version_that_is_being_loaded_is_served_before_a_newer_one_is_loaded():
    loading, *_ = plan(served(1).scanned({1: "a", 2: "a"}), 3)
    model, starts, drains = plan(loading.scanned({1: "a", 2: "b", 3: "a"}), 5)
    assert (starts, drains) == ([], [])
    model = model.loaded(3).loaded(4)
    assert model.status.serving == 2
    assert plan(model.scanned({1: "a", 2: "b", 3: "a"}))[1] == [(3, 0), (3, 1)]
    assert plan(loading.scanned({1: "a"}))[1:] == ([], [3, 4]), "its files have gone"
    refused, *_ = plan(loading.scanned({1: "a", 2: "b"}).failed(3, "half a file"))
    again = refused.scanned({1: "a", 2: "b"})
    assert plan(again)[1] == [(2, 0), (2, 1)], "its files were copied meanwhile"


def test_a_version_that_does_not_load_is_refused_until_its_files_are_others():
    model, *_ = plan(served(1).scanned({1: "a", 2: "a"}), 3)
    model = model.failed(3, "no variables")
    assert (model.status.serving, max(model.targets)) == (1, 1)
    states = {state.version: (state.state, state.message) for state in model.status.states}
    assert states == {1: ("AVAILABLE", ""), 2: ("END", "no variables")}
    model, starts, drains = plan(model)
    assert (starts, drains) == ([], [3, 4])
    assert plan(model.scanned({1: "a", 2: "a"}))[1] == []
    assert plan(model.scanned({1: "a", 2: "b"}))[1] == [(2, 0), (2, 1)]


def test_a_version_whose_replicas_keep_dying_while_they_load_is_refused():
    model = served(1, replicas=1).scanned({1: "a", 2: "a"})
    for id in (3, 4, 5):
        assert max(model.targets) == 2
        model = plan(model, id)[0].ended(id, "was killed by SIGSEGV")
    assert max(model.targets) == 1
    assert "SIGSEGV" in model.refused[2]


def test_removing_the_newest_rolls_back():
    model = served(2).scanned({1: "a"})
    assert (model.status.serving, max(model.targets)) == (2, 1)
    model, starts, _ = plan(model, 3)
    assert starts == [(1, 0), (1, 1)]
    model = model.loaded(3).loaded(4)
    assert (model.status.serving, *plan(model)[1:]) == (1, [], [1, 2])


def test_when_all_versions_are_removed_the_last_one_goes_on():
    model = served(1).scanned({})
    assert (model.status.serving, max(model.targets), *plan(model)[1:]) == (1, 1, [], [])
    model = model.ended(1, "was killed").scanned({})
    assert (model.status.serving, *plan(model)[1:]) == (1, [], [])
    model = model.ended(2, "was killed").scanned({})
    assert (model.status.serving, model.targets, *plan(model)[1:]) == (None, set(), [], [])


def test_a_dead_replica_is_replaced_and_waits_longer_each_time():
    model = served(1).ended(2, "was killed")
    waits = list[float]()
    for id in range(3, 12):
        model, (start,), _ = model.plan(itertools.count(id))
        waits.append(start.wait_s)
        model = model.ended(id, "was killed")
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.05, 30.0)
    assert (model.status.serving, dict(model.refused)) == (1, {})
    model = plan(model, 20)[0].loaded(20).ended(20, "x")
    _, (start,), _ = model.plan(itertools.count(21))
    assert (start.version, start.index, start.wait_s) == (1, 1, 0.05)


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
    model = plan(model)[0].loaded(1).loaded(2)
    assert (model.status.serving, model.served, *plan(model)[1:]) == (2, {1, 2}, [], [])
    model, *_ = plan(model.scanned({1: "a", 2: "a", 3: "a"}), 3)
    assert (model.served, *plan(model)[1:]) == ({1, 2}, [], [])
    model = model.loaded(3)
    assert (model.status.serving, model.served, *plan(model)[1:]) == (3, {2, 3}, [], [1])


def test_a_label_that_is_moved_keeps_its_version():
    model = served(1, replicas=1).scanned({1: "a", 2: "a"})
    model = plan(model.with_policy(Policy(labels={"stable": 1})), 2)[0].loaded(2)
    assert (model.status.serving, model.served, *plan(model)[1:]) == (2, {1, 2}, [], [])
    moved = model.with_policy(Policy(labels={"stable": 2}))
    assert (moved.served, moved.labels, *plan(moved)[1:]) == ({2}, {"stable": 2}, [], [1])


def test_a_label_names_its_old_version_until_the_new_one_is_served():
    model = served(3, replicas=1).scanned({1: "a", 2: "a", 3: "a"})
    model = plan(model.with_policy(Policy(labels={"stable": 1})), 2)[0].loaded(2)
    model = model.with_policy(Policy(labels={"stable": 2}))
    assert (model.served, model.labels) == ({1, 3}, {"stable": 1})
    model = plan(model, 3)[0].loaded(3)
    assert (model.served, model.labels, *plan(model)[1:]) == ({2, 3}, {"stable": 2}, [], [2])


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


@pytest.mark.parametrize(
    ("flags", "hang_s"),
    [([], 15), (["--timeout_s=120"], 60), (["--timeout_s=1"], 5), (["--hang_s=40"], 40)],
)
def test_a_request_has_as_long_again_when_its_replica_hangs(flags, hang_s):
    options = serve._parser().parse_args(["served", *flags])
    serve._check(options)
    assert serve._settings(options).limits.hang_s == hang_s


def test_a_directory_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path, capsys):
    flags = ["--rest_port", "0", "--grpc_port", "0"]
    assert serve.main([str(tmp_path / "nothere"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothere (no such directory)" in line
