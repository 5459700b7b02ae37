"""Ranges are short until the speed is known, and then of about a second."""

from __future__ import annotations

import pytest

from tfdist.training.pace import Pace


def ranges(step_s: float, *, first_s: float = 0.0, count: int = 12) -> list[int]:
    """The ranges of a program whose step takes `step_s`, and whose first one takes more."""
    pace, sizes = Pace(), []
    for _ in range(count):
        sizes.append(pace.steps())
        pace.note(sizes[-1], elapsed_s=sizes[-1] * step_s + (0 if len(sizes) > 1 else first_s))
    return sizes


@pytest.mark.parametrize("step_s", [0.00001, 0.001, 0.3, 20.0])
def test_no_range_takes_more_than_a_second_or_one_step(step_s: float) -> None:
    assert all(size * step_s <= 1.0 or size == 1 for size in ranges(step_s, first_s=30.0))


def test_a_fast_program_comes_to_ranges_of_a_second_in_a_few() -> None:
    assert ranges(0.001, first_s=30.0, count=6) == [1, 1, 8, 64, 512, 1000]
