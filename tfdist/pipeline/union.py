"""Union of the stages' variables: the owner of each variable, and transfer from the owner.

While steps run, a task holds only the values of its own stage and releases the memory of the other
variables. Before the values are read, every task receives all weights and metrics. The chief,
which writes the checkpoints, also receives all slots of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.pipeline.cuts import ModelPart
from tfdist.strategy import Job
from tfdist.strategy.group import sum_words
from tfdist.training.keras_compat.sharding import following_slots

_MESSAGE_BYTES = 2**22
_INITIALIZER = "_tfdist_initializer"

Owners = Mapping[int, int]
"""Index of the stage that updates a variable, by the variable's `id` (default: stage 0).

Scalars of an optimizer, such as its count of updates, are the same in all stages.
"""


def owners_of(model: keras.Model, parts: Sequence[ModelPart]) -> dict[int, int]:
    """Return the stage of each variable: weights, slots of the optimizer, metrics.

    Raises:
      UsageError: the optimizer has a slot that does not belong to a single variable.
    """
    owners = {id(v): part.index for part in parts for v in part.module.variables}
    owners.update((id(v), len(parts) - 1) for v in model.metrics_variables)
    owners.update((id(v), part.index) for part in parts for v in part.module.metrics_variables)
    optimizers = list(_optimizers(model))
    for optimizer in optimizers:
        trainable = optimizer._trainable_variables
        for slots in _by_variable(optimizer):
            for slot, variable in zip(slots, trainable, strict=True):
                owners.setdefault(id(slot), owners.get(id(variable), 0))
    for optimizer in optimizers:
        for variable in optimizer.variables:
            if id(variable) not in owners and tuple(variable.shape):
                raise UsageError(
                    "optimizer",
                    f"strategy pipeline cannot divide {type(optimizer).__name__}, because "
                    f"{variable.path} does not belong to a single variable",
                    fix="use another optimizer, such as Adam",
                    code="unsupported-optimizer",
                )
    return owners


def slots_of(model: keras.Model) -> list[Any]:
    """Return the slots that only their stage needs. Averages of weights are not among them."""
    return [
        slot
        for optimizer in _optimizers(model)
        for slots in _by_variable(optimizer)
        if slots is not getattr(optimizer, "_model_variables_moving_average", None)
        for slot in slots
        if slot is not None and tuple(slot.shape)
    ]


def from_owners(
    job: Job, variables: Sequence[Any], owners: Owners, *, chief_only: bool = False
) -> None:
    """Set each variable to its owner's value, in every task or in the chief. A collective.

    Owners are the stages of the first pipeline. The other pipelines have the same values.
    """
    place = job.stages
    if place is None or not job.has_peers:
        return
    for group in _in_messages(variables):
        words = np.zeros(-(-bytes_of(group) // 4), np.int32)
        data, start = words.view(np.uint8), 0
        mine = [place.pipeline == 0 and owners.get(id(v), 0) == place.index for v in group]
        pieces = []
        for variable, own in zip(group, mine, strict=True):
            pieces.append(slice(start, start := start + bytes_of([variable])))
            if own:
                data[pieces[-1]] = np.asarray(variable.value).reshape(-1).view(np.uint8)
        sum_words(job, words, of="the stages' state")
        for variable, own, piece in zip(group, mine, pieces, strict=True):
            if not own and (job.is_chief or not chief_only):
                dtype = variable.value.dtype.as_numpy_dtype
                variable.assign(data[piece].view(dtype).reshape(variable.shape))


def release(variables: Sequence[Any]) -> None:
    """Release the memory of Keras or TensorFlow variables. `assign` allocates it again."""
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        value._validate_shape = False  # else `assign` checks the current shape
        tf.raw_ops.AssignVariableOp(
            resource=value.handle, value=tf.zeros([0], value.dtype), validate_shape=False
        )


def making_empty_slots(optimizer: Any) -> AbstractContextManager[None]:
    """Release the memory of each slot that the optimizer creates in the block (see `fill`)."""

    def empty(slot: Any, variable: Any, name: str | None, initializer: Any) -> None:
        if tuple(slot.shape) and name != "average":  # all tasks need averages of weights
            setattr(slot, _INITIALIZER, keras.initializers.get(initializer))
            release([slot])

    return following_slots(optimizer, empty)


def is_empty(variable: Any) -> bool:
    shape = tf.raw_ops.VariableShape(input=variable.value.handle)
    return tuple(shape.numpy()) != tuple(variable.shape)


def fill(slots: Sequence[Any]) -> None:
    """Set slots from `making_empty_slots` to their initial values."""
    for slot in slots:
        slot.assign(getattr(slot, _INITIALIZER)(slot.shape, slot.dtype))


def bytes_of(variables: Sequence[Any]) -> int:
    """Return the size of variables in bytes, including released variables."""
    return sum(math.prod(v.shape) * v.value.dtype.size for v in variables)


def _in_messages(variables: Sequence[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    size = 0
    for variable in variables:
        group.append(variable)
        size += bytes_of([variable])
        if size >= _MESSAGE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _optimizers(model: keras.Model) -> Iterator[Any]:
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        if optimizer.built:
            yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _by_variable(optimizer: Any) -> Iterator[list[Any]]:
    """Yield the optimizer's lists with a slot or `None` for each trainable variable."""
    trainable = optimizer._trainable_variables
    for slots in vars(optimizer).values():
        if (
            isinstance(slots, list)
            and slots is not trainable
            and slots is not optimizer._variables
            and len(slots) == len(trainable) > 0
            and all(slot is None or isinstance(slot, keras.Variable) for slot in slots)
        ):
            yield slots
