"""A step of a stage as one compiled call, from whose graph messages go out and come in.

`tf.numpy_function` holds a thread of TensorFlow's while it waits for a message, which is why each
pass waits for the one before it: there is one such call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.pipeline.link import StageLink
from tfdist.pipeline.schedule import Pass
from tfdist.pipeline.stage import MicroBatch, Received, Segment, Tensors, nothing_received
from tfdist.training import keras_compat

Tag = Callable[[int, Pass], str]


class WholeStep:
    """Runs all passes of a step of a stage.

    Args:
      stage: that computes them, in one segment.
      before: to the stage before; None in the first.
      after: to the stage after; None in the last.
      tag: of a step's pass, by which messages are told apart.
    """

    def __init__(
        self, stage: Segment, *, before: StageLink | None, after: StageLink | None, tag: Tag
    ) -> None:
        self._stage, self._before, self._after, self._tag = stage, before, after, tag
        self._compiled: dict[tuple[Pass, ...], Any] = {}

    def run(self, step: int, order: Sequence[Pass], batches: list[MicroBatch]) -> None:
        """Run the passes; the stage has the sums of the gradients."""
        function = self._compiled.get(tuple(order))
        if function is None:

            def passes(step: tf.Tensor, batches: list[MicroBatch]) -> list[tf.Tensor | None]:
                exchange = StageExchange(self, step, batches)
                return self._stage.traced_passes(order, batches, exchange)

            function = self._compiled[tuple(order)] = keras_compat.compiled(passes)
        self._stage.take(function(tf.constant(step, tf.int64), batches))


class StageExchange:
    """Messages to and from the neighbouring stages, in the graph of a step."""

    def __init__(self, whole: WholeStep, step: tf.Tensor, batches: list[MicroBatch]) -> None:
        self._whole, self._step, self._batches = whole, step, batches

    def received(self, one: Pass) -> Received:
        """Return what a forward pass receives."""
        stage, link = self._whole._stage, self._whole._before
        if link is None:
            return nothing_received()
        symbols = list(stage.part.received)
        masks = [t._keras_mask for t in symbols if getattr(t, "_keras_mask", None) is not None]
        dtypes = [tf.as_dtype(t.dtype) for t in (*symbols, *masks)]
        found = self._from(link, one, [*dtypes, tf.float32])
        for tensor, symbol in zip(found, (*symbols, *masks), strict=False):
            tensor.set_shape(symbol.shape)
        found[-1].set_shape(())
        return stage.unpacked(found)

    def gradients(self, one: Pass, targets: Tensors) -> Tensors:
        """Return the gradients that a backward pass receives, of the first of these targets."""
        link = self._whole._after
        if link is None:
            return []
        count = sum("float" in t.dtype for t in self._whole._stage.part.sent)
        found = self._from(link, one, [t.dtype for t in targets[:count]])
        for tensor, target in zip(found, targets, strict=False):
            tensor.set_shape(target.shape)
        return found

    def sent(self, one: Pass, tensors: Tensors) -> tf.Tensor:
        """Send what a pass has made; return a scalar that is there when that is done."""
        link = self._whole._after if one.forward else self._whole._before
        if link is None:
            return tf.constant(0)

        def send(step: Any, *arrays: Any) -> Any:
            # TensorFlow uses its memory again when this returns.
            link.send(self._whole._tag(int(step), one), [np.array(array) for array in arrays])
            return np.int32(0)

        return tf.numpy_function(send, [self._step, *tensors], tf.int32)

    def _from(self, link: StageLink, one: Pass, dtypes: list[Any]) -> Tensors:
        def receive(step: Any) -> list[np.ndarray]:
            return link.receive(self._whole._tag(int(step), one))

        found: Tensors = tf.numpy_function(receive, [self._step], dtypes)
        return list(found) if isinstance(found, list | tuple) else [found]
