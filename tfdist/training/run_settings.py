"""`Run`, the callback with the settings of one `fit`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

import keras
from keras.src.models.model import Trainer

from tfdist.errors import require, require_int, require_number
from tfdist.renamed import without_renamed
from tfdist.strategy.native import require_engine, route_keras
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.epochs import VirtualEpochs

_DURATION = re.compile(r"\d+:\d\d:\d\d:\d\d")


@dataclasses.dataclass(eq=False, kw_only=True)
class Run(keras.callbacks.Callback):
    """Settings of one `fit` that Keras' `fit` lacks. Pass it among the callbacks.

    KerasTuner, KerasHub, MLflow and a user's own `fit` forward callbacks but no other arguments.

    Args:
      virtual_epochs: length of the run in examples, instead of `epochs` (default: `None`).
      seed: seed of the example order, augmentation and Dropout. By default the chief draws it
        with Python's `random`, which `keras.utils.set_random_seed` seeds.
      overfit_batches: number of batches at the start of the data to overfit (default: all data).
      initial_weights: `.keras` or `.weights.h5` file, or checkpoint directory, to start from. See
        `tfdist.load_weights`. A resumed run continues with its own weights.
      max_staleness: maximum number of updates by other workers between a step's read of the
        weights and its write (default: `None`, no limit). Applies to ps only.
      sharded_optimizer: True to keep on each multiworker worker only its part of the optimizer's
        state. See the guide on training. With one worker this has no effect.
      fast_dev_run: True to test the program quickly, or a number of batches (True is 1). `fit` runs
        that many batches of training and of validation in one epoch. It writes no checkpoints,
        logs or metrics.
      max_time: time after which training stops at a step block: seconds, "DD:HH:MM:SS", a
        `datetime.timedelta`, or a dict of its arguments (default: None, no limit). A resumed
        run adds the time before its checkpoint. To continue a run, raise `max_time`.
      fused_kernels: True to compute normalization, GELU, attention, `Dense` and `EinsumDense` in
        training steps with fewer kernels. Rounding differs. See the guide on training.
    """

    virtual_epochs: VirtualEpochs | None = None
    seed: int | None = None
    overfit_batches: int | None = None
    initial_weights: str | os.PathLike[str] | None = None
    max_staleness: int | None = None
    sharded_optimizer: bool = False
    fast_dev_run: bool | int = False
    max_time: float | str | timedelta | Mapping[str, float] | None = None
    fused_kernels: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def dev_batches(self) -> int:
        """Number of batches of a fast development run, 0 in a normal run."""
        if isinstance(self.fast_dev_run, bool):
            return int(self.fast_dev_run)
        fix = "write fast_dev_run=True, or a number of batches"
        return require_int("fast_dev_run", self.fast_dev_run, least=0, fix=fix)

    @property
    def max_time_s(self) -> float | None:
        """`max_time` in seconds."""
        value: Any = self.max_time
        if value is None:
            return None
        if isinstance(value, str) and _DURATION.fullmatch(value):
            days, hours, minutes, seconds = map(int, value.split(":"))
            value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, Mapping):
            value = timedelta(**value)
        if isinstance(value, timedelta):
            value = value.total_seconds()
        fix = 'write max_time=3600, or max_time="00:01:00:00" (DD:HH:MM:SS)'
        return require_number("max_time", value, above=0, unit="seconds", fix=fix)

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise UsageError: the engine reads the settings and never calls this callback."""
        require_engine(self)


SETTINGS = tuple(field.name for field in dataclasses.fields(Run))


def run_of(callbacks: Any, settings: Mapping[str, Any]) -> tuple[list[Any], Run]:
    """Return the callbacks without `Run`, and the run's settings."""
    listed = keras.tree.flatten(callbacks or [])
    runs = [callback for callback in listed if isinstance(callback, Run)]
    runs += [Run(**settings)] if settings else []
    require(
        len(runs) < 2,
        "callbacks",
        f"the run has {len(runs)} tfdist.Run (keyword settings of tfdist.fit count too)",
        fix="pass all settings in a single tfdist.Run, or all as keywords",
        code="exclusive",
    )
    return [c for c in listed if not isinstance(c, Run)], runs[0] if runs else Run()


# Calls of `tfdist.fit(model, ...)`, which reach the engine directly or through `model.fit`.


fit_by: contextvars.ContextVar[Any] = contextvars.ContextVar("fit_by", default=None)
"""Function that calls of `model.fit` reach instead of the engine, `None` inside of it."""
_on_the_way: contextvars.ContextVar[Any] = contextvars.ContextVar("on_the_way", default=None)
"""Model and method name of the current call, which must reach the engine."""


@contextlib.contextmanager
def fits_by(function: Callable[..., Any] | None) -> Iterator[None]:
    """Call `function` instead of the engine for each `model.fit` of a model of the job."""
    token = fit_by.set(function)
    try:
        yield
    finally:
        fit_by.reset(token)


@contextlib.contextmanager
def on_the_way(model: keras.Model | None, name: str) -> Iterator[None]:
    """Send calls of this model's method to the engine, regardless of the model's scope."""
    token = _on_the_way.set(None if model is None else (model, name))
    try:
        yield
    finally:
        _on_the_way.reset(token)


def is_on_the_way(model: keras.Model, name: str) -> bool:
    """Return whether the current call of this model's method must reach the engine."""
    asked = _on_the_way.get()
    return asked is not None and asked[0] is model and asked[1] == name


def by_own_method(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Call `model.fit` in `tfdist.fit(model)` if the model's class overrides it."""
    name = engine.__name__

    @without_renamed(name)
    @functools.wraps(engine)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        owner = next((c for c in type(model).__mro__ if name in vars(c)), Trainer)
        own = owner is not Trainer and isinstance(model, keras.Model)
        if not own or is_on_the_way(model, name) or _is_in_method(model, name):
            with on_the_way(None, name), naming_a_lost_server():
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
    """Return whether the model's own method is running, so that it called `tfdist.fit`."""
    methods = [inspect.unwrap(vars(c)[name]) for c in type(model).__mro__ if name in vars(c)]
    codes = {getattr(method, "__code__", None) for method in methods}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in codes and any(v is model for v in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False
