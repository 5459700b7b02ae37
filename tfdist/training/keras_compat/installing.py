"""Puts the replacements in place, and makes them follow the step of a thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from tfdist.strategy.split import reading_once
from tfdist.training.keras_compat import (
    accumulation,
    at_once,
    averaging,
    conditions,
    constraints,
    gradients,
    losses,
    metrics,
    moments,
    randomness,
    rates,
    updates,
    variables,
)
from tfdist.training.keras_compat.reduction import reduce_statistics
from tfdist.training.keras_compat.trace import StepTrace, following

REPLACEMENTS = (
    *randomness.REPLACEMENTS,
    *losses.REPLACEMENTS,
    *metrics.REPLACEMENTS,
    *moments.REPLACEMENTS,
    *gradients.REPLACEMENTS,
    *variables.REPLACEMENTS,
    *conditions.REPLACEMENTS,
    *constraints.REPLACEMENTS,
    *averaging.REPLACEMENTS,
    *rates.REPLACEMENTS,
    *updates.REPLACEMENTS,
    *at_once.REPLACEMENTS,
    *accumulation.REPLACEMENTS,
)


@functools.cache
def install() -> None:
    """Puts the replacements in place, once a process."""
    for replacement in REPLACEMENTS:
        replacement.put_in_place()


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[StepTrace]:
    """Makes Keras follow `trace` in this thread; used inside the replica function of a step."""
    install()
    with following(trace), reading_once():
        yield trace
        if trace.training:
            reduce_statistics(trace)
