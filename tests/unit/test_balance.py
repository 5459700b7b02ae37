"""Which parameter server gets the next variable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.ps.balance import Balance, rows_of_parts


def placed(sizes: list[int], *, num_ps: int) -> tuple[list[int], tuple[int, ...]]:
    """Where each variable goes, and the bytes of each ps at the end."""
    balance = Balance(num_ps)
    where = []
    for size_bytes in sizes:
        where.append(balance.next())
        balance.add(where[-1], size_bytes)
    return where, balance.sizes_bytes


@pytest.mark.parametrize(
    ("sizes", "num_ps", "where"),
    [
        # Kernels and biases by turns: round robin would give one ps all the kernels.
        ([4000, 4, 4000, 4, 4000, 4], 2, [0, 1, 1, 0, 0, 1]),
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([9, 1, 1, 1, 9], 3, [0, 1, 2, 1, 2]),
        ([5, 5, 5], 1, [0, 0, 0]),
        ([7], 3, [0]),
    ],
)
def test_a_variable_goes_to_the_ps_with_the_fewest_bytes(
    sizes: list[int], num_ps: int, where: list[int]
) -> None:
    assert placed(sizes, num_ps=num_ps)[0] == where


def test_slots_count_for_the_ps_of_their_variable() -> None:
    balance = Balance(2)
    balance.add(balance.next(), 100)
    balance.add(0, 200)  # two slots beside it
    assert [balance.next(), balance.sizes_bytes] == [1, (300, 0)]


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 8))
def test_no_two_ps_differ_by_more_than_the_largest_variable(sizes: list[int], num_ps: int) -> None:
    _, totals = placed(sizes, num_ps=num_ps)
    assert sum(totals) == sum(sizes)
    assert max(totals) - min(totals) <= max(sizes, default=0)


@pytest.mark.parametrize(
    ("rows", "size_bytes", "num_ps", "parts"),
    [
        (10, 1000, 2, (10,)),  # of the size itself: whole
        (10, 1001, 2, (5, 5)),
        (10, 9000, 2, (5, 5)),
        (10, 9000, 3, (4, 3, 3)),
        (10, 2500, 8, (4, 3, 3)),  # no more parts than the size asks for
        (3, 90_000, 8, (1, 1, 1)),
        (1, 90_000, 8, (1,)),
        (0, 0, 8, (0,)),
        (10, 9000, 1, (10,)),
    ],
)
def test_a_variable_is_split_by_rows(
    rows: int, size_bytes: int, num_ps: int, parts: tuple[int, ...]
) -> None:
    found = rows_of_parts(rows, size_bytes=size_bytes, split_bytes=1000, num_ps=num_ps)
    assert found == parts
