"""Validation of the numeric arguments of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.errors import UsageError


def require_whole(name: str, value: Any, *, least: int) -> None:
    """Raise UsageError unless `value` is None or a whole number of at least `least`."""
    if value is None:
        return
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise UsageError(
            name,
            received=repr(value),
            expected=f"a whole number of at least {least}",
            fix=f"pass {name} as an int",
        )


def require_frequency(validation_freq: Any) -> None:
    """Raise UsageError unless this is a whole number of epochs, or a list of epochs from 1."""
    if not isinstance(validation_freq, int | list):
        raise UsageError(
            "validation_freq",
            received=repr(validation_freq),
            expected="an int, or a list of the epochs, counted from 1",
            fix="write validation_freq=2 or validation_freq=[1, 2, 10]",
        )
    if isinstance(validation_freq, int):
        require_whole("validation_freq", validation_freq, least=1)


def require_split(validation_split: Any) -> None:
    """Raise UsageError unless the share is one of the data that leaves some to train on."""
    if not isinstance(validation_split, int | float | np.number) or not 0 <= validation_split < 1:
        raise UsageError(
            "validation_split",
            received=repr(validation_split),
            expected="a number from 0 up to, but not including, 1",
            fix="pass the share of the examples that validation takes, such as 0.1",
        )


def require_class_weight(class_weight: Any) -> None:
    """Raise UsageError unless this is None or a weight by class number."""
    if class_weight is None:
        return
    good = isinstance(class_weight, dict) and bool(class_weight)
    if not good or not all(
        isinstance(c, int | np.integer) and c >= 0 and isinstance(w, int | float | np.number)
        for c, w in class_weight.items()
    ):
        raise UsageError(
            "class_weight",
            received=repr(class_weight)[:80],
            expected="a dict of class numbers, from 0 up, and weights",
            fix="write it as {0: 1.0, 1: 2.5}; a class that is not in it weighs 1",
        )
