"""The parts of a sweep that load no KerasTuner: options, journal, lock, outcomes, directory."""

import contextlib
import errno
import fcntl
import io
import os
import re
import resource
import signal
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.refusals import refusal, refused
from tfdist import tune
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE, TfdistError, UsageError
from tfdist.files import is_held
from tfdist.outputs.sweep_journal import LOCK, Journal, fold, read
from tfdist.tuning import results
from tfdist.tuning import sweep as sweep_module
from tfdist.tuning.options import RunOptions, parse
from tfdist.tuning.sweep import FORK_LOG, Sweep, chief_lock, require_own, require_same, set_aside
from tfdist.tuning.trial_job import (
    Assignment,
    Completed,
    Failed,
    Goal,
    Killed,
    LauncherRunner,
    Slot,
    TrialHosts,
    TrialJob,
    TrialProgram,
    failure_of,
    outcome_of,
)

GOAL = Goal(objective="val_accuracy", direction="max")
FLOAT = {"name": "dropout", "min_value": 0.0, "max_value": 0.5, "conditions": []}


def space_of(**changes: Any) -> list[dict[str, Any]]:
    return [{"class_name": "Float", "config": {**FLOAT, **changes}}]


def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)


def add_trial(
    book: Journal, name: str, *, score: float | None, asked: Any = None, **values: Any
) -> None:
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
        hyperparameters=asked,
    )


def new_sweep(tmp_path: Path, **changes: Any) -> Journal:
    book = journal(tmp_path)
    fields = {"tuner": "random", "objective": "loss", "direction": "min"}
    book.add("begun", **{**fields, "seed": 1, "max_trials": 3, **changes})
    return book


def sweep(tmp_path: Path) -> Journal:
    book = new_sweep(tmp_path)
    for number, score in enumerate([0.5, 0.3, None]):
        add_trial(book, str(number), score=score, lr=10.0**-number, opt="adam" if number else "sgd")
    return book


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Another process has the lock of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


# Options.


@pytest.mark.parametrize(
    ("tuner", "missing", "pip"),
    [
        ("tpe", "optuna", "'tfdist[optuna]'"),
        ("cmaes", "cmaes", "'tfdist[optuna]'"),
        ("gp", "torch", "'tfdist[optuna]' torch"),
    ],
)
def test_a_tuner_without_its_packages_tells_the_pip_command(
    monkeypatch, capsys, tuner, missing, pip
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else name)
    assert tune.main(["--config", "configs/digits_sweep.py", "--tuner", tuner]) == EXIT_USAGE
    said = f"--tuner {tuner}: cannot import {missing}. Fix: run pip install {pip}\n"
    assert capsys.readouterr().err.endswith(said)


# Journal.


def test_trial_time_is_the_time_of_its_jobs():
    asked = {"event": "asked", "trial": "0", "values": {}, "run": "0", "until": None}
    end = {"status": "FAILED", "score": None, "best_virtual_epoch": None, "history": []}
    lines = [
        {"event": "begun", "at": 0.0},
        {**asked, "at": 0.0},
        {"event": "started", "trial": "0", "at": 10.0},
        {"event": "killed", "trial": "0", "at": 15.0, "reason": "", "kills": 1, "reached": 0},
        {"event": "started", "trial": "0", "at": 20.0},
        {"event": "started", "trial": "0", "at": 300.0, "ran_until": 27.0},
        {"event": "ended", "trial": "0", "at": 700.0, "ran_until": 302.0, "reason": "", **end},
    ]
    state = fold([{"last_lines": [], **line} for line in lines])
    assert state.trials["0"].seconds == 5.0 + 7.0 + 2.0


def test_a_trial_is_shown_with_used_values_only(tmp_path):
    book = new_sweep(tmp_path)
    drawn = {"layers": 1, "units_1": 8, "tuner/epochs": 2}
    add_trial(book, "0", score=0.5, asked={"layers": 1, "units": 16}, **drawn)
    trial = fold(book.lines).trials["0"]
    assert trial.hyperparameters == {"layers": 1, "units": 16}
    assert trial.values == drawn
    assert fold(book.lines).varied == ["layers", "units"]


def test_a_line_without_disk_space_is_not_partly_written(tmp_path):
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


def test_a_broken_journal_is_named_with_its_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "begun"}\nhello\n')
    assert refused(lambda: journal(tmp_path)) == (f"{path}, line 2", "not-json")


# Outcomes.

LINES = [
    {"step": 10, "virtual_epoch": 1, "loss": 0.5, "val_accuracy": 0.7, "learning_rate": 1e-3},
    {"step": 20, "virtual_epoch": 2, "loss": 0.4, "val_accuracy": 0.9, "learning_rate": 1e-3},
    {"step": 30, "virtual_epoch": 3, "loss": None, "val_accuracy": 0.8, "learning_rate": 1e-3},
]


def outcome(status: str | None, lines: Any = LINES, **changes: Any) -> Any:
    goal = Goal(**{"objective": "val_accuracy", "direction": "max", **changes})
    return outcome_of(goal, summary={"status": status} if status else None, metrics=lines)


def test_a_trial_scores_its_best_epoch_before_its_goal():
    done = outcome("done")
    assert (done.score, done.best_virtual_epoch) == (0.9, 2)
    assert done.history[2] == {"virtual_epoch": 3, "val_accuracy": 0.8}
    assert outcome("stopped", until=1).score == 0.7
    assert outcome("stopped") is outcome(None, [], until=1) is None
    unknown = outcome("done", objective="val_f1")
    assert unknown == Failed(reason="the trial reports loss, val_accuracy, not val_f1")
    infinite = outcome("done", [{"virtual_epoch": 1, "val_accuracy": None}])
    assert infinite == Failed(reason="val_accuracy was never finite")


@pytest.mark.parametrize(
    ("code", "sent", "cause", "found"),
    [
        (1, None, "ValueError: no", Failed(reason="worker-1: ValueError: no", last_lines=("a",))),
        (139, "SIGSEGV", "killed", Failed(reason="worker-1: killed", last_lines=("a",))),
        (137, "SIGKILL", "killed", Killed(reason="worker-1: killed")),
        (75, None, "peer", Killed(reason="worker-1: peer")),
        (75, None, "", Killed(reason="[launch] no", has_started=False)),
        (143, None, "", Killed(reason="stopped by a signal (exit code 143)")),
        (-9, None, "", Killed(reason="the launcher was killed by signal 9")),
        (2, None, "", Failed(reason="[launch] no", last_lines=("[launch] no",))),
    ],
)
def test_a_failed_program_fails_and_a_killed_one_resumes(code, sent, cause, found):
    failure = {"task": "worker-1", "cause": cause, "last_lines": ["a"]}
    tasks = [{"task": "worker-0", "signal": None}, {"task": "worker-1", "signal": sent}]
    report = {"attempts": [{"tasks": tasks, "first_failure": failure}]} if cause else None
    assert failure_of(code, report=report, last_lines=["[launch] no"]) == found


def test_a_program_that_exits_early_fails_its_trial():
    report = {"attempts": [{"first_failure": None}]}
    found = failure_of(0, report=report, last_lines=["Epoch 1/5"])
    assert found.reason == "the program exited before the trial was done (exit code 0)"


# The runner of this machine.


def local_runner() -> LauncherRunner:
    return LauncherRunner(
        program=("no such program",),
        launch_flags=(),
        gpus=(),
        slots=1,
        environ={},
        timeout_s=60.0,
    )


# Trials on other hosts.


def runner_on(line: str, **environ: str) -> LauncherRunner:
    options = parse(["--config", "configs/digits_sweep.py", *line.split()])
    assert not isinstance(options, Path)
    return sweep_module.runner_of(options, TrialProgram(command=()), environ)


def slots_and_flags(runner: LauncherRunner) -> Iterator[str]:
    for slot in runner.free_slots(()):
        job = TrialJob(
            run_dir=Path("d"), flags=(), goal=GOAL, slot=slot, variables={"B": "", "A": ""}
        )
        yield " ".join(runner.command(job)[5:])


def test_each_trial_has_its_host_and_variables():
    found = list(slots_and_flags(runner_on("--hosts a,b,a --rsh x --env C --env D")))
    last = "--env A,B --on ssh --rsh x --env C,D --strategy multiworker --devices_per_worker 1"
    assert [line.split(" --threads")[0] for line in found] == [
        f"--hosts {host}:1 {last}" for host in ("a", "b", "a")
    ]
    ps = list(slots_and_flags(runner_on("--hosts [::1] --strategy ps --workers 2 --ps 2")))
    assert ps[0].startswith("--hosts [::1]:5 --env A,B --on ssh --strategy ps --ps 2 --threads")


def test_slurm_assigns_nodes_to_trials_but_ray_does_not():
    slurm = runner_on("--on slurm --parallel_trials 2", SLURM_JOB_NODELIST="n[1-2]")
    hosts = [line.split()[1] for line in slots_and_flags(slurm)]
    assert hosts == ["n1:1", "n2:1", "n1:1", "n2:1"]
    ray = list(slots_and_flags(runner_on("--on ray --parallel_trials 2 --strategy mirrored")))
    assert ray == ["--env A,B --on ray --strategy multiworker --workers 1"] * 2


def test_a_host_that_cannot_start_trials_is_closed(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    hosts = TrialHosts(hosts={"a": 1, "b": 1}, tasks=1)
    a, b = hosts.slots()
    hosts.close("b", EXIT_PEER_MISSING, "host b is gone")
    assert hosts.slots() == [a]
    now_s += 61
    assert hosts.slots() == [a, b]
    hosts.close("a", EXIT_USAGE, "a: Permission denied")
    now_s += 1e6
    assert hosts.slots() == [b]
    assert hosts.flags(b) == ["--hosts", "b:1"]
    hosts.close("b", EXIT_USAGE, "b: Permission denied")
    assert refused(hosts.slots) == ("--hosts", "no-hosts")


def test_a_trial_whose_host_is_not_ready_has_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(
        LauncherRunner, "command", lambda *_: ["/bin/sh", "-c", "echo gone; exit 75"]
    )
    runner = local_runner()
    runner.elsewhere = TrialHosts(hosts={"a": 1}, tasks=1)
    job = TrialJob(run_dir=tmp_path / "0", flags=(), goal=GOAL, slot=Slot(host="a"))
    trial = runner.start(job)
    runner.wait([trial], 10.0)
    assert trial.poll() == Killed(reason="gone", has_started=False)


def test_trials_get_gpus_hidden_from_the_sweep(monkeypatch):
    seen: list[LauncherRunner] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(
        sweep_module, "run", lambda sweep: (seen.append(sweep.runner), (0, None))[1]
    )
    assert tune.main(["--config", "configs/digits_sweep.py", "--parallel_trials", "2"]) == 0
    job = TrialJob(run_dir=Path("d"), flags=(), goal=GOAL, slot=Slot(number=1))
    assert seen[0].environ_of(job)["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("locked", ["5/logs/.lock", "0/checkpoints/.lock"])
def test_a_trial_waits_for_the_writer_of_its_files(tmp_path, locked):
    """What a killed chief had started ends; hyperband's writes the checkpoints of another trial."""
    run_dir = tmp_path / "5"
    told = Assignment(
        sweep_dir=str(tmp_path),
        trial="5",
        run_dir=str(run_dir),
        checkpoints=str(tmp_path / "0" / "checkpoints"),
        values={},
        seed=1,
    )
    with held(tmp_path / locked):
        job = TrialJob(run_dir=run_dir, flags=(), goal=GOAL, variables=told.encode())
        trial = local_runner().start(job)
        assert trial.poll() is None
        run_dir.mkdir(exist_ok=True)
        (run_dir / "metrics.jsonl").write_text('{"virtual_epoch": 1, "val_accuracy": 0.5}\n')
        (run_dir / "summary.json").write_text('{"status": "done"}')
        assert trial.poll() is None
    ended = trial.poll()
    assert isinstance(ended, Completed)
    assert ended.score == 0.5
    assert trial.pidfd is None


def test_an_unwritable_trial_is_a_one_line_error(tmp_path):
    (tmp_path / "0" / "launch.log").mkdir(parents=True)
    with pytest.raises(TfdistError, match=r"0: Is a directory$"):
        local_runner().start(TrialJob(run_dir=tmp_path / "0", flags=(), goal=GOAL))


# The directory.


class ImpossibleSweep(Sweep):
    """A sweep that cannot be, with a runner that says what it is told."""

    def __init__(self, path: Path, said: list[str], *, overwrite: bool) -> None:
        program = TrialProgram(command=())
        super().__init__(RunOptions(sweep_dir=path, overwrite=overwrite), program, {})
        self.said = said
        imports = types.SimpleNamespace(
            start=lambda: said.append("imports"), close=lambda: said.append("closed")
        )
        self.runner = types.SimpleNamespace(warm=imports)

    def describe(self) -> Any:
        self.said.append("described")
        raise UsageError("space", "it is empty", fix="add a value", code="none")

    def search(self, begun: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else_is_refused(tmp_path, overwrite):
    (tmp_path / "thesis.tex").touch()
    again = ImpossibleSweep(tmp_path, [], overwrite=overwrite)
    assert refused(lambda: sweep_module.run(again))[1] == "not-a-run"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_second_chief_is_refused_and_moves_nothing(tmp_path):
    book = journal(tmp_path)
    book.add("begun", seed=1)
    with chief_lock(tmp_path):
        again = ImpossibleSweep(tmp_path, [], overwrite=True)
        error = refusal(lambda: sweep_module.run(again))
    assert error.code == "second-writer"
    assert f"process {os.getpid()} already runs this sweep" in str(error)
    assert book.path.exists()
    assert not is_held(tmp_path / LOCK)
    with pytest.raises(TfdistError, match=r"no/\.chief\.lock: No such file or directory$"):
        chief_lock(tmp_path / "no").__enter__()


def test_imports_start_early_and_end_after_a_failure(tmp_path):
    said: list[str] = []
    journal(tmp_path).add("begun", seed=1)
    again = ImpossibleSweep(tmp_path, said, overwrite=True)
    assert refused(lambda: sweep_module.run(again))[0] == "space"
    assert said == ["imports", "described", "closed"]
    assert not (tmp_path / "old-1").exists(), "moved aside for nothing"


def test_overwrite_moves_only_an_old_sweep_aside(tmp_path):
    with chief_lock(tmp_path):  # a start that came to no journal leaves no more
        (tmp_path / FORK_LOG).touch()
        require_own(tmp_path)
    set_aside(tmp_path)
    assert not (tmp_path / "old-1").exists()
    for _ in range(2):
        journal(tmp_path).add("begun", seed=1)
        (tmp_path / "trials").mkdir()
        require_own(tmp_path)
        set_aside(tmp_path)
    assert not (tmp_path / "trials").exists()
    assert (tmp_path / "old-1" / "trials").exists()
    assert (tmp_path / "old-2" / "journal.jsonl").exists()


@pytest.mark.parametrize("locked", ["logs/.lock", "checkpoints/.lock"])
def test_a_sweep_with_a_running_trial_is_not_moved(tmp_path, locked):
    """A runner's trial outlives a chief that was killed, and would write among the new ones."""
    sweep(tmp_path)
    with held(tmp_path / "trials" / "1" / locked):
        assert refused(lambda: set_aside(tmp_path)) == ("--overwrite", "second-writer")
        assert (tmp_path / "journal.jsonl").exists()


def begun(**changes: Any) -> dict[str, Any]:
    return {
        **{"tuner": "random", "objective": "val_accuracy", "factor": 3, "strategy": "single"},
        **{"workers": 1, "ps": 1, "seed": 7, "max_trials": None},
        **{"config": {"dropout": 0.1}, "space": space_of(), **changes},
    }


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_restarted_sweep_without_completed_trials_fails_again(overwrite, tmp_path, monkeypatch):
    if overwrite:  # it was for the first start
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    book = journal(tmp_path)
    book.add("begun", **begun())
    add_trial(book, "0", score=None)
    book.add("finished", reason="all trials failed", is_complete=True)
    again = ImpossibleSweep(tmp_path, [], overwrite=overwrite)
    again.describe = begun
    exit_code, state = sweep_module.run(again)
    assert (exit_code, state.finished) == (1, "all trials failed")


def test_a_changed_sweep_is_refused_with_the_changes(tmp_path):
    """So are hyperparameters that are new, gone, or in another order."""
    require_same(tmp_path, begun(), begun(seed=None))
    require_same(tmp_path, begun(early_stop="none"), begun())  # of an earlier release
    now = begun(space=space_of(max_value=0.9), tuner="grid", config={"dropout": 0.2})
    said = str(refusal(lambda: require_same(tmp_path, begun(), now)))
    assert "tuner='grid' (there: 'random')" in said
    assert "config.dropout=0.2 (there: 0.1)" in said
    assert "search space.0 dropout.max_value=0.9 (there: 0.5)" in said
    one, other = space_of(), space_of(name="momentum")
    for before, after in ((one, one + other), (one, other), (one + other, other + one)):
        first, second = begun(space=before), begun(space=after)
        error = refusal(lambda a=first, b=second: require_same(tmp_path, a, b))
        assert error.code == "another-run"


# What a person sees.


def test_the_leaderboard_works_in_a_read_only_directory(tmp_path, capsys, monkeypatch):
    open_ = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777, **where: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return open_(path, flags, mode, **where)

    sweep(tmp_path)
    results.show(tmp_path)
    said = capsys.readouterr().out
    assert said.index("0.3000") < said.index("0.5000")
    assert "trial 2 failed: chief-0: the loss became nan" in said
    assert "not finished: run the same command to resume; best 0.3000 (trial 1)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    with chief_lock(tmp_path), monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        results.show(tmp_path)
    assert "not finished: the sweep is running; best 0.3000" in capsys.readouterr().out
    assert refused(lambda: results.show(tmp_path / "nowhere")) == ("--show", "not-a-run")


def test_the_best_trial_is_printed_with_copyable_values(tmp_path, capsys):
    sweep(tmp_path)
    results.show_best(tmp_path)
    run_dir = tmp_path / "trials" / "1"
    lines = ["trial  1, virtual epoch 1", "loss   0.3", "lr     0.1", "opt    adam"]
    assert capsys.readouterr().out.splitlines() == [*lines, f"run    {run_dir}"]
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    (run_dir / "report.json").write_text('{"job": {"command": "python -m tfdist.launch"}}')
    assert parse(["--best", str(tmp_path)]) == ("best", tmp_path)
    results.show_best(tmp_path)
    more = [f"config   {run_dir}/config.json", "command  python -m tfdist.launch"]
    assert capsys.readouterr().out.splitlines()[-2:] == more
    assert refused(lambda: results.show_best(tmp_path / "nowhere")) == ("--best", "not-a-run")
    (tmp_path / "new").mkdir()
    new_sweep(tmp_path / "new")
    assert refused(lambda: results.show_best(tmp_path / "new")) == ("--best", "no-best")


def test_the_progress_of_running_trials_is_shown(tmp_path, capsys):
    book = sweep(tmp_path)
    running = {"trial": "3", "values": {"lr": 0.25}, "run": "3", "until": None}
    book.add("asked", status="RUNNING", **running)
    book.add("started", trial="3")
    (tmp_path / "trials" / "3").mkdir(parents=True)
    (tmp_path / "trials" / "3" / "metrics.jsonl").write_text(
        '{"step": 90, "virtual_epoch": 2, "loss": 0.25}\n'
    )
    results.show(tmp_path)
    said = capsys.readouterr().out
    assert re.search(r"3 +running +2 of \?, step 90 +0\.2500 +lr=0.25", said)


def test_each_change_is_a_line_and_a_resumed_sweep_tells_its_trials(tmp_path):
    state, out, exported = fold(sweep(tmp_path).lines), io.StringIO(), []
    screen = results.SweepScreen(
        tmp_path, console=Console(file=out, width=100), export=lambda *_: exported.append(1)
    )
    screen.begin(state)
    screen.changed(state, state.trials["0"])
    screen.tick(state)
    screen.tick(state)
    assert out.getvalue().splitlines() == [
        "resuming: 3 trials are finished, 0 continue",
        "trial 0 completed: 0.5000; best 0.3000 (trial 1)",
    ]
    assert exported == [1]


def test_user_names_and_values_are_no_markup(tmp_path, capsys):
    objective = "$val$ [/b]"
    book = new_sweep(tmp_path, tuner="[/i]", objective=objective, max_trials=2)
    for name, value in (("0", "[/b] $^"), ("1", r"[relu] $\x$")):
        add_trial(book, name, score=0.5, **{"$_$ [/c]": value})
    results.show(tmp_path)
    said = capsys.readouterr().out
    assert all(text in said for text in ("[/i]: 2 of 2", objective, "$_$ [/c]=[/b] $^", "[relu]"))
