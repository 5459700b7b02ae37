"""A piece of work of a ps job: where it runs, how, and what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import context as tf_context

# What the runtime says of a worker that ended and came back between two calls.
_REPLACED = (
    "unknown device",
    "Primary device is not remote",
    "Unable to find the relevant tensor remote_handle",
    "Unable to find a context_id",
    "which might mean the worker",
)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Piece:
    """A piece of work, and who waits for its result."""

    function: Callable[[Place], Any]
    future: Future[Done]
    steps: int
    max_staleness: int | None = None
    losses: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a piece of work runs.

    Attributes:
      worker_index: the worker's.
      life: how many times this worker has been connected to; what was kept there is gone with
        the life before.
    """

    worker_index: int
    life: int

    @property
    def task(self) -> str:
        """The worker's name."""
        return f"worker-{self.worker_index}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A piece of work that is done.

    Attributes:
      value: what its function returned.
      worker_index: of the worker that did it.
      times: how often it was begun: 1, and 1 more for each worker that died over it.
    """

    value: Any
    worker_index: int
    times: int


@contextlib.contextmanager
def running_at(place: Place, executor: Any) -> Iterator[None]:
    """Runs what is in the block on the devices of a worker, one operation after the other."""
    device = f"/job:worker/replica:0/task:{place.worker_index}"
    dispatch = coordinator_context.with_dispatch_context(place)
    with tf.device(device), tf_context.executor_scope(executor), dispatch:
        yield


def is_of_the_network(error: tf.errors.OpError) -> bool:
    """Whether an error may be the end of a worker, and not a mistake in the work."""
    if isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return True
    return any(text in str(error) for text in _REPLACED)
