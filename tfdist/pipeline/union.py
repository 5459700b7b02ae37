"""Union of the stages' variables: each is some stage's, and all tasks get all values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.errors import UsageError
from tfdist.pipeline.cuts import Part
from tfdist.strategy import Job
from tfdist.strategy.group import sum_bytes

Owners = Mapping[int, int]
"""The stage that updates a variable, by the variable's `id`; one that is not in it is the chief's.

Numbers of an optimizer, such as its count of updates, are the same in all stages.
"""


def owners_of(model: keras.Model, parts: Sequence[Part]) -> dict[int, int]:
    """Return the stage of each variable: weights, slots of the optimizer, metrics.

    Raises:
      UsageError: the optimizer has a slot that belongs to no one variable.
    """
    owners = {id(v): part.index for part in parts for v in part.module.variables}
    owners.update((id(v), len(parts) - 1) for v in model.metrics_variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return owners
    trainable = optimizer._trainable_variables
    for slots in vars(optimizer).values():
        if _is_by_variable(slots, len(trainable)):
            for slot, variable in zip(slots, trainable, strict=True):
                owners.setdefault(id(slot), owners.get(id(variable), 0))
    for variable in optimizer.variables:
        if id(variable) not in owners and tuple(variable.shape):
            raise UsageError(
                "optimizer",
                received=f"{type(optimizer).__name__}, whose {variable.path} is of no one variable",
                expected="an optimizer with slots for each variable, under strategy pipeline",
                fix="use another one, such as Adam",
                code="whole-optimizer",
            )
    return owners


def from_owners(job: Job, variables: Sequence[Any], owners: Owners) -> None:
    """Set each variable to its owner's value, in every task. A collective.

    Takes the memory of one more copy of them.
    """
    if job.stages is None or not job.has_peers:
        return
    mine = [owners.get(id(v), 0) == job.stages.index for v in variables]
    values = [np.asarray(v.value) for v in variables]
    packed = [
        (value if own else np.zeros_like(value)).reshape(-1).view(np.uint8)
        for value, own in zip(values, mine, strict=True)
    ]
    data = sum_bytes(job, np.concatenate([np.zeros(0, np.uint8), *packed]), of="the stages' state")
    start = 0
    for variable, value, own in zip(variables, values, mine, strict=True):
        part = data[start : start + value.nbytes]
        start += value.nbytes
        if not own:
            variable.assign(part.view(value.dtype).reshape(value.shape))


def _is_by_variable(slots: Any, count: int) -> bool:
    return (
        isinstance(slots, list)
        and len(slots) == count > 0
        and all(slot is None or isinstance(slot, keras.Variable) for slot in slots)
    )
