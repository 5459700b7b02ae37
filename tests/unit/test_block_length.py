"""Blocks of steps are short until the speed is known, and then of about a second."""

from tfdist.training.blocks import BlockLengthPolicy


def blocks(step_s: float, *, count: int = 12) -> list[int]:
    """The blocks of a program whose step takes `step_s`, and whose first one takes 30 s more."""
    policy, sizes = BlockLengthPolicy(), []
    for number in range(count):
        sizes.append(policy.steps())
        policy.note(sizes[-1], elapsed_s=sizes[-1] * step_s + (0 if number else 30.0))
    return sizes


def test_a_block_takes_a_second_or_one_step():
    for step_s in (0.00001, 0.001, 0.3, 20.0):
        assert all(size * step_s <= 1.0 or size == 1 for size in blocks(step_s))
    assert blocks(0.001, count=6) == [1, 1, 8, 64, 512, 1000]


def test_blocks_that_are_not_whole_count_together():
    policy = BlockLengthPolicy()
    policy.note(8, elapsed_s=1.0)
    for steps, elapsed_s, next_one in ((0, 1.5, 8), (6, 0.5, 3), (6, 0.1, 3)):
        policy.note(steps, elapsed_s=elapsed_s, is_whole=False)
        assert policy.steps() == next_one


def test_the_speed_is_known_once_blocks_do_not_grow():
    policy = BlockLengthPolicy()
    known = [policy.is_known]
    for elapsed_s in (0.01, 2.0):  # 100 steps a second, in blocks of 8
        policy.note(1, elapsed_s=elapsed_s)
        known.append(policy.is_known)
    assert known == [False, False, True]
