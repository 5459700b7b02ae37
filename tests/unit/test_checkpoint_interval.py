"""The interval between two checkpoints: formulas, and what a report says of failures."""

import itertools
import json
import math

import pytest

from tfdist.checkpoint.backup import (
    DEFAULT_MTBF_S,
    FIRST_S,
    MOST_COST,
    AutoInterval,
    failures_in,
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
def test_the_interval_itself_is_within_5_percent_of_the_optimum(save_s, mtbf_s):
    best_s = min(allowed(save_s, mtbf_s), key=lambda s: expected_share(s, save_s, mtbf_s))
    assert interval_for(save_s, mtbf_s) == pytest.approx(best_s, rel=0.05)


def test_saving_never_costs_more_than_its_bound():
    for save_s, mtbf_s in itertools.product((0.0, 1e-3, 0.1, 5.0, 1e4), (1e-3, 10.0, 1e6)):
        assert save_s <= MOST_COST * (1 + 1e-9) * (interval_for(save_s, mtbf_s) + save_s)


def attempt(*, exit_code: int, failed: bool, begin: str, end: str | None) -> dict[str, object]:
    return {
        "exit_code": exit_code,
        "first_failure": {"task": "worker-0"} if failed else None,
        "tasks": [
            {"started_at": f"2026-01-01T{begin}Z", "ended_at": end and f"2026-01-01T{end}Z"},
            {"started_at": None, "ended_at": None},
        ],
    }


def test_the_report_of_the_launcher_tells_the_mean_time_between_failures(tmp_path):
    attempts = [
        attempt(exit_code=137, failed=True, begin="10:00:00.000", end="10:10:00.000"),
        attempt(exit_code=143, failed=True, begin="10:10:00.000", end="10:20:00.500"),
        attempt(exit_code=1, failed=True, begin="11:00:00.000", end=None),
    ]
    (tmp_path / "report.json").write_text(json.dumps({"exit_code": None, "attempts": attempts}))
    assert failures_in(tmp_path) == (2, 1200.5)
    auto = AutoInterval()
    auto.begin(tmp_path, now_s=7.0)
    assert auto.mtbf_s(106.5) == 650.0
    for text in ("", "{", "[]", '{"attempts": [1]}', '{"attempts": [{}]}'):  # says nothing
        (tmp_path / "report.json").write_text(text)
        assert failures_in(tmp_path) == (0, 0.0)
    assert failures_in(tmp_path / "none") == failures_in(None) == (0, 0.0)


def test_a_run_without_a_failure_is_taken_for_a_day():
    assert AutoInterval().mtbf_s(5.0) == DEFAULT_MTBF_S
    assert AutoInterval().mtbf_s(2 * DEFAULT_MTBF_S) == 2 * DEFAULT_MTBF_S


def test_the_interval_follows_what_saves_cost():
    auto = AutoInterval(mtbf_s=3600.0)
    auto.begin(None, now_s=0.0)
    assert auto.interval_s == FIRST_S
    auto.saved(blocked_s=0.1, now_s=60.0)
    assert auto.interval_s == interval_for(0.1, 3600.0)
    auto.saved(blocked_s=0.3, now_s=90.0)
    assert auto.interval_s == interval_for(0.2, 3600.0)
