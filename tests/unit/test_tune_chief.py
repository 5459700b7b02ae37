"""The chief of a sweep with trials that are no processes: every order of events, every crash."""

import itertools
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.unit.sweep_world import (
    BEGUN,
    Crash,
    Disk,
    FakeRunner,
    FakeSearch,
    flags_of,
    make_chief,
)
from tfdist.errors import UsageError
from tfdist.outputs.sweep_journal import Journal, Trial, fold, read
from tfdist.tuning.chief import IDLE, RUNNING
from tfdist.tuning.options import MEDIAN
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.sweep import begin_retraining, retrain
from tfdist.tuning.trial_job import (
    LEAST_TRIALS,
    Completed,
    Failed,
    Goal,
    Killed,
    Outcome,
    TrialJob,
    medians_of,
    outcome_of,
    values_of,
)

GOAL = Goal(objective="val_accuracy", direction="max")
KILLED = Killed(reason="chief-0: killed by SIGKILL")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def trials_in(tmp_path: Path) -> dict[str, tuple[str, float | None]]:
    state = fold(read(tmp_path / "journal.jsonl"))
    return {trial.id: (trial.status, trial.score) for trial in state.trials.values()}


@pytest.mark.parametrize(
    ("parallel", "ahead", "at_once"), [(1, 99, 1), (3, 99, 3), (3, 1, 1)], ids=str
)
def test_all_trials_run_once_as_many_at_once_as_there_are_places_and_the_search_gives(
    tmp_path, parallel, ahead, at_once
):
    disk = Disk()
    search_of = partial(FakeSearch, ahead=ahead)
    chief = make_chief(tmp_path, disk, parallel=parallel, search_of=search_of)
    assert chief.run() == 0
    assert disk.started == ["0", "1", "2", "3"]
    assert [trial.id for trial in chief.state.ranked()] == ["0", "1", "2", "3"]
    assert chief.state.is_complete
    assert disk.most_at_once == at_once
    idle = [line for line in read(tmp_path / "journal.jsonl") if line.get("status") == IDLE]
    assert len(idle) <= 4, "asked once for each change, not at every look"


@pytest.mark.parametrize("how", ["before", "within", "after"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_crash_at_any_write_changes_nothing(tmp_path, how, parallel):
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    work = Disk()
    make_chief(undisturbed, work, parallel=parallel).run()
    writes = len(read(undisturbed / "journal.jsonl")) - 1
    assert writes > 10
    for at in range(writes):
        place = tmp_path / f"at-{at}"
        place.mkdir()
        disk = Disk()
        chief = make_chief(place, disk, at=at, how=how, parallel=parallel)
        with pytest.raises(Crash):
            chief.run()
        assert make_chief(place, disk, parallel=parallel).run() == 0
        assert trials_in(place) == trials_in(undisturbed)
        assert disk.work == work.work, "a finished trial was run again, or a step was"


def test_a_failed_trial_is_written_down_and_the_sweep_goes_on(tmp_path):
    failed = Failed(reason="worker-0: ValueError: too wide", last_lines=("Traceback", "ValueError"))
    chief = make_chief(tmp_path, Disk(fates={"1": [failed]}))
    assert chief.run() == 0
    trial = chief.state.trials["1"]
    assert (trial.status, trial.reason) == ("failed", failed.reason)
    assert trial.last_lines == failed.last_lines
    assert len(chief.state.ranked()) == 3


def test_a_sweep_of_which_no_trial_was_completed_has_failed(tmp_path):
    fates: dict[str, list[Outcome]] = {name: [Failed(reason="no")] for name in "0123"}
    chief = make_chief(tmp_path, Disk(fates=fates))
    assert chief.run() == 1
    assert chief.state.finished == "all trials have failed"
    assert chief.state.is_complete, "there is nothing to go on with"


def test_values_that_make_no_configuration_fail_their_trial_only(tmp_path):
    def flags(trial: Trial) -> tuple[str, ...]:
        if trial.id == "2":
            raise UsageError("config.dropout", received=2, expected="less than 1", fix="lower it")
        return flags_of(trial)

    disk = Disk()
    chief = make_chief(tmp_path, disk, flags_of=flags)
    assert chief.run() == 0
    assert "config.dropout: received 2" in chief.state.trials["2"].reason
    assert disk.started == ["0", "1", "3"]


def test_too_many_failed_trials_end_the_sweep_with_the_reason(tmp_path):
    fates = {name: [Failed(reason="no")] for name in "012"}
    chief = make_chief(tmp_path, Disk(fates=fates), max_failed_trials=2)
    assert chief.run() == 1
    assert chief.state.finished == "2 failed trials (--max_failed_trials)"
    assert not chief.state.is_complete
    more = make_chief(tmp_path, Disk(fates=fates), max_failed_trials=4)
    assert more.run() == 0
    assert more.state.is_complete
    assert [t.status for t in more.state.trials.values()] == ["failed"] * 3 + ["completed"]


def test_a_killed_trial_goes_on_and_one_that_is_always_killed_fails(tmp_path):
    disk = Disk(fates={"0": [KILLED] * 2, "1": [KILLED] * 9})
    chief = make_chief(tmp_path, disk)
    assert chief.run() == 0
    assert chief.state.trials["0"].status == "completed"
    assert chief.state.trials["0"].starts == 3
    assert chief.state.trials["1"].status == "failed"
    assert "killed 4 times without progress" in chief.state.trials["1"].reason


def test_kills_with_progress_in_between_are_not_counted(tmp_path):
    disk = Disk(length=20)
    chief = make_chief(tmp_path, disk)
    polls = itertools.count()

    def kill_at_every_second_look() -> None:
        if next(polls) % 2 and disk.running:
            disk.fates.setdefault(next(iter(disk.running)), []).append(Killed(reason="SIGKILL"))

    disk.on_wait = kill_at_every_second_look
    assert chief.run() == 0
    assert {status for status, _ in trials_in(tmp_path).values()} == {"completed"}
    assert chief.state.trials["0"].starts > 5


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_chief_that_is_asked_to_stop_leaves_trials_to_go_on(tmp_path, signum, code):
    disk = Disk()
    chief = make_chief(tmp_path, disk, parallel=2)
    disk.on_wait = lambda: disk.signals.append(signum)
    assert chief.run() == code
    assert not disk.running
    assert {t.status for t in chief.state.trials.values()} <= {"running", "waiting"}
    disk.signals.clear()
    disk.on_wait = lambda: None
    assert make_chief(tmp_path, disk, parallel=2).run() == 0
    assert len(trials_in(tmp_path)) == 4
    assert disk.work == 4 * disk.length


def test_trials_left_by_a_chief_with_more_at_once_wait_for_their_turn(tmp_path):
    disk = Disk()
    with pytest.raises(Crash):  # three have been asked for and started, none has ended
        make_chief(tmp_path, disk, at=6, parallel=3).run()
    disk.most_at_once = 0
    assert make_chief(tmp_path, disk, parallel=1).run() == 0
    assert disk.most_at_once == 1
    assert len(trials_in(tmp_path)) == 4


def test_a_trial_that_a_runner_elsewhere_has_is_not_started_but_taken_over(tmp_path):
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", **BEGUN)
    for name in ("0", "1"):
        more = {"values": {"x": 1}, "run": name, "until": None}
        book.add("asked", status=RUNNING, trial=name, **more)
    book.add("started", trial="0")
    book.add("killed", trial="0", reason="", kills=1, reached=0)
    book.add("started", trial="0", runner=7, place=0)
    book.add("started", trial="1")
    disk = Disk()
    chief = make_chief(tmp_path, disk, parallel=2)
    assert chief.run() == 0
    assert disk.taken_over == [("0", 2, 7)]
    assert [trial.starts for trial in chief.state.trials.values()] == [2, 2, 1, 1]
    assert disk.most_at_once == 3, "its place is not one of those here"


def test_a_chief_that_does_not_serve_leaves_trials_elsewhere_alone(tmp_path):
    runner = LauncherRunner(
        program=(), launch_flags=(), gpus=(), slots=1, environ={}, timeout_s=1.0
    )
    job = TrialJob(run_dir=tmp_path, flags=(), goal=GOAL, trial="0")
    assert refused(lambda: runner.take_over(job)) == ("--serve", "trial-elsewhere")


# --- hopeless trials

GOOD = (0.6, 0.8, 0.9)
OTHERS = (GOOD,) * LEAST_TRIALS


def lines(*values: float | None) -> list[dict[str, Any]]:
    return [{"virtual_epoch": n, "val_accuracy": v} for n, v in enumerate(values, 1)]


NAN = math.nan


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


def test_what_is_not_reported_is_no_value():
    found = values_of([{"x": 1}, {"x": None}, {}], "x")
    assert found[0] == 1.0
    assert [math.isnan(value) for value in found] == [False, True, True]


def test_a_trial_that_went_further_before_it_was_seen_is_judged_by_what_counts():
    goal = Goal(objective="val_accuracy", direction="max", medians=medians_of(OTHERS))
    seen_late = lines(0.1, 0.2, 0.99)
    for summary in (None, {"status": "stopped"}, {"status": "done"}):
        outcome = outcome_of(goal, summary=summary, metrics=seen_late)
        assert isinstance(outcome, Completed)
        assert (outcome.score, outcome.stopped_at) == (0.2, 2)
    goes_on = outcome_of(goal, summary={"status": "done"}, metrics=lines(0.7, 0.8, 0.99))
    assert isinstance(goes_on, Completed)
    assert (goes_on.score, goes_on.stopped_at) == (0.99, None)


def one_bad(job: TrialJob) -> Any:
    """Trial 5 is a bad one, until the end."""
    values = (0.1, 0.2, 0.99) if job.trial == "5" else GOOD
    return outcome_of(job.goal, summary={"status": "done"}, metrics=lines(*values))


EIGHT = partial(FakeSearch, count=8)


@pytest.mark.parametrize("early_stop", ["none", MEDIAN])
def test_the_chief_measures_a_trial_by_those_that_have_ended(tmp_path, early_stop):
    disk = Disk(result=one_bad)
    chief = make_chief(tmp_path, disk, search_of=EIGHT, early_stop=early_stop)
    assert chief.run() == 0
    stopped = {name: t.stopped_at for name, t in chief.state.trials.items() if t.stopped_at}
    assert stopped == ({"5": 2} if early_stop == MEDIAN else {})
    assert chief.state.trials["5"].score == (0.2 if early_stop == MEDIAN else 0.99)


def test_a_trial_begun_again_is_measured_by_those_that_had_ended_when_it_first_began(tmp_path):
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", **BEGUN)

    def begin(*names: str) -> None:
        for name in names:
            more = {"values": {"x": 1}, "run": name, "until": None}
            book.add("asked", status=RUNNING, trial=name, **more)
            book.add("started", trial=name)

    def end(*names: str) -> None:
        for name in names:
            score = {"score": GOOD[-1], "best_virtual_epoch": 3, "history": lines(*GOOD)}
            more = {"status": "COMPLETED", "reason": "", "last_lines": []}
            book.add("ended", trial=name, **score, **more)

    begin("0", "1", "2", "3")
    end("0", "1", "2", "3")
    begin("5", "4")  # at once
    end("4")  # and then the chief is killed
    chief = make_chief(tmp_path, Disk(result=one_bad), search_of=EIGHT, early_stop=MEDIAN)
    assert chief.run() == 0
    trials = chief.state.trials
    assert trials["5"].stopped_at is None, "measured by five; it began after four"
    assert trials["5"].measured_by == ("0", "1", "2", "3")
    assert trials["6"].measured_by == ("0", "1", "2", "3", "5", "4")


# --- the best trial, trained again

JOB = TrialJob(run_dir=Path("best"), flags=("--config.x=1",), goal=GOAL)


@pytest.mark.parametrize(
    ("fates", "done", "code", "starts"),
    [
        ([], 0, 0, 1),
        ([], 2, 0, 0),
        ([KILLED, KILLED], 0, 0, 3),
        ([Failed(reason="ValueError: no")], 0, 1, 1),
        ([KILLED] * 9, 0, 1, 4),
    ],
    ids=["done", "done_before", "killed", "failed", "killed_too_often"],
)
def test_the_best_is_trained_until_it_has_an_end(fates, done, code, starts):
    disk = Disk(fates={"best": [*fates]}, done={"best": done})
    assert retrain(FakeRunner(disk), JOB, stop_requests=tuple) == code
    assert len(disk.started) == starts


def test_kills_of_the_best_with_progress_in_between_are_not_counted(monkeypatch):
    disk = Disk(fates={"best": [KILLED] * 9})
    monkeypatch.setattr(FakeRunner, "metrics", lambda _, run_dir: [{}] * len(disk.started))
    assert retrain(FakeRunner(disk), JOB, stop_requests=tuple) == 0
    assert len(disk.started) == 10


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


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_best_is_told_to_stop_and_the_same_command_goes_on(signum, code):
    disk = Disk(length=9)
    disk.on_wait = lambda: disk.signals.append(signum)
    assert retrain(FakeRunner(disk), JOB, stop_requests=lambda: disk.signals) == code
    assert not disk.running
    assert retrain(FakeRunner(disk), JOB, stop_requests=tuple) == 0
    assert disk.started == ["best", "best"]
