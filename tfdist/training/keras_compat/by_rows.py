"""Which optimizers may update a variable that is in parts.

A part of it is updated with its rows of the gradient and of the slots alone. Nothing would tell
that an optimizer which needs other rows too, for a norm as an example, came to another result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.strategy.split import SplitVariable

# Whose update of a row needs no other row of the same variable.
_BY_ROWS = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
)


def require_by_rows(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises UsageError for an optimizer that needs one of the variables whole."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    split = [v for v in variables if isinstance(getattr(v, "value", v), SplitVariable)]
    by_rows = tuple(getattr(keras.optimizers, name) for name in _BY_ROWS)
    if not split or type(optimizer) in by_rows:
        return
    raise UsageError(
        "optimizer",
        received=f"{type(optimizer).__name__} for {split[0].path}, which is in parts",
        expected=f"one whose update goes row by row: {', '.join(_BY_ROWS)}",
        fix="leave --split_bytes out",
    )
