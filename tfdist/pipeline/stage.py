"""Stage: forward and backward passes of a part of a model, and its sums of gradients.

A pass is a compiled function, and a Python loop runs the passes in the order of the schedule.
Between the two passes of a micro-batch, an eager `tf.GradientTape` keeps the activations. With
``recompute`` the stage keeps only inputs and computes the forward pass again, segment by segment.
Memory holds a single segment's activations (Chen et al., 2016, arXiv:1604.06174). If a backward
pass directly follows its forward pass, the same function computes both. With ``compiled``, or with
``tape`` and one micro-batch, a single function computes the step. Its passes run in sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.pipeline.cuts import MOST_DRAWS, ModelPart, has_mask, one_or_list
from tfdist.pipeline.link import StageLink
from tfdist.pipeline.schedule import Pass
from tfdist.pipeline.union import release
from tfdist.training import keras_compat
from tfdist.training.program import resized

_TRACED_ROWS = 8, 16
"""Two batch sizes. A loss with a batch axis has another shape for each size."""

Tensors = list[tf.Tensor]
LossOf = Callable[["MicroBatch", Tensors, tf.Tensor], tf.Tensor]
"""Loss of a micro-batch, from the last stage's outputs and the losses added by layers."""


class MicroBatch(NamedTuple):
    """Data of a micro-batch that a stage reads. Only the last stage has targets and weights."""

    inputs: dict[int, tf.Tensor]  # the model's inputs by index
    share: tf.Tensor  # fraction of the step's examples, scalar float32
    random_key: tf.Tensor  # from seed, step and micro-batch, int32 [2]
    targets: Any = None
    weights: Any = None


class Received(NamedTuple):
    """Received activations, their Keras masks, and the losses added by earlier stages."""

    tensors: Tensors
    masks: Tensors
    added: tf.Tensor


@dataclasses.dataclass(slots=True)
class _Kept:
    """Data of a micro-batch kept from its forward pass to its backward pass."""

    batch: MicroBatch
    received: Received
    back: Tensors | None = None
    tape: tf.GradientTape | None = None
    targets: Tensors = dataclasses.field(default_factory=list)


class Stage:
    """Computation of a stage of a model. Several micro-batches may be in flight.

    Args:
      parts: The stage, or its segments in order. With several segments, every segment except the
        last keeps only its inputs and computes its activations again.
      keep: ``tape`` keeps activations. ``compiled`` keeps them inside a single call for the whole
        step. ``recompute`` computes them again. ``nothing`` lets the last segment run both passes
        of a micro-batch in a single call.
      loss_of: Loss function of the last stage, traced in the forward pass. It may update metrics.
      scaled: Function that scales a loss before the gradients.
      micros: Function that returns the number of micro-batches of a whole step.
      check: Function called when a training pass is traced.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        *,
        keep: str = "tape",
        loss_of: LossOf | None = None,
        scaled: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
        micros: Callable[[], int] = lambda: 1,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        *before, last = parts
        self.keep = keep
        of_all: dict[str, Any] = {"scaled": scaled, "micros": micros, "check": check}
        self.segments = [Segment(part, keep="recompute", **of_all) for part in before]
        self.segments.append(Segment(last, keep=keep, loss_of=loss_of, **of_all))
        # The trainable variables, in the order of `take_sums`.
        self.variables = [v for segment in self.segments for v in segment.variables]
        self.inputs = sorted({i for part in parts for i in part.inputs})
        self.is_last = last.is_last
        self._whole_step: Any = None

    def run(
        self, step: int, order: Sequence[Pass], batches: Sequence[MicroBatch], *, links: StageLinks
    ) -> None:
        """Run the passes of a step in their order. `take_sums` returns the gradients."""
        given = tf.constant(step, tf.int64), tuple(order), list(batches)
        # With a single micro-batch, a call for both passes is faster than two calls.
        if self.keep == "compiled" or (self.keep == "tape" and len(batches) == 1):
            (whole,) = self.segments
            if self._whole_step is None:
                self._whole_step = keras_compat.compiled(partial(self._run, links))
            whole.step_sums = self._whole_step(*given)
        else:
            self._run(links, *given)

    def _run(
        self, links: StageLinks, step: tf.Tensor, order: Sequence[Pass], batches: list[MicroBatch]
    ) -> list[tf.Tensor | None]:
        """Run the passes. If traced, return the sums of the gradients."""
        whole, before = self.segments[-1], list[Any]()
        whole.traced_sums = [None] * len(whole.variables)
        for one in order:
            with tf.control_dependencies(before):  # has an effect only in a graph
                # The types and shapes of the message, for a graph.
                like = self.segments[0].received if one.forward else whole.sent(one.micro)
                message = links.receive(step, one, like=like)
                if one.forward:
                    message = self.forward(one.micro, batches[one.micro], message)
                    before = message
                else:
                    message = self.backward(one.micro, message)
                    before = [total for total in whole.traced_sums if total is not None]
                before = [*before, *links.send(step, one, message)]
        return whole.traced_sums

    def forward(self, micro: int, batch: MicroBatch, message: Tensors) -> Tensors:
        """Run a forward pass. Return the message for the next stage, or the scalar loss.

        `message` is from the previous stage, or empty in the first stage. The loss is weighted by
        the micro-batch's share of the step.
        """
        for segment in self.segments:
            message = segment.forward(micro, batch, message)
        return message

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        """Run a backward pass, and add to the sums. Return the message for the previous stage.

        `gradients` are the gradients of the sent float tensors. The last stage has none.
        """
        for segment in reversed(self.segments):
            gradients = segment.backward(micro, gradients)
        return gradients

    def infer(self, batch: MicroBatch, message: Tensors, *, loss: bool) -> Tensors:
        """Run a forward pass without training. The last stage returns the loss or the outputs."""
        for segment in self.segments:
            run = segment.evaluate if loss else segment.predict
            message = run(batch, segment.unpacked(message))
        return message

    def take_sums(self) -> list[tf.Tensor | None]:
        """Return the sum of the gradients of each trainable variable, and reset the sums.

        The sum is `None` if no loss depends on the variable.
        """
        return [total for segment in self.segments for total in segment.take_sums()]

    def forget(self) -> None:
        """Discard the data of unfinished micro-batches, and the sums."""
        for segment in self.segments:
            segment.forget()


class Segment:
    """Computation of a stage or of a sequence of its layers. Arguments as in `Stage`."""

    def __init__(
        self,
        part: ModelPart,
        *,
        keep: str,
        scaled: Callable[[tf.Tensor], tf.Tensor],
        micros: Callable[[], int],
        check: Callable[[], None],
        loss_of: LossOf | None = None,
    ) -> None:
        self._scaled = scaled
        self._micros, self._check = micros, check
        self.part = part
        self.variables: list[Any] = list(part.module.trainable_variables)
        self.keep = keep
        self._loss_of = loss_of
        self._values = [variable.value for variable in self.variables]
        self._sums: list[tf.Variable] = []
        self.traced_sums: list[tf.Tensor | None] = []  # only while a step is traced
        self.step_sums: list[tf.Tensor | None] = []  # returned by a compiled step
        self._summed: set[int] = set()  # variables that a loss depends on, found by tracing
        self._summing = False
        self._kept: dict[int, _Kept] = {}
        self._axes = keras_compat.BatchAxes()
        self._masked = [i for i, t in enumerate(part.received) if has_mask(t)]
        masks = [t._keras_mask for t in part.received if has_mask(t)]
        # The types and shapes of the message that a forward pass receives.
        self.received = [*part.received, *masks, tf.TensorSpec([], tf.float32)]
        self._forward = keras_compat.compiled(self._traced_forward)
        self._backward_again = keras_compat.compiled(self._traced_backward)
        self._both = keras_compat.compiled(self._traced_both)
        self.predict = keras_compat.compiled(partial(self._traced_inference, loss_of=None))
        self.evaluate = keras_compat.compiled(partial(self._traced_inference, loss_of=loss_of))

    def unpacked(self, message: Tensors) -> Received:
        """Return the parts of the previous segment's message, empty for the first segment."""
        if not message:
            return Received(tensors=[], masks=[], added=tf.constant(0.0))
        count = len(self.part.received)
        return Received(tensors=message[:count], masks=message[count:-1], added=message[-1])

    def sent(self, micro: int) -> Tensors:
        """Return the float tensors that a forward pass sent, if they are kept."""
        count = sum("float" in t.dtype for t in self.part.sent)
        return self._kept[micro].targets[:count]

    def forward(self, micro: int, batch: MicroBatch, message: Tensors) -> Tensors:
        received = self.unpacked(message)
        kept = self._kept[micro] = _Kept(batch, received)
        if self.keep == "nothing":
            self._begin_sums()
            message, kept.back = self._both(batch, received)
            return message
        if self.keep == "recompute":
            return self._forward(batch, received)[0]
        run = self._forward if tf.executing_eagerly() else self._traced_forward
        with tf.GradientTape() as tape:
            tape.watch([t for t in received.tensors if t.dtype.is_floating])
            message, kept.targets = run(batch, received)
        kept.tape = tape
        return message

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        kept = self._kept.pop(micro)
        if kept.back is not None:
            return kept.back
        if kept.tape is None:
            self._begin_sums()
            return self._backward_again(kept.batch, kept.received, gradients)
        with keras_compat.adding_in_order():  # the first pass traced these operations
            own, back = self._gradients(kept.tape, kept.targets, kept.received, gradients)
        if tf.executing_eagerly():
            self._begin_sums()
            self._add(own)
        else:
            pairs = zip(self.traced_sums, own, strict=True)
            self.traced_sums = [a if b is None else b if a is None else a + b for a, b in pairs]
        return back

    def take_sums(self) -> list[tf.Tensor | None]:
        if self.step_sums:
            sums, self.step_sums = self.step_sums, []
            return sums
        sums = [
            tf.convert_to_tensor(self._sums[i]) if self._summing and i in self._summed else None
            for i in range(len(self.variables))
        ]
        release(self._sums)
        self._summing = False
        return sums

    def forget(self) -> None:
        self._kept.clear()
        self.step_sums = []
        self._summing = False

    def _begin_sums(self) -> None:
        """Set the sums to zeros at the first pass of a step."""
        if self._summing:
            return
        self._summing = True
        zeros = (tf.zeros(value.shape, value.dtype) for value in self._values)
        if not self._sums:
            self._sums = [tf.Variable(each, trainable=False) for each in zeros]
            return
        for total, each in zip(self._sums, zeros, strict=True):
            total.assign(each)

    def _add(self, gradients: Sequence[tf.Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._summed.add(index)
                self._sums[index].assign_add(gradient)

    def _traced_forward(self, batch: MicroBatch, received: Received) -> tuple[Tensors, Tensors]:
        with keras_compat.pools_again():
            outputs, added = self._run(batch, received, training=True, loss_of=self._loss_of)
        if self.part.is_last:
            loss = outputs[0] * batch.share  # the losses of earlier stages add no gradient here
            return [loss], [self._scaled(loss)]
        targets = [t for t in outputs if t.dtype.is_floating]
        if added is not None:
            targets.append(self._scaled(added * batch.share))
        return self._message(outputs, received, added), targets

    def _traced_both(self, batch: MicroBatch, received: Received) -> tuple[Tensors, Tensors]:
        with tf.GradientTape() as tape:
            tape.watch([t for t in received.tensors if t.dtype.is_floating])
            message, targets = self._traced_forward(batch, received)
        own, back = self._gradients(tape, targets, received, [])
        self._add(own)
        return message, back

    def _traced_backward(
        self, batch: MicroBatch, received: Received, gradients: Tensors
    ) -> Tensors:
        with tf.GradientTape() as tape:
            tape.watch([t for t in received.tensors if t.dtype.is_floating])
            # The first pass has updated statistics and metrics. Updates of this pass are dropped.
            # A regularizer reads None for a variable that has no value in such a scope.
            weights = [(variable, variable.value) for variable in self.variables]
            with keras.StatelessScope(state_mapping=weights, collect_losses=True):
                _, targets = self._traced_forward(batch, received)
        own, back = self._gradients(tape, targets, received, gradients)
        self._add(own)
        return back

    def _traced_inference(
        self, batch: MicroBatch, received: Received, *, loss_of: LossOf | None
    ) -> Tensors:
        """Return the message, the model's flat outputs, or the scalar loss, without training."""
        outputs, added = self._run(batch, received, training=False, loss_of=loss_of)
        return outputs if self.part.is_last else self._message(outputs, received, added)

    def _run(
        self,
        batch: MicroBatch,
        received: Received,
        *,
        training: bool,
        loss_of: LossOf | None = None,
    ) -> tuple[Tensors, tf.Tensor | None]:
        """Return the outputs or the loss, and the sum of the losses added by layers."""
        # Under an eager tape, the backward function computes gradients of all its arguments.
        # Leave out the model's inputs: ragged and sparse inputs have no gradient.
        own = [batch.inputs[i] for i in self.part.inputs]
        own = tf.nest.map_structure(tf.stop_gradient, own, expand_composites=True)
        inputs = [*received.tensors, *own]
        masks: list[Any] = [None] * len(inputs)
        for index, mask in zip(self._masked, received.masks, strict=True):
            masks[index] = mask
        given = {"mask": one_or_list(masks)} if self._masked else {}
        module = self.part.module
        trace = keras_compat.StepTrace(
            num_replicas=1,
            share=1.0,
            examples=tf.shape(inputs[0])[0],
            random_key=batch.random_key,
            part=batch.share,
            micros=self._micros(),
            batch=inputs,
            fused=training and keras_compat.is_fused(module),
            draws=MOST_DRAWS + self.part.index * 2**16,
            numbers={key: iter(numbers) for key, numbers in self.part.draws.items()},
        )
        with keras_compat.tracing(trace):
            outputs = keras.tree.flatten(module(one_or_list(inputs), training=training, **given))
            for index in self._masked:  # an input may pass through
                inputs[index]._keras_mask = masks[index]
            outputs = [[*inputs, *outputs][i] for i in self.part.sources]
            losses = self._added(module.losses, inputs, trace)
            added = tf.add_n(losses) if losses else None
            if loss_of is not None:
                total = received.added if added is None else received.added + added
                outputs = [loss_of(batch, outputs, total)]
            losses_here = outputs if loss_of is not None else [] if added is None else [added]
            keras_compat.warn_of_parts(losses_here, trace)
        if training:
            self._check()
        return outputs, added

    def _added(
        self, losses: Sequence[tf.Tensor], inputs: Tensors, trace: keras_compat.StepTrace
    ) -> Tensors:
        """Return the losses added by layers, each weighted by its part of the step's loss."""
        several = [loss.shape.rank != 0 for loss in losses]
        if any(several) and self._axes.shapes is None:
            with tf.init_scope():
                self._axes.shapes = [self._added_shapes(inputs, rows) for rows in _TRACED_ROWS]
        return [
            keras_compat.added_in_part(
                loss,
                trace,
                is_sum=is_several
                and keras_compat.has_examples(loss, self._axes, number=number, what="add_loss"),
            )
            for number, (loss, is_several) in enumerate(zip(losses, several, strict=True))
        ]

    def _added_shapes(self, inputs: Tensors, rows: int) -> list[tf.TensorShape]:
        """Return the shapes of the losses that layers add to a micro-batch of `rows` rows."""
        shapes: list[tf.TensorShape] = []

        def call(given: Tensors) -> None:
            with keras_compat.tracing(keras_compat.bare_trace(rows)):
                self.part.module(one_or_list(given), training=True)
                shapes.extend(loss.shape for loss in self.part.module.losses)

        specs = [resized(tf.type_spec_from_value(tensor), rows) for tensor in inputs]
        with contextlib.suppress(Exception):  # the model may need a fixed batch size
            keras_compat.compiled(call).get_concrete_function(specs)
        return shapes

    def _message(self, outputs: Tensors, received: Received, added: tf.Tensor | None) -> Tensors:
        pairs = zip(self.part.sent, outputs, strict=True)
        masks = [_mask_of(sent, output) for sent, output in pairs if has_mask(sent)]
        return [*outputs, *masks, received.added if added is None else received.added + added]

    def _gradients(
        self, tape: tf.GradientTape, targets: Tensors, received: Received, gradients: Tensors
    ) -> tuple[list[tf.Tensor | None], Tensors]:
        """Return the gradients of the variables and of the received float tensors."""
        sources = [t for t in received.tensors if t.dtype.is_floating]
        ones = [tf.ones_like(t) for t in targets[len(gradients) :]]  # an added loss
        found = tape.gradient(
            targets, [*self._values, *sources], output_gradients=[*gradients, *ones]
        )
        count = len(self._values)
        # Gradients of an Embedding are IndexedSlices, which cannot be added.
        own = [None if g is None else tf.convert_to_tensor(g) for g in found[:count]]
        back = zip(found[count:], sources, strict=True)
        return own, [tf.zeros_like(s) if g is None else tf.convert_to_tensor(g) for g, s in back]


def _mask_of(sent: Any, output: tf.Tensor) -> tf.Tensor:
    """Return the Keras mask of a tensor with a symbolic mask.

    If Keras has dropped the mask (for example in MultiHeadAttention), return a mask of all True.
    """
    mask = getattr(output, "_keras_mask", None)
    if mask is None:
        return tf.fill(tf.shape(output)[: len(sent._keras_mask.shape)], True)
    return mask


# Messages between the passes of neighbouring stages, also from inside a graph.
#
# In a graph `tf.numpy_function` blocks a TensorFlow thread while it waits for a message. Each pass
# of a traced step therefore waits for the previous pass, so that calls never overlap.


class StageLinks:
    """Links to the previous stage (`None` in the first) and the next stage (`None` in the last)."""

    def __init__(self, before: StageLink | None, after: StageLink | None) -> None:
        self.before, self.after = before, after

    def receive(self, step: tf.Tensor, one: Pass, *, like: Sequence[Any] = ()) -> Tensors:
        """Return the message that a pass needs, empty at an end of the pipeline.

        In a graph, `like` sets the types and shapes of the tensors.
        """
        link = self.before if one.forward else self.after
        if link is None:
            return []

        def receive(step: Any) -> list[np.ndarray]:
            return link.receive(_tag(step, one))

        if tf.executing_eagerly():
            return [tf.constant(array) for array in receive(step)]
        types = [tf.as_dtype(each.dtype) for each in like]
        message = keras_compat.call_to_peer(receive, [step], types)
        for tensor, each in zip(message, like, strict=True):
            tensor.set_shape(each.shape)
        return message

    def send(self, step: tf.Tensor, one: Pass, message: Tensors) -> Tensors:
        """Send the results of a pass. In a graph, return a tensor that is set after the send."""
        link = self.after if one.forward else self.before
        if link is None:
            return []

        if tf.executing_eagerly():
            link.send(_tag(step, one), [np.asarray(tensor) for tensor in message])
            return []

        def send(step: Any, *arrays: Any) -> Any:
            # Copy, because TensorFlow reuses the memory after the return.
            link.send(_tag(step, one), [np.array(array) for array in arrays])
            return np.int32(0)

        return [tf.numpy_function(send, [step, *message], tf.int32)]


def _tag(step: Any, one: Pass) -> str:
    """Return the unique tag of a pass's message."""
    return f"step {int(step)} {'forward' if one.forward else 'backward'} {one.micro}"
