"""`evaluate` and `predict`: every example exactly once, whatever the remainder."""

from __future__ import annotations

import random
import time
from typing import Any

import keras
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from tfdist import phases
from tfdist.checkpoint.preemption import SIGNALS, StopRequested, StopRequests, signal_of
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training import building
from tfdist.training.callbacks import callback_list, wants_every_batch
from tfdist.training.engines.base import naming_a_lost_server
from tfdist.training.engines.joining import joined
from tfdist.training.inputs import Length, prepare
from tfdist.training.loop import BlockLengthPolicy
from tfdist.training.program import StepProgram
from tfdist.training.session import Session


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
        Session(model, job), (x, y, sample_weight), batch_size=batch_size, steps=steps
    )
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
    data = prepare(x, None, None, job=job, length=length, shuffle=False, seed=0)
    building.build_to_predict(model, job, data.batch_spec, first_batch=data.first_batch)
    session = Session(model, job)
    # A layer that draws while it predicts draws anew in each call, as under Keras.
    seed = int(broadcast(random.randrange(2**31)))
    program = session.program("predict_step", data.feed, seed=seed)
    total = data.plan.total_steps
    listed = callback_list(callbacks, job=job, model=model, verbose=verbose, epochs=1, steps=total)
    model.stop_predicting = False
    listed.on_predict_begin()
    looks = _some_task_looks(listed, mode="predict", stop=model.stop_predicting)
    batches: list[Any] = []
    computed = session.engine.outputs(program, 0, total)
    while len(batches) < total and not (looks and batches and _asked(job, model.stop_predicting)):
        step = len(batches)
        listed.on_predict_batch_begin(step)
        batches.append(next(computed))
        listed.on_predict_batch_end(step, {"outputs": batches[-1]})
    listed.on_predict_end()
    return keras.tree.map_structure(lambda *parts: joined(parts), *batches)


def _length(*, batch_size: int | None, steps: int | None) -> Length:
    most = keras.config.max_steps_per_epoch()
    return Length(batch_size=batch_size, steps_per_epoch=steps, once=True, most_steps=most)


def _some_task_looks(callbacks: Any, *, mode: str, stop: bool) -> bool:
    """True in every task when the chief is to stop, or has a callback that looks at each batch."""
    looks = any(wants_every_batch(c, mode=mode) for c in callbacks.callbacks)
    return bool(broadcast(looks or stop))


def _asked(job: Job, stop: bool) -> bool:
    """Return True in every task when some task has asked to stop. A collective."""
    return bool(sum_over_tasks(job, np.array([float(stop)]), of="wishes to stop evaluating")[0])


class Evaluation:
    """A data set and the program that evaluates the model on it, traced once, run many times."""

    def __init__(
        self,
        session: Session,
        data: tuple[Any, Any, Any],
        *,
        batch_size: int | None,
        steps: int | None,
    ) -> None:
        length = _length(batch_size=batch_size, steps=steps)
        prepared = prepare(*data, job=session.job, length=length, shuffle=False, seed=0)
        building.build(
            session.model, session.job, prepared.batch_spec, first_batch=prepared.first_batch
        )
        building.require_examples_first(
            session.model, session.job, "test_step", prepared.batch_spec, rows=prepared.rows
        )
        self._session = session
        self.feed = prepared.feed
        self._program: StepProgram = session.program("test_step", prepared.feed, seed=0)
        self._block_length = BlockLengthPolicy()
        self.steps = prepared.plan.total_steps

    def run(self, callbacks: Any, *, requests: StopRequests | None = None) -> dict[str, Any]:
        """Evaluate every example once and return the metrics. A collective.

        Raises:
          Asked: some task has been asked by a signal to stop; where `requests` hears them.
        """
        session = self._session
        session.reset_metrics()
        session.model.stop_evaluating = False
        with phases.entered("validate"):
            with phases.entered("callback"):
                callbacks.on_test_begin()
            looks = _some_task_looks(callbacks, mode="test", stop=session.model.stop_evaluating)
            logs: dict[str, float] = {}
            first = 0
            while first < self.steps:
                last, stop = self._decide(first, looks=looks, requests=requests)
                if stop:
                    break
                with phases.entered("callback"):
                    callbacks.on_test_batch_begin(first)
                logs = self._run_range(first, last, looks=looks)
                seen = session.metrics(self._program, logs) if looks else {}
                with phases.entered("callback"):
                    callbacks.on_test_batch_end(last - 1, seen)
                first = last
            result = session.metrics(self._program, logs)
            with phases.entered("callback"):
                callbacks.on_test_end(result)
        return result

    def _decide(
        self, first: int, *, looks: bool, requests: StopRequests | None
    ) -> tuple[int, bool]:
        """Where the next range ends by the chief's clock, and whether a callback has stopped it."""
        job, model = self._session.job, self._session.model
        told = np.zeros(2 + len(SIGNALS))
        if job.is_chief:
            told[0] = min(self.steps, first + (1 if looks else self._block_length.steps()))
        told[1] = looks and first > 0 and model.stop_evaluating
        if requests is not None:
            told[2:] = requests.slots()
        last, stop, *asked = sum_over_tasks(job, told, of="the next range of an evaluation")
        signum = signal_of(asked)
        if signum is not None:
            self._session.finish(self._program)
            raise StopRequested(signum)
        return int(last), stop > 0

    def _run_range(self, first: int, last: int, *, looks: bool) -> dict[str, float]:
        goes_on = self._block_length.is_known and not looks and last < self.steps
        # A long validation moves on with each range; one that hangs does not.
        phases.enter("validate" if self._session.has_run(self._program) else "trace")
        engine = self._session.engine
        start, before = time.perf_counter(), engine.steps_under_way
        logs = self._session.run(self._program, first, last, goes_on=goes_on)
        elapsed_s, left = time.perf_counter() - start, engine.steps_under_way
        done = last - first + before - left
        self._block_length.note(done, elapsed_s=elapsed_s, is_whole=not before and not left)
        phases.enter("validate")
        return logs
