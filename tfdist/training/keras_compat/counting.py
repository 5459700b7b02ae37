"""What of an optimizer goes by the step that was handed out, and what by its server's count.

Keras asks one count for both. Within an update it is the server's, elsewhere the step's (see
`counts`), but for two methods. Averages begin where the count is 0: of the first steps under ps any
may come first, and one that took an average which has not begun for the weights would end them. And
weights decay in an update, by the step's learning rate.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py"


def _going_by(*, step: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has what a method asks of counts be of the step, or of the servers."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace = current()
            if trace is None or trace.counts is None:
                return original(self, *args, **kwargs)
            with trace.counts.going_by(step=step):
                return original(self, *args, **kwargs)

        return method

    return make


REPLACEMENTS = (
    Replacement(
        owner=BaseOptimizer,
        name="_update_model_variables_moving_average",
        make=_going_by(step=False),
        issue=f"{_SOURCE}#L970",
    ),
    Replacement(
        owner=BaseOptimizer,
        name="_get_current_learning_rate",
        make=_going_by(step=True),
        issue=f"{_SOURCE}#L777",
    ),
)
