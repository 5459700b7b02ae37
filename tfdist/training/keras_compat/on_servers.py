"""Hooks of a step on parameter servers: empty until `tfdist.ps` is imported.

That is what a ps job alone does, before it traces its first step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace


def _may_be() -> bool:
    """Return whether this may be a ps job."""
    return "tfdist.ps" in sys.modules


def replacements() -> tuple[Replacement, ...]:
    """Return the replacements of a ps job; none in any other."""
    if not _may_be():
        return ()
    from tfdist.ps.keras_compat import REPLACEMENTS

    return REPLACEMENTS


def reading_once() -> AbstractContextManager[None]:
    """While a step is traced: a variable in parts is read once between two writes."""
    if not _may_be():
        return nullcontext()
    from tfdist.ps import split

    return split.reading_once()


def is_split(variable: Any) -> bool:
    """Return whether a variable is in parts on several servers."""
    if not _may_be():
        return False
    from tfdist.ps.split import SplitVariable

    return isinstance(variable, SplitVariable)


def require_by_rows(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError for an optimizer that needs a variable whole which is in parts."""
    if _may_be():
        from tfdist.ps import split

        split.require_by_rows(optimizer, variables)


def sent_together(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of gradient and variable, small gradients on their way to a server packed."""
    if not _may_be():
        return list(pairs)
    from tfdist.ps import messages

    return messages.sent_together(list(pairs))


def taken(variable: Any, trace: StepTrace) -> tf.Tensor | None:
    """Return what an update takes of a sum of gradients on a server; None of any other variable."""
    if id(variable) not in trace.taken:
        return None
    from tfdist.ps import keras_compat

    return keras_compat.taken(variable, trace)


def hold(variable: Any, value: tf.Tensor, trace: StepTrace) -> None:
    """Have `value` be that of a variable which lives in the step of a worker."""
    from tfdist.ps import keras_compat

    keras_compat.hold(variable, value, trace)
