"""A step of a stage as one compiled call, from whose graph messages go out and come in.

`tf.numpy_function` holds a thread of TensorFlow's while it waits for a message, which is why each
pass waits for the one before it: there is one such call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.pipeline.cuts import has_mask
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
                return self._stage.traced_passes(step, order, batches, exchange=self)

            function = self._compiled[tuple(order)] = keras_compat.compiled(passes)
        self._stage.take(function(tf.constant(step, tf.int64), batches))

    def received(self, step: tf.Tensor, one: Pass) -> Received:
        """Return what a forward pass receives; in graph."""
        if self._before is None:
            return nothing_received()
        symbols = list(self._stage.part.received)
        symbols += [tensor._keras_mask for tensor in symbols if has_mask(tensor)]
        dtypes = [tf.as_dtype(symbol.dtype) for symbol in symbols]
        found = self._from(self._before, step, one, [*dtypes, tf.float32])
        for tensor, symbol in zip(found, symbols, strict=False):
            tensor.set_shape(symbol.shape)
        found[-1].set_shape(())
        return self._stage.unpacked(found)

    def gradients(self, step: tf.Tensor, one: Pass, targets: Tensors) -> Tensors:
        """Return the gradients that a backward pass receives, of the first of these; in graph."""
        if self._after is None:
            return []
        count = sum("float" in t.dtype for t in self._stage.part.sent)
        found = self._from(self._after, step, one, [t.dtype for t in targets[:count]])
        for tensor, target in zip(found, targets, strict=False):
            tensor.set_shape(target.shape)
        return found

    def sent(self, step: tf.Tensor, one: Pass, tensors: Tensors) -> tf.Tensor:
        """Send what a pass has made; return a scalar that is there when that is done; in graph."""
        link = self._after if one.forward else self._before
        if link is None:
            return tf.constant(0)

        def send(step: Any, *arrays: Any) -> Any:
            # TensorFlow uses its memory again when this returns.
            link.send(self._tag(int(step), one), [np.array(array) for array in arrays])
            return np.int32(0)

        return tf.numpy_function(send, [step, *tensors], tf.int32)

    def _from(self, link: StageLink, step: tf.Tensor, one: Pass, dtypes: list[Any]) -> Tensors:
        def receive(step: Any) -> list[np.ndarray]:
            return link.receive(self._tag(int(step), one))

        found: Tensors = tf.numpy_function(receive, [step], dtypes)
        return list(found) if isinstance(found, list | tuple) else [found]
