"""The parts of a sweep that load no KerasTuner: options, journal, lock, results, directory."""

import contextlib
import errno
import fcntl
import functools
import io
import json
import os
import re
import resource
import signal
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.refusals import refusal, refused
from tfdist.errors import TfdistError, UsageError
from tfdist.files import is_held
from tfdist.launch.machine import raise_file_limit
from tfdist.outputs.sweep_journal import LOCK, Journal, fold, read
from tfdist.tuning import directory, exports
from tfdist.tuning import sweep as sweep_module
from tfdist.tuning.options import RunOptions, SweepOptions, parse
from tfdist.tuning.runner import LauncherRunner, TrialProgram
from tfdist.tuning.screen import SweepScreen, as_json, change_line, show
from tfdist.tuning.sweep import Sweep
from tfdist.tuning.trial_job import (
    Assignment,
    Completed,
    Failed,
    Goal,
    Killed,
    TrialJob,
    failure_of,
    outcome_of,
)

GOAL = Goal(objective="val_accuracy", direction="max")
LINES = [
    {"step": 10, "virtual_epoch": 1, "loss": 0.5, "val_accuracy": 0.7, "learning_rate": 1e-3},
    {"step": 20, "virtual_epoch": 2, "loss": 0.4, "val_accuracy": 0.9, "learning_rate": 1e-3},
    {"step": 30, "virtual_epoch": 3, "loss": None, "val_accuracy": 0.8, "learning_rate": 1e-3},
]
SPACE = [
    {
        "class_name": "Float",
        "config": {"name": "dropout", "min_value": 0.0, "max_value": 0.5, "conditions": []},
    }
]


def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)


def add_trial(book: Journal, name: str, *, score: float | None, **values: Any) -> None:
    """Write down a trial from its beginning to its end."""
    book.add("asked", status="RUNNING", trial=name, values=values, run=name, until=None)
    book.add("started", trial=name)
    book.add(
        "ended",
        trial=name,
        status="FAILED" if score is None else "COMPLETED",
        score=score,
        best_virtual_epoch=None if score is None else 1,
        history=[],
        reason="chief-0: the loss became nan" if score is None else "",
        last_lines=[],
    )


def sweep(tmp_path: Path) -> Journal:
    book = journal(tmp_path)
    book.add("begun", tuner="random", objective="loss", direction="min", seed=1, max_trials=3)
    for number, score in enumerate([0.5, 0.3, None]):
        add_trial(book, str(number), score=score, lr=10.0**-number, opt="adam" if number else "sgd")
    return book


def local_runner() -> LauncherRunner:
    return LauncherRunner(
        program=("no such program",),
        launch_flags=(),
        gpus=(),
        slots=1,
        environ={},
        timeout_s=60.0,
    )


# --- options


def test_the_command_line_of_the_page_is_read():
    job = ["--strategy", "ps", "--workers", "4", "--ps", "1", "--config.dropout=0.1"]
    search = ["--tuner", "bayesian", "--max_trials", "30", "--parallel_trials", "2"]
    options = parse(["--config", "configs/digits_sweep.py", *search, *job])
    assert isinstance(options, SweepOptions)
    assert (options.tuner, options.max_trials, options.parallel_trials) == ("bayesian", 30, 2)
    assert options.config_flags == ("--config.dropout=0.1",)
    assert options.sweep_dir == Path("runs/digits_sweep-bayesian")
    assert options.tasks_per_trial == 5


def test_show_needs_no_config():
    assert parse(["--show", "runs/x"]) == Path("runs/x")


@pytest.mark.parametrize(
    ("flags", "where", "code"),
    [
        (["--tuner", "bayes"], "--tuner", "unknown-value"),
        (["--objective", "val_acuracy"], "--objective", "unknown-value"),
        (["--strategy", "auto"], "--strategy", "unknown-value"),
        (["--early_stop", "medain"], "--early_stop", "unknown-value"),
        (["--early_stop", "median", "--tuner", "hyperband"], "--early_stop", "exclusive"),
        (["--parallel_trials", "0"], "--parallel_trials", "not-an-int"),
        (["--max_trials", "many"], "--max_trials", "not-an-int"),
        (["--factor", "1"], "--factor", "not-an-int"),
        (["--seed", "0"], "--seed", "not-an-int"),
        (["--trial_timeout_s", "0"], "--trial_timeout_s", "not-a-number"),
        (["--trial_timeout_s", "nan"], "--trial_timeout_s", "not-a-number"),
        (["--workers", "2"], "--workers", "workers-of-one-process"),
        (["--serve", "a"], "--serve", "TFC010"),
        (["--join", "a:99999"], "--join", "TFC011"),
        (["--serve", "a:1", "--join", "a:1"], "--join", "exclusive"),
        (["--join", "a:1", "--parallel_trials", "0"], "--parallel_trials", "not-an-int"),
        (["--join", "a:1", "--reconnect_s", "0"], "--reconnect_s", "not-a-number"),
    ],
)
def test_a_wrong_flag_is_refused(flags, where, code):
    assert refused(lambda: parse(["--config", "c.py", *flags])) == (where, code)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel_trials", "2"),
        ("workers", 1.5),
        ("ps", True),
        ("trial_timeout_s", "60"),
        ("reconnect_s", "60"),
        ("strategy", None),
    ],
)
def test_what_is_no_number_or_name_is_refused_from_python_too(name, value):
    caught = refusal(lambda: RunOptions(sweep_dir=Path("s"), **{name: value}))
    assert (caught.where, caught.received) == (f"--{name}", repr(value))


def test_a_sweep_needs_a_config():
    assert refused(lambda: parse(["--tuner", "grid"])) == ("--config", "missing")


# --- journal


def test_a_line_for_which_there_is_no_room_is_not_there_in_part(tmp_path):
    """The chief has its trials end then, and writes that down where there is room again."""
    book = journal(tmp_path)
    book.add("begun", seed=1)
    room = book.path.stat().st_size + 10
    with contextlib.ExitStack() as full:
        full.callback(signal.signal, signal.SIGXFSZ, signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        with pytest.raises(TfdistError, match=r"journal\.jsonl: File too large"):
            book.add("asked", trial="0", values={"name": "x" * 90})
    assert book.path.stat().st_size == room
    book.add("finished", reason="r", is_complete=True)
    assert read(book.path) == book.lines
    assert [line["event"] for line in book.lines] == ["begun", "finished"]


def test_a_file_that_is_no_journal_is_named_with_its_line(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"event": "begun"}\nhello\n')
    with pytest.raises(UsageError, match=r"journal\.jsonl, line 2: received 'hello'"):
        journal(tmp_path)


# --- trials at once


def test_a_program_with_many_open_files_waits_for_its_trials():
    runner = local_runner()
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, raise_file_limit(2048))
        files = [stack.enter_context(open(os.devnull)) for _ in range(1100)]
        runner.wait([types.SimpleNamespace(pidfd=files[-1].fileno())], 0.0)


# --- lock


def test_a_second_chief_is_refused_with_the_first_ones_pid(tmp_path):
    with (
        directory.chief_lock(tmp_path),
        pytest.raises(UsageError, match=f"a second chief while process {os.getpid()} runs"),
        directory.chief_lock(tmp_path),
    ):
        pass
    assert not is_held(tmp_path / LOCK)
    with pytest.raises(TfdistError, match=r"no/\.chief\.lock: No such file or directory$"):
        directory.chief_lock(tmp_path / "no").__enter__()


# --- results


def test_the_score_is_the_best_virtual_epochs():
    outcome = outcome_of(GOAL, summary={"status": "done"}, metrics=LINES)
    assert isinstance(outcome, Completed)
    assert (outcome.score, outcome.best_virtual_epoch) == (0.9, 2)
    assert outcome.history[2] == {"virtual_epoch": 3, "val_accuracy": 0.8}


def test_a_trial_with_a_shorter_goal_is_judged_by_what_it_had_done_by_then():
    goal = Goal(objective="val_accuracy", direction="max", until=1)
    outcome = outcome_of(goal, summary={"status": "stopped"}, metrics=LINES)
    assert isinstance(outcome, Completed)
    assert outcome.score == 0.7
    assert outcome_of(goal, summary=None, metrics=[]) is None
    assert outcome_of(GOAL, summary={"status": "stopped"}, metrics=LINES) is None


def test_an_objective_that_is_not_reported_or_never_finite_fails_the_trial():
    goal = Goal(objective="val_f1", direction="max")
    outcome = outcome_of(goal, summary={"status": "done"}, metrics=LINES)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "it does not report val_f1; it reports loss, val_accuracy"
    nan = [{"virtual_epoch": 1, "val_accuracy": None}]
    outcome = outcome_of(GOAL, summary={"status": "done"}, metrics=nan)
    assert outcome == Failed(reason="val_accuracy was never finite")


def report(signal: str | None, *, cause: str = "exit code 1") -> Mapping[str, Any]:
    failure = {"task": "worker-1", "cause": cause, "last_lines": ["a", "b"]}
    tasks = [{"task": "worker-0", "signal": None}, {"task": "worker-1", "signal": signal}]
    return {"attempts": [{"tasks": tasks, "first_failure": failure}]}


def test_a_program_that_failed_failed_and_one_that_was_killed_goes_on():
    failed = failure_of(1, report=report(None, cause="ValueError: no"), last_lines=["x"])
    assert failed == Failed(reason="worker-1: ValueError: no", last_lines=("a", "b"))
    assert failure_of(137, report=report("SIGKILL", cause="killed"), last_lines=[]) == Killed(
        reason="worker-1: killed"
    )
    assert isinstance(failure_of(139, report=report("SIGSEGV"), last_lines=[]), Failed)
    assert isinstance(failure_of(75, report=report(None), last_lines=[]), Killed)
    assert isinstance(failure_of(143, report=None, last_lines=[]), Killed)
    assert isinstance(failure_of(-9, report=None, last_lines=[]), Killed)
    said = failure_of(0, report={"attempts": [{"first_failure": None}]}, last_lines=["Epoch 1/5"])
    assert isinstance(said, Failed)
    assert said.reason == "its program ended before the trial was done (exit code 0)"
    said = failure_of(2, report=None, last_lines=["[launch] config.x: received 2"])
    assert isinstance(said, Failed)
    assert said.reason == "[launch] config.x: received 2"


# --- directory


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"with thesis\.tex and no journal\.jsonl"):
            sweep_module.run(ImpossibleSweep(tmp_path, [], overwrite=overwrite))
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_what_a_start_leaves_that_came_to_no_journal_is_no_hindrance(tmp_path):
    with directory.chief_lock(tmp_path):
        (tmp_path / directory.FORK_LOG).touch()
        directory.require_own(tmp_path)
    directory.set_aside(tmp_path)
    assert not (tmp_path / "old-1").exists()


def test_overwrite_moves_the_old_sweep_aside(tmp_path):
    for _ in range(2):
        journal(tmp_path).add("begun", seed=1)
        (tmp_path / "trials").mkdir()
        directory.require_own(tmp_path)
        directory.set_aside(tmp_path)
    assert not (tmp_path / "trials").exists()
    assert (tmp_path / "old-1" / "trials").exists()
    assert (tmp_path / "old-2" / "journal.jsonl").exists()


class ImpossibleSweep(Sweep):
    """A sweep that cannot be, with a runner that says what it is told."""

    def __init__(self, path: Path, said: list[str], *, overwrite: bool) -> None:
        program = TrialProgram(command=(), name="none", file=__file__)
        super().__init__(RunOptions(sweep_dir=path, overwrite=overwrite), program, {})
        self.said = said
        self.runner = types.SimpleNamespace(  # type: ignore[assignment]
            warm_up=lambda: said.append("imports"), close=lambda: said.append("closed")
        )

    def describe(self) -> Mapping[str, Any]:
        self.said.append("described")
        raise UsageError("space", received="nothing", expected="one", fix="name one")

    def search(self, begun: Any) -> Any:
        raise NotImplementedError


def test_imports_begin_before_a_sweep_is_described_and_end_where_it_cannot_be(tmp_path):
    said: list[str] = []
    book = journal(tmp_path)
    book.add("begun", seed=1)
    with pytest.raises(UsageError, match="space: received nothing"):
        sweep_module.run(ImpossibleSweep(tmp_path, said, overwrite=True))
    assert said == ["imports", "described", "closed"]
    assert not (tmp_path / "old-1").exists(), "moved aside for nothing"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_finished_sweep_of_which_no_trial_was_completed_has_failed_again(
    overwrite, tmp_path, monkeypatch
):
    if overwrite:  # it was for the first start
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    book = journal(tmp_path)
    book.add("begun", **begun())
    add_trial(book, "0", score=None)
    book.add("finished", reason="all trials have failed", is_complete=True)
    again = ImpossibleSweep(tmp_path, [], overwrite=overwrite)
    again.describe = begun  # type: ignore[method-assign]
    exit_code, state = sweep_module.run(again)
    assert exit_code == 1
    assert state.finished == "all trials have failed"


def begun(**changes: Any) -> dict[str, Any]:
    return {
        "tuner": "random",
        "objective": "val_accuracy",
        "factor": 3,
        "strategy": "single",
        "workers": 1,
        "ps": 1,
        "seed": 7,
        "max_trials": None,
        "config": {"dropout": 0.1},
        "space": SPACE,
        **changes,
    }


@pytest.mark.parametrize("held", ["logs", "checkpoints/.lock"])
def test_a_sweep_is_not_moved_aside_while_a_trial_of_it_runs(tmp_path, held):
    """A runner's trial outlives a chief that was killed, and would write among the new ones."""
    sweep(tmp_path)
    path = tmp_path / "trials" / "1" / held
    path.parent.mkdir(parents=True)
    path.mkdir() if held == "logs" else path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match=r"^--overwrite: received it while .*trials/1 is written"):
        directory.set_aside(tmp_path)
    assert (tmp_path / "journal.jsonl").exists()
    os.close(descriptor)
    directory.set_aside(tmp_path)
    assert (tmp_path / "old-1" / "journal.jsonl").exists()


def test_a_trial_that_ends_while_its_directory_is_waited_for_is_not_run_again(tmp_path):
    """What a killed chief had started comes to its end under the next one."""
    logs = tmp_path / "trials" / "0" / "logs"
    logs.mkdir(parents=True)
    descriptor = os.open(logs, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    runner = local_runner()
    trial = runner.start(TrialJob(run_dir=logs.parent, flags=(), goal=GOAL))
    assert trial.poll() is None
    (logs.parent / "metrics.jsonl").write_text('{"virtual_epoch": 1, "val_accuracy": 0.5}\n')
    (logs.parent / "summary.json").write_text('{"status": "done"}')
    assert trial.poll() is None
    os.close(descriptor)
    outcome = trial.poll()
    assert isinstance(outcome, Completed)
    assert outcome.score == 0.5
    assert trial.pid is None


def test_a_trial_waits_for_who_still_writes_the_checkpoints_that_it_goes_on_from(tmp_path):
    """Of hyperband from Python: they are those of the bracket's first trial."""
    trials = tmp_path / "trials"
    held = trials / "0" / "checkpoints" / ".lock"
    held.parent.mkdir(parents=True)
    held.touch()
    told = Assignment(
        sweep_dir=str(tmp_path),
        trial="5",
        run_dir=str(trials / "5"),
        checkpoints=str(held.parent),
        values={},
        seed=1,
    )
    runner = local_runner()
    with open(held) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        job = TrialJob(run_dir=trials / "5", flags=(), goal=GOAL, variables=told.encode())
        trial = runner.start(job)
        assert trial.poll() is None
        assert trial.pid is None, "it would find them locked, and fail"


def test_a_trial_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "trials" / "0" / "launch.log").mkdir(parents=True)
    runner = local_runner()
    with pytest.raises(TfdistError, match=r"trials/0: Is a directory$"):
        runner.start(TrialJob(run_dir=tmp_path / "trials" / "0", flags=(), goal=GOAL))


def test_a_trial_that_removes_its_directory_has_failed(tmp_path, monkeypatch):
    run_dir = tmp_path / "trials" / "0"
    remove = [sys.executable, "-c", f"import shutil; shutil.rmtree({str(run_dir)!r}); exit(3)"]
    monkeypatch.setattr(LauncherRunner, "command", lambda *_, **__: remove)
    runner = local_runner()
    trial = runner.start(TrialJob(run_dir=run_dir, flags=(), goal=GOAL))
    while (outcome := trial.poll()) is None:
        runner.wait([trial], 10.0)
    assert outcome == Failed(reason="exit code 3")


def test_a_changed_sweep_is_refused_with_what_has_changed(tmp_path):
    directory.require_same(tmp_path, begun(), begun(seed=None))
    wider = json.loads(json.dumps(SPACE))
    wider[0]["config"]["max_value"] = 0.9
    now = begun(space=wider, tuner="grid", config={"dropout": 0.2})
    error = refusal(lambda: directory.require_same(tmp_path, begun(), now))
    said = str(error)
    assert "tuner='grid' (there: 'random')" in said
    assert "config.dropout=0.2 (there: 0.1)" in said
    assert "search space.0 dropout.max_value=0.9 (there: 0.5)" in said
    assert "--overwrite" in said


def test_new_and_gone_hyperparameters_and_another_order_make_another_sweep(tmp_path):
    other = json.loads(json.dumps(SPACE).replace("dropout", "momentum"))
    two, turned = begun(space=[*SPACE, *other]), begun(space=[*other, *SPACE])
    for before, now in ((begun(), two), (begun(), begun(space=other)), (two, turned)):
        require_same = functools.partial(directory.require_same, tmp_path, before, now)
        assert refusal(require_same).code == "another-sweep"


# --- what a person sees


def test_the_leaderboard_of_a_directory_is_shown(tmp_path, capsys):
    sweep(tmp_path)
    before = sorted(tmp_path.iterdir())
    show(tmp_path)
    said = capsys.readouterr().out
    assert said.index("0.3000") < said.index("0.5000")
    assert "trial 2 failed: chief-0: the loss became nan" in said
    assert "not finished: the same command goes on; best 0.3000, trial 1" in said
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match="where no sweep is"):
        show(tmp_path / "nowhere")


def test_a_running_sweep_is_shown_as_one_also_where_nothing_can_be_written(
    tmp_path, capsys, monkeypatch
):
    def read_only(path: Any, flags: int, mode: int = 0o777, **where: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return open_(path, flags, mode, **where)

    sweep(tmp_path)
    open_ = os.open
    with directory.chief_lock(tmp_path), monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        show(tmp_path)
    assert "not finished: its chief is running; best 0.3000" in capsys.readouterr().out


def test_sweep_json_has_every_trial_and_the_best(tmp_path):
    state = fold(sweep(tmp_path).lines)
    content = as_json(state)
    assert content["best"]["trial"] == "1"
    assert [trial["status"] for trial in content["trials"]] == ["completed", "completed", "failed"]
    assert (
        change_line(state, state.trials["0"]) == "trial 0 completed: 0.5000; best 0.3000 (trial 1)"
    )


def test_a_terminal_shows_one_table_that_follows_the_sweep(tmp_path):
    book = sweep(tmp_path)
    running = {"trial": "3", "values": {"lr": 0.25}, "run": "3", "until": None}
    book.add("asked", status="RUNNING", **running)
    book.add("started", trial="3")
    (tmp_path / "trials" / "3").mkdir(parents=True)
    (tmp_path / "trials" / "3" / "metrics.jsonl").write_text(
        '{"step": 90, "virtual_epoch": 2, "loss": 0.25}\n'
    )
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    state = fold(book.lines)
    with SweepScreen(tmp_path, console=console) as screen:
        screen.begin(state)
        screen.changed(state, state.trials["3"])
        screen.tick(state)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "going on: 3 trials have ended, 1 go on where they stood" in said
    assert re.search(r"3 +running +2 of \?, step 90 +0\.2500 +lr=0.25", said)
    assert json.loads((tmp_path / "sweep.json").read_text())["trials"][3]["status"] == "running"


def test_what_a_user_names_is_shown_as_it_is(tmp_path, capsys, caplog):
    """No name and no value is markup of a table or a formula of a picture."""
    book = journal(tmp_path)
    objective = "$val$ [/b]"
    book.add("begun", tuner="[/i]", objective=objective, direction="max", seed=1, max_trials=2)
    for name, value in (("0", "[/b] $^"), ("1", r"[relu] $\x$")):
        add_trial(book, name, score=0.5, **{"$_$ [/c]": value})
    show(tmp_path)
    said = capsys.readouterr().out
    assert all(text in said for text in ("[/i]: 2 of 2", objective, "$_$ [/c]=[/b] $^", "[relu]"))
    path = exports.draw_plot(fold(book.lines), tmp_path)
    assert path is not None, caplog.text
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_does_not_fail_the_sweep(tmp_path, caplog):
    (tmp_path / directory.PLOT).mkdir()
    assert exports.draw_plot(fold(sweep(tmp_path).lines), tmp_path) is None
    assert "no plot: IsADirectoryError" in caplog.text
    assert exports.draw_plot(fold([]), tmp_path) is None, "there is no trial"
