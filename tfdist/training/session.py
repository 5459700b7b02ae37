"""A model under its strategy: its step programs, its metrics, its learning rate."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training.engines import engine_for
from tfdist.training.keras_compat import compiled
from tfdist.training.program import StepProgram, flat_logs, plain

_OTHER_LENGTH = re.compile(
    r"expected to contain (\d+) elements? but contained (?:only |at least )?(\d+)"
)
_BAD_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of (\[.*?\))")


class Session:
    """What `fit`, `evaluate` and `predict` do with one model. Every training task makes one."""

    def __init__(self, model: keras.Model, job: Job) -> None:
        self.model = model
        self.job = job
        self.engine = engine_for(job)
        self._read_metrics: Any = None
        self._read_updated: Any = None
        self._has_run: set[StepProgram] = set()

    def program(
        self,
        step: str,
        feed: Any,
        *,
        seed: int,
        exact: bool = False,
        max_staleness: int | None = None,
    ) -> StepProgram:
        """Return the program of ``train_step``, ``test_step`` or ``predict_step`` over a feed."""
        deciding = (step, "compute_metrics")
        own = any(_is_own(self.model, name) for name in deciding)
        return StepProgram(
            function=plain(getattr(self.model, step), self.job, where=step),
            feed=feed,
            seed=seed,
            training=step == "train_step",
            metrics=() if step == "predict_step" else tuple(self.model.metrics_variables),
            keras_metrics=() if step == "predict_step" else tuple(self.model.metrics),
            keep_logs=own and step != "predict_step",
            exact=exact,
            max_staleness=max_staleness,
        )

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run steps as `Engine.run` does; wrong labels and data that end are told in one line."""
        with _telling_of_data():
            logs = self.engine.run(program, first, last, goes_on=goes_on)
        self._has_run.add(program)
        return logs

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for what `run` has left under way, as `Engine.finish` does."""
        with _telling_of_data():
            return self.engine.finish(program)

    def has_run(self, program: StepProgram) -> bool:
        """False while the next range of `program` will trace it first."""
        return program in self._has_run

    def metrics(self, program: StepProgram, logs: dict[str, float]) -> dict[str, Any]:
        """The model's metrics over all replicas. A collective: every task calls it alike.

        As in Keras, `logs` of a step of the user's own win where their names are not those of
        the model's metrics.
        """
        result = self._metrics_result(program)
        if not logs or set(logs) == set(result):
            return result
        # What a step says of a metric is what its replica, or one worker's last range, has seen.
        metrics = logs.keys() & result.keys()
        seen = self._updated() if metrics else set()
        return {**logs, **{name: result[name] for name in metrics if name in seen}}

    def reset_metrics(self) -> None:
        """Set every metric to zero, on every replica."""
        self.model.reset_metrics()
        self.engine.reset_metrics()

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate where it can be set, else NaN (a schedule, or none)."""
        rate = getattr(self.model.optimizer, "_learning_rate", None)
        inner = getattr(self.model.optimizer, "inner_optimizer", None)
        rate = getattr(inner, "_learning_rate", rate)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else math.nan

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not math.isnan(value) and np.float32(value) != np.float32(self.learning_rate):
            self.model.optimizer.learning_rate = value

    def _metrics_result(self, program: StepProgram) -> dict[str, Any]:
        self.engine.publish_metrics(program)
        if self._read_metrics is None:
            with self.job.strategy.scope():
                self._read_metrics = compiled(self._result_in_graph)
        result = self._read_metrics()
        return {name: _python(value) for name, value in result.items()}

    def _updated(self) -> set[str]:
        """Return the names under which metrics that a step has updated give their results."""
        if self._read_updated is None:
            with self.job.strategy.scope():
                self._read_updated = compiled(self._updated_in_graph)
        return {name for name, moved in self._read_updated().items() if moved.numpy()}

    def _updated_in_graph(self) -> dict[str, tf.Tensor]:
        found: dict[str, tf.Tensor] = {}
        for metric in self.model.metrics:
            result = metric.result()
            moved = tf.constant(False)
            for variable in metric.variables:
                moved |= keras.ops.any(keras.ops.not_equal(variable, 0))
            names = flat_logs(result) if isinstance(result, dict) else [metric.name]
            found |= dict.fromkeys(names, moved)
        return found

    def _result_in_graph(self) -> dict[str, Any]:
        results = flat_logs(self.model.get_metrics_result())
        return {name: tf.convert_to_tensor(result) for name, result in results.items()}


@contextlib.contextmanager
def _telling_of_data() -> Iterator[None]:
    """Tell of data that end too soon and of a wrong label in one line."""
    try:
        yield
    except tf.errors.OutOfRangeError:
        raise UsageError(
            "data",
            received="a dataset that ended before the step it was asked for",
            expected="one that gives as many batches each time that it is read",
            fix="let from_generator make a new iterator each time, as a function does",
        ) from None
    except tf.errors.FailedPreconditionError as error:
        found = _OTHER_LENGTH.search(str(error))
        if found is None:
            raise
        raise UsageError(
            "data",
            received=f"a pass over a dataset with {found[2]} batches",
            expected=f"{found[1]}, its cardinality",
            fix="delete the files of its cache or snapshot, which a program that stopped early may "
            "have cut short, or mend tf.data.experimental.assert_cardinality",
        ) from None
    except tf.errors.AlreadyExistsError as error:
        if "lockfile" not in str(error):
            raise
        raise UsageError(
            "data",
            received="a file cache that another process writes, or that one left half written",
            expected="files of its own for each process that reads",
            fix="give Dataset.cache a name with the task's index in it, or delete its .lockfile",
        ) from None
    except tf.errors.InvalidArgumentError as error:
        found = _BAD_LABEL.search(str(error))
        if found is None:
            raise
        raise UsageError(
            "labels",
            received=f"a label of {found[1]}",
            expected=f"labels in the range {found[2]}",
            fix="number the classes from 0, or make the last layer as wide as there are",
        ) from None


def _is_own(model: keras.Model, name: str) -> bool:
    """True where a method is not Keras' own, but of the model's class or set on the model."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(TensorFlowTrainer, name)


def _python(value: tf.Tensor) -> Any:
    array = value.numpy()
    return float(array) if array.ndim == 0 else array
