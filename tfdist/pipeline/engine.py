"""Engine of a pipeline job: each task computes its stage of every micro-batch.

All tasks read the same batch, as a function of the step: the first stage its inputs, the last one
its targets. Between them travel activations and their gradients alone. Every task updates the
variables of its stage; before anybody looks, all tasks get all of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import PeerLost
from tfdist.pipeline.link import Link
from tfdist.pipeline.schedule import Pass, micro_sizes, passes
from tfdist.pipeline.stage import MicroBatch, Received, Stage, Tensors
from tfdist.pipeline.staged import StagedModel
from tfdist.pipeline.union import from_owners
from tfdist.strategy import Job
from tfdist.strategy.group import naming_lost_peer, sum_bytes, sum_over_tasks
from tfdist.strategy.stages import Stages
from tfdist.training import keras_compat
from tfdist.training.feed import Part as FeedPart
from tfdist.training.program import StepProgram

_LOG = logging.getLogger(__name__)
_FORWARD, _BACKWARD = "forward", "backward"


class PipelineEngine:
    """Runs blocks of steps, each as the passes of its micro-batches by the schedule."""

    def __init__(self, job: Job) -> None:
        assert job.stages is not None
        self._job = job
        self._place = job.stages
        self._before, self._after = links_of(job.stages)
        self._models: dict[int, StagedModel] = {}
        self._batches: dict[StepProgram, Callable[[tf.Tensor], Any]] = {}

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``. A collective: every task calls it alike."""
        with self._telling_neighbours():
            staged = self._staged(program)
            for step in range(first, last):
                if program.training:
                    self._train(staged, program, step)
                else:
                    self._infer(program, step, staged.stage.evaluate)
        return {}

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, whole on every task. A collective."""
        with self._telling_neighbours():
            staged = self._staged(program)
            for step in range(first, last):
                rows = self._infer(program, step, staged.stage.predict)
                columns = [
                    np.concatenate([np.asarray(tensor) for tensor in column])
                    for column in zip(*rows, strict=True)
                ]
                yield staged.packed(self._from_last(columns, count=len(staged.graph.outputs)))

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Do nothing: all are done when `run` returns."""
        return {}

    def close(self) -> None:
        """Do nothing: all are done when `run` returns."""

    @property
    def steps_under_way(self) -> int:
        """0, always."""
        return 0

    def reset_metrics(self) -> None:
        """Do nothing: the model's own variables hold the metrics."""

    def publish_metrics(self, program: StepProgram) -> None:
        """Give all tasks the metrics of the last stage. A collective."""
        from_owners(self._job, list(program.metrics), self._staged(program).owners)

    def publish_state(self, program: StepProgram) -> None:
        """Give all tasks each stage's variables, slots and metrics. A collective."""
        staged = self._staged(program)
        from_owners(self._job, staged.variables(), staged.owners)

    def take_state(self, program: StepProgram) -> None:
        """Do nothing: what is restored is in all tasks."""

    def _staged(self, program: StepProgram) -> StagedModel:
        """Return the model in stages; cuts it at the first call, which is a collective."""
        model = program.function.__self__  # type: ignore[attr-defined]
        if id(model) not in self._models:
            self._models[id(model)] = StagedModel(
                model, self._job, batch=program.feed.plan.global_batch_size
            )
        return self._models[id(model)]

    def _train(self, staged: StagedModel, program: StepProgram, step: int) -> None:
        """Run one step: all passes of the schedule, and the update."""
        batches = self._micro_batches(staged, program, step)
        order = passes(
            self._place.options.schedule,
            stage=self._place.index,
            stages=self._place.count,
            micros=len(batches),
        )
        for one in order:
            if one.forward:
                message = staged.stage.forward(
                    one.micro, batches[one.micro], self._received(staged.stage, step, one)
                )
                self._send(self._after, step, one, message)
            else:
                gradients = [] if self._after is None else _receive(self._after, step, one)
                back = staged.stage.backward(one.micro, gradients)
                self._send(self._before, step, one, back)
        self._update(staged)

    def _update(self, staged: StagedModel) -> None:
        """Update the stage's variables; gradients are clipped by the norm over all stages."""
        gradients = staged.stage.take_sums()
        clip = staged.global_clipnorm
        if clip:
            own = sum(float(tf.reduce_sum(tf.square(g))) for g in gradients if g is not None)
            total = sum_over_tasks(self._job, np.array([own]), of="squares of gradients")[0]
            factor = tf.constant(clip / max(np.sqrt(total), clip), tf.float32)
            gradients = [None if g is None else g * tf.cast(factor, g.dtype) for g in gradients]
        staged.update(gradients)

    def _infer(
        self, program: StepProgram, step: int, run: Callable[[MicroBatch, Received], Tensors]
    ) -> list[Tensors]:
        """Run one step's forward passes; return what the last stage makes of each micro-batch."""
        staged = self._staged(program)
        found = []
        for micro, batch in enumerate(self._micro_batches(staged, program, step)):
            one = Pass(True, micro)
            message = run(batch, self._received(staged.stage, step, one))
            self._send(self._after, step, one, message)
            found.append(message)
        return found if self._after is None else []

    def _received(self, stage: Stage, step: int, one: Pass) -> Received:
        if self._before is None:
            return stage.first()
        return stage.unpacked(_receive(self._before, step, one))

    def _send(self, link: Link | None, step: int, one: Pass, tensors: Tensors) -> None:
        if link is not None:
            link.send(_tag(step, one), [np.asarray(tensor) for tensor in tensors])

    def _micro_batches(
        self, staged: StagedModel, program: StepProgram, step: int
    ) -> list[MicroBatch]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self._batch(program, step))
        inputs = [staged.inputs_of(x)[i] for i in staged.stage.part.inputs]
        if not staged.stage.part.is_last:
            y = weights = None
        rows = next(int(leaf.shape[0]) for leaf in keras.tree.flatten(x) if leaf is not None)
        found, start = [], 0
        for micro, size in enumerate(micro_sizes(rows, split_size=staged.split_size)):
            piece = slice(start, start + size)
            start += size
            found.append(
                MicroBatch(
                    inputs=[tensor[piece] for tensor in inputs],
                    targets=_rows(y, piece),
                    weights=_rows(weights, piece),
                    share=tf.constant(size / rows, tf.float32),
                    random_key=keras_compat.random_key(
                        program.seed, step=tf.constant(step, tf.int64), replica=micro
                    ),
                )
            )
        return found

    def _batch(self, program: StepProgram, step: int) -> Any:
        """Return the whole batch of a step."""
        if not program.feed.direct:
            part = FeedPart(*next(program.feed.iterator(step))[0])
            program.feed.advanced_to(step + 1)
            return part.data
        if program not in self._batches:
            self._batches[program] = keras_compat.compiled(
                lambda step: program.feed.at(step)[0].data
            )
        return self._batches[program](tf.constant(step, tf.int64))

    def _from_last(self, columns: list[np.ndarray], *, count: int) -> list[np.ndarray]:
        """Return the last stage's arrays in every task. A collective."""
        if not self._job.has_peers:
            return columns
        mine = columns if self._after is None else [np.zeros(0, np.float32)] * count
        whole = []
        for array in mine:
            given = self._after is None
            shape = np.zeros(9, np.int32)
            if given:
                shape[:2] = array.ndim, np.dtype(array.dtype).num
                shape[2 : 2 + array.ndim] = array.shape
            shape = sum_over_tasks(self._job, shape, of="the shape of a step's outputs")
            if not given:
                size = shape[2 : 2 + shape[0]]
                array = np.zeros(size, _dtype_of(int(shape[1])))
            whole.append(sum_bytes(self._job, array, of="a step's outputs"))
        return whole

    @contextlib.contextmanager
    def _telling_neighbours(self) -> Iterator[None]:
        """Tell the neighbouring stages why this one fails; they tell theirs."""
        try:
            with naming_lost_peer(self._job):
                yield
        except Exception as error:
            name = self._place.names[self._place.index]
            first = (str(error) or type(error).__name__).splitlines()[0]
            reason = first if isinstance(error, PeerLost) else f"{name} failed: {first}"
            for link in (self._before, self._after):
                if link is not None:
                    link.fail(reason)
            for staged in self._models.values():
                staged.stage.forget()
            raise


@functools.cache
def links_of(place: Stages) -> tuple[Link | None, Link | None]:
    """Return the links to the stages before and after; the same for all engines of a process."""
    before = None if place.before is None else Link(place.before, name=place.names[place.index - 1])
    after = None if place.after is None else Link(place.after, name=place.names[place.index + 1])
    return before, after


def _receive(link: Link, step: int, one: Pass) -> Tensors:
    return [tf.constant(array) for array in link.receive(_tag(step, one))]


def _tag(step: int, one: Pass) -> str:
    return f"step {step} {_FORWARD if one.forward else _BACKWARD} {one.micro}"


def _rows(values: Any, piece: slice) -> Any:
    return keras.tree.map_structure(lambda t: None if t is None else t[piece], values)


def _dtype_of(number: int) -> Any:
    codes = np.typecodes["All"]
    return next(np.dtype(code) for code in codes if np.dtype(code).num == number)
