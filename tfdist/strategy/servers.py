"""Where the variables of a ps job are: on the server with the fewest bytes when they were made.

TensorFlow takes the servers in turn, whatever the size of a variable
(tensorflow/python/distribute/parameter_server_strategy_v2.py, `_create_variable_round_robin`), so
that of two servers one may hold every large kernel and the other every bias. What is made beside
another variable, as an optimizer's slots are, is on that one's server in TensorFlow too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.parameter_server_strategy_v2 import (
    ParameterServerStrategyV2Extended,
)

from tfdist.cluster.balance import Balance

_LOG = logging.getLogger(__name__)


class BalancedExtended(ParameterServerStrategyV2Extended):
    """TensorFlow's, but for where it makes a variable."""

    def __init__(self, strategy: tf.distribute.Strategy, resolver: Any) -> None:
        super().__init__(strategy, resolver, None)
        self._balance = Balance(self._num_ps)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        index = server_of(variable)
        if index is not None:
            self._balance.add(index, size_bytes(variable))
        return variable

    def _create_variable_round_robin(self, next_creator: Any, **kwargs: Any) -> Any:
        self._variable_count = self._balance.next()  # of which TensorFlow takes the remainder
        return super()._create_variable_round_robin(next_creator, **kwargs)


def server_of(variable: Any) -> int | None:
    """The index of the ps that holds a variable, None for one that is elsewhere."""
    device = tf.DeviceSpec.from_string(variable.device or "")
    return device.task if device.job == "ps" else None


def size_bytes(variable: Any) -> int:
    """The bytes of a variable's values; 0 where its shape is not known."""
    return int((variable.shape.num_elements() or 0) * variable.dtype.size)


def bytes_on_servers(variables: Iterable[Any], *, num_ps: int) -> dict[str, int]:
    """The bytes of Keras variables by the ps that holds them: ``{"ps-0": 4096}``.

    Read from where the variables are, so of any strategy.
    """
    totals = {f"ps-{index}": 0 for index in range(num_ps)}
    for variable in variables:
        value = variable.value
        index = server_of(value)
        if index is not None:
            totals[f"ps-{index}"] += size_bytes(value)
    return totals


def say(held: Mapping[str, int], *, weights: Mapping[str, int]) -> None:
    """Logs the bytes that each ps holds, and warns of those with none of the model's weights."""
    shown = ", ".join(f"{name} {size:,} bytes" for name, size in held.items())
    _LOG.info("variables by parameter server: %s", shown)
    idle = [name for name, size in weights.items() if not size]
    if idle:
        _LOG.warning(
            "ps: received %d for a model whose weights are on %d of them; %s does next to "
            "nothing. Fix: --ps %d",
            len(weights),
            len(weights) - len(idle),
            ", ".join(idle),
            max(len(weights) - len(idle), 1),
        )
