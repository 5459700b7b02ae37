"""How many steps of others a work unit may see applied, counted before any is."""

import random

import pytest

from tfdist.ps.clock import InFlight, steps_of_a_unit
from tfdist.ps.workers import Account


@pytest.mark.parametrize(
    ("under_way", "steps", "bound", "admitted"),
    [
        ([32, 32], 32, None, True),
        ([], 32, 0, True),
        ([32], 1, 0, False),
        ([32], 0, 0, True),  # no training
        ([5], 1, 4, False),  # which might see the long one whole
        ([5], 1, 5, True),
    ],
)
def test_what_may_begin_beside_others(under_way, steps, bound, admitted):
    flight = InFlight()
    for unit, length in enumerate(under_way):
        flight.begin(unit, steps=length)
    assert flight.admits(steps, max_staleness=bound) == admitted


@pytest.mark.parametrize("bound", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_no_step_sees_more_than_the_bound_whatever_the_speeds(bound, workers):
    draw = random.Random(100 * bound + workers)
    each = steps_of_a_unit(most=32, workers=workers, max_staleness=bound)
    flight, left, most = InFlight(), {}, 0
    applied = {}  # by others, since each piece began
    for number in range(3000):
        if len(left) < workers and flight.admits(each, max_staleness=bound):
            flight.begin(number, steps=each)
            left[number], applied[number] = each, 0
            most = max(most, len(left))
        if left and draw.random() < 0.7:
            unit = draw.choice(list(left))
            left[unit] -= 1
            for other in left:
                applied[other] += other != unit
                assert applied[other] <= bound
            if not left[unit]:
                del left[unit], applied[unit]
                flight.end(unit)
    assert most == min(workers, bound + 1)


@pytest.mark.parametrize(
    ("workers", "bound", "steps"),
    [(3, None, 32), (1, 0, 32), (3, 0, 32), (3, 1, 1), (3, 8, 2), (2, 100, 32)],
)
def test_pieces_are_as_long_as_the_bound_leaves_room_for(workers, bound, steps):
    assert steps_of_a_unit(most=32, workers=workers, max_staleness=bound) == steps


def test_the_account_counts_each_step_once_and_names_what_was_begun_again():
    account = Account()
    account.done(0, 3, times=1, staleness=[0, 2, 0])
    account.done(3, 5, times=2, staleness=[1, 0])
    account.applied_twice += 1
    assert account.summary() == {
        "staleness": {"0": 3, "1": 1, "2": 1},
        "steps_applied_twice": 1,
        "repeated_ranges": [[3, 5, 2]],
    }
