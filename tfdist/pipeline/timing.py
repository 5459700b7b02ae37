"""Measured times of a model's parts, by which it is divided over the stages."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.pipeline.cuts import CutPoint, LayerGraph, ModelPart, one_or_list
from tfdist.pipeline.schedule import (
    Pass,
    Timeline,
    balanced,
    passes,
    require_enough,
    runs,
    timeline,
)
from tfdist.training import keras_compat

_LOG = logging.getLogger(__name__)
_ROUNDS = 3
_MOST_TENSORS = 2
_PLACES_A_STAGE = 8
_LEADS = (0.0, 0.5, 1.0)

LossOf = Callable[[list[tf.Tensor]], tf.Tensor]
"""Scalar loss of the model's flat outputs."""


def possible_places(graph: LayerGraph, *, num_stages: int) -> list[CutPoint]:
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
    graph: LayerGraph,
    places: Sequence[CutPoint],
    *,
    num_stages: int,
    rows: int,
    micros: int,
    schedule: str = "1f1b",
    keep: str = "tape",
    loss_of: LossOf | None = None,
) -> list[CutPoint]:
    """Return where to cut so that a step is as fast as it can be, and log it.

    Under 1F1B the first stages wait less than the last ones at the start and at the end of a step,
    and have more to do for that. Weights stay as they are.

    Args:
      graph: of the model.
      places: of which to choose.
      num_stages: to make.
      rows: examples of a micro-batch, at which the parts are timed.
      micros: micro-batches of a step.
      schedule: of their passes.
      keep: ``recompute`` to need less memory for it, and look less closely.
      loss_of: of so many rows of flat outputs, computed in the last stage; by default no time.
    """
    positions = [place.position for place in places]
    weights = [place.example_bytes for place in places]
    trainable = _with_weights(graph, places)
    orders = [
        passes(schedule, stage=stage, stages=num_stages, micros=micros)
        for stage in range(num_stages)
    ]
    seconds = _seconds(graph, positions, rows, loss_of)
    chosen, _ = _fastest_cut(seconds, weights, trainable, orders, micros)
    # Parts have ends that a stage has not, which take time: the more, the larger their tensors are.
    if keep != "recompute":  # which is there to need less than the activations of a whole stage
        whole = _seconds(graph, [positions[i] for i in chosen], rows, loss_of)
        for run, measured in zip(runs(chosen, len(seconds)), whole, strict=True):
            factor = measured / sum(seconds[run])
            seconds[run] = [factor * each for each in seconds[run]]
    chosen, step = _fastest_cut(seconds, weights, trainable, orders, micros)
    _LOG.info(
        "cut behind %s: %s s for a micro-batch of %d%s; of %d the stages wait %.0f %%",
        ", ".join(places[i].name for i in chosen),
        " + ".join(f"{sum(seconds[run]):.4f}" for run in runs(chosen, len(seconds))),
        *(rows, "" if loss_of is None else " with its loss", micros, 100 * step.bubble),
    )
    return [places[i] for i in chosen]


def _fastest_cut(
    seconds: Sequence[float],
    crossing_bytes: Sequence[int],
    trainable: Sequence[bool],
    orders: Sequence[Sequence[Pass]],
    micros: int,
) -> tuple[tuple[int, ...], Timeline]:
    """Return at which of the places a step is the fastest, and how it goes then."""
    found = []
    for share in _LEADS:
        lead = share / micros
        cut = balanced(seconds, crossing_bytes, stages=len(orders), trainable=trainable, lead=lead)
        each = [sum(seconds[run]) for run in runs(cut, len(seconds))]
        found.append((cut, timeline(orders, forward_s=each, backward_s=[2 * s for s in each])))
    return min(found, key=lambda one: one[1].makespan_s)


def _with_weights(graph: LayerGraph, places: Sequence[CutPoint]) -> list[bool]:
    """Return whether each run of layers between two places has trainable weights."""
    bounds = [0, *(place.position + 1 for place in places), len(graph.nodes)]
    return [graph.is_trainable(low, high) for low, high in itertools.pairwise(bounds)]


def _seconds(
    graph: LayerGraph, positions: Sequence[int], rows: int, loss_of: LossOf | None
) -> list[float]:
    """Return the seconds of each run of layers between two positions, forward and backward.

    Those that compute the same, as the blocks of a transformer do, are timed once.
    """
    parts = graph.divided(graph.behind(positions), num_stages=len(positions) + 1)
    work = [(part.work, part.is_last) for part in parts]
    timed = {
        each: _timed_passes(part, rows, loss_of if part.is_last else None)
        for each, part in zip(work, parts, strict=True)
    }
    for run in timed.values():  # compiles
        run()
    # In turn, as a machine has moments in which all take longer.
    rounds = [{each: run() for each, run in timed.items()} for _ in range(_ROUNDS)]
    return [min(seconds[each] for seconds in rounds) for each in work]


def _timed_passes(part: ModelPart, rows: int, loss_of: LossOf | None) -> Callable[[], float]:
    """Return what runs both passes of a part once, and returns their seconds."""
    module, first = part.module, part.index == 0
    made = [i for i, o in enumerate(module.outputs) if tf.as_dtype(o.dtype).is_floating]

    @keras_compat.compiled
    def both(given: list[tf.Tensor], gradients: list[tf.Tensor] | None) -> list[tf.Tensor]:
        floats = [] if first else [x for x in given if x.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():  # nothing that changes is kept
            tape.watch(floats)
            with keras_compat.tracing(_trace(module, rows)):
                outputs = tf.nest.flatten(module(one_or_list(given), training=True))
                if loss_of is None:
                    outputs = [outputs[i] for i in made]
                else:
                    outputs = [loss_of([[*given, *outputs][i] for i in part.sources])]
        values = [variable.value for variable in module.trainable_variables]
        sources = [*values, *floats] if outputs else []  # there may be integers alone
        found = tape.gradient(outputs, sources, output_gradients=gradients)
        return [*outputs, *(tf.convert_to_tensor(g) for g in found if g is not None)]

    def timed() -> float:
        inputs = [_example(tensor, rows) for tensor in module.inputs]
        ends = [_example(module.outputs[i], rows) for i in made]
        gradients = ends if loss_of is None else None
        start = time.perf_counter()
        both(inputs, gradients)
        return time.perf_counter() - start

    return timed


def _trace(module: keras.Model, rows: int) -> keras_compat.StepTrace:
    """Return the trace of a step, with which layers compute as they do in the stages."""
    return keras_compat.StepTrace(
        num_replicas=1,
        share=1.0,
        examples=rows,
        random_key=tf.zeros([2], tf.int32),
        fused=keras_compat.is_fused(module),
    )


def _example(tensor: Any, rows: int) -> tf.Tensor:
    shape = [rows, *(size or 1 for size in tensor.shape[1:])]
    if tf.as_dtype(tensor.dtype).is_floating:
        return tf.random.stateless_normal(shape, seed=[0, 0], dtype=tensor.dtype)
    return tf.zeros(shape, tensor.dtype)
