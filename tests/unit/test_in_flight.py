"""How many steps of others a work unit may see applied, counted before any is."""

import random

import pytest

from tfdist.ps.clock import InFlight, steps_of_a_unit
from tfdist.ps.workers import Account


def test_without_a_bound_everything_may_begin():
    flight = InFlight()
    for unit in range(9):
        assert flight.admits(32, max_staleness=None)
        flight.begin(unit, steps=32)


def test_with_a_bound_of_0_one_piece_is_under_way_at_a_time():
    flight = InFlight()
    assert flight.admits(32, max_staleness=0)
    flight.begin("a", steps=32)
    assert not flight.admits(1, max_staleness=0)
    flight.end("a")
    assert flight.admits(32, max_staleness=0)


def test_a_slow_piece_holds_up_the_others_once_they_have_done_what_it_may_see():
    flight = InFlight()
    flight.begin("slow", steps=1)
    for unit in range(4):
        assert flight.admits(1, max_staleness=4)
        flight.begin(unit, steps=1)
        flight.end(unit)
    assert not flight.admits(1, max_staleness=4)
    flight.end("slow")
    assert flight.admits(1, max_staleness=4)


def test_a_short_piece_waits_for_a_long_one_that_it_might_see_whole():
    flight = InFlight()
    flight.begin("long", steps=5)
    assert not flight.admits(1, max_staleness=4)
    assert flight.admits(1, max_staleness=5)


def test_work_that_is_no_training_always_may_begin():
    flight = InFlight()
    flight.begin("a", steps=32)
    assert flight.admits(0, max_staleness=0)


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
