"""The median stopping rule: which trials are hopeless, and that it decides alike each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import UsageError
from tfdist.tuning.chief import RUNNING, STOPPED, Chief, NextTrial, SweepPlan
from tfdist.tuning.early import LEAST_TRIALS, MedianRule, medians_of, values_of
from tfdist.tuning.journal import Journal, Slot
from tfdist.tuning.options import MEDIAN, parse
from tfdist.tuning.trial_job import Completed, Goal, completed

GOOD = (0.6, 0.8, 0.9)
OTHERS = (GOOD,) * LEAST_TRIALS


def lines(*values: float | None) -> list[dict[str, Any]]:
    return [{"virtual_epoch": n, "val_accuracy": v} for n, v in enumerate(values, 1)]


def last(
    *values: float | None, others: Sequence[Sequence[float]] = OTHERS, direction: str = "max"
) -> int | None:
    medians = medians_of(others)
    rule = MedianRule(objective="val_accuracy", direction=direction, medians=medians)
    return rule.last(lines(*values))


def test_a_trial_below_the_median_of_the_averages_is_stopped() -> None:
    assert last(0.1, 0.2) == 2
    assert last(0.1, 0.69) == 2  # the averages at the second are 0.7
    assert last(0.1, 0.7) is None
    assert last(0.1, 0.72, 0.75) == 3  # at the third 0.77
    assert last(0.8, 0.1, 0.1) is None  # its best counts


def test_lower_is_better_where_it_is() -> None:
    assert last(0.9, 0.9, others=[(0.8, 0.4)] * 5, direction="min") == 2
    assert last(0.9, 0.5, others=[(0.8, 0.4)] * 5, direction="min") is None


def test_the_first_virtual_epoch_and_the_first_trials_are_never_stopped() -> None:
    assert last(0.0) is None
    assert last(0.0, 0.0, 0.0, others=OTHERS[1:]) is None


def test_trials_that_have_not_come_as_far_are_no_measure() -> None:
    assert last(0.1, 0.1, others=[*OTHERS[1:], (0.9,)]) is None
    assert last(0.1, 0.1, others=[*OTHERS, (0.9,)]) == 2


def test_what_is_not_finite_is_no_value() -> None:
    assert last(None, None) == 2
    assert last(0.9, None) is None
    assert last(0.3, 0.3, others=[(0.2, math.nan)] * 5) is None
    assert last(0.3, 0.3, others=[(math.nan, math.nan)] * 5) is None
    found = values_of([{"x": 1}, {"x": None}, {}], "x")
    assert found[0] == 1.0
    assert [math.isnan(value) for value in found] == [False, True, True]


def test_a_trial_that_went_further_before_it_was_seen_is_judged_by_what_counts() -> None:
    rule = MedianRule(objective="val_accuracy", direction="max", medians=medians_of(OTHERS))
    goal = Goal(objective="val_accuracy", direction="max", rule=rule)
    seen_late = lines(0.1, 0.2, 0.99)
    for summary in (None, {"status": "stopped"}, {"status": "done"}):
        outcome = completed(goal, summary=summary, metrics=seen_late)
        assert isinstance(outcome, Completed)
        assert (outcome.score, outcome.stopped_at) == (0.2, 2)
    goes_on = completed(goal, summary={"status": "done"}, metrics=lines(0.7, 0.8, 0.99))
    assert isinstance(goes_on, Completed)
    assert (goes_on.score, goes_on.stopped_at) == (0.99, None)


class Done:
    """A runner whose trials are done when they are started; trial 6 is a bad one."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def outcome(self, job: Any) -> Any:
        name = job.run_dir.name
        values = (0.1, 0.2, 0.99) if name == "6" else GOOD
        metrics = lines(*values) if name in self.done else []
        done = {"status": "done"} if name in self.done else None
        return completed(job.goal, summary=done, metrics=metrics)

    def metrics(self, run_dir: Path) -> list[Any]:
        return []

    def start(self, job: Any) -> Any:
        self.done.add(job.run_dir.name)
        outcome = self.outcome(job)

        class Ended:
            poll = staticmethod(lambda: outcome)
            taken = staticmethod(lambda: None)

        return Ended()

    def free_slots(self, taken: Any) -> list[Slot]:
        return [] if taken else [Slot(number=0)]

    def wait(self, running: Any, timeout_s: float) -> None:
        pass


class Eight:
    """Eight trials, one after the other."""

    def __init__(self, *, count: int = 0) -> None:
        self.count = count

    def ask(self) -> Any:
        self.count += 1
        if self.count > 8:
            return NextTrial(status=STOPPED, asker="r")
        return NextTrial(status=RUNNING, asker="r", trial=str(self.count), values={})

    def tell(self, *args: Any, **kwargs: Any) -> None:
        pass

    def publish(self, trials: Any = None) -> None:
        pass


class Nobody:
    def changed(self, state: Any, trial: Any) -> None:
        pass

    def tick(self, state: Any) -> None:
        pass


def early_chief(tmp_path: Path, book: Journal, *, search: Eight, early_stop: str = MEDIAN) -> Chief:
    plan = SweepPlan(
        sweep_dir=tmp_path,
        objective="val_accuracy",
        direction="max",
        max_epochs=None,
        max_failed_trials=None,
        early_stop=early_stop,
    )
    return Chief(plan, search=search, journal=book, runner=Done(), observer=Nobody())


@pytest.mark.parametrize("early_stop", ["none", MEDIAN])
def test_the_chief_measures_a_trial_by_those_that_have_ended(
    tmp_path: Path, early_stop: str
) -> None:
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", direction="max")
    chief = early_chief(tmp_path, book, search=Eight(), early_stop=early_stop)
    assert chief.run() == 0
    stopped = {name: t.stopped_at for name, t in chief.state.trials.items() if t.stopped_at}
    assert stopped == ({"6": 2} if early_stop == MEDIAN else {})
    assert chief.state.trials["6"].score == (0.2 if early_stop == MEDIAN else 0.99)


def test_a_trial_begun_again_is_measured_by_those_that_had_ended_when_it_first_began(
    tmp_path: Path,
) -> None:
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", direction="max")

    def begin(*names: str) -> None:
        for name in names:
            more = {"values": {}, "run": name, "until": None}
            book.add("asked", asker="r", status=RUNNING, trial=name, **more)
            book.add("started", trial=name)

    def end(*names: str) -> None:
        for name in names:
            score = {"score": GOOD[-1], "best_virtual_epoch": 3, "history": lines(*GOOD)}
            more = {"status": "COMPLETED", "reason": "", "last_lines": []}
            book.add("ended", trial=name, **score, **more)

    begin("1", "2", "3", "4")
    end("1", "2", "3", "4")
    begin("6", "5")  # at once
    end("5")  # and then the chief is killed
    chief = early_chief(tmp_path, book, search=Eight(count=6))
    assert chief.run() == 0
    assert chief.state.trials["6"].stopped_at is None, "measured by five; it began after four"
    assert chief.state.trials["7"].stopped_at is None
    assert chief.state.trials["6"].measured_by == ("1", "2", "3", "4")
    assert chief.state.trials["7"].measured_by == ("1", "2", "3", "4", "6", "5")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--early_stop", "medain"], "(did you mean 'median'?)"),
        (["--early_stop", "median", "--tuner", "hyperband"], "hyperband ends trials itself"),
    ],
)
def test_wrong_rules_are_one_line(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(["--config", "c.py", *flags])
    assert said in str(error.value)
