"""Averages of weights are taken on the parameter servers, and begin with the first update there.

Keras takes them in the step: by way of the worker, which reads weights and averages once more and
sends the new averages, while others do the same. And they begin in the step whose number is 0. Of
the first steps under ps any may come first, and one that then puts the averages in the place of the
weights would take what has not begun.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.strategy.servers import server_of
from tfdist.strategy.split import parts_of
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers"


def _on_their_servers(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_averages(self: Any, trainable_variables: Any) -> Any:
        weights = [v.value if isinstance(v, Variable) else v for v in trainable_variables]
        if current() is None or not all(map(_is_on_servers, weights)):
            return original(self, trainable_variables)

        def update(weight: Any, average: Any) -> None:
            # The count is the server's here, as in any update.
            is_begun = tf.cast(tf.not_equal(self.iterations, 0), weight.dtype)
            momentum = is_begun * tf.cast(self.ema_momentum, weight.dtype)
            before, now = tf.convert_to_tensor(average), tf.convert_to_tensor(weight)
            self.assign(average, momentum * before + (1 - momentum) * now)

        averages = self._model_variables_moving_average
        for weight, average in zip(weights, averages, strict=True):
            if average is not None:
                self._distribution_strategy.extended.update(
                    weight, update, args=(average,), group=False
                )
        return None

    return update_averages


def _is_on_servers(weight: Any) -> bool:
    return all(server_of(part) is not None for part in parts_of(weight))


REPLACEMENTS = (
    Replacement(
        owner=BaseOptimizer,
        name="_update_model_variables_moving_average",
        make=_on_their_servers,
        issue=f"{_SOURCE}/base_optimizer.py#L970",
    ),
)
