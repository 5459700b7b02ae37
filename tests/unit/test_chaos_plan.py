"""What the chaos runner does without a job: reading plans, drawing times, judging, counting."""

import random
import re
import sys
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos.plan import Case, Fault, Plan, PlanError, by_case, in_turn, random_faults, read
from tests.chaos.record import Record
from tests.chaos.summary import kind_of, percentile, table
from tests.chaos.verdict import differences

PLANS = Path(__file__).parents[1] / "chaos" / "plans"
PAIR = Case(name="pair", strategy="multiworker", workers=2)


OF_ALL = (
    30,
    {
        ("single", 1, 1),
        ("mirrored", 1, 2),
        ("multiworker", 2, 1),
        ("multiworker", 3, 1),
    },
)
OF_STAGES = 12, {("pipeline", 2, 1), ("pipeline", 4, 1)}


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_plans_can_be_read(path):
    plan = read(path)
    kills, jobs = OF_STAGES if path.stem == "pipeline" else OF_ALL
    assert plan.kills >= kills
    assert {(c.strategy, c.workers, c.devices) for c in plan.cases if c.share} >= jobs
    tasks = {case.name: case.tasks for case in plan.cases}
    for entry in plan.placed:
        assert all(fault.task in tasks[entry.case] for fault in entry.faults)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"do": "sing", "at": "step 3"}, "expected one of kill"),
        ({"do": "kill", "at": "later"}, "expected one of step"),
        ({"do": "kill", "at": "phase lunch"}, "expected a phase of import"),
        ({"do": "slow", "at": "write 3"}, "only kill and stop"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault, said):
    with pytest.raises(PlanError, match=said):
        Fault(**fault)


def test_a_plan_with_an_unknown_word_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[case]]\nname = "a"\nstrategy = "single"\nworker = 2\n')
    with pytest.raises(PlanError, match="worker: expected one of name"):
        read(path)


def test_the_same_seed_draws_the_same_kills_and_leaves_training_to_kill():
    def drawn(seed: int) -> list[Fault]:
        draw = random.Random(seed)
        return [
            fault
            for _ in range(20)
            for fault in random_faults(PAIR, draw, startup_s=5.0, training_s=8.0)
        ]

    faults = drawn(3)
    assert faults == drawn(3) != drawn(4)
    assert {fault.do for fault in faults} == {"kill", "kill_all", "kill_launcher"}
    assert {fault.task for fault in faults} == {"worker-0", "worker-1"}
    training = [fault.number for fault in faults if fault.kind == "training"]
    assert max(training) * PAIR.kills_per_run < 8.0


def test_cases_take_turns_by_their_share():
    cases = [Case(name=n, strategy="single", share=s) for n, s in (("a", 2), ("b", 0), ("c", 1))]
    assert [case.name for case in in_turn(cases)] == ["a", "c", "a"]


def test_a_plan_is_divided_by_case_with_its_runs_and_all_of_the_kills():
    plan = read(PLANS / "short.toml")
    parts = by_case(plan)
    assert [part.cases for part in parts] == [(case,) for case in plan.cases]
    assert sum(part.kills for part in parts) == plan.kills
    kills = {part.cases[0].name: part.kills for part in parts}
    assert kills == {
        "multiworker-2": 12,
        "single": 9,
        "mirrored-2": 6,
        "multiworker-3": 3,
        "sharded-2": 0,
    }
    for part in parts:
        (case,) = part.cases
        assert part.placed == tuple(entry for entry in plan.placed if entry.case == case.name)
    idle = Plan(cases=(Case(name="idle", strategy="single", share=0),), placed=(), kills=5)
    assert [part.kills for part in by_case(idle)] == [0]


def test_a_difference_is_named_by_where_it_is():
    expected = {"sha": "a", "history": {"loss": ["0.1", "0.2"]}, "metrics": [{"step": 1}]}
    assert differences(expected, expected) == []
    found = {"sha": "a", "history": {"loss": ["0.1", "0.3"]}, "metrics": []}
    assert differences(found, expected) == [
        "history: loss: [1]: '0.3', expected '0.2'",
        "metrics: 0 entries, expected 1",
    ]


def test_times_are_those_of_the_last_task_after_the_fault():
    fault = Fault(do="kill", at="step 9", task="worker-1")
    record = Record(fault=fault, case="pair", at_s=10.0, attempt=1, tasks=2)
    record.named("worker-1 failed first", 10.2)
    record.named("worker-0 failed first", 11.0)
    for event, task, attempt, at_s in [
        ("first_step", "worker-0", 1, 10.1),  # of the attempt that was hit
        ("program", "worker-0", 2, 11.2),
        ("program", "worker-1", 2, 11.7),
        ("imported", "worker-0", 2, 15.2),
        ("imported", "worker-1", 2, 15.7),
        ("first_step", "worker-1", 2, 17.0),
    ]:
        record.saw({"event": event, "task": task, "attempt": attempt, "at": at_s})
    assert record.detect_s == pytest.approx(0.2)
    assert record.restart_s == pytest.approx(1.5)
    assert record.import_s == pytest.approx(4.0)
    assert record.first_step_s is None  # worker-0 is not back yet
    assert record.restarted_by == "launcher"
    assert "detect 0.20 s, restart 1.50 s, restore -, first_step -" in record.line()


def test_the_table_counts_what_ended_identical():
    record = Record(
        fault=Fault(do="kill", at="write 3"), case="single", at_s=1.0, attempt=1, identical=True
    )
    other = {**record.as_dict(), "identical": False}
    assert kind_of(other) == "kill in a save"
    assert table([record.as_dict(), other]).splitlines()[-1].endswith("1 of 2")


class OfOneCase:
    """A campaign that kept the directory of the case `b`."""

    def __init__(self, plan: Plan, directory: Path, **_: object) -> None:
        (case,) = plan.cases
        self.kept = [directory / "b-1"] if case.name == "b" else []
        fault = Fault(do="kill", at="step 3")
        record = Record(fault=fault, case=case.name, at_s=1.0, attempt=1, identical=not self.kept)
        self.lines = [record.as_dict()]

    def placed(self) -> None:
        pass

    def random_kills(self, kills: int) -> None:
        assert kills == 2


@pytest.mark.parametrize(("cases", "code"), [(["a", "b", "c"], 1), (["a", "c"], 0)])
def test_what_one_of_the_cases_side_by_side_has_kept_is_named(
    cases, code, tmp_path, monkeypatch, capsys
):
    plan = tmp_path / "plan.toml"
    text = [f'[[case]]\nname = "{n}"\nstrategy = "single"\nkills_per_run = 2\n' for n in cases]
    plan.write_text("".join([f"kills = {2 * len(cases)}\n", *text]))
    monkeypatch.setattr(chaos, "Campaign", OfOneCase)
    flags = ["--plan", str(plan), "--at_once", "2", "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["chaos", *flags])
    assert chaos.main() == code
    said = capsys.readouterr().out
    assert re.search(rf"{len(cases)} faults in \d+ s, {code} not identical", said)
    assert said.count("kept ") == code
    assert len(list(tmp_path.glob("chaos-*"))) == code


def test_percentiles_are_of_values_that_were_measured():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([7.0], 0.5) == 7.0
