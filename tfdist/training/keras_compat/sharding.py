"""Sharded optimizer state: each worker updates its part of every variable (ZeRO stage 1).

The optimizer is built on flat variables that hold this worker's part of each trainable variable,
so its slots cover only the part. A step sums the gradients part by part. It runs Keras' own update
on the parts and gathers the new weights (Rajbhandari et al., 2020,
https://arxiv.org/abs/1910.02054). Each element sees the same operations as without sharding, so the
results are bit-identical. Clipping by a norm gathers the gradients first, because a sum of partial
sums can differ in its last bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategy.group import mark, own_initial_values, own_part, whole
from tfdist.strategy.job import Job
from tfdist.training.keras_compat.reduction import (
    cut,
    gather_over_workers,
    own_copy,
    place_of,
    sum_over_replicas,
    wholes_of,
)
from tfdist.training.keras_compat.trace import StepTrace, current, warn_once

_NAMES = (
    *("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Ftrl"),
    *("Lion", "ScheduleFreeAdamW"),
)
BY_ELEMENT = tuple(getattr(keras.optimizers, n) for n in _NAMES if hasattr(keras.optimizers, n))
"""Optimizers that update each element independently of all other elements."""
_TYPES = ("float16", "float32", "float64")


def require_by_element(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError if the optimizer or a variable does not support updates by parts."""
    inner = _innermost(optimizer)
    if type(inner) not in BY_ELEMENT:
        raise not_sharded(
            f"the update of {type(inner).__name__} may need whole variables",
            fix=f"use {', '.join(kind.__name__ for kind in BY_ELEMENT)}, or leave out "
            "sharded_optimizer",
        )
    for variable in variables:
        if variable.dtype not in _TYPES:
            raise not_sharded(
                f"{variable.path} has dtype {variable.dtype}, not {', '.join(_TYPES)}",
                fix="use mixed precision, which keeps float32 weights, or leave out "
                "sharded_optimizer",
            )


def not_sharded(problem: str, *, fix: str = "leave out sharded_optimizer") -> UsageError:
    return UsageError("sharded_optimizer", problem, fix=fix, code="unsupported")


@contextlib.contextmanager
def building_in_parts(optimizer: Any, job: Job) -> Iterator[None]:
    """Make a build of the optimizer in this block use this worker's parts of the variables.

    Keras builds the optimizer with the model. Use it in the job's scope. This is a collective.

    Raises:
      UsageError: The optimizer already has whole slots, or cannot update parts.
    """
    if optimizer in wholes_of:
        yield
        return
    if optimizer.built:
        raise not_sharded(
            f"{type(optimizer).__name__} is already built with whole slots",
            fix="compile the model with a new optimizer, and shard it from its first fit",
        )
    with building_by(optimizer, lambda variables: _build(optimizer, variables, job)):
        yield


@contextlib.contextmanager
def building_by(optimizer: Any, build: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Replace the optimizer's `build` method in this block."""
    object.__setattr__(optimizer, "build", build)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "build")


@contextlib.contextmanager
def following_slots(optimizer: Any, follow: Callable[..., None]) -> Iterator[None]:
    """Call ``follow(slot, variable, name, initializer)`` for each slot created in this block."""
    inner = _innermost(optimizer)
    make = inner.add_variable_from_reference

    def followed(
        reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        slot = make(reference_variable, name=name, initializer=initializer)
        follow(slot, reference_variable, name, initializer)
        return slot

    object.__setattr__(inner, "add_variable_from_reference", followed)
    try:
        yield
    finally:
        object.__delattr__(inner, "add_variable_from_reference")


def _build(optimizer: Any, variables: Sequence[Any], job: Job) -> None:
    require_by_element(optimizer, variables)
    with own_initial_values(job):
        parts = [_part(variable, job) for variable in variables]
        with following_slots(optimizer, lambda slot, part, *_: mark(slot, place_of(part))):
            type(optimizer).build(optimizer, parts)
    for one in {id(o): o for o in (optimizer, _innermost(optimizer))}.values():
        wholes_of[one] = tuple(variables)
        for index, variable in enumerate(variables):  # callers look parts up by variable
            one._trainable_variables_indices[one._var_key(variable)] = index
        for name, method in _METHODS.items():
            if hasattr(one, name):
                object.__setattr__(one, name, functools.partial(method, one))


def _part(variable: Any, job: Job) -> Any:
    """Create the variable for this worker's part, with the same name and path."""
    part = own_part(job, tuple(variable.shape))
    value = variable.numpy().reshape(-1)[part.first : part.end]
    made = keras.Variable(value, dtype=variable.dtype, trainable=False, name=variable.name)
    made._path = variable.path  # Keras names slots after this path
    mark(made, part)
    return made


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _step_of(optimizer: Any) -> StepTrace:
    """Return the trace of the step that applies the optimizer. Raise UsageError outside steps."""
    trace = current()
    if trace is None or not trace.in_hook:
        raise not_sharded(
            f"{type(optimizer).__name__}.apply was called outside a step of tfdist.fit",
            fix="use another optimizer there",
        )
    return trace


# A sharded optimizer is Keras' own object, with these methods instead of its class's methods.


def _apply_to_parts(optimizer: Any, grads: Any, trainable_variables: Any) -> None:
    """Clip, decay, update and average the parts, then gather the weights."""
    trace, wholes = _step_of(optimizer), wholes_of[optimizer]
    mine = [optimizer._get_variable_index(variable) for variable in trainable_variables]
    parts = optimizer._trainable_variables
    touched = list(range(len(parts))) if optimizer.use_ema else mine
    for index in touched:
        _refresh(optimizer, wholes[index], parts[index])
    trace.updated = [parts[index] for index in mine]
    type(optimizer)._backend_apply_gradients(optimizer, grads, trace.updated)
    _gather([(wholes[index], parts[index]) for index in touched])


def _clip_whole(optimizer: Any, grads: Any) -> Any:
    """Clip by a norm of the whole gradients, with additions in the order that Keras uses."""
    clip = functools.partial(type(optimizer)._clip_gradients, optimizer)
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        return clip(grads)
    places = [place_of(part) for part in _step_of(optimizer).updated]
    parts = [tf.convert_to_tensor(gradient) for gradient in grads]
    wholes = gather_over_workers(parts, [place.shape for place in places])
    return [cut(gradient, at) for gradient, at in zip(clip(wholes), places, strict=True)]


def _check_finite(optimizer: Any, grads: Any) -> Any:
    """Return whether the parts of all workers are finite."""
    finite = type(optimizer).check_finite(optimizer, grads)
    return tf.equal(sum_over_replicas([tf.cast(~finite, tf.int32)])[0], 0)


def _save_nothing(optimizer: Any, store: Any) -> None:
    """Leave the slots out of a `.keras` file, because its writer has only its own part."""
    warn_once(
        f"the state of {type(optimizer).__name__} is sharded: model files do not contain it, but "
        "checkpoints of BackupAndRestore do"
    )


def _take_averages(optimizer: Any, variables: Any) -> None:
    """Replace the weights by their averages, as Keras does. This is a collective."""
    inner, asked = _innermost(optimizer), set(map(id, variables))
    if inner.use_ema:
        averages = inner._model_variables_moving_average
        for variable, average in zip(wholes_of[inner], averages, strict=True):
            if id(variable) in asked:  # others were frozen after the build
                variable.assign(whole(average))


_METHODS: dict[str, Callable[..., Any]] = {
    "finalize_variable_values": _take_averages,
    "_backend_apply_gradients": _apply_to_parts,
    "_clip_gradients": _clip_whole,
    "check_finite": _check_finite,
    "save_own_variables": _save_nothing,
}


def _refresh(optimizer: Any, variable: Any, part: Any) -> None:
    """Copy the part from the weights, because other code may have set the weights."""
    own_copy(part).assign(cut(own_copy(variable).read_value(), place_of(part)))
    # Keras decides by the whole variable whether a weight decays.
    decays = optimizer._use_weight_decay(variable.value)
    optimizer._exclude_from_weight_decay_cache[optimizer._var_key(part)] = decays


def _gather(pairs: Sequence[tuple[Any, Any]]) -> None:
    parts = [own_copy(part).read_value() for _, part in pairs]
    wholes = gather_over_workers(parts, [tuple(variable.shape) for variable, _ in pairs])
    for (variable, _), value in zip(pairs, wholes, strict=True):
        own_copy(variable).assign(value)
