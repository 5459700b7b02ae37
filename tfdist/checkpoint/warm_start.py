"""Warm starts from the weights in a checkpoint, a `.keras` file or a `.weights.h5` file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint import model_state
from tfdist.checkpoint.remote import is_remote, local_copy
from tfdist.checkpoint.saved_run import RunStore
from tfdist.checkpoint.store import Checkpoint
from tfdist.errors import UsageError, named, near, require, require_one_of
from tfdist.renamed import without_renamed
from tfdist.strategy import Job, broadcast, job_of

_LOG = logging.getLogger(__name__)


@without_renamed("load_weights")
def load_weights(
    model: keras.Model,
    filepath: str | os.PathLike[str],
    skip_mismatch: bool = False,
    *,
    job: Job | None = None,
    layers: Sequence[str] | None = None,
    best: bool = False,
) -> list[str]:
    """Set the model's weights from a file or checkpoint. Collective: every task calls it.

    The chief reads the file and sends the weights to the other tasks. The optimizer is unchanged.

    Args:
      model: Built model. Frozen layers (``trainable = False``) also get weights.
      filepath: A `.keras` file (read in safe mode), a `.weights.h5` file, or a backup directory.
      skip_mismatch: True to skip a weight that is missing in the file or has another shape there,
        and to log its name (default: False, an error).
      job: Job of the calling task (default: the job of the model's strategy).
      layers: Names of the layers to set (default: all). Other layers are unchanged.
      best: True to use the best checkpoint of a directory instead of the newest (default: False).

    Returns:
      Keys of the variables that were set, like ``dense/0/kernel``.

    Raises:
      UsageError: The file or a layer does not exist, or shapes differ.
    """
    job = job or job_of(model.distribute_strategy)
    path = os.fspath(filepath)
    require(
        model.built and model.weights,
        "load_weights",
        "the model has no weights yet",
        fix="add an Input to the model, or load the weights with fit(initial_weights=filepath)",
        code="not-built",
    )
    wanted = _wanted(model, layers)
    values: dict[str, Any] = {}
    skipped: list[str] = []
    if job.is_chief:
        with (
            local_copy(path, best=best)
            if is_remote(path)
            else contextlib.nullcontext(path) as local
        ):
            values = _read(model, local, best=best, skip_mismatch=skip_mismatch)
        skipped = _checked(values, wanted, path, skip_mismatch=skip_mismatch)
    if skip_mismatch:
        skipped = broadcast(skipped)
        wanted = {name: v for name, v in wanted.items() if name not in skipped}
    for name, variable in wanted.items():
        variable.assign(model_state.from_chief(job, values.get(name), like=variable))
    model_state.renew_constants(model)
    _LOG.info("%s: loaded %d variables", path, len(wanted))
    return list(wanted)


def _wanted(model: keras.Model, layers: Sequence[str] | None) -> dict[str, Any]:
    """Return the variables to set, by keys ``layer/position/name``.

    For variables outside of all layers the layer name is empty. If layers share a name, the second
    layer's name ends with ``#2``.
    """
    names = [layer.name for layer in model.layers]
    for name in layers or ():
        require_one_of("load_weights", name, names, fix="use names of the model's layers")
    wanted: dict[str, Any] = {}
    of_layers: set[int] = set()
    seen = Counter[str]()
    for layer in model.layers:
        seen[layer.name] += 1
        number = f"#{seen[layer.name]}" if seen[layer.name] > 1 else ""
        of_layers |= {id(variable) for variable in layer.weights}
        if layers is None or layer.name in layers:
            wanted |= _keyed(f"{layer.name}{number}", layer.weights)
    if layers is None:
        wanted |= _keyed("", [v for v in model.weights if id(v) not in of_layers])
    return wanted


def _keyed(owner: str, variables: Sequence[Any]) -> dict[str, Any]:
    named = {f"{owner}/{i}/{variable.name}": variable for i, variable in enumerate(variables)}
    return {key: v for key, v in named.items() if "seed_generator" not in v.path}


def _read(model: keras.Model, path: str, *, best: bool, skip_mismatch: bool) -> dict[str, Any]:
    """Return the values in a file by the keys of `_wanted`."""
    if os.path.isdir(path):
        store = RunStore(path)
        step = store.best() if best else None
        if best and step is None:
            raise _unreadable(path, "no checkpoint is marked best")
        values = _values_of(model, store.read(step))
    elif best:
        raise _unreadable(path, "best=True needs a directory of checkpoints")
    elif not os.path.exists(path):
        raise _unreadable(path, "the file or directory does not exist")
    elif path.endswith(".keras"):
        saved = _wanted(load_model_file(path), None)
        values = {key: variable.numpy() for key, variable in saved.items()}
    elif path.endswith(".weights.h5"):
        values = _from_weights_file(model, path, skip_mismatch=skip_mismatch)
    else:
        raise _unreadable(path, "the file is neither a .keras nor a .weights.h5 file")
    return values


def _checked(
    values: dict[str, Any], wanted: dict[str, Any], path: str, *, skip_mismatch: bool
) -> list[str]:
    """Return the keys of variables without a value of their shape, or raise UsageError."""
    skipped = []
    for key, variable in wanted.items():
        found = values.get(key)
        if found is not None and tuple(np.shape(found)) == tuple(variable.shape):
            continue
        if skip_mismatch:
            skipped.append(key)
        else:
            problem = f"the file has no weights for {variable.path}{near(key, values)}"
            if found is not None:
                problem = f"{variable.path} has the shape {tuple(np.shape(found))} in the file, "
                problem += f"but {tuple(variable.shape)} in the model"
            raise UsageError(
                f"weights in {path}",
                problem,
                fix="give the layers their names in the file, or select layers with layers=[...]",
                code="another-run",
            )
    if skipped:
        _LOG.warning("%s: no weights of the same shape for %s", path, named(skipped))
    return skipped


def load_model_file(path: str | os.PathLike[str]) -> keras.Model:
    """Return the model in a `.keras` file, read in the safe mode of Keras. Raise UsageError."""
    with loading(path):
        return keras.models.load_model(path, compile=False, safe_mode=True)


@contextlib.contextmanager
def loading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise UsageError for any error in the block: damaged files cause errors of every type."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).rpartition("Exception encountered: ")[2].split())
        raise UsageError(
            os.fspath(path),
            f"Keras cannot load the file ({type(error).__name__}: {said:.200})",
            fix="save the model again. If it has custom classes, load it in the program that "
            "defines them",
            code="unreadable",
        ) from error


def _from_weights_file(model: keras.Model, path: str, *, skip_mismatch: bool) -> dict[str, Any]:
    """Read the file into the model, return the values, and restore the model's own weights.

    Optimizers are skipped: otherwise Keras would set them too, and only in the chief.
    """
    before = model.get_weights()
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    try:
        model.load_weights(path, skip_mismatch, objects_to_skip=optimizers)
        return {key: variable.numpy() for key, variable in _wanted(model, None).items()}
    except Exception as error:  # damaged files cause errors of every type
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        is_intact = isinstance(error, ValueError)
        problem = "the file has weights of another model" if is_intact else "the file is damaged"
        raise _unreadable(path, f"{problem} ({first})") from error
    finally:
        model.set_weights(before)


def set_weights(model: keras.Model, checkpoint: Checkpoint, *, where: str) -> None:
    """Set a model's weights in a single process, or raise UsageError if they do not fit it."""
    saved = checkpoint.meta["variables"]
    model_state.require_same_variables(model, saved, where=where, group="weights")
    for i, variable in enumerate(model.weights):
        array = checkpoint.arrays[f"weights/{i}"]
        if "seed_generator" not in variable.path:
            model_state.require_shape(array, tuple(variable.shape), variable, where=where)
            variable.assign(array)
    model_state.renew_constants(model)


def _values_of(model: keras.Model, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the weights by key: by order if all shapes are the same, otherwise by path.

    If the layers have the checkpoint's names, the order is the model's.
    """
    saved = checkpoint.meta["variables"]
    weights = {n: a for n, a in checkpoint.arrays.items() if n.startswith("weights/")}
    paths = Counter(saved[name][0] for name in weights)
    by_path = {saved[n][0]: a for n, a in weights.items() if paths[saved[n][0]] == 1}
    names = list(weights)
    theirs = dict(zip(_in_model([saved[n][0] for n in names]), names, strict=True))
    mine = _in_model([v.path for v in model.weights])
    if theirs.keys() == set(mine) and len(theirs) == len(mine) == len(names):
        names = [theirs[path] for path in mine]
    positions = {id(v): name for v, name in zip(model.weights, names, strict=False)}
    same = [list(v.shape) for v in model.weights] == [saved[n][1] for n in names]
    found = {}
    for key, variable in _wanted(model, None).items():
        # Paths depend on the process: Keras counts all layers that the process has built before.
        if same:
            found[key] = weights[positions[id(variable)]]
        elif variable.path in by_path:
            found[key] = by_path[variable.path]
    return found


def _in_model(paths: list[str]) -> list[str]:
    """Return the paths without their first part if all share it: the name of the model."""
    parts = [path.partition("/") for path in paths]
    return [p[2] for p in parts] if len({p[0] for p in parts}) == 1 else paths


def _unreadable(path: str, problem: str) -> UsageError:
    return UsageError(
        f"weights in {path}",
        problem,
        fix="pass a .keras file, a .weights.h5 file, or a directory of BackupAndRestore",
        code="unreadable",
    )
