"""Conversion of a model's state to arrays and back under every strategy, and its configuration.

Weights and optimizer slots are the same on every replica. Metric totals differ between replicas. A
checkpoint saves every total, because a restored share of the sum could differ in its last bit.

A resume compares the configuration of optimizer, layers and losses. It compares plain values of
``get_config``, lists of numbers, regularizers and constraints. It ignores settings that may change
between the attempts of a run: names, seeds, the learning rate, and whether a layer is trainable.
Random numbers depend on the run's seed, not on the layers' seeds. The learning rate is part of the
checkpoint or of the program's schedule.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.model import Trainer

from tfdist.checkpoint.format import raw_bytes
from tfdist.errors import named, require
from tfdist.strategy import Job
from tfdist.strategy.group import gathered, part_of, sum_bytes

_DIFFERENCES_SHOWN = 4
_ANOTHER = "use another directory, or start from the saved weights with initial_weights"
_FREE = frozenset(["name", "seed", "learning_rate", "trainable", "dtype", "initial_scale"])
_BY_CLASS = ("_regularizer", "_constraint")
Arrays = dict[str, np.ndarray[Any, Any]]
Settings = dict[str, Any]


def variables_of(model: keras.Model) -> dict[str, Any]:
    """Return the variables of a run's state, by their names in a checkpoint."""
    slots = {id(v): v for one in all_optimizers(model) for v in one.variables}
    groups = {
        "weights": model.weights,
        "optimizer": list(slots.values()),
        "metrics": model.metrics_variables,
        "states": states_of(model),
    }
    return {f"{group}/{i}": v for group, listed in groups.items() for i, v in enumerate(listed)}


def states_of(model: keras.Model) -> list[Any]:
    """Return the states of stateful recurrent layers, which Keras does not list as weights."""
    layers = (layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN))
    states = [layer.states for layer in layers if layer.stateful]
    return [state for state in keras.tree.flatten(states) if state is not None]


def all_optimizers(model: keras.Model) -> Iterator[Any]:
    """Yield the optimizer of `compile` and the optimizers that a custom `train_step` may use."""
    optimizer = getattr(model, "optimizer", None)  # Keras sets it in compile
    if optimizer is not None:
        yield optimizer
    if type(model).train_step is Trainer.train_step:
        return
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            several = value.values() if isinstance(value, dict) else value
            several = several if isinstance(value, dict | list | tuple) else [value]
            yield from (one for one in several if isinstance(one, keras.optimizers.Optimizer))


def capture(model: keras.Model, job: Job) -> Arrays:
    """Copy the state into arrays. Collective: every training task calls it.

    An array has the variable's shape. Arrays of per-replica variables are ``[replicas, *shape]``.
    Only the chief returns arrays. Other tasks send the rows of their replicas and return an empty
    dict. The tasks exchange bytes, not sums of floats, so a save does not change results.
    """
    arrays = {}
    for name, variable in variables_of(model).items():
        if _per_replica(variable):
            array = _rows_of_all(variable, job)
        elif part_of(variable) is not None:
            array = gathered(job, variable)
        elif job.is_chief:  # a copy, because the next steps overwrite the variable
            array = np.asarray(_copies(variable, job)[0].numpy())
            array = array if array.flags.owndata else array.copy()
        else:
            continue
        if job.is_chief:  # other tasks drop each array at once
            arrays[name] = array
    return arrays


def is_finite(model: keras.Model, arrays: Mapping[str, Any]) -> bool:
    """Return whether the trainable weights are finite and no slot is NaN, in the chief in `arrays`.

    Other weights may be infinite by design, such as masks and running minima. A slot that is
    infinite may stop the updates of its weight, but a gradient accumulator must be finite.
    """
    for name, variable in variables_of(model).items():
        is_slot = name.startswith("optimizer/")
        if is_slot or (name.startswith("weights/") and variable.trainable):
            array = arrays[name] if arrays else np.asarray(variable.value)
            may_be_infinite = is_slot and "gradient_accumulator" not in variable.path
            if not np.isfinite(array).all() and not (may_be_infinite and not np.isnan(array).any()):
                return False
    return True


def restore(model: keras.Model, job: Job, arrays: Mapping[str, Any] | None) -> None:
    """Set the state from the chief's `arrays`. Collective: every task calls it."""
    for name, variable in variables_of(model).items():
        value = None if arrays is None else arrays[name]
        if _per_replica(variable):
            _restore_replicas(variable, job, value)
        else:
            variable.assign(_own_of_chief(job, value, variable))
    renew_constants(model)


def own_arrays(model: keras.Model) -> Arrays:
    """Return copies of the state's arrays. The task must hold every array whole."""
    return {name: np.array(v.value.numpy()) for name, v in variables_of(model).items()}


def set_own_arrays(model: keras.Model, arrays: Mapping[str, Any]) -> None:
    """Set the state from the arrays of `own_arrays`."""
    for name, variable in variables_of(model).items():
        variable.assign(arrays[name])
    renew_constants(model)


def renew_constants(model: keras.Model) -> None:
    """After new weights are set, update the layers that compute with copies of their weights."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def from_chief(job: Job, value: Any, *, like: Any) -> np.ndarray[Any, Any]:
    """Return the chief's array in every task, with shape and dtype of `like`. Collective."""
    dtype = _numpy_dtype(like)
    mine = np.asarray(value, dtype) if job.is_chief else np.zeros(tuple(like.shape), dtype)
    return sum_bytes(job, mine, of="the chief's value of a variable")


def names_of(model: keras.Model) -> dict[str, list[Any]]:
    """Return path, shape and dtype of each array's variable, as JSON."""
    return {
        name: [v.path, list((part_of(v) or v).shape), str(v.dtype)]
        for name, v in variables_of(model).items()
    }


def configuration_of(model: keras.Model) -> dict[str, list[Settings]]:
    """Return settings of the optimizers (outermost first), layers and losses, as JSON."""
    loss = getattr(model, "loss", None)
    weights = getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)
    by_loss = _relevant({"loss_weights": keras.tree.flatten(weights)})
    losses = keras.tree.flatten(loss) if isinstance(loss, list | tuple | dict) else [loss]
    return {
        "optimizer": [_settings(optimizer) for optimizer in _optimizers(model.optimizer)],
        "layer": [
            {**_settings(layer), "precision": layer.dtype_policy.name}
            for layer in model._flatten_layers(include_self=False, recursive=True)
        ],
        "loss": [_settings(each) for each in losses],
        "compile": [{"class": "compile", **by_loss}],
    }


def require_same_variables(
    model: keras.Model, saved: Mapping[str, Any], *, where: str, group: str = ""
) -> None:
    """Raise UsageError with the differences between the saved variables and the model's.

    With a `group` ("weights", "optimizer", "metrics"), compare only variables of this group.
    """
    mine, saved = (
        {name: entry for name, entry in entries.items() if name.startswith(group)}
        for entries in (names_of(model), saved)
    )
    paths = {name: entry[0] for name, entry in {**saved, **mine}.items()}
    differences = [
        f"{paths[name]}: saved {_shown(saved.get(name))}, model {_shown(mine.get(name))}"
        for name in sorted(paths, key=lambda name: (name.split("/")[0], int(name.split("/")[1])))
        if mine.get(name, [])[1:] != list(saved.get(name, []))[1:]
    ]
    roles, before = _roles(mine), _roles(saved)
    differences += [
        f"{saved[name][0]} -> {paths[name]}"
        for name, role in roles.items()
        if before.get(name, role) != role
    ]
    require(
        not differences,
        where,
        f"the checkpoint belongs to another model: {_summary(differences)}",
        fix=_ANOTHER,
        code="another-run",
    )


def require_shapes(model: keras.Model, arrays: Mapping[str, Any], *, where: str) -> None:
    """Raise UsageError if `restore` could not set a variable from its array."""
    for name, variable in variables_of(model).items():
        shape = tuple((part_of(variable) or variable).shape)
        if _per_replica(variable):
            shape = arrays[name].shape[:1] + shape
        require_shape(arrays[name], shape, variable, where=where)


def require_shape(array: Any, shape: tuple[int, ...], variable: Any, *, where: str) -> None:
    """Raise UsageError if an array of a checkpoint has another shape."""
    require(
        array.shape == shape,
        where,
        f"the array for {variable.path} has the shape {array.shape} instead of {shape}",
        fix="use an intact checkpoint, or another directory",
        code="damaged",
    )


def require_same_configuration(
    saved: Mapping[str, Sequence[Settings]] | None, mine: dict[str, list[Settings]], *, where: str
) -> None:
    """Raise UsageError with the settings that differ from `saved`, unless `saved` is `None`."""
    differences = [] if saved is None else list(_differences(saved, mine))
    require(
        not differences,
        where,
        f"the checkpoint belongs to another configuration: {_summary(differences)}",
        fix=_ANOTHER,
        code="another-run",
    )


def _roles(names: Mapping[str, Any]) -> dict[str, str]:
    """Return a role for each slot and metric variable, to tell variables of equal shape apart.

    The role of a slot is the name of its weight. The role of a metric variable is its path without
    the numbers that Keras adds to make names unique. Slots without a known weight are left out.
    """
    owners = {
        f"/{path.replace('/', '_')}_": name
        for name, (path, *_) in names.items()
        if name.startswith("weights/")
    }
    roles = {}
    for name, (path, *_) in names.items():
        if name.startswith("metrics/"):
            roles[name] = re.sub(r"_\d+(?![0-9a-zA-Z])", "", path)
        elif name.startswith("optimizer/"):
            found = max((part for part in owners if part in path), key=len, default=None)
            roles |= {} if found is None else {name: owners[found]}
    return roles


def _summary(differences: Sequence[str]) -> str:
    return printable(named(differences, most=_DIFFERENCES_SHOWN))


def printable(text: str) -> str:
    """Return a text with control characters escaped: a checkpoint may be untrusted."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _own_of_chief(job: Job, value: Any, variable: Any) -> np.ndarray[Any, Any]:
    """Return the chief's array, or this task's part of it if the variable is split. Collective."""
    part = part_of(variable)
    if part is None:
        return from_chief(job, value, like=variable)
    whole = from_chief(job, value, like=tf.TensorSpec(part.shape, variable.value.dtype))
    return whole.reshape(-1)[part.first : part.end]


def _rows_of_all(variable: Any, job: Job) -> np.ndarray[Any, Any]:
    """Return ``[replicas, *shape]``, a row per replica. Collective."""
    replicas, own = _metric_replicas(job)
    rows = np.zeros((replicas, *variable.shape), _numpy_dtype(variable))
    for replica, copy in zip(own, _copies(variable, job), strict=True):
        rows[replica] = copy.numpy()
    if replicas == 1:  # in a pipeline, every task already has the value
        return rows
    return sum_bytes(job, rows, of="the replicas' own values")


def _restore_replicas(variable: Any, job: Job, rows: Any) -> None:
    """Set each replica's row. If the number of replicas differs, the first replica gets the sum."""
    shape, dtype = tuple(variable.shape), _numpy_dtype(variable)
    replicas, own = _metric_replicas(job)
    if rows is not None and len(rows) != replicas:
        total = rows.sum(axis=0, dtype=dtype)
        rows = np.zeros((replicas, *shape), dtype)
        rows[0] = total
    whole = from_chief(job, rows, like=tf.TensorSpec((replicas, *shape), dtype))
    for replica, copy in zip(own, _copies(variable, job), strict=True):
        copy.assign(whole[replica])


def _metric_replicas(job: Job) -> tuple[int, tuple[int, ...]]:
    """Return the number of copies of a metric in the job, and this task's copies.

    In an elastic job each task holds the whole metric.
    """
    return (1, (0,)) if job.shards is not None else (job.num_replicas, job.replica_ids)


def _per_replica(variable: Any) -> bool:
    return bool(variable.synchronization == "on_read")


def _copies(variable: Any, job: Job) -> tuple[Any, ...]:
    value = getattr(variable, "value", variable)
    copies: tuple[Any, ...] = job.strategy.experimental_local_results(value)
    return copies


def _numpy_dtype(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    return value.dtype.as_numpy_dtype


def _shown(entry: Any) -> str:
    return "nothing" if entry is None else f"{tuple(entry[1])} {entry[2]}"


def _differences(
    saved: Mapping[str, Sequence[Settings]], mine: dict[str, list[Settings]]
) -> Iterator[str]:
    for group, now in mine.items():
        before = saved.get(group, now if group == "compile" else [])  # older checkpoints lack it
        if len(before) != len(now):
            yield f"{len(before)} {group}s -> {len(now)}"
            continue
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            if old["class"] != new["class"]:
                yield f"{group} {i} {old['class']} -> {new['class']}"
                continue
            for key in sorted({*old, *new}):
                one, other = old.get(key), new.get(key)
                if one != other and json.dumps(one) != json.dumps(other):  # as text, NaN equals NaN
                    yield f"{group} {i} ({new['class']}) {key} {one} -> {other}"


def _optimizers(optimizer: Any) -> Iterator[Any]:
    while optimizer is not None:
        yield optimizer
        yield from getattr(optimizer, "optimizers", ())  # of a MultiOptimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _settings(thing: Any) -> Settings:
    if thing is None or isinstance(thing, str):
        return {"class": str(thing)}
    try:
        config = thing.get_config()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        config = {}  # a custom class without a configuration
    plain = _relevant(config) if isinstance(config, dict) else {}
    return {**plain, "class": getattr(thing, "__name__", type(thing).__name__)}


def _relevant(config: Settings) -> Settings:
    """Return the settings to compare, as JSON values."""
    plain: Settings = {}
    for key, value in config.items():
        if key in _FREE:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            plain[key] = value
        elif _is_numbers(value):
            plain[key] = json.loads(json.dumps(value))  # tuples as lists
        elif key.endswith(_BY_CLASS) and isinstance(value, dict):
            plain[key] = {"class": value.get("class_name"), **_relevant(value.get("config") or {})}
    return plain


def _is_numbers(value: Any) -> bool:
    """Return whether a setting is a number or a (nested) list of numbers, like strides."""
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return value is None or isinstance(value, bool | int | float)


# Two digests that show whether two runs have the same results.


def weights_sha256(model: Any) -> str:
    """Return the SHA-256 of `model.weights` in order, as little-endian bytes in C order.

    Reads the variables individually. Not a collective: any single task may call it.
    """
    return _sha256(model.weights)


def state_sha256(model: Any, *, read: Callable[[Any], Any] = np.asarray) -> str:
    """Return the SHA-256 of `model.weights` and then of the optimizer's variables.

    `read` returns the array of a variable. For a sharded variable, `read` is a collective.
    """
    optimizer = getattr(model, "optimizer", None)
    slots = () if optimizer is None else optimizer.variables
    return _sha256([*model.weights, *slots], read=read)


def _sha256(variables: Iterable[Any], *, read: Callable[[Any], Any] = np.asarray) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(raw_bytes(read(variable)))
    return digest.hexdigest()
