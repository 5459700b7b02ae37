"""Communication between a job's tasks: sums, rows and variable values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import context
from tensorflow.python.trackable.base import CheckpointInitialValue

from tfdist import phases
from tfdist.cluster import read_environment
from tfdist.errors import PeerLost, UsageError
from tfdist.strategy.job import Job, current_job
from tfdist.strategy.ring import Members, Ring

_PIECE_WORDS = 2**22
_MARK = "_tfdist_part"
_OF_PEERS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
_ABORTED = "Collective ops is aborted by: "  # TensorFlow's message after another task's error


def is_chief() -> bool:
    """Return True in the task that writes files, and in a single process. Not a collective."""
    job = current_job()
    if job is not None:
        return job.is_chief
    config = read_environment(os.environ)
    if config is None or not config.cluster.tasks():
        return True
    return config.task == config.cluster.chief_task


def on_chief(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return `callback` in the chief, and an empty callback in every other task.

    In an elastic job, return `callback` in every task, and only the chief calls it. Use it for a
    callback that writes files. The callback must not run collectives: evaluate, predict, or read a
    metric.
    """
    job = current_job()
    if job is not None and isinstance(job.ring, Members):
        callback.chief_only = True  # another task may become the chief
        return callback
    return callback if is_chief() else keras.callbacks.Callback()


MESSAGE_FAILED = "a message from another task did not arrive"
"""Text of the error if a peer is lost within a step."""


@contextlib.contextmanager
def naming_lost_peer(job: Job) -> Iterator[None]:
    """Convert a failed collective to an error that names the lost task.

    Raise PeerLost if the neighbour in the ring exited, and UsageError if it runs another sum. Leave
    this task's own errors unchanged. Without a ring, raise PeerLost if TensorFlow reports a lost
    task or the block exceeds the job's timeout.
    """
    if job.ring is None:
        with _limiting_collectives(job) if job.has_peers else contextlib.nullcontext():
            yield
        return
    try:
        yield
    except (tf.errors.OpError, ConnectionError) as error:
        lost = job.ring.lost
        known = lost in str(error) or MESSAGE_FAILED in str(error) or isinstance(error, _OF_PEERS)
        if not lost or not known:
            raise
        if job.ring.differs:
            theirs, mine = job.ring.differs
            raise UsageError(
                "sums over the workers",
                f"{job.ring.previous_name} runs {theirs}, but {job.name} runs {mine}",
                fix="run the same sums in the same order in every worker (look for a tf.cond, an "
                "if or a callback that only some workers run)",
                code="different-sums",
            ) from error
        raise PeerLost(f"{job.name}: {lost}") from error


@contextlib.contextmanager
def _limiting_collectives(job: Job) -> Iterator[None]:
    """Abort TensorFlow's collectives after the job's timeout. Raise PeerLost for a lost task."""
    late = f"no answer in a collective for {job.collective_timeout_s:g} s"
    abort = functools.partial(context().abort_collective_ops, tf.errors.DEADLINE_EXCEEDED, late)
    timer = threading.Timer(job.collective_timeout_s, abort)
    timer.daemon = True
    if job.collective_timeout_s:
        timer.start()
    try:
        yield
    except _OF_PEERS as error:
        _, aborted, cause = str(error).partition(_ABORTED)
        if not aborted:
            raise
        tasks = re.findall(r"^/job:(\w+)/replica:0/task:(\d+)$", cause, re.MULTILINE)
        lost = ", ".join(f"{kind}-{index}" for kind, index in tasks) or "another worker"
        raise PeerLost(f"{job.name}: lost {lost}: {cause.splitlines()[0]}") from error
    finally:
        timer.cancel()


def require_same_place(job: Job, *, of: str) -> None:
    """Check that all tasks run the same call, before a collective of TensorFlow hangs.

    A collective. It returns at once if the job has no ring or is a pipeline.
    """
    if job.ring is not None and job.stages is None:
        sum_over_tasks(job, np.zeros(1), of=of)


def sum_over_tasks(job: Job, values: np.ndarray, *, of: str) -> np.ndarray:
    """Sum a float64 or int32 vector of the same length over the tasks. A collective.

    `of` describes the sum, with the same text in every task. The ring compares this text, so two
    tasks cannot mix up two sums. If the job has no peers, return `values`.
    """
    if not job.has_peers:
        return values
    with phases.waiting_for_all(), naming_lost_peer(job):
        if job.ring is None:
            return _summer(job.strategy)(tf.constant(values)).numpy()
        return job.ring.sum(values, of=of)[0]


def of_all_tasks(job: Job, values: Sequence[float] | np.ndarray, *, of: str) -> np.ndarray:
    """Return the `values` of all tasks as float64 ``[tasks, len(values)]``. A collective."""
    table = np.zeros((job.num_tasks, len(values)))
    table[job.task_index] = values
    table = sum_over_tasks(job, table.reshape(-1), of=of).reshape(table.shape)
    if isinstance(job.ring, Members):
        table[job.task_index] = values  # a joining task receives a sum without its values
        table[job.ring.absent] = values  # lost members have no values
    return table


def rows_of_all_tasks(
    job: Job, rows: np.ndarray | None, *, rank: int, of: str
) -> np.ndarray[Any, Any]:
    """Return the rows of all tasks, in the order of the tasks. A collective.

    Args:
      job: Job of this task.
      rows: This task's rows, or `None`. All tasks use the same type and row shape.
      rank: Number of dimensions of `rows`.
      of: Description of the rows (see `sum_over_tasks`).

    Raises:
      UsageError: two tasks have rows of different shapes.
    """
    spec = np.zeros(1 + rank)
    if rows is not None:
        spec[:] = tf.as_dtype(rows.dtype).as_datatype_enum, *rows.shape
    specs = of_all_tasks(job, spec, of=f"the types and sizes of {of}").astype(np.int64)
    kinds, counts, *sizes = specs.T
    shapes = sorted({tuple(row[2:].tolist()) for row in specs if row[1]})
    if len(shapes) > 1:  # NumPy would repeat a row of size 1
        raise UsageError(
            of,
            f"the rows of one batch have the shapes {', '.join(map(str, shapes))} in the tasks",
            fix="pad all batches to the same length, for example with output_sequence_length",
            code="shapes-differ",
        )
    dtype = tf.as_dtype(int(max(kinds))).as_numpy_dtype
    whole = np.zeros((sum(counts), *map(max, sizes)), dtype)
    if rows is not None:
        start = sum(counts[: job.task_index])
        whole[start : start + len(rows)] = rows
    return sum_bytes(job, whole, of=of)


def sum_bytes(job: Job, array: np.ndarray, *, of: str) -> np.ndarray:
    """Sum arrays bit for bit, if each element is zero in all tasks except one. A collective.

    The array may have any type, and has the same shape in all tasks. It is sent in pieces. The
    sum needs the memory of another array.
    """
    if not job.has_peers:
        return array
    if array.dtype == object:
        return _sum_texts(job, array, of=of)
    words = np.zeros(-(-array.nbytes // 4), np.int32)
    whole = words.view(np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
    whole[...] = array
    sum_words(job, words, of=of)
    return whole


def _sum_texts(job: Job, array: np.ndarray, *, of: str) -> np.ndarray:
    """Sum arrays of bytes objects. An element is 0 if another task has its text."""
    texts = [text or b"" for text in array.reshape(-1)]
    lengths = sum_bytes(job, np.array([len(text) for text in texts], np.int64), of=of)
    longest = max(1, *lengths)
    padded = np.array([list(text.ljust(longest, b"\0")) for text in texts], np.uint8)
    whole = sum_bytes(job, padded.reshape(-1, longest), of=of)
    found = [row[:length].tobytes() for row, length in zip(whole, lengths, strict=True)]
    return np.array(found, object).reshape(array.shape)


def sum_words(job: Job, words: np.ndarray, *, of: str) -> None:
    """Sum an int32 vector in place, in pieces. A collective."""
    for start in range(0, words.size, _PIECE_WORDS):
        piece = slice(start, start + _PIECE_WORDS)
        words[piece] = sum_over_tasks(job, words[piece], of=of)


@functools.lru_cache(maxsize=4)
def _summer(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    first = strategy.extended._get_replica_id_in_sync_group(0)

    @tf.function(reduce_retracing=True, autograph=False)
    def total(vector: tf.Tensor) -> tf.Tensor:
        def in_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            mine = tf.equal(context.replica_id_in_sync_group, first)
            return context.all_reduce("SUM", tf.where(mine, vector, tf.zeros_like(vector)))

        return strategy.experimental_local_results(strategy.run(in_replica))[0]

    return total


# Parts of variables. Each worker keeps only a range of a variable's flat elements.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VariablePart:
    """Elements ``[first, end)`` of a flattened variable.

    Attributes:
      shape: Shape of the whole variable.
      first: Index of the first element.
      end: Index after the last element.
    """

    shape: tuple[int, ...]
    first: int
    end: int


def own_part(job: Job, shape: tuple[int, ...]) -> VariablePart:
    """Return this worker's part of a variable of this shape."""
    assert isinstance(job.ring, Ring)
    first, end = job.ring.part(math.prod(shape))
    return VariablePart(shape=shape, first=first, end=end)


def mark(variable: Any, part: VariablePart) -> None:
    """Mark a variable as a part of a larger variable."""
    setattr(variable, _MARK, part)


def part_of(variable: Any) -> VariablePart | None:
    """Return the part that a variable holds, `None` for a whole variable."""
    return getattr(variable, _MARK, None)


def gathered(job: Job, variable: Any) -> np.ndarray[Any, Any]:
    """Return the whole array of a variable that the workers hold in parts. A collective."""
    part, ring = part_of(variable), job.ring
    assert part is not None
    assert isinstance(ring, Ring)
    with phases.waiting_for_all(), naming_lost_peer(job):
        mine = np.asarray(variable.numpy())
        (flat,) = ring.all_gather(mine, sizes=[math.prod(part.shape)], of="the parts of a variable")
    return flat.reshape(part.shape)


def whole(variable: Any) -> np.ndarray[Any, Any]:
    """Return the whole array of a variable. A collective if the variable holds a part."""
    if part_of(variable) is None:
        return np.asarray(variable)
    job = current_job()
    assert job is not None
    return gathered(job, variable)


# Initial values of variables.


def broadcast_initial_values(job: Job) -> None:
    """Initialize later variables in the scope of `job` from the chief's values, over the ring.

    TensorFlow runs a collective for each variable, and each collective needs several messages.
    This dominates the time to build a model of many variables. TensorFlow still sends strings and
    the variables of a graph.
    """
    extended = job.strategy.extended
    by_collective = extended._get_variable_creator_initial_value

    def creator(*, initial_value: Any, dtype: Any = None, **where: Any) -> Callable[[], Any]:
        require_no_search(job)

        def given(value: Any) -> Any:
            return by_collective(initial_value=value, dtype=dtype, **where)()

        def initial() -> Any:
            if not tf.executing_eagerly():
                return given(initial_value)
            value = _own_value(initial_value, dtype, where["device"])
            if value.dtype == tf.string or not value.dtype.is_numpy_compatible:
                return given(value)
            mine = value.numpy() if job.is_chief else np.zeros_like(value.numpy())
            with tf.device(where["device"]):
                return tf.constant(sum_bytes(job, mine, of="the initial value of a variable"))

        return initial

    extended._get_variable_creator_initial_value = creator


def require_no_search(job: Job) -> None:
    """Reject a call inside KerasTuner's `tuner.search`: each task would choose its own trials.

    KerasTuner continues with the next trial after an error that is not one of its fatal errors.
    """
    calls = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "search")
    if not any(call.f_globals.get("__name__", "").startswith("keras_tuner.") for call in calls):
        return
    fatal = sys.modules["keras_tuner"].errors.FatalError
    raise type("UsageError", (UsageError, fatal), {})(
        "tuner.search",
        f"each task of the {job.kind} job would run its own search",
        fix="call tfdist.tuning.search(tuner, ..., strategy=...) in a single process",
        code="search-in-a-job",
    )


@contextlib.contextmanager
def own_initial_values(job: Job) -> Iterator[None]:
    """Initialize variables inside the block from this worker's values, not the chief's.

    Creating these variables is not a collective, and their shapes may differ between workers.
    """
    extended = job.strategy.extended
    before = extended._get_variable_creator_initial_value

    def creator(*, initial_value: Any, dtype: Any = None, **where: Any) -> Callable[[], Any]:
        return lambda: _own_value(initial_value, dtype, where["device"])

    extended._get_variable_creator_initial_value = creator
    try:
        yield
    finally:
        extended._get_variable_creator_initial_value = before


def _own_value(initial_value: Any, dtype: Any, device: str) -> tf.Tensor:
    with tf.device(device):
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, CheckpointInitialValue):
            value = value.wrapped_value
        return tf.convert_to_tensor(value, dtype=dtype)
