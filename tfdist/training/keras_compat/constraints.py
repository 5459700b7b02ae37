"""A variable is constrained on the parameter server that holds it.

Keras reads what it has updated, constrains it and writes it back. By way of the worker the variable
crosses the network twice, and what others write until it is back is lost. A variable in parts goes
that way all the same, as a constraint may need it whole.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable

from tfdist.strategy.servers import server_of
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers"


def _on_its_server(original: property) -> property:
    def constraint(self: Any) -> Callable[[Any], Any] | None:
        own: Callable[[Any], Any] | None = original.fget(self)  # type: ignore[misc]
        if own is None or current() is None or server_of(self._value) is None:
            return own

        def on_its_server(variable: Any) -> Any:
            with tf.device(self._value.device):
                return own(variable)

        return on_its_server

    return property(constraint, original.fset, doc=original.__doc__)


REPLACEMENTS = (
    Replacement(
        owner=Variable,
        name="constraint",
        make=_on_its_server,
        issue=f"{_SOURCE}/base_optimizer.py#L530",
    ),
)
