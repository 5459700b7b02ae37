"""A KerasTuner hypermodel whose models train by tfdist: `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import keras_tuner
from keras_tuner.src.engine import tuner_utils
from keras_tuner.src.engine.hypermodel import get_hypermodel

from tfdist.errors import UsageError
from tfdist.strategy import current_job, is_chief
from tfdist.training import evaluate, fit, predict


class HyperModel(keras_tuner.HyperModel):
    """Wraps a build function or a `keras_tuner.HyperModel`.

    While it is fitted, ``model.fit``, ``model.evaluate`` and ``model.predict`` of the model that
    it has built are `tfdist.fit`, `tfdist.evaluate` and `tfdist.predict`, also where the
    hypermodel has a ``fit`` of its own that calls them.

        tuner = keras_tuner.RandomSearch(
            tfdist.tuning.HyperModel(build_model),
            distribution_strategy=tfdist.make_strategy("mirrored"), ...)
        tuner.search(x, y, epochs=3, validation_data=(xv, yv))

    That runs every trial in this one process. `tfdist.tuning.search` makes jobs of them.
    """

    def __init__(self, hypermodel: Any, *, fit: Callable[..., Any] = fit) -> None:
        inner = get_hypermodel(hypermodel)
        # One that is wrapped twice is fitted once, as who wraps it last says.
        self._inner: Any = inner._inner if isinstance(inner, HyperModel) else inner
        self._fit = fit
        super().__init__(name=self._inner.name, tunable=self._inner.tunable)

    def build(self, hp: Any) -> Any:
        return self._inner.build(hp)

    def declare_hyperparameters(self, hp: Any) -> Any:
        return self._inner.declare_hyperparameters(hp)

    def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _require_one_process_or_trial(self._fit)
        kwargs["callbacks"] = _fitting(kwargs.get("callbacks") or [])
        with _routed(model, self._fit):
            return self._inner.fit(hp, model, *args, **kwargs)


@contextlib.contextmanager
def _routed(model: keras.Model, fit: Callable[..., Any]) -> Iterator[None]:
    ours: dict[str, Callable[..., Any]] = {"fit": fit, "evaluate": evaluate, "predict": predict}
    for name, function in ours.items():
        object.__setattr__(model, name, partial(function, model))  # no layer, no variable
    try:
        yield
    finally:
        for name in ours:
            object.__delattr__(model, name)


def _fitting(callbacks: Sequence[Any]) -> list[Any]:
    return [_replaced(callback) for callback in callbacks]


def _replaced(callback: Any) -> Any:
    """Returns KerasTuner's own callbacks as they fit a run that is resumed, and not by batches."""
    if type(callback) is tuner_utils.SaveBestEpoch:
        return SaveBest(callback)
    tuner = keras_tuner.Tuner
    if type(callback) is tuner_utils.TunerCallback and (
        type(callback.tuner).on_batch_begin is tuner.on_batch_begin
        and type(callback.tuner).on_batch_end is tuner.on_batch_end
    ):
        return EpochHooks(callback)
    return callback


class SaveBest(keras.callbacks.Callback):
    """KerasTuner's saving of the weights of the best epoch, by the chief, and resumed.

    A trial that goes on from another's checkpoints has a best epoch of its own. Where it has none,
    as that one was stopped for good, the best weights are that one's.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._original = original
        self._file = Path(original.filepath)
        self._before: Path | None = None
        """What the trial before has saved, where nothing of this one was resumed."""
        self._has_saved = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        original, value = self._original, None
        if original.objective.has_value(logs):
            value = original.objective.get_value(logs)
            if not original.objective.better_than(value, original.best_value):
                return
            original.best_value = value
        elif math.isfinite(original.best_value):  # reported after some epochs only
            return
        if is_chief():
            self.model.save_weights(original.filepath)
            if not self._has_saved:  # what KerasTuner writes in the end, where no stop came before
                shapes = self._file.with_name("build_config.json")
                shapes.write_text(json.dumps(self.model.get_build_config()), encoding="utf-8")
        self._has_saved = True

    def on_train_end(self, logs: Any = None) -> None:
        has_best = self._has_saved or math.isfinite(self._original.best_value)
        if self._before is not None and not has_best and is_chief():
            shutil.copyfile(self._before, self._file)

    def get_state(self) -> Any:
        best = repr(float(self._original.best_value))  # JSON has no infinity
        return {"trial": self._file.parent.name, "best": best}

    def set_state(self, state: Any) -> None:
        if state["trial"] == self._file.parent.name:
            self._original.best_value = float(state["best"])
        else:
            self._before = self._file.parents[1] / state["trial"] / self._file.name


class EpochHooks(keras.callbacks.Callback):
    """Calls a tuner's hooks of epochs; one that overrides those of batches gets KerasTuner's."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._tuner, self._trial = original.tuner, original.trial

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._tuner.on_epoch_begin(self._trial, self.model, epoch, logs=logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._tuner.on_epoch_end(self._trial, self.model, epoch, logs=logs)


def _require_one_process_or_trial(route: Callable[..., Any]) -> None:
    """Refuses a `tuner.search` that every task of a job would do by itself."""
    job = current_job()
    if route is fit and job is not None and job.kind in ("multiworker", "ps"):
        raise UsageError(
            "tuner.search",
            received=f"a search in each task of a {job.kind} job",
            expected="one process, single or mirrored",
            fix=f"use tfdist.tuning.search(tuner, ..., strategy={job.kind!r})",
        )
