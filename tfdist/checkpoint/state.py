"""A model's variables as arrays and back, under every strategy.

Weights and optimizer slots are the same on every replica; metric totals are each replica's own,
and are kept so: a total that was summed and divided differs in its last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_bytes, sum_over_tasks

_DIFFERENCES_SHOWN = 4
Arrays = dict[str, np.ndarray[Any, Any]]


def variables_of(model: keras.Model) -> dict[str, Any]:
    """Return the variables that make up the state of a run, by the name they are stored under."""
    groups = {
        "weights": model.weights,
        "optimizer": model.optimizer.variables if model.optimizer is not None else [],
        "metrics": model.metrics_variables,
    }
    return {f"{group}/{i}": v for group, listed in groups.items() for i, v in enumerate(listed)}


def capture(model: keras.Model, job: Job) -> Arrays:
    """Copy the state into arrays. A collective: every training task calls it alike.

    An array is of the variable's shape, those of per-replica variables ``[replicas, *shape]``.
    Only the chief gets them; the others send the rows of their replicas and get nothing. What is
    sent are bytes, after the steps and outside of them: no arithmetic of the training sees it.
    """
    variables = variables_of(model)
    rows = {name: _own_rows(v, job) for name, v in variables.items() if _per_replica(v)}
    rows = _rows_of_all(job, rows)
    if not job.is_chief:
        return {}
    return {
        name: rows[name] if name in rows else _own_copy(_copies(v, job)[0])
        for name, v in variables.items()
    }


def restore(model: keras.Model, job: Job, arrays: Mapping[str, Any] | None) -> None:
    """Set the state from the chief's `arrays`. A collective: every task calls it alike."""
    for name, variable in variables_of(model).items():
        if _per_replica(variable):
            _restore_replicas(variable, job, None if arrays is None else arrays[name])
        else:
            value = None if arrays is None else arrays[name]
            variable.assign(from_chief(job, value, like=variable))


def from_chief(job: Job, value: Any, *, like: Any) -> np.ndarray[Any, Any]:
    """Return the chief's array, of the shape and type of `like`, in every task. A collective."""
    dtype = _numpy_dtype(like)
    mine = np.asarray(value, dtype) if job.is_chief else np.zeros(tuple(like.shape), dtype)
    return sum_bytes(job, mine, of="the chief's value of a variable")


def all_from_chief(job: Job, arrays: Mapping[str, Any] | None) -> Arrays:
    """Return the chief's `arrays`, of any types and shapes, in every task. A collective."""
    mine = {name: np.asarray(array) for name, array in (arrays or {}).items()}
    told = broadcast({name: [array.dtype.name, array.shape] for name, array in mine.items()})
    return {
        name: sum_bytes(
            job,
            mine[name] if job.is_chief else np.zeros(shape, np.dtype(dtype)),
            of="an array of the chief's",
        )
        for name, (dtype, shape) in told.items()
    }


def names_of(model: keras.Model) -> dict[str, list[Any]]:
    """Return what each array is: the variable's path, shape and type, as JSON."""
    return {
        name: [variable.path, list(variable.shape), str(variable.dtype)]
        for name, variable in variables_of(model).items()
    }


def require_same(
    model: keras.Model, saved: Mapping[str, Any], *, where: str, group: str = ""
) -> None:
    """Raise UsageError that names the differences between a saved state and the model's.

    With a `group` ("weights", "optimizer", "metrics") nothing else is looked at.
    """
    mine, saved = (
        {name: entry for name, entry in entries.items() if name.startswith(group)}
        for entries in (names_of(model), saved)
    )
    paths = {name: entry[0] for name, entry in {**saved, **mine}.items()}
    differences = [
        f"{paths[name]}: saved {_shown(saved.get(name))}, model {_shown(mine.get(name))}"
        for name in sorted(paths, key=_natural)
        if mine.get(name, [])[1:] != list(saved.get(name, []))[1:]
    ]
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise UsageError(
            where,
            received="a checkpoint of another model: "
            + "; ".join(differences[:_DIFFERENCES_SHOWN])
            + rest,
            expected="the variables of this model and optimizer",
            fix="use another directory, or start from its weights with initial_weights",
        )


def _own_copy(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value in memory of our own: the next steps write to the variable's."""
    array = np.asarray(variable.numpy())
    return array if array.flags.owndata else array.copy()


def _own_rows(variable: Any, job: Job) -> np.ndarray[Any, Any]:
    """``[replicas, *shape]``, zero but for the rows of this task's replicas."""
    mine = np.zeros((job.num_replicas, *variable.shape), _numpy_dtype(variable))
    for replica, copy in zip(job.replica_ids, _copies(variable, job), strict=True):
        mine[replica] = copy.numpy()
    return mine


def _rows_of_all(job: Job, rows: Arrays) -> Arrays:
    """The arrays with the rows of all tasks, by one message for all of them. A collective."""
    if not rows:
        return rows
    packed = np.concatenate([a.reshape(-1).view(np.uint8) for a in rows.values()])
    data, start = sum_bytes(job, packed, of="the replicas' own values").tobytes(), 0
    whole = {}
    for name, array in rows.items():
        part = data[start : start + array.nbytes]
        whole[name] = np.frombuffer(part, array.dtype).reshape(array.shape)
        start += array.nbytes
    return whole


def _restore_replicas(variable: Any, job: Job, rows: Any) -> None:
    """Give each replica its row; with another number of replicas, the first one the sum."""
    count = np.array([0.0 if rows is None else float(len(rows))])
    saved = int(sum_over_tasks(job, count, of="the number of replicas in a checkpoint")[0])
    shape, dtype = tuple(variable.shape), _numpy_dtype(variable)
    whole = np.zeros((saved, *shape), dtype)
    if rows is not None:
        whole[:] = rows
    whole = sum_bytes(job, whole, of="a variable of each replica")
    if saved != job.num_replicas:
        first = whole.sum(axis=0, dtype=dtype)
        whole = np.zeros((job.num_replicas, *shape), dtype)
        whole[0] = first
    for replica, copy in zip(job.replica_ids, _copies(variable, job), strict=True):
        copy.assign(whole[replica])


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


def _natural(name: str) -> tuple[str, int]:
    group, _, index = name.partition("/")
    return group, int(index)
