"""The chief of a sweep with simulated trials: every order of events, every crash."""

import itertools
import os
import signal
from functools import partial

import pytest

from tests.unit.sweep_world import FAILED, FakeSearch, World, flags_of, trials_in
from tfdist.errors import UsageError
from tfdist.outputs.sweep_journal import Trial, read
from tfdist.tuning.chief import IDLE
from tfdist.tuning.trial_job import Failed, Goal, Killed

GOAL = Goal(objective="val_accuracy", direction="max")
KILLED = Killed(reason="chief-0: killed by SIGKILL")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize(
    ("slots", "ahead", "at_once"), [(1, 99, 1), (3, 99, 3), (3, 1, 1)], ids=str
)
def test_all_trials_run_once_within_the_slots(tmp_path, slots, ahead, at_once):
    world = World(tmp_path, slots=slots, search_of=partial(FakeSearch, ahead=ahead))
    chief = world.run()
    assert world.started == ["0", "1", "2", "3"]
    assert [trial.id for trial in chief.state.ranked()] == ["0", "3", "1", "2"]
    assert chief.state.is_complete
    assert world.most_at_once == at_once
    idle = [line for line in read(tmp_path / "journal.jsonl") if line.get("status") == IDLE]
    assert len(idle) <= 4, "asked once for each change, not at every look"


@pytest.mark.parametrize("how", ["before", "within", "after"])
@pytest.mark.parametrize(("slots", "later"), [(1, 1), (2, 2), (3, 1), (1, 3)])
def test_a_crash_at_any_write_gives_the_same_trials(tmp_path, how, slots, later):
    """Nor does another number of slots, where more trials wait for one than there are."""
    whole = World(tmp_path / "whole", slots=slots)
    whole.run()
    writes = len(read(whole.path / "journal.jsonl")) - 1
    assert writes > 10
    for at in range(writes):
        world = World(tmp_path / str(at), slots=slots, slots_later=later)
        world.run(at=at, how=how)
        assert world.chiefs == 2
        assert world.most_at_once <= later
        assert trials_in(world.path) == trials_in(whole.path)
        assert world.done == whole.done, "a finished trial was run again, or a step was"


def test_a_failed_trial_is_recorded_and_the_sweep_continues(tmp_path):
    """So is one whose values make no configuration, which is not started at all."""

    def flags(trial: Trial) -> tuple[str, ...]:
        if trial.id == "2":
            raise UsageError("config.dropout", "2 is too large", fix="lower it")
        return flags_of(trial)

    failed = Failed(reason="worker-0: ValueError: too wide", last_lines=("Traceback", "ValueError"))
    world = World(tmp_path)
    world.sweep.flags_of = lambda trial, seed: flags(trial)
    world.fates = {"1": [failed]}
    trials = world.run().state.trials
    assert (trials["1"].status, trials["1"].reason) == ("failed", failed.reason)
    assert trials["1"].last_lines == failed.last_lines
    assert "config.dropout: 2 is too large" in trials["2"].reason
    assert world.started == ["0", "1", "3"]
    assert [trial.status for trial in trials.values()].count("completed") == 2


def test_a_sweep_without_completed_trials_has_failed(tmp_path):
    world = World(tmp_path)
    world.fate_of = lambda run: FAILED
    chief = world.begin()
    assert chief.run() == 1
    assert chief.state.finished == "all trials failed"
    assert chief.state.is_complete, "there is nothing to go on with"


def test_too_many_failed_trials_end_the_sweep(tmp_path):
    world = World(tmp_path, options={"max_failed_trials": 2})
    world.fates = {name: [FAILED] for name in "012"}
    chief = world.begin()
    assert chief.run() == 1
    assert chief.state.finished == "stopped after 2 failed trials (--max_failed_trials)"
    assert not chief.state.is_complete
    more = World(tmp_path, options={"max_failed_trials": 4})
    more.fates = world.fates
    state = more.run().state
    assert state.is_complete
    assert [t.status for t in state.trials.values()] == ["failed"] * 3 + ["completed"]


def test_a_killed_trial_resumes_unless_killed_too_often(tmp_path):
    world = World(tmp_path)
    no_host = Killed(reason="no host in time", has_started=False)
    world.fates = {"0": [KILLED] * 2, "1": [KILLED] * 9, "2": [no_host] * 9}
    trials = world.run().state.trials
    assert trials["2"].status == "completed"
    assert (trials["0"].status, trials["0"].starts) == ("completed", 3)
    assert trials["1"].status == "failed"
    assert "killed 4 times without progress" in trials["1"].reason


def test_kills_with_progress_in_between_are_not_counted(tmp_path):
    world = World(tmp_path, epochs=20)
    ticks = itertools.count()

    def kill_at_every_second_tick() -> None:
        for process in world.processes:
            if process.lives and next(ticks) % 2:
                process.kill()

    world.events = kill_at_every_second_tick
    trials = world.run().state.trials
    assert {trial.status for trial in trials.values()} == {"completed"}
    assert trials["0"].starts > 5


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_chief_leaves_trials_resumable(tmp_path, signum, code):
    world = World(tmp_path, slots=2)
    chief = world.begin()
    world.events = lambda: world.signals.append(signum)
    assert chief.run() == code
    assert not any(process.lives for process in world.processes)
    assert {t.status for t in chief.state.trials.values()} <= {"running", "waiting"}
    world.signals, world.events = [], lambda: None
    assert len(world.run().state.completed) == 4
    assert set(world.done.values()) == {world.epochs}


def test_trial_time_excludes_time_without_a_chief(tmp_path):
    world = World(tmp_path, trials=1, epochs=3, ticks=10, time_of_day=lambda: world.now_s)
    chief = world.begin()
    world.events = lambda: world.signals.extend([signal.SIGTERM] * (world.done["0"] == 5))
    chief.run()
    world.signals, world.events = [], lambda: None
    (live := tmp_path / "trials" / "0" / "live.json").parent.mkdir(parents=True)
    live.touch()
    first = chief.state.trials["0"].started_at
    os.utime(live, (first + 4.0, first + 4.0))  # its job has ended after the chief
    world.now_s += 1000.0
    trial = world.run().state.trials["0"]
    _, again = [line for line in read(tmp_path / "journal.jsonl") if line["event"] == "started"]
    second = trial.ended_at - again["at"]
    assert trial.seconds == pytest.approx(4.0 + second)
    assert trial.ended_at - trial.began_at > 1000.0
