"""Which checkpoint is the best, by an epoch's end or by the evaluator's lines."""

import math
from typing import Any

import pytest

from tests.refusals import refusal
from tfdist.checkpoint.backup import Best, best_so_far


def improvements(best: Best, values: list[float], name: str) -> list[bool]:
    seen = []
    for value in values:
        best.epoch_begins()
        assert not best.improved
        best.epoch_ends({name: value})
        seen.append(best.improved)
    return seen


@pytest.mark.parametrize(
    ("name", "mode", "values", "expected"),
    [
        ("val_loss", "auto", [2.0, 3.0, 1.0, 1.0, math.nan], [True, False, True, False, False]),
        ("val_accuracy", "auto", [2.0, 3.0, 1.0], [True, True, False]),
        ("reward", "max", [2.0, 3.0, 1.0], [True, True, False]),
        ("reward", "min", [2.0, 3.0, 1.0], [True, False, True]),
        ("loss", "auto", [math.inf, 2.0, -math.inf, 1.0], [False, True, False, True]),
    ],
)
def test_improvements_are_finite_and_better_than_all_before(name, mode, values, expected):
    assert improvements(Best(name, mode), values, name) == expected


def test_a_metric_that_is_not_known_is_refused():
    for name, logs in (("los", {"loss": 1.0}), ("val_los", {"loss": 1.0, "val_loss": 2.0})):
        error = refusal(lambda name=name, logs=logs: Best(name, "min").epoch_ends(logs))
        assert (error.where, error.code) == ("BackupAndRestore: best", "unknown-value")
        assert f"'{name}s'" in error.problem
    error = refusal(lambda: best_so_far(lines(1.0), monitor="val_los", less=True))
    assert "'val_loss'" in error.problem


def test_an_epoch_without_validation_is_no_error(caplog):
    best = Best("val_loss", "auto")
    for logs in ({"loss": 1.0}, {"loss": 1.0}, {"loss": 1.0, "val_loss": 3.0}):
        best.epoch_ends(logs)
    assert best.improved
    assert len(caplog.records) == 1


def test_a_resumed_run_continues_with_its_best_value():
    first, name = Best("val_loss", "auto"), "val_loss"
    improvements(first, [2.0, 1.0], name)
    resumed, other = Best("val_loss", "auto"), Best("val_accuracy", "auto")
    for best in (resumed, other):
        best.set_state(first.get_state() or {})
    assert improvements(resumed, [1.5, 0.5], name) == [False, True]
    assert improvements(other, [0.1], "val_accuracy") == [True]
    assert Best(None, "auto").get_state() is None


def lines(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * i, "val_loss": loss} for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "best", "since"),
    [
        ((3.0,), 0, 0),
        ((3.0, 2.0, 2.5, 2.1), 1, 2),
        ((3.0, 3.0), 0, 1),
        ((3.0, 2.95), 0, 1),  # by less than min_delta
        ((None, 2.0), 1, 0),
        ((None, None), None, 2),
        ((2.0, None, None), 0, 2),
        ((math.nan, 2.0), 1, 0),
        ((2.0, math.nan, -math.inf), 0, 2),
        ((math.inf,), None, 1),
    ],
)
def test_the_best_line_is_better_by_min_delta(losses, best, since):
    found = best_so_far(lines(*losses), monitor="val_loss", less=True, min_delta=0.1)
    assert found == (None if best is None else lines(*losses)[best], since)


def test_the_best_value_can_be_the_largest():
    assert best_so_far(lines(0.1, 0.3, 0.2), monitor="val_loss", less=False)[0]["step"] == 10
