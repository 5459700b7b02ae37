"""Messages of a stage's passes, to and from the stages beside it; also from inside a graph.

There `tf.numpy_function` holds a thread of TensorFlow's while it waits for a message, which is why
each pass of a traced step waits for the one before it: there is one such call at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.pipeline.link import StageLink
from tfdist.pipeline.schedule import Pass

Tensors = list[tf.Tensor]


class StageLinks:
    """Both links of a stage.

    Args:
      before: to the stage before; None in the first.
      after: to the stage after; None in the last.
    """

    def __init__(self, before: StageLink | None, after: StageLink | None) -> None:
        self.before, self.after = before, after

    def receive(self, step: tf.Tensor, one: Pass, *, like: Sequence[Any] = ()) -> Tensors:
        """Return the message that a pass begins with; empty at an end of the pipeline.

        `like` tells the types and shapes of its tensors, for a graph.
        """
        link = self.before if one.forward else self.after
        if link is None:
            return []

        if tf.executing_eagerly():
            return [tf.constant(array) for array in link.receive(_tag(step, one))]

        def receive(step: Any) -> list[np.ndarray]:
            return link.receive(_tag(step, one))

        found: Any = tf.numpy_function(receive, [step], [tf.as_dtype(each.dtype) for each in like])
        message = list(found) if isinstance(found, list | tuple) else [found]
        for tensor, each in zip(message, like, strict=True):
            tensor.set_shape(each.shape)
        return message

    def send(self, step: tf.Tensor, one: Pass, message: Tensors) -> Tensors:
        """Send what a pass has made; return what is there, in a graph, when that is done."""
        link = self.after if one.forward else self.before
        if link is None:
            return []

        if tf.executing_eagerly():
            link.send(_tag(step, one), [np.asarray(tensor) for tensor in message])
            return []

        def send(step: Any, *arrays: Any) -> Any:
            # TensorFlow uses its memory again when this returns.
            link.send(_tag(step, one), [np.array(array) for array in arrays])
            return np.int32(0)

        return [tf.numpy_function(send, [step, *message], tf.int32)]


def _tag(step: Any, one: Pass) -> str:
    """Return what tells a pass's message from all others of a run."""
    return f"step {int(step)} {'forward' if one.forward else 'backward'} {one.micro}"
