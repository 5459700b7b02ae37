"""Keras' own `fit` and its like, left in a program: refused in one line where they cannot work.

In a group of several workers Keras reads all replicas of a batch at once
(https://github.com/keras-team/keras/issues/20585), and under ps it would need a coordinator, which
Keras 3 has not. What works there (`predict` in such a group, a batch by itself on the chief of a ps
job), and every model of another strategy, is as it was.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.errors import UsageError

_REFUSED_UNDER = {
    "multiworker": ("fit", "evaluate", "train_on_batch", "test_on_batch"),
    "ps": ("fit", "evaluate", "predict"),
}
_INSTEAD = {
    **{
        name: f"write tfdist.{name}(model, ...), with the same arguments"
        for name in ("fit", "evaluate", "predict")
    },
    "train_on_batch": "write tfdist.fit(model, ...), or tfdist.StepLoop for a loop of your own",
    "test_on_batch": "write tfdist.evaluate(model, x, y)",
}


@functools.cache
def refuse_native_calls() -> None:
    """Have methods of every Keras model ask for its strategy first; put in place once a process."""
    for name in _INSTEAD:
        setattr(TensorFlowTrainer, name, _asking(name, getattr(TensorFlowTrainer, name)))


def _asking(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(self.distribute_strategy)
        if name in _REFUSED_UNDER.get(kind, ()):
            raise UsageError(
                f"{_caller()}: model.{name}",
                received=f"Keras' own {name}, which does not work under strategy {kind}",
                expected="tfdist's",
                fix=_INSTEAD[name],
            )
        return original(self, *args, **kwargs)

    return call


def _kind(strategy: tf.distribute.Strategy) -> str:
    """Return the kind of a strategy, as far as Keras' methods differ in it."""
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        return "ps"
    group = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return "multiworker" if group and strategy.num_replicas_in_sync > 1 else ""


def _caller() -> str:
    """Return the file and line of the program that has called a method, or had Keras call it."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "keras" and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
