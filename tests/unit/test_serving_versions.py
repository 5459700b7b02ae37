"""Versions of a model: histories without a process, and directories."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tfdist import serve
from tfdist.serving.model_versions import Model, find_models, find_versions

# Each line has what happens to a model, and what it does then: the replicas that are started, as
# VERSION:NUMBER, those that are drained, the version that is served, or refused.
HISTORIES = {
    "two_replicas_of_the_newest_version_are_served_when_both_are_ready": """
        scan 1 10 9     | start 10:1 start 10:2
        loaded 1        |
        loaded 2        | serve 10
        scan 11 10      | start 11:3 start 11:4
        loaded 3        |
        loaded 4        | drain 1 drain 2 serve 11
    """,
    "what_is_being_loaded_is_served_before_a_newer_version_is_loaded": """
        scan 1          | start 1:1
        loaded 1        | serve 1
        scan 1 2        | start 2:2
        scan 1 2b 3     |
        loaded 2        | drain 1 serve 2
        scan 1 2b 3     | start 3:3
    """,
    "what_does_not_load_or_goes_is_tried_again_when_its_files_are_others": """
        scan 1          | start 1:1
        loaded 1        | serve 1
        scan 1 2        | start 2:2
        scan 1          | drain 2
        scan 1 2        | start 2:3
        scan 1 2b       |
        failed 3        | drain 3 refuse 2
        scan 1 2        |
        scan 1 2b       | start 2:4
    """,
    "a_version_whose_replicas_keep_dying_while_they_load_is_refused": """
        scan 1          | start 1:1
        loaded 1        | serve 1
        scan 1 2        | start 2:2
        ended 2         | start 2:3
        ended 3         | start 2:4
        ended 4         | refuse 2
    """,
    "when_all_versions_are_removed_the_last_one_goes_on": """
        scan 1          | start 1:1
        loaded 1        | serve 1
        scan            |
        ended 1         |
        scan            | serve
    """,
}


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name):
    model, ids = Model(replicas_wanted=2 if name.startswith("two") else 1), itertools.count(1)
    for line in HISTORIES[name].strip().splitlines():
        event, expected = map(str.strip, line.split("|"))
        what, *words = event.split()
        before = model
        if what == "scan":
            model = model.scanned({int(word.rstrip("b")): word for word in words})
        else:
            model = getattr(model, what)(int(words[0]), *(() if what == "loaded" else ("why",)))
        model, starts, drains = model.plan(ids)
        done = [f"start {one.version}:{one.id}" for one in starts]
        done += [f"drain {id}" for id in drains]
        status = model.status
        if status.served != before.served:
            done.append(f"serve {status.served or ''}".strip())
        ended = {one.version for one in status.states if one.state == "END"}
        done += [f"refuse {version}" for version in ended - before.refused.keys()]
        assert " ".join(done) == expected, line


def test_a_failing_replica_waits_longer_each_time():
    model, ids = Model(replicas_wanted=1).scanned({1: "1"}), itertools.count(1)
    waits = list[float]()
    for id in range(1, 12):
        model, (start,), _ = model.plan(ids)
        waits.append(start.wait_s)
        model = (model.loaded(id) if id in (1, 11) else model).ended(id, "was killed")
    assert waits[:2] == [0.0, 0.05]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0
    _, (start,), _ = model.plan(ids)
    assert (start.version, start.wait_s) == (1, 0.05)


def make_version(directory: Path, version: str) -> None:
    (directory / version).mkdir(parents=True)
    (directory / version / "saved_model.pb").write_bytes(b"")


def test_versions_are_numbered_directories_with_a_model(tmp_path):
    largest, too_large = str(2**63 - 1), str(2**63)
    for name in ("1", "020", ".partial-3", "x4", "٣", largest, too_large):
        make_version(tmp_path, name)
    (tmp_path / "5").mkdir()
    (tmp_path / "6").write_text("")
    assert set(find_versions(tmp_path)) == {1, 20, int(largest)}


def test_other_files_of_one_version_have_another_mark(tmp_path):
    make_version(tmp_path / "variables", "1")
    marks = set()
    files = ("saved_model.pb", "variables/variables.index", "variables/variables.data", "assets/a")
    for file in files:
        path = tmp_path / "variables" / "1" / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"late")
        marks.add(find_versions(tmp_path / "variables")[1])
    assert len(marks) == 4


def test_unreadable_directories_are_skipped_when_finding_models(tmp_path, monkeypatch):
    make_version(tmp_path / "digits", "1")
    make_version(tmp_path / "letters", "1")
    for name in ("empty", "lost+found"):
        (tmp_path / name).mkdir()
    iterdir = Path.iterdir

    def refusing(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    assert set(find_models(tmp_path)) == {"digits", "letters"}
    assert set(find_models(tmp_path, "letters")) == {"letters"}
    assert find_models(tmp_path / "digits") == {"digits": tmp_path / "digits"}
    assert set(find_models(tmp_path / "digits", "d")) == {"d"}


def test_a_missing_directory_is_a_one_line_error(tmp_path, capsys):
    assert serve.main([str(tmp_path / "none")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"cannot read {tmp_path}/none: No such file or directory")


@pytest.mark.parametrize(
    ("flags", "hang_s"),
    [([], 15), (["--timeout_s=120"], 60), (["--timeout_s=1"], 5), (["--hang_s=40"], 40)],
)
def test_the_hang_limit_leaves_time_for_a_retry(flags, hang_s):
    options = serve._parser().parse_args(["served", *flags])
    serve._check(options)
    assert serve._settings(options).hang_s == hang_s


def test_a_request_is_not_larger_than_grpc_allows():
    options = serve._parser().parse_args(["served", "--max_body_mib=4096"])
    serve._check(options)
    assert serve._settings(options).body_bytes == 2047 << 20
