"""The chief of a sweep with simulated trials: every order of events, every crash."""

import itertools
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sweep_world import BEGUN, FAILED, FakeSearch, Slots, World, flags_of, trials_in
from tfdist.errors import UsageError
from tfdist.options import MEDIAN
from tfdist.outputs.sweep_journal import Journal, Trial, fold, read
from tfdist.tuning.chief import IDLE
from tfdist.tuning.sweep import begin_retraining, retrain
from tfdist.tuning.trial_job import (
    LEAST_TRIALS,
    Completed,
    Failed,
    Goal,
    Killed,
    TrialJob,
    medians_of,
    outcome_of,
)

GOAL = Goal(objective="val_accuracy", direction="max")
KILLED = Killed(reason="chief-0: killed by SIGKILL")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize(
    ("slots", "ahead", "at_once"), [(1, 99, 1), (3, 99, 3), (3, 1, 1)], ids=str
)
def test_all_trials_run_once_as_many_at_once_as_there_are_slots_and_the_search_gives(
    tmp_path, slots, ahead, at_once
):
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
def test_a_crash_at_any_write_changes_nothing(tmp_path, how, slots, later):
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


def test_a_failed_trial_is_written_down_and_the_sweep_goes_on(tmp_path):
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


def test_a_sweep_of_which_no_trial_was_completed_has_failed(tmp_path):
    world = World(tmp_path)
    world.fate_of = lambda run: FAILED
    chief = world.begin()
    assert chief.run() == 1
    assert chief.state.finished == "all trials failed"
    assert chief.state.is_complete, "there is nothing to go on with"


def test_too_many_failed_trials_end_the_sweep_with_the_reason(tmp_path):
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


def test_a_killed_trial_goes_on_and_one_that_is_always_killed_fails(tmp_path):
    world = World(tmp_path)
    world.fates = {"0": [KILLED] * 2, "1": [KILLED] * 9}
    trials = world.run().state.trials
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
def test_a_chief_that_is_asked_to_stop_leaves_trials_to_go_on(tmp_path, signum, code):
    world = World(tmp_path, slots=2)
    chief = world.begin()
    world.events = lambda: world.signals.append(signum)
    assert chief.run() == code
    assert not any(process.lives for process in world.processes)
    assert {t.status for t in chief.state.trials.values()} <= {"running", "waiting"}
    world.signals, world.events = [], lambda: None
    assert len(world.run().state.completed) == 4
    assert set(world.done.values()) == {world.epochs}


def test_the_time_of_a_trial_leaves_out_the_time_without_a_chief(tmp_path):
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


# Hopeless trials.

GOOD = (0.6, 0.8, 0.9)
OTHERS = (GOOD,) * LEAST_TRIALS
NAN = math.nan


def lines(*values: float | None) -> list[dict[str, Any]]:
    return [{"virtual_epoch": n, "val_accuracy": v} for n, v in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "others", "direction", "last"),
    [
        # below the median of the averages, which are 0.6, 0.7 and 0.77
        ((0.1, 0.2), OTHERS, "max", 2),
        ((0.1, 0.69), OTHERS, "max", 2),
        ((0.1, 0.7), OTHERS, "max", None),
        ((0.1, 0.72, 0.75), OTHERS, "max", 3),
        ((0.8, 0.1, 0.1), OTHERS, "max", None),  # its best counts
        # lower is better
        ((0.9, 0.9), [(0.8, 0.4)] * 5, "min", 2),
        ((0.9, 0.5), [(0.8, 0.4)] * 5, "min", None),
        # the first virtual epoch, and the first trials
        ((0.0,), OTHERS, "max", None),
        ((0.0, 0.0, 0.0), OTHERS[1:], "max", None),
        # others that have not come as far are no measure
        ((0.1, 0.1), [*OTHERS[1:], (0.9,)], "max", None),
        ((0.1, 0.1), [*OTHERS, (0.9,)], "max", 2),
        # what is not finite is no value
        ((None, None), OTHERS, "max", 2),
        ((0.9, None), OTHERS, "max", None),
        ((0.3, 0.3), [(0.2, NAN)] * 5, "max", None),
        ((0.3, 0.3), [(NAN, NAN)] * 5, "max", None),
    ],
)
def test_a_trial_is_hopeless_by_the_median_rule(values, others, direction, last):
    goal = Goal(objective="val_accuracy", direction=direction, medians=medians_of(others))
    assert goal.last(lines(*values)) == last


def test_a_trial_that_went_further_before_it_was_seen_is_judged_by_what_counts():
    goal = Goal(objective="val_accuracy", direction="max", medians=medians_of(OTHERS))
    for summary in (None, {"status": "stopped"}, {"status": "done"}):
        outcome = outcome_of(goal, summary=summary, metrics=lines(0.1, 0.2, 0.99))
        assert isinstance(outcome, Completed)
        assert (outcome.score, outcome.stopped_at) == (0.2, 2)
    goes_on = outcome_of(goal, summary={"status": "done"}, metrics=lines(0.7, 0.8, 0.99))
    assert isinstance(goes_on, Completed)
    assert (goes_on.score, goes_on.stopped_at) == (0.99, None)


def one_bad(job: TrialJob) -> Any:
    """Trial 5 is a bad one, until the end."""
    values = (0.1, 0.2, 0.99) if job.trial == "5" else GOOD
    return outcome_of(job.goal, summary={"status": "done"}, metrics=lines(*values))


def test_the_chief_measures_a_trial_by_those_that_have_ended(tmp_path):
    options = {"early_stop": MEDIAN}
    trials = World(tmp_path, trials=8, result=one_bad, options=options).run().state.trials
    assert {name: t.stopped_at for name, t in trials.items() if t.stopped_at} == {"5": 2}
    assert trials["5"].score == 0.2


def test_a_trial_begun_again_is_measured_by_those_that_had_ended_when_it_first_began(tmp_path):
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", **BEGUN)

    def begin(*names: str) -> None:
        for name in names:
            more = {"values": {"x": 1}, "run": name, "until": None}
            book.add("asked", status="RUNNING", trial=name, **more)
            book.add("started", trial=name)

    def end(*names: str) -> None:
        for name in names:
            how = {"score": 0.9, "best_virtual_epoch": 3, "reason": "", "last_lines": []}
            book.add("ended", trial=name, status="COMPLETED", history=lines(*GOOD), **how)

    begin("0", "1", "2", "3")
    end("0", "1", "2", "3")
    begin("5", "4")  # at once
    end("4")  # and then the chief is killed
    options = {"early_stop": MEDIAN}
    trials = World(tmp_path, trials=8, result=one_bad, options=options).run().state.trials
    assert trials["5"].stopped_at is None, "measured by five; it began after four"
    assert trials["5"].measured_by == ("0", "1", "2", "3")
    assert trials["6"].measured_by == ("0", "1", "2", "3", "5", "4")


# The best trial, trained again.

BEST = TrialJob(run_dir=Path("best"), flags=("--config.x=1",), goal=GOAL)
DONE = Completed(history=(), score=0.5, best_virtual_epoch=1)


@pytest.fixture
def best(tmp_path):
    return World(tmp_path, result=lambda job: DONE)


@pytest.mark.parametrize(
    ("fates", "done", "code", "starts"),
    [
        ([], 0, 0, 1),
        ([], 2, 0, 0),
        ([KILLED, KILLED], 0, 0, 3),
        ([FAILED], 0, 1, 1),
        ([KILLED] * 9, 0, 1, 4),
    ],
    ids=["done", "done_before", "killed", "failed", "killed_too_often"],
)
def test_the_best_is_trained_until_it_has_an_end(best, fates, done, code, starts):
    best.fates["best"], best.done["best"] = [*fates], done
    assert retrain(Slots(best), BEST, stop_requests=tuple) == code
    assert len(best.started) == starts


def test_kills_of_the_best_with_progress_in_between_are_not_counted(best, monkeypatch):
    best.fates["best"] = [KILLED] * 9
    monkeypatch.setattr(Slots, "metrics", lambda _, run_dir: [{}] * len(best.started))
    assert retrain(Slots(best), BEST, stop_requests=tuple) == 0
    assert len(best.started) == 10


def test_the_best_is_told_to_stop_and_the_same_command_goes_on(best):
    best.events = lambda: best.signals.append(signal.SIGTERM)
    assert retrain(Slots(best), BEST, stop_requests=lambda: best.signals) == 143
    assert not any(process.lives for process in best.processes)
    assert retrain(Slots(best), BEST, stop_requests=tuple) == 0
    assert best.started == ["best", "best"]


def test_a_better_trial_that_is_found_later_is_trained_in_place_of_the_first(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)

    def begin(best: str) -> None:
        begin_retraining(tmp_path, journal, fold(journal.lines), best=best)

    begin("1")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "of").write_text("1")
    begin("1")  # the same command again
    assert (tmp_path / "best" / "of").exists()
    begin("3")
    assert not (tmp_path / "best").exists(), "it would be taken for that of the better one"
    assert (tmp_path / "best-1" / "of").read_text() == "1"
    assert fold(read(journal.path)).retrained == "3"
    begin("3")
    assert len(journal.lines) == 2
