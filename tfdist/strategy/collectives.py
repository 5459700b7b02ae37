"""Collectives of a job's tasks for users: barrier, broadcast, all_reduce, gather and others.

They take NumPy arrays or nests of arrays, and return the same. On CPUs the arrays travel around
the ring. Other jobs use TensorFlow's collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from tfdist import phases
from tfdist.cluster import read_environment, resolved_kind
from tfdist.errors import PeerLost, UsageError, require, require_int, require_one_of
from tfdist.strategy import group
from tfdist.strategy.job import Job, current_job
from tfdist.strategy.ring import CALL_S, Members, Ring, empty

_FIRST_BYTES = 1024
_SUMMED_BY_TENSORFLOW = ("float64", "float32", "float16", "bfloat16", "int64", "int32")
_Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


def barrier() -> None:
    """Block until every training task has called `barrier`. A collective under multiworker.

    Raises:
      UsageError: the task of a multiworker or pipeline job has not called `make_strategy` yet.
    """
    job = _own_job("barrier")
    if job is not None:
        group.sum_over_tasks(job, np.zeros(1), of="a barrier")


def broadcast(value: Any = None, root: int = 0) -> Any:
    """Return the `value` of task `root` in every task. A collective under multiworker.

    In the root, the arrays of the result can share memory with those of `value`.

    Args:
      value: JSON value, which may contain NumPy arrays. Only the root's value is used. Tuples
        arrive as lists.
      root: Index of the task that has the value (default: the chief, as always in elastic jobs).

    Raises:
      UsageError: the value is not JSON (for example a dict with integer keys), or the task has
        not called `make_strategy` yet.
      PeerLost: another task exited. In an elastic job: the chief exited before it sent the value.
    """
    job = _fixed_job("broadcast") if root else _own_job("broadcast")
    _require_root("broadcast", job, root)
    arrays: list[_Array] = []
    text, is_root = "", _is_root(job, root)
    if is_root:  # check in a single process, too
        text = json.dumps(_encoded("broadcast", value, arrays))
    if job is None or not job.has_peers:
        return value
    of = _described("broadcast", (), "", job, root)
    try:
        value = _decoded(job, text, arrays, root=root, is_root=is_root, of=of, receive=_from_root)
    except (json.JSONDecodeError, UnicodeDecodeError):  # an elastic job has lost the chief
        if not isinstance(job.ring, Members):
            raise
    if isinstance(job.ring, Members):
        roots = group.sum_over_tasks(job, np.array([float(is_root)]), of="the chief of a value")
        if not roots[0]:
            raise PeerLost(f"{job.name}: lost the chief while it sent a value")
    return value


def share_generators() -> None:
    """Set Python's and NumPy's global generators to the chief's states. A collective.

    A program without a seed then shuffles its arrays and files in the same order in every task.
    """
    (version, state, gauss), numbers = broadcast([random.getstate(), np.random.get_state()])
    random.setstate((version, tuple(state), gauss))
    np.random.set_state(tuple(numbers))


def scatter(values: Any = None, root: int = 0) -> Any:
    """Return this task's element of each array of task `root`. A collective under multiworker.

    Args:
      values: JSON value with NumPy arrays of the shape ``[tasks, ...]``. Other values, such as a
        list of numbers, arrive whole. Only the root's values are used.
      root: Index of the task that has the values (default: the chief).

    Returns:
      The same value with new arrays of the shape ``[...]``, also in the root. Tuples arrive as
      lists.

    Raises:
      UsageError: an array does not have one element for each task, or the job is elastic. See
        also `broadcast`.

    Example:
      >>> mine = tfdist.scatter(np.arange(8).reshape(2, 4) if tfdist.is_chief() else None)
    """
    job = _fixed_job("scatter")
    _require_root("scatter", job, root)
    arrays: list[_Array] = []
    text, count, is_root = "", job.num_tasks if job else 1, _is_root(job, root)
    if is_root:
        text = json.dumps(_encoded("scatter", values, arrays))
        for array in arrays:
            require(
                array.shape[:1] == (count,),
                "scatter",
                f"an array has the shape {list(array.shape)}, but the job has {count} tasks",
                fix=f"pass arrays of the shape [{count}, ...]",
                code="shapes-differ",
            )
    of = _described("scatter", (), "", job, root) if job else ""
    return _decoded(job, text, arrays, root=root, is_root=is_root, of=of, receive=_row_from_root)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Return the sum or mean over the tasks, with the same bits in every task. A collective.

    Args:
      value: Number or array of numbers, or a nest of them. All tasks have the same shapes and
        types.
      op: "sum" or "mean". "mean" needs floating-point numbers.

    Returns:
      New arrays with the shapes and types of `value`, in the same nest.

    Raises:
      UsageError: another task runs another call, or has other shapes or types. A value is not a
        number. The job is elastic.
      PeerLost: another task exited or, on CPUs, does not make this call for 30 minutes.

    Example:
      >>> tfdist.all_reduce({"loss": 0.5, "counts": np.ones(2)})  # in both of two tasks
      {'loss': array(1.), 'counts': array([2., 2.])}
    """
    return _reduced("all_reduce", value, op, root=None)


def reduce(value: Any, op: str = "sum", root: int = 0) -> Any:
    """Return the sum or mean over the tasks in task `root`, and `None` in other tasks.

    A collective under multiworker. Arguments, result and errors are as in `all_reduce`.
    """
    return _reduced("reduce", value, op, root=root)


def all_gather(value: Any) -> Any:
    """Return the values of all tasks in every task. A collective under multiworker.

    Args:
      value: Number, text or array, or a nest of them. All tasks have the same shapes and types,
        and texts of the same length.

    Returns:
      Arrays of the shape ``[tasks, ...]`` in the same nest. Element i is the value of task i.

    Raises:
      UsageError: another task runs another call, or has other shapes or types. A value is a Python
        object. The job is elastic.
      PeerLost: another task exited or, on CPUs, does not make this call for 30 minutes.
    """
    return _gathered("all_gather", value, root=None)


def gather(value: Any, root: int = 0) -> Any:
    """Return the values of all tasks in task `root`, and `None` in other tasks.

    A collective under multiworker. Arguments, result and errors are as in `all_gather`.
    """
    return _gathered("gather", value, root=root)


@contextlib.contextmanager
def chief_first() -> Iterator[None]:
    """Run the block in the chief first, then in all other tasks. A collective.

    Use it to download or prepare files once. If the block fails in the chief, the other tasks do
    not run it. If an elastic job loses its chief in the block, the others run it together.

    Example:
      >>> with tfdist.chief_first():
      ...     path = keras.utils.get_file("data.npz", origin=url)
    """
    job = _own_job("chief_first")
    is_first = job is None or job.is_chief
    if not is_first:
        barrier()
    yield
    if is_first:
        barrier()


@np.errstate(all="ignore")  # infinity and NaN are values, as in the ring's sums
def _reduced(name: str, value: Any, op: str, *, root: int | None) -> Any:
    require_one_of(f"{name} op", op, ("sum", "mean"))
    job, arrays = _fixed_job(name), _arrays(name, value)
    _require_root(name, job, root or 0)
    for array in arrays:
        require(
            array.dtype.kind in ("fcV" if op == "mean" else "fcViu"),
            name,
            f"there is no {op} of values of the type {array.dtype.name}",
            fix="convert the values, for example with astype('float32')",
            code="collective-type",
        )
    if job is None:
        return _packed(value, [array.copy() for array in arrays])
    of = _described(name, arrays, f"({op})", job, root)
    totals: Sequence[_Array | None]
    if root is not None:
        totals = [_sum_in_root(job, array, root, of=of) for array in arrays]
    elif isinstance(job.ring, Ring):
        totals = _in_ring(job, lambda ring: ring.sum(*arrays, of=of, within_s=CALL_S))
    else:
        totals = [_sum_by_tensorflow(job, array, of=of) for array in arrays]
    if op == "mean":
        count = job.num_tasks
        totals = [t if t is None else np.asarray(t / t.dtype.type(count)) for t in totals]
    return _packed(value, totals)


def _gathered(name: str, value: Any, *, root: int | None) -> Any:
    job, arrays = _fixed_job(name), _arrays(name, value)
    _require_root(name, job, root or 0)
    if job is None:
        return _packed(value, [array[np.newaxis].copy() for array in arrays])
    of = _described(name, arrays, "", job, root)
    return _packed(value, [_rows(job, array, root, of=of) for array in arrays])


# This task's job and arrays.


def _own_job(collective: str) -> Job | None:
    """Return the job of this process, `None` in a single process."""
    job = current_job()
    config = read_environment(os.environ) if job is None else None
    if config is not None and resolved_kind(config).has_collectives:
        raise UsageError(
            collective,
            f"{config.task} runs a collective before make_strategy has connected the tasks",
            fix="call tfdist.make_strategy() first",
            code="no-strategy",
        )
    return job


def _fixed_job(collective: str) -> Job | None:
    """Return the job if it has peers, and reject a job with a changing number of tasks."""
    job = _own_job(collective)
    if job is None:
        return None
    require(
        job.shards is None,
        collective,
        "the number of workers of an elastic job can change",
        fix="use a job without --elastic, or tfdist.broadcast",
        code="other-strategy",
    )
    return job if job.has_peers else None


def _require_root(name: str, job: Job | None, root: int) -> None:
    index, count = require_int(f"{name} root", root, least=0), job.num_tasks if job else 1
    require(
        index < count,
        f"{name} root",
        f"there is no task {index} in a job of {count} tasks",
        fix=f"pass an index from 0 to {count - 1}",
        code="out-of-range",
    )


def _is_root(job: Job | None, root: int) -> bool:
    if job is None:
        return True
    return job.task_index == root if root else job.is_chief


def _arrays(name: str, value: Any) -> list[_Array]:
    arrays = [np.ascontiguousarray(leaf).reshape(np.shape(leaf)) for leaf in _leaves(value)]
    for array in arrays:
        require(
            not (array.dtype == object or array.dtype.names),
            name,
            f"tfdist cannot send values of the type {array.dtype}",
            fix="pass arrays of numbers or text",
            code="collective-type",
        )
    return arrays


def _leaves(value: Any) -> list[Any]:
    return keras.tree.flatten(value)


def _packed(value: Any, arrays: Sequence[_Array | None]) -> Any:
    """Return the arrays in the nest of `value`, or `None` in a task without a result."""
    if arrays and arrays[0] is None:
        return None
    return keras.tree.pack_sequence_as(value, list(arrays))


def _described(
    name: str, arrays: Sequence[_Array], details: str, job: Job, root: int | None
) -> str:
    """Return the text of this call, and check that it is the same in all tasks."""
    of = " ".join(filter(None, [name, details, f"with root {root}" if root is not None else ""]))
    if job.ring is not None:
        return of  # rings compare text, types and shapes. Elastic members compare only the text
    call = f"{of} {[(array.dtype.name, array.shape) for array in arrays]}"
    checks = group.of_all_tasks(job, [zlib.crc32(call.encode())], of=of)
    require(
        len(set(checks.ravel())) == 1,
        name,
        f"the tasks run different calls ({job.name}: {call})",
        fix="run the same collectives in the same order, with the same shapes and types",
        code="different-sums",
    )
    return of


# Transfers.


def _in_ring(job: Job, call: Callable[[Ring], _T]) -> _T:
    assert isinstance(job.ring, Ring)
    with phases.waiting_for_all(), group.naming_lost_peer(job):
        return call(job.ring)


def _sum_by_tensorflow(job: Job, array: _Array, *, of: str) -> _Array:
    if array.dtype.name not in _SUMMED_BY_TENSORFLOW:
        rows = _rows(job, array, None, of=of)
        assert rows is not None
        return rows.sum(axis=0, dtype=array.dtype)
    return group.sum_over_tasks(job, array.reshape(-1), of=of).reshape(array.shape)


def _sum_in_root(job: Job, array: _Array, root: int, *, of: str) -> _Array | None:
    if isinstance(job.ring, Ring):
        return _in_ring(job, lambda ring: ring.sum_to_root(array, root, of=of))
    total = _sum_by_tensorflow(job, array, of=of)
    return total if _is_root(job, root) else None


def _rows(job: Job, array: _Array, root: int | None, *, of: str) -> _Array | None:
    """Return the arrays of all tasks in the root, or in all tasks if `root` is `None`."""
    if isinstance(job.ring, Ring):
        if root is None:
            return _in_ring(job, lambda ring: ring.rows_of_all(array, of=of))
        return _in_ring(job, lambda ring: ring.rows_to_root(array, root, of=of))
    rows = np.zeros((job.num_tasks, *array.shape), array.dtype)
    rows[job.task_index] = array
    rows = group.sum_bytes(job, rows, of=of)
    return rows if root is None or _is_root(job, root) else None


def _from_root(job: Job, array: _Array, root: int, *, of: str, follows: bool = True) -> _Array:
    """Return the root's array. Other tasks give zeros of the same shape and type.

    If it `follows` the message of a call, the message has told all tasks about it.
    """
    if isinstance(job.ring, Ring):
        if not _is_root(job, root):
            array = empty(array.shape, array.dtype)
        _in_ring(job, lambda ring: ring.from_root(array, root, of="" if follows else of))
        return array
    return group.sum_bytes(job, array, of=of)


def _row_from_root(job: Job, rows: _Array, root: int, *, of: str) -> _Array:
    if isinstance(job.ring, Ring):
        return _in_ring(job, lambda ring: ring.rows_from_root(rows, root))
    return _from_root(job, rows, root, of=of)[job.task_index]


# JSON text with arrays.


def _decoded(
    job: Job | None,
    text: str,
    arrays: list[_Array],
    *,
    root: int,
    is_root: bool,
    of: str,
    receive: Callable[..., _Array],
) -> Any:
    """Send the root's JSON text, then each array with `receive`."""

    def decode(found: dict[str, Any]) -> Any:
        if "__array__" not in found:
            return found
        if job is None:
            return np.array(arrays.pop(0)[0])
        dtype, shape = found["__array__"]
        mine = arrays.pop(0) if is_root else np.broadcast_to(np.zeros((), dtype), shape)
        return receive(job, mine, root, of=of)

    with job.ring.call() if job and isinstance(job.ring, Ring) else contextlib.nullcontext():
        if job is not None:
            message = text.encode() if is_root else None
            text = _text_from_root(job, message, root, of=of)
        return json.loads(text, object_hook=decode) if text else None


def _text_from_root(job: Job, text: bytes | None, root: int, *, of: str) -> str:
    """Send a text with its size in the first message, so that a short text needs no other.

    `text` is `None` in other tasks. The result is empty if an elastic job has lost the root.
    """
    message = b"" if text is None else len(text).to_bytes(8, "little") + text

    def sent(first: int, size: int) -> bytes:
        part = np.zeros(size, np.uint8)
        if text is not None:
            part[:] = np.frombuffer(message[first : first + size].ljust(size, b"\0"), np.uint8)
        return _from_root(job, part, root, of=of, follows=first > 0).tobytes()

    came = sent(0, _FIRST_BYTES)
    size = 8 + int.from_bytes(came[:8], "little")
    if size > _FIRST_BYTES:
        came += sent(_FIRST_BYTES, size - _FIRST_BYTES)
    return came[8:size].decode()


def _encoded(name: str, value: Any, arrays: list[_Array]) -> Any:
    """Return the value in JSON form, and append its arrays to `arrays` in their order."""
    if isinstance(value, dict):
        for key in value:
            require(
                isinstance(key, str),
                name,
                f"the key {key!r} of a dict is not text",
                fix="send a list of pairs, and build the dict from the list",
                code="collective-type",
            )
        return {key: _encoded(name, item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(name, item, arrays) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    array = np.asarray(value)
    require(
        not (array.dtype == object or array.dtype.names or isinstance(value, bytes)),
        name,
        f"tfdist cannot send a {type(value).__name__}{' with fields' * bool(array.dtype.names)}",
        fix="send its content as numbers, text, lists, dicts and arrays of numbers or text",
        code="collective-type",
    )
    if isinstance(value, np.generic) and array.dtype.kind in "biuf":
        return value.item()
    arrays.append(np.ascontiguousarray(array).reshape(array.shape))
    # NumPy sees bfloat16 and similar types as raw bytes, so send the type's name.
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    return {"__array__": [dtype, array.shape]}
