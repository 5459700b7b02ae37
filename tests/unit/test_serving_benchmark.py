"""What the serving benchmark makes of its measurements."""

import pytest

from benchmarks.serving import Figure
from benchmarks.serving_peers import P99_MS, Answered, best, ratios


def answered(per_s: float, p99_ms: float) -> Answered:
    return Answered(connections=1, per_s=per_s, p99_ms=p99_ms, failed=0, processor_us=1.0)


def test_only_rates_within_the_limit_of_p99_count():
    slow, fast = answered(100.0, P99_MS), answered(900.0, P99_MS + 1)
    assert best([slow, fast]) == slow
    assert best([fast]) is None
    found = {"a": [[slow, fast], [slow]], "b": [[answered(50.0, 1.0)], [fast]]}
    assert ratios(found, "a", "b") == [2.0], "the second round of b has none"


@pytest.mark.parametrize(
    ("values", "limits", "met"),
    [
        ([1.0, 2.5, 9.0], {"least": 2.0}, "yes"),
        ([1.0, 1.9, 9.0], {"least": 2.0}, "no"),
        ([130.0, 100.0, 110.0], {"most": 120.0}, "yes"),
        ([0], {"most": 0}, "yes"),
        ([1], {"most": 0}, "no"),
        ([], {"least": 2.0}, "no"),
    ],
)
def test_a_target_is_held_against_the_middle_round(values, limits, met):
    assert Figure(what="w", against="a", values=values, **limits).cells[-1] == met
