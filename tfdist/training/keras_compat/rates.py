"""The learning rate is that of the step that was handed out, in an update too.

Within an update the count of an optimizer is the server's (see `counts`), and there Keras asks for
the learning rate once more, to have weights decay by it.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers"


def _of_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def learning_rate(self: Any) -> Any:
        trace = current()
        if trace is None or trace.counts is None:
            return original(self)
        with trace.counts.also_in_updates():
            return original(self)

    return learning_rate


REPLACEMENTS = (
    Replacement(
        owner=BaseOptimizer,
        name="_get_current_learning_rate",
        make=_of_the_step,
        issue=f"{_SOURCE}/base_optimizer.py#L777",
    ),
)
