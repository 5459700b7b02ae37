"""Patch of Keras' `fit`, `evaluate`, `predict` and calls of one batch, which calls a router.

`tfdist.training.routing` sends the calls of models in the job's scope to the engine. The patch is
below every override: the `fit` of a user's class runs unchanged, and its `super().fit` calls the
router. The patch replaces the code of Keras' functions and keeps the function objects, because
`mlflow.autolog()` stores these objects.
Needed up to Keras 3.15.1 and mlflow 3.17, the newest releases.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from keras.src.models.model import Trainer

from tfdist.errors import end_mistakes_in_one_line, require

_engine_runs = contextvars.ContextVar("engine_runs", default=False)
_autologs = [True]
_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
KERAS_HUB = "keras_hub.src.utils.pipeline_model"


def route_keras(*, autologs: bool | None = None) -> None:
    """Route the calls of Keras models, and of KerasHub models if KerasHub is imported.

    With `autologs` False, `mlflow.autolog()` logs nothing in this task.
    """
    if autologs is not None:
        _autologs[:] = [autologs]
    _route_trainer()
    if KERAS_HUB in sys.modules:
        _route_keras_hub()


@functools.cache
def _route_trainer() -> None:
    for name in _METHODS:
        function: Any = inspect.unwrap(getattr(Trainer, name))
        original: Any = types.FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__
        )
        function.__signature__ = inspect.signature(original)
        function.__code__, function.__defaults__ = _routed.__code__, None
        function.__kwdefaults__ = {"_original": original}
    Trainer.__init__ = _preparing(Trainer.__init__)


@functools.cache
def _route_keras_hub() -> None:
    """Route each KerasHub call before KerasHub makes batches: they have no examples by index."""
    model: Any = sys.modules[KERAS_HUB].PipelineModel
    for name in _METHODS:
        if name in vars(model):
            original = getattr(model, name)
            setattr(model, name, _routing(original))


def _routing(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _routed(self, *args, _original=original, **kwargs)

    return call


def _routed(self: Any, *args: Any, _original: Any, **kwargs: Any) -> Any:
    import importlib  # this code runs with the globals of Keras' module

    routing = importlib.import_module("tfdist.training.routing")  # it imports this package
    return routing.call(_original, self, *args, **kwargs)


def _preparing(original: Any) -> Any:
    """Return a model constructor that also patches libraries imported in the meantime."""

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        route_keras()
        autologging: Any = sys.modules.get("mlflow.utils.autologging_utils")
        if not _autologs[0] and autologging is not None:
            # Otherwise each task would open a run, but only the chief's callbacks write to a run,
            # and none in a probe.
            autologging._AUTOLOGGING_GLOBALLY_DISABLED = True
        original(self, *args, **kwargs)

    return make


@contextlib.contextmanager
def engine_runs() -> Iterator[None]:
    """Allow callbacks of tfdist in the block. Keras' own loop would ignore some of their hooks."""
    token = _engine_runs.set(True)
    try:
        yield
    finally:
        _engine_runs.reset(token)


def require_engine(callback: Any) -> None:
    """Raise UsageError if Keras' own `fit` calls a callback of tfdist."""
    end_mistakes_in_one_line()
    require(
        _engine_runs.get(),
        f"tfdist.{type(callback).__name__}",
        "Keras' own fit trains this model, because the model is not in strategy.scope()",
        fix="add strategy = tfdist.make_strategy(), and make and compile the model inside "
        "`with strategy.scope():`",
        code="another-scope",
    )
