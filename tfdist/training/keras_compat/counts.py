"""Under ps an optimizer goes by the step that was handed out.

Keras asks an optimizer's count of updates for the learning rate of a schedule, for which step of an
accumulation this is, and for when averages are taken over. The count is on a server, where workers
add to it in any order: two steps may find the same number there, and none another one.
An update itself keeps to the count there: Adam corrects by how often its slots were updated.
The learning rate is that of the step there, too (`rates`).
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from tensorflow.python.distribute import distribute_lib


class UpdateCounts:
    """What optimizers have for their counts while a step is traced; made in the step's graph.

    Args:
      given: updates that the steps before this one make, int64 ``[optimizers]``, as many as were
        found to be `followed` when the step was traced.
    """

    def __init__(self, given: tf.Tensor) -> None:
        self.followed: list[Variable] = []
        self.each: list[int] = []
        self._given = given
        self._also_in_updates = False
        self._graph = tf.compat.v1.get_default_graph()

    def follow(self, variable: Variable) -> None:
        """Takes over an optimizer's count, unless a condition decides about its updates."""
        if self._in_step() and self._place(variable) is None:
            self.followed.append(variable)
            self.each.append(0)

    def add(self, variable: Variable) -> None:
        """Takes down that the step has counted an update."""
        place = self._place(variable)
        if place is not None and self._in_step():
            self.each[place] += 1

    def value(self, variable: Variable) -> tf.Tensor | None:
        """What a count is in this step; None for another variable, and within an update."""
        place, in_update = self._place(variable), distribute_lib.get_update_replica_id() is not None
        if place is None or (in_update and not self._also_in_updates):
            return None
        return tf.cast(self._given[place] + self.each[place], variable.dtype)

    @contextlib.contextmanager
    def also_in_updates(self) -> Iterator[None]:
        """Counts are those of the step within an update as well."""
        before, self._also_in_updates = self._also_in_updates, True
        try:
            yield
        finally:
            self._also_in_updates = before

    def after(self) -> tf.Tensor:
        """What is given to the next step."""
        return self._given + tf.constant(self.each, tf.int64) if self.each else self._given

    def _in_step(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph

    def _place(self, variable: Variable) -> int | None:
        return next((i for i, one in enumerate(self.followed) if one is variable), None)
