"""Measured times of a model's parts, by which it is divided over the stages."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.pipeline.balance import balanced, require_enough
from tfdist.pipeline.cuts import LayerGraph, Place, one_or_list
from tfdist.pipeline.schedule import passes, timeline
from tfdist.training import keras_compat

_LOG = logging.getLogger(__name__)
_ROUNDS = 3
_MOST_TENSORS = 2
_PLACES_A_STAGE = 8


def possible_places(graph: LayerGraph, *, num_stages: int) -> list[Place]:
    """Return the places that are looked at: those that one tensor crosses, or two if they are few.

    Raises:
      UsageError: the model has fewer of them than cuts.
    """
    places = [place for place in graph.places() if place.num_tensors <= _MOST_TENSORS]
    require_enough(_with_weights(graph, places), stages=num_stages)
    narrow = [place for place in places if place.num_tensors == 1]
    is_enough = sum(_with_weights(graph, narrow)) > _PLACES_A_STAGE * num_stages
    return narrow if is_enough else places


def chosen_places(
    graph: LayerGraph, places: Sequence[Place], *, num_stages: int, rows: int, micros: int
) -> list[Place]:
    """Return where to cut so that the slowest stage is as fast as it can be, and log it.

    Weights stay as they are.

    Args:
      graph: of the model.
      places: of which to choose.
      num_stages: to make.
      rows: examples of a micro-batch, at which the parts are timed.
      micros: micro-batches of a step, for the time that is said to be lost.
    """
    seconds = _seconds(graph, [place.position for place in places], rows)
    weights = [place.example_bytes for place in places]
    chosen = balanced(seconds, weights, stages=num_stages, trainable=_with_weights(graph, places))
    bounds = [0, *(i + 1 for i in chosen), len(seconds)]
    each = [sum(seconds[low:high]) for low, high in itertools.pairwise(bounds)]
    orders = [passes("1f1b", stage=k, stages=num_stages, micros=micros) for k in range(num_stages)]
    _LOG.info(
        "cut behind %s: %s s for a micro-batch of %d; of %d micro-batches the stages wait %.0f %%",
        ", ".join(places[i].name for i in chosen),
        " + ".join(f"{one:.4f}" for one in each),
        *(rows, micros),
        100 * timeline(orders, forward_s=each, backward_s=[2 * s for s in each]).bubble,
    )
    return [places[i] for i in chosen]


def _with_weights(graph: LayerGraph, places: Sequence[Place]) -> list[bool]:
    """Return whether each run of layers between two places has trainable weights."""
    bounds = [0, *(place.position + 1 for place in places), len(graph.nodes)]
    return [graph.is_trainable(low, high) for low, high in itertools.pairwise(bounds)]


def _seconds(graph: LayerGraph, positions: Sequence[int], rows: int) -> list[float]:
    """Return the seconds of each run of layers between two positions, forward and backward."""
    parts = graph.divided(graph.behind(positions), num_stages=len(positions) + 1)
    return [_seconds_of(part.module, rows, first=part.index == 0) for part in parts]


def _seconds_of(module: keras.Model, rows: int, *, first: bool) -> float:
    inputs = [_example(tensor, rows) for tensor in module.inputs]
    made = [i for i, o in enumerate(module.outputs) if tf.as_dtype(o.dtype).is_floating]
    gradients = [_example(module.outputs[i], rows) for i in made]

    @keras_compat.compiled
    def both(given: list[tf.Tensor], gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        floats = [] if first else [x for x in given if x.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():  # statistics and seeds stay
            tape.watch(floats)
            outputs = tf.nest.flatten(module(one_or_list(given), training=True))
            outputs = [outputs[i] for i in made]
        values = [variable.value for variable in module.trainable_variables]
        sources = [*values, *floats] if outputs else []  # there may be integers alone
        found = tape.gradient(outputs, sources, output_gradients=gradients)
        return [*outputs, *(tf.convert_to_tensor(g) for g in found if g is not None)]

    both(inputs, gradients)
    return min(_timed(lambda: both(inputs, gradients)) for _ in range(_ROUNDS))


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _example(tensor: Any, rows: int) -> tf.Tensor:
    shape = [rows, *(size or 1 for size in tensor.shape[1:])]
    if tf.as_dtype(tensor.dtype).is_floating:
        return tf.random.stateless_normal(shape, seed=[0, 0], dtype=tensor.dtype)
    return tf.zeros(shape, tensor.dtype)
