"""Ranges are short until the speed is known, and then of about a second."""

import pytest

from tfdist.training.blocks import BlockLengthPolicy


def ranges(step_s: float, *, first_s: float = 0.0, count: int = 12) -> list[int]:
    """The ranges of a program whose step takes `step_s`, and whose first one takes more."""
    pace, sizes = BlockLengthPolicy(), []
    for _ in range(count):
        sizes.append(pace.steps())
        pace.note(sizes[-1], elapsed_s=sizes[-1] * step_s + (0 if len(sizes) > 1 else first_s))
    return sizes


@pytest.mark.parametrize("step_s", [0.00001, 0.001, 0.3, 20.0])
def test_no_range_takes_more_than_a_second_or_one_step(step_s):
    assert all(size * step_s <= 1.0 or size == 1 for size in ranges(step_s, first_s=30.0))


def test_a_fast_program_comes_to_ranges_of_a_second_in_a_few():
    assert ranges(0.001, first_s=30.0, count=6) == [1, 1, 8, 64, 512, 1000]


def test_ranges_that_are_not_whole_count_together():
    pace = BlockLengthPolicy()
    pace.note(8, elapsed_s=1.0)
    pace.note(0, elapsed_s=1.5, is_whole=False)
    assert pace.steps() == 8
    pace.note(6, elapsed_s=0.5, is_whole=False)
    assert pace.steps() == 3
    pace.note(6, elapsed_s=0.1, is_whole=False)
    assert pace.steps() == 3


def test_the_speed_is_known_once_ranges_do_not_grow():
    pace = BlockLengthPolicy()
    assert not pace.is_known
    pace.note(1, elapsed_s=0.01)
    assert not pace.is_known  # 100 steps a second, ranges of 8
    pace.note(1, elapsed_s=2.0)
    assert pace.is_known
