"""Parts of variables: of each, a worker keeps a run of its flat elements alone."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.strategy.group import naming_lost_peer
from tfdist.strategy.job import Job, current_job

_MARK = "_tfdist_part"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VariablePart:
    """Elements ``[first, end)`` of a variable of this shape, laid out flat.

    Attributes:
      shape: of the whole variable.
      first: the first of the elements.
      end: after the last of them.
    """

    shape: tuple[int, ...]
    first: int
    end: int

    @property
    def size(self) -> int:
        """Elements of the whole variable."""
        return math.prod(self.shape)


def own_part(job: Job, shape: tuple[int, ...]) -> VariablePart:
    """Return this worker's part of a variable of this shape."""
    assert job.ring is not None
    first, end = job.ring.part(math.prod(shape))
    return VariablePart(shape=shape, first=first, end=end)


def mark(variable: Any, part: VariablePart) -> None:
    """Note that a variable holds this part of a larger one."""
    setattr(variable, _MARK, part)


def part_of(variable: Any) -> VariablePart | None:
    """Return the part that a variable holds, None for one that is whole."""
    return getattr(variable, _MARK, None)


def gathered(job: Job, variable: Any) -> np.ndarray[Any, Any]:
    """Return the whole of a variable that each worker has its part of. A collective."""
    part, ring = part_of(variable), job.ring
    assert part is not None
    assert ring is not None
    with phases.waiting_for_all(), naming_lost_peer(job):
        mine = np.asarray(variable.numpy())
        (flat,) = ring.all_gather(mine, sizes=[part.size], of="the parts of a variable")
    return flat.reshape(part.shape)


def whole(variable: Any) -> np.ndarray[Any, Any]:
    """Return the array of a variable; of one that holds a part, the whole. A collective then."""
    if part_of(variable) is None:
        return np.asarray(variable)
    job = current_job()
    assert job is not None
    return gathered(job, variable)


@contextlib.contextmanager
def own_initial_values(job: Job) -> Iterator[None]:
    """Have variables that are made here start from this worker's values, not from the chief's.

    Making them is no collective then, and their shapes may differ between the workers.
    """
    extended = job.strategy.extended
    before = extended._get_variable_creator_initial_value

    def creator(*, initial_value: Any, dtype: Any = None, **where: Any) -> Callable[[], Any]:
        def initial() -> Any:
            with tf.device(where["device"]):
                value = initial_value() if callable(initial_value) else initial_value
                return tf.convert_to_tensor(value, dtype=dtype)

        return initial

    extended._get_variable_creator_initial_value = creator
    try:
        yield
    finally:
        extended._get_variable_creator_initial_value = before
