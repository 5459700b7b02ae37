"""The run directory and the files of an evaluator: whose they are, and that they are whole.

And the run directory that a job continues.
"""

import errno
import json
import math
import os

import numpy as np
import pytest

from tests.refusals import refusal
from tfdist.errors import TfdistError
from tfdist.files import FileLock
from tfdist.launch.ending import command_of, continued_run
from tfdist.launch.options import parse
from tfdist.outputs.run_directory import Claim, Evaluations, RunDirectory

CONFIG = {"seed": 3, "optimizer": "adam", "augmentation": {"random_flip": False}}


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": True}, "seed=True (there: 3)"),
        ({"augmentation": {"random_flip": True}}, "augmentation.random_flip=True (there: False)"),
        ({"new": 1}, "new=1 (there: 'nothing')"),
    ],
)
def test_another_runs_directory_is_refused_with_the_difference(directory, change, says):
    directory.claim(CONFIG)
    caught = refusal(lambda: directory.claim(CONFIG | change))
    assert caught.code == "another-run"
    assert says in str(caught)
    assert directory.read_config() == CONFIG


def test_a_withdrawn_claim_leaves_no_trace(directory):
    directory.claim(CONFIG)
    directory.withdraw()
    assert not directory.path.exists()
    (directory.path / "logs").mkdir(parents=True)
    directory.claim(CONFIG)
    directory.withdraw()
    assert os.listdir(directory.path) == ["logs"]
    assert directory.claim({"seed": 9}) is Claim.NEW


def test_free_keys_may_differ_and_tuples_equal_lists(directory):
    directory.claim({**CONFIG, "mean": (0.5, 0.25)})
    assert directory.claim({**CONFIG, "mean": (0.5, 0.25)}) is Claim.RESUMED
    other = {"mean": (0.5, 0.25), "seed": None, "augmentation": {"random_flip": True}}
    free = ("seed", "augmentation.random_flip", "optimizer")
    assert directory.claim(other, free=free) is Claim.RESUMED
    assert directory.read_config() == {**CONFIG, "mean": [0.5, 0.25]}
    directory.claim({**CONFIG, "ledger": "full", "tracker": "none"}, overwrite=True)
    assert directory.claim(CONFIG) is Claim.RESUMED  # these fields were removed


def test_overwrite_moves_the_old_run_but_not_launcher_files(directory):
    for number in (1, 2):
        (directory.path / "logs").mkdir(parents=True, exist_ok=True)
        (directory.path / ".partial-live.json").touch()
        assert directory.claim({"seed": number}, overwrite=True) is Claim.NEW
        directory.append_metrics({"step": number})
        directory.write_summary({"status": "done"})
    assert directory.claim({"seed": 2}) is Claim.FINISHED
    directory.checkpoints.mkdir()
    with FileLock(directory.checkpoints / ".lock").acquire():
        caught = refusal(lambda: directory.claim({"seed": 3}, overwrite=True))
        assert (caught.where, caught.code) == ("--overwrite", "second-writer")
        assert directory.read_config() == {"seed": 2}
    assert directory.claim({"seed": 3}, overwrite=True) is Claim.NEW
    there = [".partial-live.json", "config.json", "logs", "old-1", "old-2"]
    assert sorted(os.listdir(directory.path)) == there
    for number in (1, 2):
        old = RunDirectory(directory.path / f"old-{number}")
        assert old.read_config() == {"seed": number}
        assert old.read_metrics() == [{"step": number}]
        assert old.read_summary() == {"status": "done"}


def test_metrics_are_strict_json_lines_on_the_disk(directory, monkeypatch):
    directory.claim(CONFIG)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    directory.append_metrics({"step": np.int64(5), "loss": np.float32(0.5), "val_loss": 1e-30})
    directory.append_metrics({"step": 10, "loss": float("nan"), "confusion": np.eye(2)})
    first, second = directory.metrics_file.read_text().splitlines()
    assert first == '{"step": 5, "loss": 0.5, "val_loss": 1e-30}'
    assert synced == [len(first) + 1, len(first) + len(second) + 2]
    confusion = [[1.0, 0.0], [0.0, 1.0]]
    strict = json.loads(second, parse_constant=pytest.fail)
    assert strict == {"step": 10, "loss": None, "confusion": confusion}


def test_a_truncated_line_is_dropped_on_resume(directory):
    directory.claim(CONFIG)
    assert directory.read_metrics() == []
    directory.drop_metrics_from(1)
    for epoch in (1, 2, 3):
        directory.append_metrics({"virtual_epoch": epoch})
    with open(directory.metrics_file, "a") as file:
        file.write('{"virtual_epoch": 4')
    assert [line["virtual_epoch"] for line in directory.read_metrics()] == [1, 2, 3]
    directory.drop_metrics_from(3)
    directory.append_metrics({"step": 25})
    lines = '{"virtual_epoch": 1}\n{"virtual_epoch": 2}\n'
    assert directory.metrics_file.read_text() == lines + '{"step": 25}\n'
    directory.write_metrics([])
    directory.append_metrics({"step": 5})
    assert directory.metrics_file.read_text() == '{"step": 5}\n'


def test_a_summary_is_whole_or_the_old_one(directory, monkeypatch):
    directory.claim(CONFIG)
    directory.write_summary({"status": "stopped"})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TfdistError, match=r"No space left on device$"):
        directory.write_summary({"status": "done"})
    assert directory.read_summary() == {"status": "stopped"}
    assert sorted(os.listdir(directory.path)) == ["config.json", "summary.json"]


@pytest.mark.parametrize("config", ["seed: 3", "[" * 10**5])
def test_an_unusable_directory_or_config_is_one_line(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(TfdistError, match="Not a directory"):
        RunDirectory(tmp_path / "file" / "run").claim(CONFIG)
    (tmp_path / "config.json").write_text(config)
    assert refusal(lambda: RunDirectory(tmp_path).claim(CONFIG)).code == "not-json"


def test_files_of_an_evaluator_follow_the_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    files = Evaluations(folder)
    assert files.lines() == []
    for step in (7, 14, 21, 14):  # one that is done again takes back the lines from it on
        files.write(files.with_line({"step": step, "val_loss": math.nan}))
    with open(files.metrics_file, "a") as file:
        file.write('{"step": 1')  # cut short by a crash
    assert files.lines() == [{"step": step, "val_loss": None} for step in (7, 14)]
    files.best_file.touch()
    assert not files.is_stop_requested
    files.ask_to_stop({"step": 14, "best_step": 7})
    assert files.is_stop_requested
    folder.rename(tmp_path / "old")
    assert (files.is_stop_requested, files.lines(), files.best_file.exists()) == (False, [], False)
    with pytest.raises(TfdistError, match="evaluator, in"):
        files.write([{"step": 1}])


def link(path, victim):
    path.symlink_to(victim)


def fifo(path, victim):
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [link, fifo])
def test_foreign_links_and_fifos_are_not_opened(directory, plant):
    """A FIFO would be waited for, and a link could lead to any file of this user."""
    directory.checkpoints.mkdir(parents=True)
    evaluations = Evaluations(directory.checkpoints)
    victim = directory.path / "victim"
    victim.write_text('{"step": 1}\n')
    for path in (directory.metrics_file, directory.config_file, evaluations.metrics_file):
        plant(path, victim)
    for action in (
        lambda: directory.append_metrics({"step": 2}),
        directory.read_metrics,
        directory.read_config,
        evaluations.lines,
    ):
        with pytest.raises(TfdistError, match=r"(symbolic link|not a regular file|No such device)"):
            action()
    assert victim.read_text() == '{"step": 1}\n'


def test_odd_values_in_evaluator_lines_are_ignored(tmp_path):
    files = Evaluations(tmp_path)
    lines = ['{"step": "1"}', '{"step": 1, "checkpoint": []}', "{}", '{"step": 2}', "[" * 10**5]
    files.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    assert files.lines() == [{"step": 2}]


# the run directory that a job continues


def left(name, words, *, code, step=1, at=0):
    """A run that a command has left in runs/."""
    path = RunDirectory(f"runs/{name}").path
    (path / "logs").mkdir(parents=True)
    report = {"exit_code": code, "job": command_of(parse(words)), "attempts": []}
    (path / "report.json").write_text(json.dumps(report))
    (path / "live.json").write_text(json.dumps({"step": step, "at": at}))
    return path.absolute()


def resumed(*words, **environ):
    return continued_run(parse([*words]), environ)


def test_resume_continues_the_newest_unfinished_run_of_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["--workers=2", "t.py", "--lr", "0.1"]
    assert refusal(lambda: resumed("--resume", *command)).code == "no-run"
    killed = left("killed", command, code=None, at=1)
    failed = left("failed", command, code=1, at=2)
    for name, words, code, step in (
        ("other-args", ["--workers=2", "t.py", "--lr", "0.2"], 1, 1),
        ("other-program", ["--workers=2", "u.py", "--lr", "0.1"], 1, 1),
        ("other-workers", ["--workers=3", "t.py", "--lr", "0.1"], 1, 1),
        ("done", command, 0, 1),
        ("no-step", command, 1, None),
        ("running", command, None, 1),
    ):
        last = left(name, words, code=code, step=step, at=3)
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "report.json").write_text("{")
    with FileLock(last / "logs" / ".lock").acquire():
        grace = ["--grace_s=3", "--workers=2", str(tmp_path / "t.py"), "--lr", "0.1"]
        assert resumed("--resume", *grace) == failed
        (failed / "report.json").unlink()
        assert resumed("--resume", *command) == killed
    assert resumed(*command) is None
    assert refusal(lambda: resumed("--resume", "--run_dir=x", *command)).code == "exclusive"


def test_a_job_requeued_by_slurm_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = left("slurm-7-ab12", ["t.py"], code=0)
    left("slurm-77-ab12", ["t.py"], code=1, at=9)
    requeued = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert resumed("t.py", **requeued) == run
    assert resumed("t.py", SLURM_JOB_ID="7") is None  # the same command twice in an allocation
    assert resumed("u.py", **requeued) is None
    assert resumed("--run_dir=x", "t.py", **requeued) is None
