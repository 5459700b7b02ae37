"""The interval between two checkpoints."""

import itertools
import math

import pytest

from tfdist.checkpoint.backup import (
    DEFAULT_MTBF_S,
    FIRST_S,
    MOST_COST,
    BackupAndRestore,
    interval_for,
)

CASES = [(0.02, 600.0), (0.02, 3600.0), (0.5, 3600.0), (0.5, 86_400.0), (8.0, 86_400.0)]


def expected_share(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Time for a second of work when failures are exponential (Daly 2006, equation 13)."""
    return mtbf_s * math.expm1((interval_s + save_s) / mtbf_s) / interval_s


def allowed(save_s: float, mtbf_s: float) -> list[float]:
    """Intervals to try, 2 % apart, at which saving is within its bound."""
    least_s = save_s * (1 / MOST_COST - 1)
    return [s for n in range(600) if least_s <= (s := 1e-2 * 1.02**n) <= 3 * mtbf_s] + [least_s]


@pytest.mark.parametrize(("save_s", "mtbf_s"), CASES)
def test_the_interval_is_within_5_percent_of_the_optimum(save_s, mtbf_s):
    best_s = min(allowed(save_s, mtbf_s), key=lambda s: expected_share(s, save_s, mtbf_s))
    assert interval_for(save_s, mtbf_s) == pytest.approx(best_s, rel=0.05)


def test_saving_never_costs_more_than_its_bound():
    for save_s, mtbf_s in itertools.product((0.0, 1e-3, 0.1, 5.0, 1e4), (1e-3, 10.0, 1e6)):
        assert save_s <= MOST_COST * (1 + 1e-9) * (interval_for(save_s, mtbf_s) + save_s)


def test_the_interval_follows_the_cost_of_saves(tmp_path):
    backup = BackupAndRestore(tmp_path, "auto", mtbf_s=3600.0)
    assert backup._every_s == FIRST_S
    backup._choose_interval(0.1, mtbf_s=3600.0)
    assert backup._every_s == interval_for(0.1, 3600.0)
    backup._choose_interval(0.3, mtbf_s=3600.0)
    assert backup._every_s == interval_for(0.2, 3600.0)
    assert BackupAndRestore(tmp_path, "auto")._mtbf_s == DEFAULT_MTBF_S


def test_a_skipped_save_waits_for_the_next_interval(tmp_path):
    backup = BackupAndRestore(tmp_path, every_s=3600)
    backup._saved_at -= 7200
    assert backup.due()
    backup.pass_over()
    assert not backup.due()
