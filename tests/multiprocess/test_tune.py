"""Sweeps whose trials are jobs of the launcher: how they end, and a chief that is killed."""

import contextlib
import functools
import math
import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_python, processes
from tests.multiprocess.jobs import report
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import SweepState, fold, read
from tfdist.tuning.trial_job import Completed, Failed, Goal, LauncherRunner, Outcome, TrialJob

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0
SWEEP_DEADLINE_S = 400.0
until = functools.partial(processes.until, within_s=DEADLINE_S)

# A trial that trains nothing; `done(n)` writes the line of a virtual epoch.
PRELUDE = """
import json, os, pathlib, signal, sys
run_dir = pathlib.Path(sys.argv[1])
def done(n):
    line = {"step": n, "virtual_epoch": n, "val_accuracy": n / 10}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
def finish():
    (run_dir / "summary.json").write_text('{"status": "done"}')
"""


class Trial:
    """A trial of a program of our own."""

    def __init__(self, tmp_path: Path, source: str, **changes: Any) -> None:
        self.run_dir = tmp_path / "trials" / "0"
        script = tmp_path / "trial.py"
        script.write_text(PRELUDE + textwrap.dedent(source))
        self.program = (str(script), str(self.run_dir))
        options = {
            "launch_flags": ("--strategy", "single", "--grace_s", "15"),
            "environ": {**os.environ, "PYTHONPATH": str(ROOT)},
            "timeout_s": math.inf,
            **changes,
        }
        self.runner = LauncherRunner(program=self.program, gpus=(), slots=1, **options)
        self.running: Any = None
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, *, budget: int | None = None) -> Outcome:
        goal = Goal(objective="val_accuracy", direction="max", until=budget)
        self.running = self.runner.start(TrialJob(run_dir=self.run_dir, flags=(), goal=goal))
        try:
            return until(self._outcome)
        except BaseException:
            self.running.stop()
            until(self._outcome)
            raise

    def _outcome(self) -> Outcome | None:
        self.meanwhile()
        self.runner.wait([self.running], 0.1)
        return self.running.poll()


@pytest.fixture(autouse=True)
def _logs(tmp_path):
    yield
    for path in sorted(tmp_path.rglob("*.log")):
        print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")


@pytest.mark.parametrize(
    ("source", "changes", "reason", "line"),
    [
        (
            "raise ValueError('a layer of -3 units')",
            {},
            "worker-0: ValueError: a layer of -3 units (exit code 1)",
            "trial.py",
        ),
        ("", {"launch_flags": ("--strategy", "none")}, "--strategy: 'none' is inv", "--strategy"),
        (
            "done(1); signal.pause()",
            {"timeout_s": 3.0},
            "no virtual epoch within 3 s (--trial_timeout_s)",
            "",
        ),
    ],
    ids=["raises", "is_refused", "hangs"],
)
def test_a_failed_trial_has_a_reason_and_last_lines(tmp_path, source, changes, reason, line):
    outcome = Trial(tmp_path, source, **changes).run()
    assert isinstance(outcome, Failed)
    assert reason in outcome.reason
    assert line in "\n".join(outcome.last_lines)


def test_a_paused_trial_resumes_at_its_virtual_epoch(tmp_path):
    trial = Trial(
        tmp_path,
        """
        if (run_dir / "metrics.jsonl").exists():
            done(3); finish(); sys.exit()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        done(1); done(2)
        signal.pause()
        """,
    )
    for budget, score in ((1, 0.1), (None, 0.3)):
        outcome = trial.run(budget=budget)
        assert isinstance(outcome, Completed)
        assert outcome.score == score


TUNE = """
import sys
from tests.forked_python import SharedTemplate
from tfdist.tune import main
from tfdist.tuning import sweep
sweep.ForkTemplate = SharedTemplate
sys.exit(main())
"""


class Sweep:
    """`tfdist.tune` on the digits, two trials of 225 steps and more, a backup at every fifth.

    Its trials are forked from the process that has imported for all tests.
    """

    program: tuple[str, ...] = ("-c", TUNE)

    FLAGS = (
        *("--config", str(ROOT / "configs" / "digits_sweep.py"), "--seed", "346"),
        *("--tuner", "tpe"),
        *("--config.total_examples=14400", "--config.checkpoints=3"),
        "--config.backup_every_steps=5",
    )

    def __init__(self, path: Path, *flags: str, trials: int = 2) -> None:
        self.path = path
        self.flags = (*self.FLAGS, "--max_trials", str(trials), *flags)
        self.log = path.with_suffix(".log")

    @contextlib.contextmanager
    def started(self) -> Iterator[forked_python.Program]:
        program = (*self.program, "--sweep_dir", str(self.path), *self.flags)
        with open(self.log, "ab") as log:
            chief = forked_python.Program(*program, stdout=log, stderr=log)
        try:
            yield chief
        finally:
            chief.kill()
            chief.wait()

    def state(self) -> SweepState:
        return fold(read(self.path / "journal.jsonl"))


def weights(sweep_dir: Path) -> list[Any]:
    """Values, score, and digest of all weights of each trial."""
    found = []
    for trial in fold(read(sweep_dir / "journal.jsonl")).trials.values():
        summary = RunDirectory(sweep_dir / "trials" / trial.run).read_summary() or {}
        found.append((dict(trial.values), trial.score, summary["weights_sha256"]))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed sweep on one machine."""
    sweep = Sweep(tmp_path_factory.mktemp("undisturbed") / "whole")
    with sweep.started() as chief:
        assert chief.wait(SWEEP_DEADLINE_S) == 0, sweep.log.read_text()
    return sweep


@pytest.mark.timeout(3 * SWEEP_DEADLINE_S)
def test_a_sweep_with_a_killed_chief_finds_identical_results(whole, tmp_path):
    torn = Sweep(tmp_path / "torn")
    checkpoints = torn.path / "trials" / "0" / "checkpoints"
    with torn.started() as chief:
        until(lambda: any(checkpoints.glob("step-*")), within_s=SWEEP_DEADLINE_S)
        chief.send_signal(signal.SIGKILL)
    with torn.started() as chief:
        assert chief.wait(SWEEP_DEADLINE_S) == 0
    trials = torn.state().trials
    assert {t.status for t in trials.values()} == {"completed"}
    assert [t.starts for t in trials.values()] == [2, 1]
    summary = RunDirectory(torn.path / "trials" / "0").read_summary() or {}
    assert summary["resumed_from_step"], "it began anew"
    assert weights(torn.path) == weights(whole.path)


SHELL = """#!/bin/sh
echo $$ > "$0.$1"
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"  # as of names that ssh alone knows
exec sh -c "$2"
"""


@pytest.mark.timeout(3 * SWEEP_DEADLINE_S)
def test_trials_of_a_killed_agent_finish_on_another_host(whole, tmp_path):
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    torn = Sweep(tmp_path / "torn", "--hosts", "near:1,far:1", "--rsh", str(shell))
    checkpoints = torn.path / "trials" / "0" / "checkpoints"
    with torn.started() as chief:
        until(lambda: any(checkpoints.glob("step-*")), within_s=SWEEP_DEADLINE_S)
        os.kill(int((tmp_path / "shell.near").read_text()), signal.SIGKILL)
        assert chief.wait(SWEEP_DEADLINE_S) == 0, torn.log.read_text()
    assert "near: no trials on this host for 60 s: " in torn.log.read_text()
    assert torn.state().trials["0"].starts == 2
    summary = RunDirectory(torn.path / "trials" / "0").read_summary() or {}
    assert summary["resumed_from_step"], "it began anew"
    (attempt,) = report(torn.path / "trials" / "0")["attempts"][-1:]
    assert {task["host"] for task in attempt["tasks"]} == {"far"}
    assert weights(torn.path) == weights(whole.path)
