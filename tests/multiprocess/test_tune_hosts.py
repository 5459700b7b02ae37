"""A sweep with runners that come, go, hang and are killed, and a chief that is killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.forked_python import Program
from tests.multiprocess.test_tune import (
    DEADLINE_S,
    ROOT,
    SWEEP_DEADLINE_S,
    Sweep,
    _logs,  # noqa: F401  # shows the logs
    free_address,
    until,
)
from tfdist.launch.machine import proc_state
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import SweepState, fold, read
from tfdist.tuning import directory

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "served.py"
TOKEN = "a secret that nobody must see"
GIVEN_BACK_S = 15.0  # 10 of them pass by design


class Hosts:
    """A sweep's chief and its runners, as processes of this machine."""

    def __init__(self, path: Path, *, trials: int = 1) -> None:
        self.path = path / "sweep"
        self.logs = path
        self.trials = trials
        self.address = free_address()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def chief(self, name: str = "chief", *flags: str) -> None:
        self.start(name, "--serve", self.address, "--trials", str(self.trials), *flags)

    def runner(self, name: str, *flags: str, token: str = TOKEN) -> None:
        self.start(name, "--join", self.address, *flags, token=token)

    def start(self, name: str, *flags: str, token: str = TOKEN) -> None:
        variables = {"PYTHONPATH": str(ROOT), "TFDIST_RENDEZVOUS_TOKEN": token}
        with open(self.logs / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(self.path), *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
            )

    def said(self, name: str, pattern: str) -> bool:
        return re.search(pattern, (self.logs / f"{name}.log").read_text()) is not None

    def until_said(self, name: str, pattern: str) -> None:
        until(lambda: self.said(name, pattern))

    def send(self, name: str, signum: int) -> None:
        self.processes[name].send_signal(signum)

    def code_of(self, name: str) -> int:
        return self.processes[name].wait(DEADLINE_S)

    def state(self) -> SweepState:
        return fold(read(self.path / "journal.jsonl"))

    def moments(self, event: str) -> list[float]:
        lines = read(self.path / "journal.jsonl")
        return [line["at"] for line in lines if line["event"] == event]

    def steps(self, trial: str) -> list[list[str]]:
        """Who did what in a trial: process, step, and a word."""
        file = self.path / "trials" / trial / "steps"
        text = file.read_text() if file.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def writer(self, trial: str, *, but: Sequence[int] = ()) -> int:
        """Waits until some process, none of `but`, has come to the step at which it waits."""

        def found() -> list[int]:
            waits = [int(pid) for pid, _, what in self.steps(trial) if what == "waits"]
            return [pid for pid in waits if pid not in but]

        until(lambda: bool(found()))
        return found()[-1]

    def require_one_after_the_other(self) -> None:
        """Each trial was written by one process at a time, and each step was done once."""
        for trial in map(str, range(self.trials)):
            steps = self.steps(trial)
            writers = [pid for pid, _ in groupby(pid for pid, _, _ in steps)]
            assert len(writers) == len(set(writers)), f"trial {trial}: two wrote at once"
            done = [int(step) for _, step, what in steps if what == "done"]
            assert done == list(range(1, 21)), f"trial {trial}"


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def is_alive(pid: int) -> bool:
    return proc_state(pid) not in (None, "Z")


@pytest.mark.timeout(600)
def test_runners_come_and_leave_and_outlive_a_chief_that_is_killed(hosts):
    hosts.trials = 3
    hosts.runner("a")  # before there is a chief
    hosts.chief()
    first = hosts.writer("0")
    hosts.runner("b")
    second = hosts.writer("1")

    hosts.send("chief", signal.SIGKILL)
    hosts.code_of("chief")
    for name in ("a", "b"):
        hosts.until_said(name, "is gone")
    before = len(hosts.steps("0"))
    until(lambda: len(hosts.steps("0")) > before + 5)  # it goes on
    hosts.chief("chief-2")
    for name in ("a", "b"):
        hosts.until_said(name, "is there(.|\n)*is gone(.|\n)*is there")
    assert hosts.writer("0") == first
    assert hosts.writer("1") == second

    hosts.send("b", signal.SIGTERM)
    assert hosts.code_of("b") == 143
    assert hosts.steps("1")[-1] == [str(second), "10", "saved"]
    hosts.send("chief-2", signal.SIGTERM)  # and so do all
    assert hosts.code_of("chief-2") == hosts.code_of("a") == 143
    assert hosts.steps("0")[-1] == [str(first), "10", "saved"]
    (hosts.path / "go").touch()
    hosts.chief("chief-3")
    hosts.runner("c")
    assert hosts.code_of("chief-3") == hosts.code_of("c") == 0
    trials = hosts.state().trials
    assert [(t.status, t.starts, t.kills) for t in trials.values()] == [
        ("completed", 2, 0),
        ("completed", 2, 0),
        ("completed", 1, 0),
    ]
    assert [t.score for t in trials.values()] == [1 / 2, 1 / 3, 1 / 4]
    assert len(hosts.moments("ended")) == 3
    hosts.require_one_after_the_other()


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_runner_that_vanishes_or_hangs_loses_its_trial_to_another(hosts):
    hosts.chief()
    hosts.runner("a")
    first = hosts.writer("0")
    hosts.runner("b")
    hosts.until_said("b", "is there")
    hosts.send("a", signal.SIGKILL)
    killed_s = time.time()
    second = hosts.writer("0", but=[first])
    assert not is_alive(first)
    assert hosts.moments("started")[1] - killed_s < GIVEN_BACK_S

    hosts.runner("c")
    hosts.until_said("c", "is there")
    hosts.send("b", signal.SIGSTOP)  # its trial is not stopped, and nobody reads what it says
    stopped_s = time.time()
    third = hosts.writer("0", but=[first, second])
    assert not is_alive(second)
    assert hosts.moments("started")[2] - stopped_s < GIVEN_BACK_S
    hosts.send("b", signal.SIGCONT)
    hosts.until_said("chief", "comes too late with trial 0")
    assert hosts.writer("0") == third
    (hosts.path / "go").touch()
    for name in ("chief", "b", "c"):
        assert hosts.code_of(name) == 0
    trial = hosts.state().trials["0"]
    assert (trial.status, trial.starts, trial.score) == ("completed", 3, 1 / 2)
    hosts.require_one_after_the_other()


@pytest.mark.timeout(600)
def test_who_does_not_belong_to_the_sweep_is_sent_away_with_one_line(hosts):
    hosts.chief()
    hosts.until_said("chief", "runners may come")
    hosts.runner("no-token", token="")
    hosts.runner("other-token", token="another secret of that length")
    hosts.runner("other-program", "--program", "mine.py")
    found = directory.read_ownership(hosts.path)
    for name in ("no-token", "other-token", "other-program"):
        assert hosts.code_of(name) == 2
    another = '{"sweep": "another", "address": "127.0.0.1:1"}'
    hosts.path.joinpath(directory.OWNERSHIP).write_text(another)
    hosts.runner("other-directory")
    assert hosts.code_of("other-directory") == 2
    assert found is not None
    assert found.address == hosts.address
    said = {name: (hosts.logs / f"{name}.log").read_text() for name in hosts.processes}
    assert "served: TFDIST_RENDEZVOUS_TOKEN: received a token of 0 characters" in said["no-token"]
    assert "token: received one that 127.0.0.1:" in said["other-token"]
    assert "received program mine.py there, served here" in said["other-program"]
    assert "--sweep_dir: received" in said["other-directory"]
    assert "which is not that of the chief at" in said["other-directory"]
    assert all(text.count("\n") == 1 for name, text in said.items() if name != "chief"), said
    assert not any(TOKEN in text for text in said.values())
    hosts.send("chief", signal.SIGTERM)
    assert hosts.code_of("chief") == 143
    hosts.runner("late", "--reconnect_s", "0.5")
    assert hosts.code_of("late") == 75
    hosts.until_said("late", "no chief of the sweep was there for .*Connection refused")


class Served(Sweep):
    """A sweep over the learning rate alone, in a directory with a space in its name."""

    CONFIG = """
from tfdist.configs import base

def get_config():
    config = base()
    config.dataset, config.model = "tfdist_digits", "cnn"
    config.augmentation.std = (16.0,)
    config.global_batch_size, config.total_examples = 32, {examples}
    config.checkpoints, config.backup_every_steps = 3, 10
    return config

def space(hp, config):
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-2, sampling="log")
"""
    FLAGS = ("--seed", "5")

    def __init__(self, tmp_path: Path, *flags: str, examples: int) -> None:
        self.address = free_address()
        path = tmp_path / "a sweep"
        path.mkdir()
        config = path / "a config.py"
        config.write_text(self.CONFIG.format(examples=examples))
        super().__init__(path / "found", "--config", str(config), *flags, trials=4)

    def chief(self, *flags: str) -> contextlib.AbstractContextManager[Program]:
        return self._as("chief", "--serve", self.address, "--parallel_trials", "0", *flags)

    def runner(self, name: str) -> contextlib.AbstractContextManager[Program]:
        return self._as(name, "--join", self.address)

    def _as(self, name: str, *flags: str) -> contextlib.AbstractContextManager[Program]:
        one = Sweep(self.path)
        one.flags = (*self.flags, *flags)
        one.log = self.path.with_name(f"{name}.log")
        return one.started()

    def lose_the_runner_of(self, trial: str) -> None:
        """Runs the sweep to its end; the trial's runner is killed in its midst, another comes."""
        with self.chief() as chief, contextlib.ExitStack() as stack:
            with self.runner("first") as first:
                self._until_it_trains(trial)
                first.send_signal(signal.SIGKILL)
            second = stack.enter_context(self.runner("second"))
            assert chief.wait(SWEEP_DEADLINE_S) == 0
            assert second.wait(SWEEP_DEADLINE_S) == 0
        self._require_each_once(torn=trial)
        assert self.summary(self.run_of(trial))["resumed_from_step"], "it began anew"

    def run_of(self, trial: str) -> Path:
        return self.path / "trials" / self.state().trials[trial].run

    def summary(self, run: Path) -> dict[str, Any]:
        return RunDirectory(run).read_summary() or {}

    def _until_it_trains(self, trial: str) -> None:
        """Waits until a trial that was started has saved something new, far from its end."""

        def has_begun() -> bool:
            return any(name == trial and one.starts for name, one in self.state().trials.items())

        until(has_begun, within_s=SWEEP_DEADLINE_S)
        checkpoints = self.run_of(trial) / "checkpoints"
        before = set(checkpoints.glob("step-*"))
        until(lambda: set(checkpoints.glob("step-*")) - before, within_s=SWEEP_DEADLINE_S)

    def _require_each_once(self, *, torn: str) -> None:
        """All trials have ended, each once; that which lost its runner was started twice."""
        trials = self.state().trials
        assert {trial.status for trial in trials.values()} == {"completed"}
        assert {t.id: t.starts for t in trials.values()} == {
            name: 2 if name == torn else 1 for name in trials
        }
        lines = read(self.path / "journal.jsonl")
        ended = [line["trial"] for line in lines if line["event"] == "ended"]
        assert sorted(ended) == sorted(trials)


@pytest.mark.timeout(3 * SWEEP_DEADLINE_S)
def test_hyperband_goes_on_with_a_multiworker_trial_on_another_runner(tmp_path, monkeypatch):
    """The trial that continues another loses its runner, and is that of one run through."""
    monkeypatch.setenv("TFDIST_RENDEZVOUS_TOKEN", TOKEN)
    flags = ("--strategy", "multiworker", "--workers", "2", "--retrain_best")
    sweep = Served(tmp_path, *flags, "--tuner", "hyperband", examples=9600)
    sweep.lose_the_runner_of("3")
    trials = sweep.state().trials
    assert [trial.until for trial in trials.values()] == [1, 1, 1, None]
    assert trials["3"].run in "012"
    torn, whole = sweep.summary(sweep.run_of("3")), sweep.summary(sweep.path / "best")
    assert torn["resumed_from_step"] > 100, "it began anew"  # that is what it continues
    assert whole["resumed_from_step"] is None
    for name in ("weights_sha256", "state_sha256"):
        assert torn[name] == whole[name]


@pytest.mark.timeout(3 * SWEEP_DEADLINE_S)
def test_a_bayesian_sweep_of_ps_trials_outlives_a_runner(tmp_path, monkeypatch):
    """The last trial, which the model has chosen, loses its runner, and waits for another."""
    monkeypatch.setenv("TFDIST_RENDEZVOUS_TOKEN", TOKEN)
    flags = ("--strategy", "ps", "--workers", "1", "--ps", "1")
    sweep = Served(tmp_path, *flags, "--tuner", "bayesian", examples=2880)
    sweep.lose_the_runner_of("3")
    trials = sweep.state().trials
    assert len({trial.values["learning_rate"] for trial in trials.values()}) == 4
