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
from tfdist.outputs.sweep_journal import fold, read
from tfdist.tuning import protocol

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "served.py"
TOKEN = "a secret that nobody must see"
GIVEN_BACK_S = 15.0  # 10 of them pass by design


class Hosts:
    """A sweep's chief and its runners, as processes of this machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.trials = path / "sweep", path, 1
        self.address = free_address()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def chief(self, name: str = "chief") -> None:
        self._start(name, "--serve", self.address, "--trials", str(self.trials))

    def runner(self, name: str, *flags: str, token: str = TOKEN) -> None:
        self._start(name, "--join", self.address, *flags, token=token)

    def _start(self, name: str, *flags: str, token: str = TOKEN) -> None:
        variables = {"PYTHONPATH": str(ROOT), "TFDIST_RENDEZVOUS_TOKEN": token}
        with open(self.logs / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(self.path), *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
            )

    def said(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def until_said(self, name: str, pattern: str) -> None:
        until(lambda: re.search(pattern, self.said(name)))

    def send(self, name: str, signum: int) -> float:
        self.processes[name].send_signal(signum)
        return time.time()

    def code_of(self, name: str) -> int:
        return self.processes[name].wait(DEADLINE_S)

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [one for one in read(self.path / "journal.jsonl") if one["event"] == event]

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

        return until(found)[-1]

    def ended(self) -> list[tuple[Any, ...]]:
        """What became of the trials, each written by one process at a time, each step done once."""
        for trial in map(str, range(self.trials)):
            steps = self.steps(trial)
            writers = [pid for pid, _ in groupby(pid for pid, _, _ in steps)]
            assert len(writers) == len(set(writers)), f"trial {trial}: two wrote at once"
            done = [int(step) for _, step, what in steps if what == "done"]
            assert done == list(range(1, 21)), f"trial {trial}"
        assert len(self.lines("ended")) == self.trials
        trials = fold(read(self.path / "journal.jsonl")).trials.values()
        return [(trial.status, trial.starts, trial.score) for trial in trials]


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


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
    done = [("completed", starts, 1 / n) for starts, n in ((2, 2), (2, 3), (1, 4))]
    assert hosts.ended() == done
    assert not any(line["kills"] for line in hosts.lines("killed"))


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_runner_that_vanishes_or_hangs_loses_its_trial_to_another(hosts):
    hosts.chief()
    hosts.runner("a")
    writers = [hosts.writer("0")]
    # The trial of a runner that hangs is not stopped, and nobody reads what it says.
    for runner, signum, another in (("a", signal.SIGKILL, "b"), ("b", signal.SIGSTOP, "c")):
        hosts.runner(another)
        hosts.until_said(another, "is there")
        sent_s = hosts.send(runner, signum)
        writers.append(hosts.writer("0", but=writers))
        assert proc_state(writers[-2]) in (None, "Z")
        assert hosts.lines("started")[-1]["at"] - sent_s < GIVEN_BACK_S
    hosts.send("b", signal.SIGCONT)
    hosts.until_said("chief", "comes too late with trial 0")
    assert hosts.writer("0") == writers[-1]
    (hosts.path / "go").touch()
    for name in ("chief", "b", "c"):
        assert hosts.code_of(name) == 0
    assert hosts.ended() == [("completed", 3, 1 / 2)]


@pytest.mark.timeout(600)
def test_who_does_not_belong_to_the_sweep_is_sent_away_with_one_line(hosts):
    hosts.chief()
    hosts.until_said("chief", "runners may come")
    hosts.runner("no-token", token="")
    hosts.runner("other-token", token="another secret of that length")
    hosts.runner("other-program", "--program", "mine.py")
    reasons = {
        "no-token": "served: TFDIST_RENDEZVOUS_TOKEN: received a token of 0 characters",
        "other-token": "token: received one that 127.0.0.1:",
        "other-program": "received program mine.py there, served here",
        "other-directory": "which is not that of the chief at",
    }
    for name, reason in reasons.items():
        if name == "other-directory":  # as it is by now
            another = '{"sweep": "another", "address": "127.0.0.1:1"}'
            hosts.path.joinpath(protocol.OWNERSHIP).write_text(another)
            hosts.runner(name)
        assert hosts.code_of(name) == 2
        assert reason in hosts.said(name)
        assert hosts.said(name).count("\n") == 1
    hosts.send("chief", signal.SIGTERM)
    assert hosts.code_of("chief") == 143
    assert not any(TOKEN in hosts.said(name) for name in hosts.processes)


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

    def __init__(self, tmp_path: Path, *flags: str, examples: int, trials: int = 4) -> None:
        self.address = free_address()
        path = tmp_path / "a sweep"
        path.mkdir()
        config = path / "a config.py"
        config.write_text(self.CONFIG.format(examples=examples))
        super().__init__(path / "found", "--config", str(config), *flags, trials=trials)

    def _as(self, name: str, *flags: str) -> contextlib.AbstractContextManager[Program]:
        one = Sweep(self.path)
        one.flags = (*self.flags, *flags)
        one.log = self.path.with_name(f"{name}.log")
        return one.started()

    def lose_the_runner_of(self, trial: str) -> None:
        """Runs the sweep to its end; the trial's runner is killed in its midst, another comes."""
        with contextlib.ExitStack() as stack:
            serve = ("--serve", self.address, "--parallel_trials", "0")
            chief = stack.enter_context(self._as("chief", *serve))
            with self._as("first", "--join", self.address) as first:
                self._until_it_trains(trial)
                first.send_signal(signal.SIGKILL)
            second = stack.enter_context(self._as("second", "--join", self.address))
            assert chief.wait(SWEEP_DEADLINE_S) == 0
            assert second.wait(SWEEP_DEADLINE_S) == 0
        lines, trials = read(self.path / "journal.jsonl"), self.state().trials
        assert {trial.status for trial in trials.values()} == {"completed"}
        assert {t.id: t.starts for t in trials.values()} == {n: 1 + (n == trial) for n in trials}
        ended = [line["trial"] for line in lines if line["event"] == "ended"]
        assert sorted(ended) == sorted(trials)
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
def test_a_sweep_of_ps_trials_outlives_a_runner(tmp_path, monkeypatch):
    """The last trial loses its runner, and waits for another."""
    monkeypatch.setenv("TFDIST_RENDEZVOUS_TOKEN", TOKEN)
    flags = ("--strategy", "ps", "--workers", "1", "--ps", "1")
    sweep = Served(tmp_path, *flags, examples=2880, trials=2)
    sweep.lose_the_runner_of("1")
    trials = sweep.state().trials
    assert len({trial.values["learning_rate"] for trial in trials.values()}) == 2
