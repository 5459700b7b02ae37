"""What the chaos runner does without a job: reading plans and judging."""

import re
import sys
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos.campaign import differences
from tests.chaos.plan import Case, Fault, PlanError, kills_of_cases, read
from tests.chaos.record import Record

PLANS = Path(__file__).parents[1] / "chaos" / "plans"
OF_ALL = {("single", 1, 1), ("mirrored", 1, 2), ("multiworker", 2, 1), ("multiworker", 3, 1)}
OF_STAGES = {("pipeline", 2, 1), ("pipeline", 4, 1)}


@pytest.mark.parametrize(
    ("name", "kills", "jobs"),
    [
        ("short", 30, OF_ALL),
        ("auto", 30, OF_ALL),
        ("long", 200, OF_ALL),
        ("pipeline", 12, OF_STAGES),
    ],
)
def test_the_plans_can_be_read(name, kills, jobs):
    plan = read(PLANS / f"{name}.toml")
    assert plan.kills == sum(kills_of_cases(plan).values()) == kills
    assert {(c.strategy, c.workers, c.devices) for c in plan.cases if c.share} >= jobs
    tasks = {case.name: case.tasks for case in plan.cases}
    assert all(f.task in tasks[entry.case] for entry in plan.placed for f in entry.faults)


@pytest.mark.parametrize(
    "fault",
    [
        {"do": "sing", "at": "step 3"},
        {"do": "kill", "at": "later"},
        {"do": "kill", "at": "phase lunch"},
        {"do": "slow", "at": "write 3"},
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault):
    with pytest.raises(PlanError):
        Fault(**fault)


def test_a_plan_with_an_unknown_word_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[case]]\nname = "a"\nstrategy = "single"\nworker = 2\n')
    with pytest.raises(PlanError, match="worker: expected one of name"):
        read(path)


def test_a_difference_is_named_by_where_it_is():
    expected = {"sha": "a", "history": {"loss": ["0.1", "0.2"]}, "metrics": [{"step": 1}]}
    assert differences(expected, expected) == []
    found = {"sha": "a", "history": {"loss": ["0.1", "0.3"]}, "metrics": []}
    assert differences(found, expected) == [
        "history: loss: [1]: '0.3', expected '0.2'",
        "metrics: 0 entries, expected 1",
    ]


class OfOneCase:
    """A campaign that kept the directory of the case `b`."""

    def __init__(self, case: Case, directory: Path, **_: object) -> None:
        self.kept = [directory / "b-1"] if case.name == "b" else []
        fault = Fault(do="kill", at="step 3")
        record = Record(fault=fault, case=case.name, at_s=1.0, attempt=1, identical=not self.kept)
        self.lines = [record.as_dict()]

    def placed(self, entries: object) -> None:
        pass

    def random_kills(self, kills: int) -> None:
        assert kills == 2


@pytest.mark.parametrize(("cases", "code"), [("abc", 1), ("ac", 0)])
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
