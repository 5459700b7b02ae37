"""Dropout and friends draw from (seed, step, replica).

Keras gives every replica the same seed state, and a resumed run another one.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend import random_seed_dtype
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator

from tfdist.training.keras_compat.trace import Replacement, StepTrace, current

_LOG = logging.getLogger(__name__)
_GOLDEN_RATIO = 0x9E3779B9
_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/random/seed_generator.py"


def random_key(seed: int, *, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Return int32 [2], a hash of (seed, step, replica): one draw's seed is an offset of it."""
    low, high = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
    step = tf.cast(step, tf.int64)
    words = tf.stack([step * 2**16 + tf.cast(replica, tf.int64), tf.constant(high, tf.int64)])
    words = tf.bitwise.bitwise_xor(words, tf.constant([low << 32, low], tf.int64))
    return tf.random.stateless_uniform([2], words, minval=None, maxval=None, dtype=tf.int32)


def _seed_of_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_seed(self: Any, ordered: bool = True) -> Any:
        trace = current()
        return original(self, ordered) if trace is None else _draw(trace)

    return next_seed


def _draw(trace: StepTrace) -> tf.Tensor:
    _warn_in_loop(trace)
    trace.draws += 1
    offset = trace.draws * _GOLDEN_RATIO % 2**32
    offset = tf.constant([offset - 2**32 if offset >= 2**31 else offset, trace.draws])
    return tf.cast(trace.random_key + offset, random_seed_dtype())


def _warn_in_loop(trace: StepTrace) -> None:
    graph = tf.compat.v1.get_default_graph()
    if graph is not trace.graph and type(graph).__name__ == "WhileBodyFuncGraph":
        _LOG.warning(
            "a random draw inside a loop of the model gives the same numbers in each iteration "
            "of that loop; draw before the loop, or give the iteration's number as the seed"
        )


# A draw without a seed makes a generator for each thread, so for each replica while its step is
# traced, where no variable can be made.


class _SeedsOfTheStep:
    """Stands for the global generator; `next` without a trace cannot happen."""

    def next(self, ordered: bool = True) -> tf.Tensor:
        trace = current()
        assert trace is not None
        return _draw(trace)


def _no_generator_of_the_thread(original: Callable[[], Any]) -> Callable[[], Any]:
    def global_seed_generator() -> Any:
        return original() if current() is None else _SeedsOfTheStep()

    return global_seed_generator


REPLACEMENTS = (
    Replacement(owner=SeedGenerator, name="next", make=_seed_of_the_step, issue=f"{_SOURCE}#L98"),
    Replacement(
        owner=seed_generator,
        name="global_seed_generator",
        make=_no_generator_of_the_thread,
        issue=f"{_SOURCE}#L121",
    ),
)
