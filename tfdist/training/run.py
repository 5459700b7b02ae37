"""`Run`, the callback that carries the settings of one `fit`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.errors import require
from tfdist.strategy.native import require_engine, route_keras
from tfdist.training.epochs import VirtualEpochs


@dataclasses.dataclass(eq=False, kw_only=True)
class Run(keras.callbacks.Callback):
    """Settings of one `fit` that Keras' `fit` lacks; one of its callbacks.

    KerasTuner, KerasHub, MLflow and a user's own `fit` pass callbacks on, and no other argument.

    Args:
      virtual_epochs: length of the run in examples, instead of `epochs`.
      seed: seed of the order of the examples, of augmentation and of Dropout. By default the chief
        draws one from Python's `random`, which `keras.utils.set_random_seed` seeds.
      overfit_batches: number of batches at the beginning of the data to train on, on purpose.
      initial_weights: a `.keras` or `.weights.h5` file or a checkpoint directory to start from;
        see `tfdist.load_weights`. A resumed run continues with its own weights.
      max_staleness: under ps, the maximum number of updates by other workers between a step's
        read of the weights and its write; None for any number. Other strategies have none.
      sharded_optimizer: under multiworker each worker keeps the optimizer's state of its part of
        the weights only; see the guide on training. With one worker there is nothing to divide.
      fused_kernels: compute normalization, GELU, attention and `EinsumDense` in training steps
        by one kernel each, or a few, which rounds in another way; see the guide on training.
    """

    virtual_epochs: VirtualEpochs | None = None
    seed: int | None = None
    overfit_batches: int | None = None
    initial_weights: str | os.PathLike[str] | None = None
    max_staleness: int | None = None
    sharded_optimizer: bool = False
    fused_kernels: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise UsageError: the engine takes the settings, and does not call the callback."""
        require_engine(self)


SETTINGS = tuple(field.name for field in dataclasses.fields(Run))


def run_of(callbacks: Any, settings: Mapping[str, Any]) -> tuple[list[Any], Run]:
    """Return the callbacks without the settings of the run, and the settings."""
    listed = keras.tree.flatten(callbacks or [])
    runs = [callback for callback in listed if isinstance(callback, Run)]
    runs += [Run(**settings)] if settings else []
    require(
        len(runs) < 2,
        "callbacks",
        received=f"{len(runs)} tfdist.Run, of which keyword settings of tfdist.fit make one",
        expected="one",
        fix="give all settings to one tfdist.Run, or all as keywords",
        code="exclusive",
    )
    return [c for c in listed if not isinstance(c, Run)], runs[0] if runs else Run()


# Calls of the engine by `tfdist.fit(model, ...)`, and by the model's own `fit` in between.


_on_the_way: contextvars.ContextVar[Any] = contextvars.ContextVar("on_the_way", default=None)
"""The model, and the name of its method, whose call is to end at the engine."""


@contextlib.contextmanager
def on_the_way(model: keras.Model | None, name: str) -> Iterator[None]:
    """Have calls of this method of the model end at the engine, whatever scope it was made in."""
    token = _on_the_way.set(None if model is None else (model, name))
    try:
        yield
    finally:
        _on_the_way.reset(token)


def is_on_the_way(model: keras.Model, name: str) -> bool:
    """Return whether a call of this method of the model is to end at the engine."""
    asked = _on_the_way.get()
    return asked is not None and asked[0] is model and asked[1] == name


def by_own_method(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Have `tfdist.fit(model)` call `model.fit` if the model's class overrides it."""
    name = engine.__name__

    @functools.wraps(engine)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        owner = next((c for c in type(model).__mro__ if name in vars(c)), TensorFlowTrainer)
        own = owner is not TensorFlowTrainer and isinstance(model, keras.Model)
        if not own or is_on_the_way(model, name) or _is_in_method(model, name):
            with on_the_way(None, name):
                return engine(model, *args, **kwargs)
        route_keras()
        settings = {n: kwargs.pop(n) for n in SETTINGS if n in kwargs}
        if settings:
            callbacks = keras.tree.flatten(kwargs.get("callbacks") or [])
            kwargs["callbacks"] = [*callbacks, Run(**settings)]
        with on_the_way(model, name):
            return getattr(model, name)(*args, **kwargs)

    return call


def _is_in_method(model: keras.Model, name: str) -> bool:
    """Return whether the model's own method is being called: it calls `tfdist.fit` itself."""
    methods = [inspect.unwrap(vars(c)[name]) for c in type(model).__mro__ if name in vars(c)]
    codes = {getattr(method, "__code__", None) for method in methods}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in codes and any(v is model for v in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False
