"""How a large variable is divided over parameter servers."""

import pytest

from tfdist.ps.strategy import rows_of_parts


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
def test_a_variable_is_split_by_rows(rows, size_bytes, num_ps, parts):
    found = rows_of_parts(rows, size_bytes=size_bytes, split_bytes=1000, num_ps=num_ps)
    assert found == parts
