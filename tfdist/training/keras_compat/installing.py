"""Puts the replacements in place, and makes them follow the step of a thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from tfdist.training.keras_compat import (
    at_once,
    gradients,
    losses,
    metrics,
    moments,
    randomness,
    updates,
    variables,
)
from tfdist.training.keras_compat.on_servers import reading_once, replacements
from tfdist.training.keras_compat.reduction import reduce_statistics
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace, following

REPLACEMENTS = (
    *randomness.REPLACEMENTS,
    *losses.REPLACEMENTS,
    *metrics.REPLACEMENTS,
    *moments.REPLACEMENTS,
    *gradients.REPLACEMENTS,
    *variables.REPLACEMENTS,
    *updates.REPLACEMENTS,
    *at_once.REPLACEMENTS,
)


def install() -> None:
    """Put the replacements in place, each once a process; those of a ps job in one alone."""
    for replacement in (*REPLACEMENTS, *replacements()):
        _put_in_place(replacement)


@functools.cache
def _put_in_place(replacement: Replacement) -> None:
    replacement.put_in_place()


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[StepTrace]:
    """Make Keras follow `trace` in this thread; used inside the replica function of a step."""
    install()
    with following(trace), reading_once():
        yield trace
        if trace.training:
            reduce_statistics(trace)
