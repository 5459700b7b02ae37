"""`evaluate` and `predict`, each example exactly once."""

from __future__ import annotations

import random
from typing import Any

import keras
from keras.src.utils.python_utils import pythonify_logs

from tfdist import phases
from tfdist.strategy import Job, broadcast
from tfdist.training import building
from tfdist.training.agreement import require_same_weights
from tfdist.training.blocks import BlockRunner, Decision, any_task, decide, naming_bad_data
from tfdist.training.callbacks import callback_list, wants_every_batch
from tfdist.training.engines import engine_for, joined, naming_a_lost_server
from tfdist.training.inputs import Length, prepare
from tfdist.training.program import Engine, program_of
from tfdist.training.stop_requests import StopRequested, StopRequests


@naming_a_lost_server()
def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluate a compiled model; what `keras.Model.evaluate` does, under every strategy.

    A collective: every training task calls it alike, and all get the same result: the metrics, as
    a list or a dict, over each example exactly once.
    """
    job = building.job_for(model, doing="evaluate")
    building.require_compiled(model, doing="evaluate")
    evaluation = Evaluation(
        model, job, engine_for(job), (x, y, sample_weight), batch_size=batch_size, steps=steps
    )
    if job.stages is None:  # those of a pipeline take the chief's
        require_same_weights(job, model)
    listed = callback_list(
        callbacks, job=job, model=model, verbose=verbose, epochs=1, steps=evaluation.steps
    )
    logs = pythonify_logs(evaluation.run(listed))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


@naming_a_lost_server()
def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Compute the model's outputs for each example of `x`, in order, once each.

    What `keras.Model.predict` does, under every strategy. A collective: every training task calls
    it alike, and all get the whole result, a nest of arrays ``[examples, ...]``.
    """
    job = building.job_for(model, doing="predict")
    length = _length(batch_size=batch_size, steps=steps)
    feed = prepare(x, None, None, job=job, length=length, shuffle=False, seed=0)
    building.build_to_predict(model, job, feed)
    if job.stages is None:  # those of a pipeline take the chief's
        require_same_weights(job, model)
    # A layer that draws while it predicts draws anew in each call, as under Keras.
    seed = int(broadcast(random.randrange(2**31)))
    program = program_of(model, job, "predict_step", feed, seed=seed)
    total = feed.plan.total_steps
    listed = callback_list(callbacks, job=job, model=model, verbose=verbose, epochs=1, steps=total)
    model.stop_predicting = False
    listed.on_predict_begin()
    by_batch = _goes_by_batch(listed, mode="predict", stop=model.stop_predicting)
    batches: list[Any] = []
    computed = engine_for(job).outputs(program, 0, total)
    while len(batches) < total:
        step = len(batches)
        if by_batch and step and any_task(job, model.stop_predicting, of="requests to stop"):
            break
        listed.on_predict_batch_begin(step)
        with naming_bad_data(feed):
            batches.append(next(computed))
        listed.on_predict_batch_end(step, {"outputs": batches[-1]})
    listed.on_predict_end()
    return keras.tree.map_structure(lambda *parts: joined(parts), *batches)


def _length(*, batch_size: int | None, steps: int | None) -> Length:
    most = keras.config.max_steps_per_epoch()
    return Length(batch_size=batch_size, steps_per_epoch=steps, once=True, most_steps=most)


def _goes_by_batch(callbacks: Any, *, mode: str, stop: bool) -> bool:
    """Return True in every task when the chief stops, or has a callback for each batch."""
    by_batch = any(wants_every_batch(c, mode=mode) for c in callbacks.callbacks)
    return bool(broadcast(by_batch or stop))


class Evaluation:
    """Data set, and the program that evaluates the model on it, traced once, run many times."""

    def __init__(
        self,
        model: keras.Model,
        job: Job,
        engine: Engine,
        data: tuple[Any, Any, Any],
        *,
        batch_size: int | None,
        steps: int | None,
    ) -> None:
        length = _length(batch_size=batch_size, steps=steps)
        self.feed = prepare(*data, job=job, length=length, shuffle=False, seed=0)
        building.build(model, job, self.feed, slots="none")  # a fit makes them, or a part of them
        building.require_examples_first(model, job, "test_step", self.feed)
        program = program_of(model, job, "test_step", self.feed, seed=0)
        self.steps = self.feed.plan.total_steps
        self._blocks = BlockRunner(model, job, engine, program, phase="validate")

    def run(self, callbacks: Any, *, requests: StopRequests | None = None) -> dict[str, Any]:
        """Evaluate every example once and return the metrics. A collective.

        Raises:
          StopRequested: some task has been asked by a signal to stop; where `requests` notes them.
        """
        blocks, model = self._blocks, self._blocks.model
        blocks.reset_metrics()
        model.stop_evaluating = False
        with phases.entered("validate"):
            with phases.entered("callback"):
                callbacks.on_test_begin()
            by_batch = _goes_by_batch(callbacks, mode="test", stop=model.stop_evaluating)
            blocks.logs = {}
            first = 0
            while first < self.steps:
                decision = self._decide(first, by_batch=by_batch, requests=requests)
                if decision.stop:
                    break
                last = decision.last
                with phases.entered("callback"):
                    callbacks.on_test_batch_begin(first)
                blocks.run(first, last, looked_at=by_batch or last == self.steps)
                seen = blocks.metrics(blocks.logs) if by_batch else {}
                with phases.entered("callback"):
                    callbacks.on_test_batch_end(last - 1, seen)
                first = last
            result = blocks.metrics(blocks.logs)
            with phases.entered("callback"):
                callbacks.on_test_end(result)
        return result

    def _decide(self, first: int, *, by_batch: bool, requests: StopRequests | None) -> Decision:
        """Return where the next block ends, and whether a callback has stopped the evaluation."""
        blocks = self._blocks
        longest = 1 if by_batch else blocks.length.steps()
        mine = Decision(
            last=min(self.steps, first + longest),
            stop=by_batch and first > 0 and blocks.model.stop_evaluating,
        )
        of = "the next block of an evaluation"
        decision = decide(blocks.job, mine, requests=requests, of=of)
        if decision.signum is not None:
            blocks.finish()
            raise StopRequested(decision.signum)
        return decision
