"""One process with three logical devices, as for tests/integration; jobs have their own."""

import pytest

from tests.integration.conftest import (  # noqa: F401
    fresh_keras,
    pytest_collectstart,
    strategies,
)


@pytest.fixture
def one(strategies):  # noqa: F811
    """The strategy of one device, which is what several replicas are held against."""
    return strategies[1]


@pytest.fixture
def two(strategies):  # noqa: F811
    """A mirrored strategy of two replicas."""
    return strategies[2]
