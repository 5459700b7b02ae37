"""Engine of a pipeline job: each task computes its stage of every micro-batch.

All tasks read the same batch of a step. The first stage uses the inputs, the last stage the
targets. The stages exchange only activations and gradients. Every task updates the variables of
its stage. Before a callback or a checkpoint reads variables, all tasks receive all weights.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import PeerLost, require
from tfdist.pipeline.link import StageLink
from tfdist.pipeline.schedule import Pass
from tfdist.pipeline.stage import MicroBatch, Stage, StageLinks, Tensors
from tfdist.pipeline.staged_model import StagedModel, staged_model
from tfdist.pipeline.union import making_empty_slots
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import rows_of_all_tasks
from tfdist.strategy.pipeline_setup import Stages
from tfdist.training import keras_compat
from tfdist.training.feed import Feed, Part, rows_of
from tfdist.training.program import Engine, StepProgram
from tfdist.training.resume import require_deterministic
from tfdist.training.task_agreement import require_same_batches

_LOG = logging.getLogger(__name__)
_TRY_S, _MOST_TRIALS = 2.0, 5
_NEAR = 1.2


class _StageBatch(NamedTuple):
    """A stage's part of a step's batch, and the number of rows."""

    rows: tf.Tensor
    data: tuple[dict[int, tf.Tensor], Any, Any]


class PipelineEngine(Engine):
    """Engine that runs each step as the scheduled passes of its micro-batches."""

    def __init__(self, job: Job) -> None:
        assert job.stages is not None
        self._job = job
        self._place = job.stages
        self._links = StageLinks(*links_of(job.stages))
        self._begun: StagedModel | None = None
        self._batches: dict[tuple[StepProgram, StagedModel], Callable[[tf.Tensor], Any]] = {}
        self._peeked: dict[tuple[Feed, int], Part] = {}

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``. A collective."""
        staged = self._staged(program, first)
        with self._telling_neighbours():
            if program.training:
                staged.divide()
            for step in range(first, last):
                batch = self._batch(staged, program, step)
                if program.training:
                    self._choose_size(staged, program, step, batch)
                before = staged.values()
                batches = self._micro_batches(staged, program, step, batch)
                del batch  # the micro-batches hold its data
                if program.training:
                    self._run_passes(staged, step, batches)
                    part = sum(float(micro.share) for micro in batches)
                    # A Python variable would keep the gradients in memory during the next step.
                    staged.update(
                        staged.clipped(
                            self._summed(staged, staged.stage.take_sums(), before, part=part)
                        )
                    )
                else:
                    self._infer(staged.stage, step, batches, loss=True)
                    self._summed(staged, [], before)
        return {}

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, whole on every task. A collective."""
        staged = self._staged(program, first)
        with self._telling_neighbours():
            for step in range(first, last):
                batch = self._batch(staged, program, step)
                batches = self._micro_batches(staged, program, step, batch)
                rows = self._infer(staged.stage, step, batches, loss=False)
                arrays = [list(map(np.asarray, column)) for column in zip(*rows, strict=True)]
                columns = list(map(np.concatenate, arrays))
                if self._job.has_peers:  # only the last stages have outputs
                    columns = [
                        rows_of_all_tasks(
                            self._job,
                            columns[index] if columns else None,
                            rank=len(output.shape),
                            of="a step's outputs",
                        )
                        for index, output in enumerate(staged.graph.outputs)
                    ]
                yield staged.packed(columns)

    def publish_metrics(self, program: StepProgram) -> None:
        self._staged(program).gather_metrics()

    def publish_state(self, program: StepProgram) -> None:
        self._staged(program).gather()

    def _staged(self, program: StepProgram, step: int | None = None) -> StagedModel:
        """Return the model in stages. The first call is a collective. `step` is the next step.

        If a model is not supported, all tasks raise the error. They can then train another model
        over the same links.
        """
        model = program.function.__self__  # type: ignore[attr-defined]
        feed = program.feed
        staged = staged_model(
            model,
            self._job,
            batch=feed.plan.global_batch_size,
            spec=feed.batch_spec,
            first_batch=None if step is None else lambda: self._peek(feed, step).data,
        )
        if staged is not self._begun:
            staged.begin()
            self._begun = staged
        return staged

    def _peek(self, feed: Feed, step: int) -> Part:
        """Return the batch of a later step. If the data are a stream, the step reuses the batch."""
        if feed.direct:
            return feed.at(tf.constant(step, tf.int64))[0]
        if (feed, step) not in self._peeked:
            self._peeked[feed, step] = feed.iterator(step).get_next()[0]
        return self._peeked[feed, step]

    def _run_passes(self, staged: StagedModel, step: int, batches: list[MicroBatch]) -> None:
        order = staged.order(self._place.index, micros=len(batches))
        staged.stage.run(step, order, batches, links=self._links)

    def _summed(
        self,
        staged: StagedModel,
        gradients: list[tf.Tensor | None],
        before: list[np.ndarray],
        *,
        part: float = 0.0,
    ) -> list[tf.Tensor | None]:
        """Sum the step's results over the same stage of all pipelines. Return the gradients.

        `before` has the values of metrics and statistics before the step. Metrics get the sum of
        all pipelines' changes. Statistics get the mean, weighted by `part`, this pipeline's
        fraction of the examples.
        """
        peers, now = self._place.peers, staged.values()
        if peers is None or not (gradients or now):
            return gradients
        variables = staged.stage.variables[: len(gradients)]
        mine = [
            np.zeros(v.shape, v.value.dtype.as_numpy_dtype) if g is None else np.asarray(g)
            for g, v in zip(gradients, variables, strict=True)
        ]
        there = np.array([g is not None for g in gradients], np.int32)
        parts = [1.0] * len(staged.own_metrics) + [part] * len(staged.statistics)
        pairs = zip(parts, now, before, strict=True)
        added = [each * (np.float64(new) - old) for each, new, old in pairs]
        try:
            sums = peers.sum(there, *mine, *added, of=f"step of {len(mine)} gradients")
        except ConnectionError as error:
            raise PeerLost(peers.lost) from error
        total, sums = sums[0], sums[1:]
        changed = [*staged.own_metrics, *staged.statistics]
        for variable, old, more in zip(changed, before, sums[len(mine) :], strict=True):
            variable.assign(old + more)
        return [tf.constant(g) if some else None for g, some in zip(sums, total, strict=False)]

    def _infer(
        self, stage: Stage, step: int, batches: list[MicroBatch], *, loss: bool
    ) -> list[Tensors]:
        """Run one step's forward passes. Return the last stage's output of each micro-batch."""
        found, number = [], tf.constant(step, tf.int64)
        for micro, batch in enumerate(batches):
            one = Pass(True, micro)
            message = stage.infer(batch, self._links.receive(number, one), loss=loss)
            self._links.send(number, one, message)
            found.append(message)
        return found if stage.is_last else []

    def _choose_size(
        self, staged: StagedModel, program: StepProgram, step: int, batch: _StageBatch
    ) -> None:
        """Measure sizes of micro-batches and keep the fastest, once a run. A collective."""
        place = self._place
        if place.options.split_size != "auto" or place.chosen.split_size or staged.compares:
            return
        tried: dict[int, float] = {}
        rows = len(program.feed.plan.span(step))
        micros = [1, *(place.count * 2**k for k in range(5))]
        sizes = sorted({-(-rows // (place.pipelines * each)) for each in micros}, reverse=True)
        for _ in range(2):  # a measurement may be noisy: try near-best sizes again
            for size in sizes:
                place.chosen.split_size = size
                took_s = self._timed(staged, program, step, batch)
                tried[size] = min(took_s, tried.get(size, took_s))
            near = _NEAR * min(tried.values())  # the first stage measures: it finishes last
            sizes = broadcast([size for size in tried if tried[size] <= near])
        fastest = min(tried, key=lambda size: tried[size])
        place.chosen.split_size = int(broadcast(fastest))
        if self._job.is_chief:
            seconds = ", ".join(f"{size} in {s:.3f} s" for size, s in tried.items())
            _LOG.info("split size %d is the fastest (step times: %s)", staged.split_size, seconds)

    def _timed(
        self, staged: StagedModel, program: StepProgram, step: int, batch: _StageBatch
    ) -> float:
        """Return the fastest time of a step's passes in seconds. Restore changed variables."""
        batches = self._micro_batches(staged, program, step, batch)
        changed = [(v, v.numpy()) for v in (*staged.statistics, *staged.metrics)]
        # Compile before timing: a micro-batch of each size, or all if a single call runs them.
        sizes = {int(batch.share * 1e6): batch for batch in batches}
        whole = staged.stage.keep == "compiled"
        self._timed_passes(staged, step, batches if whole else list(sizes.values()))
        seconds = [self._timed_passes(staged, step, batches)]
        while broadcast(len(seconds) < _MOST_TRIALS and sum(seconds) < _TRY_S):
            seconds.append(self._timed_passes(staged, step, batches))
        for variable, value in changed:
            variable.assign(value)
        return min(seconds)

    def _timed_passes(self, staged: StagedModel, step: int, batches: list[MicroBatch]) -> float:
        start = time.perf_counter()
        self._run_passes(staged, step, batches)
        seconds = time.perf_counter() - start
        staged.stage.forget()
        return seconds

    def _micro_batches(
        self, staged: StagedModel, program: StepProgram, step: int, batch: _StageBatch
    ) -> list[MicroBatch]:
        rows, place = int(batch.rows), self._place
        require(
            rows,
            "pipeline",
            f"the batch of step {step + 1} has no examples",
            fix="leave empty batches out, for example with filter(lambda x, y: len(x) > 0)",
            code="no-data",
        )
        sizes, found = staged.sizes_of(rows), []
        # This pipeline's part of the step's micro-batches.
        low, high = (len(sizes) * (place.pipeline + i) // place.pipelines for i in (0, 1))
        for micro in range(low, high):
            start, size = sum(sizes[:micro]), sizes[micro]
            inputs, targets, weights = rows_of(batch.data, start, start + size)
            found.append(
                MicroBatch(
                    inputs=inputs,
                    targets=targets,
                    weights=weights,
                    share=tf.constant(size / rows, tf.float32),
                    random_key=keras_compat.random_key(
                        program.seed, step=tf.constant(step, tf.int64), replica=micro
                    ),
                )
            )
        return found

    def _batch(self, staged: StagedModel, program: StepProgram, step: int) -> _StageBatch:
        """Return this stage's part of a step's batch, and let the observers record the step.

        If the batch is a function of the step, only this part is gathered and transformed.
        """
        feed = program.feed
        if not feed.direct:
            batch, recorded = _read_part(staged, program, self._peek(feed, step))
            del self._peeked[feed, step]
            feed.advanced_to(step + 1)
            require_same_batches(self._job, feed, step, step + 1)
        else:
            if (program, staged) not in self._batches:
                read = keras_compat.compiled(
                    lambda step: _read_part(staged, program, feed.at(step)[0])
                )
                if program.exact:
                    number = tf.constant(step, tf.int64)
                    require_deterministic(read.get_concrete_function(number).graph)
                self._batches[program, staged] = read
            batch, recorded = self._batches[program, staged](tf.constant(step, tf.int64))
        for observer, noted in zip(program.observers, recorded, strict=True):
            observer.write(step, step + 1, noted)
        return batch

    @contextlib.contextmanager
    def _telling_neighbours(self) -> Iterator[None]:
        """Send the reason of a failure to the neighbouring stages, which forward the reason.

        Raises PeerLost if TensorFlow reports that a message inside a graph failed.
        """
        links = list(filter(None, (self._links.before, self._links.after)))
        try:
            yield
        except Exception as error:
            lost = next((link.lost for link in links if link.lost), "")
            first = (str(error) or type(error).__name__).splitlines()[0]
            if not isinstance(error, PeerLost):
                first = lost or f"{self._place.names[self._place.index]} failed: {first}"
            for link in links:
                link.fail(first)
            if self._begun is not None:
                self._begun.stage.forget()
            if lost and isinstance(error, tf.errors.OpError):
                raise PeerLost(lost) from error
            raise

    @staticmethod
    def creating_slots(optimizer: Any, job: Job) -> contextlib.AbstractContextManager[None]:
        return making_empty_slots(optimizer) if job.has_peers else contextlib.nullcontext()


@functools.cache
def links_of(place: Stages) -> tuple[StageLink | None, StageLink | None]:
    """Return the links to the previous and next stage, shared by all engines of a process."""
    before, after = (
        None if end is None else StageLink(end, name=place.names[index])
        for end, index in ((place.before, place.index - 1), (place.after, place.index + 1))
    )
    return before, after


def _read_part(
    staged: StagedModel, program: StepProgram, part: Part
) -> tuple[_StageBatch, list[list[tf.Tensor]]]:
    """Return the stage's part of a step's batch, and each observer's notes of the step."""
    x, targets, weights = keras.utils.unpack_x_y_sample_weight(part.data)
    flat, stage = staged.inputs_of(x), staged.stage
    inputs = {i: flat[i] for i in stage.inputs}
    if not stage.is_last:
        targets = weights = None
    batch = _StageBatch(part.count, (inputs, targets, weights))
    one, at = tf.constant(1), tf.constant(0)
    noted = [observer.noted(observer.rows(one), at, [part]) for observer in program.observers]
    return batch, [[row.stack() for row in rows] for rows in noted]
