"""How a mistake is refused: one line, which says where it is and has a code, and exit code 2."""

from collections.abc import Callable

import pytest

from tfdist.errors import EXIT_USAGE, UsageError


def refusal(action: Callable[[], object]) -> UsageError:
    """The error with which an action is refused."""
    with pytest.raises(UsageError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value


def refused(action: Callable[[], object]) -> tuple[str, str]:
    """Where and with which code an action is refused."""
    error = refusal(action)
    return error.where, error.code
