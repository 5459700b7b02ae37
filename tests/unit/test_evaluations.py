"""How a run stands by the lines of its evaluator."""

from __future__ import annotations

import math

import pytest

from tfdist.errors import UsageError
from tfdist.training.evaluator import best_so_far


def lines(*losses):
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
def test_the_best_is_the_first_that_was_better_by_enough(losses, best, since):
    stands = best_so_far(lines(*losses), monitor="val_loss", less=True, min_delta=0.1)
    assert stands.since == since
    assert (stands.best and stands.best["step"]) == (None if best is None else 10 * best)


def test_more_may_be_better():
    stands = best_so_far(lines(0.1, 0.3, 0.2), monitor="val_loss", less=False)
    assert (stands.best["step"], stands.since) == (10, 1)


def test_a_figure_that_no_evaluation_has_is_refused_by_a_near_name():
    with pytest.raises(UsageError, match=r"'val_los' .did you mean 'val_loss'"):
        best_so_far(lines(1.0), monitor="val_los", less=True)
