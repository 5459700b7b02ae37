"""What the chaos runner does without a job: reading plans and judging."""

import re
import sys
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos.plan import Fault, Plan, PlanError, read
from tests.chaos.record import Record
from tests.chaos.verdict import differences

PLANS = Path(__file__).parents[1] / "chaos" / "plans"
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
