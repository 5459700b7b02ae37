"""What a ps job counts before anything is applied: parts of variables, and steps under way."""

import random
from concurrent.futures import Future

import pytest

from tfdist.ps.engine import steps_of_a_unit
from tfdist.ps.strategy import rows_of_parts
from tfdist.ps.worker_pool import Account, WorkUnit


@pytest.mark.parametrize(
    ("rows", "size_bytes", "num_ps", "parts"),
    [
        (10, 1000, 2, (10,)),  # of the size itself: whole
        (10, 1001, 2, (5, 5)),
        (10, 9000, 3, (4, 3, 3)),
        (10, 2500, 8, (4, 3, 3)),  # no more parts than the size asks for
        (3, 90_000, 8, (1, 1, 1)),
        (0, 0, 8, (0,)),
        (10, 9000, 1, (10,)),
    ],
)
def test_a_variable_is_split_by_rows(rows, size_bytes, num_ps, parts):
    found = rows_of_parts(rows, size_bytes=size_bytes, split_bytes=1000, num_ps=num_ps)
    assert found == parts


def unit(steps, bound):
    return WorkUnit(function=print, future=Future(), steps=steps, max_staleness=bound)


@pytest.mark.parametrize(
    ("under_way", "steps", "bound", "admitted"),
    [
        ([32, 32], 32, None, True),
        ([32], 0, 0, True),  # no training
        ([5], 1, 4, False),  # which might see the long one whole
        ([5], 1, 5, True),
    ],
)
def test_a_unit_may_start_beside_others_within_the_bound(under_way, steps, bound, admitted):
    units = [unit(length, bound) for length in under_way]
    for number, one in enumerate(units):
        one.begin_beside(units[:number])
    assert unit(steps, bound).may_begin_beside(units) == admitted


@pytest.mark.parametrize("bound", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_no_step_exceeds_the_staleness_bound(bound, workers):
    draw = random.Random(100 * bound + workers)
    each = steps_of_a_unit(most=32, workers=workers, max_staleness=bound)
    left, most = {}, 0
    applied = {}  # by others, since each unit began
    for _ in range(3000):
        new = unit(each, bound)
        if len(left) < workers and new.may_begin_beside(left):
            new.begin_beside(left)
            left[new], applied[new] = each, 0
            most = max(most, len(left))
        if left and draw.random() < 0.7:
            one = draw.choice(list(left))
            left[one] -= 1
            for other in left:
                applied[other] += other != one
                assert applied[other] <= bound
            if not left[one]:
                del left[one], applied[one]
    assert most == min(workers, bound + 1)


def test_the_bound_limits_the_length_of_units():
    bounds = [(3, None), (1, 0), (3, 0), (3, 1), (3, 8), (2, 100)]
    found = [steps_of_a_unit(most=32, workers=n, max_staleness=bound) for n, bound in bounds]
    assert found == [32, 32, 32, 1, 2, 32]


def test_the_account_counts_steps_once_and_names_repetitions():
    account = Account()
    account.done(0, 3, times=1, staleness=[0, 2, 0])
    account.done(3, 5, times=2, staleness=[1, 0])
    account.applied_twice += 1
    assert account.summary() == {
        "staleness": {"0": 3, "1": 1, "2": 1},
        "steps_applied_twice": 1,
        "repeated_ranges": [[3, 5, 2]],
    }
