"""Checks that a job's tasks read the same data and compute with the same weights.

Each task uses its part of the same batches. Tasks can read different batches, for example because
of an unseeded shuffle or different files. Some examples are then used twice and others never, with
no error. So tasks compare their data. For data by index, they compare some examples before the
first step. For ready-made batches, they compare the first batch and then every 512th batch. They
also compare the number of batches, before the first step if it is known. Otherwise they compare
the ends of their data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.arrays import ArraySource
from tfdist.data.python_indexed import PythonSource
from tfdist.data.source import GraphSource, Source, unpack
from tfdist.data.stream import StreamSource, random_states
from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import of_all_tasks
from tfdist.strategy.ring import Members

if TYPE_CHECKING:
    from tfdist.training.feed import Feed

_LOG = logging.getLogger(__name__)
_DIGEST_EVERY_STEPS = 512
_EXAMPLES_BY_GRAPH = 32
_EXAMPLES_BY_PYTHON = 8
_SAME_WEIGHTS = 1e-4
"""Relative difference of sums of weights below which the difference is due to rounding."""

Digest = tuple[int, int]
"""Digests of a whole batch and of its targets, 48 bits each to fit into a float64."""


def leaves_of(batch: Any) -> list[Any]:
    """Return a batch's tensors, including the components of sparse and ragged tensors."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def digest_is_due(step: Any, *, first: int) -> Any:
    """Return whether tasks compare the batch of `step` (int or tensor) in a run from `first`."""
    return (step == first) | (step % _DIGEST_EVERY_STEPS == 0)


def digest_of(leaves: Sequence[Any]) -> int:
    """Return the 48-bit digest of arrays."""
    found = hashlib.blake2b(digest_size=6)
    for leaf in leaves:
        array = np.asarray(leaf)
        found.update(f"{array.shape}{array.dtype}".encode())
        is_text = array.dtype.kind in "OUS"
        found.update(repr(array.tolist()).encode() if is_text else array.tobytes())
    return int.from_bytes(found.digest(), "little")


def digests_of(batch: Any) -> Digest:
    """Return the digests of a batch of arrays, and of its targets only."""
    return digest_of(leaves_of(batch)), digest_of(leaves_of(unpack(batch)[1]))


def share_random_states(job: Job, source: Source) -> None:
    """Copy the chief's random states to the functions of a stream in all tasks. A collective.

    An example is the seed of a mapped `RandomFlip`, which each process draws independently.
    """
    if not isinstance(source, StreamSource) or job.num_tasks == 1:
        return
    for handle in random_states(source.dataset_for()):
        dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        chiefs = broadcast(value.numpy())
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(chiefs, dtype))


def require_same_examples(job: Job, source: Source) -> None:
    """Compare some examples of data by index. A collective of the training tasks.

    Raises:
      UsageError: the tasks have different numbers of examples, or different targets at the same
        indices. For arrays, different inputs also raise it.
    """
    if job.num_tasks == 1 or not isinstance(source, GraphSource | PythonSource):
        return
    count = source.num_examples or 0
    most = _EXAMPLES_BY_GRAPH if isinstance(source, GraphSource) else _EXAMPLES_BY_PYTHON
    indices = np.unique(np.linspace(0, max(count - 1, 0), most).astype(np.int64))
    if isinstance(source, GraphSource):
        found = source.gather(tf.constant(indices))
        found = tf.nest.map_structure(lambda leaf: leaf.numpy(), found)
    else:
        found = source.fetch(indices)
    counts = of_all_tasks(job, [float(count)], of="digests of the data")
    if len({tuple(row) for row in counts}) > 1:
        raise _differ("numbers of examples", [f"{int(row[0]):,}" for row in counts])
    whole = isinstance(source, ArraySource)
    _require_same(job, digests_of(found), where="examples at the same indices", inputs_too=whole)


_FIXES = {
    "batches": "give every task all batches of the data. To read a separate part in each task, "
    "pass a function of tf.distribute.InputContext and steps_per_epoch",
    "steps of an epoch": "give every task the same number of batches, or pass steps_per_epoch",
    "sets of validation data": "pass validation_data in every task",
    "batch_size": "pass the same batch size in all tasks (it counts the examples of all tasks)",
}


def require_same_lengths(job: Job, lengths: Mapping[str, int]) -> None:
    """Compare numbers that set the length of the run. A collective of the training tasks.

    Raises:
      UsageError: a number differs. The error names two tasks and the number in each.
    """
    if not job.has_peers:
        return
    table = of_all_tasks(job, list(lengths.values()), of="lengths of the run")
    for name, numbers in zip(lengths, table.T, strict=True):
        (others,) = np.nonzero(numbers != numbers[0])
        for other in others[:1]:
            raise UsageError(
                name,
                f"{_number(numbers[0])} in {_task(job, 0)} and {_number(numbers[other])} in "
                f"{_task(job, other)}",
                fix=_FIXES.get(name, f"pass the same {name} in every task"),
                code="tasks-differ",
            )


def _number(value: float) -> str:
    return "an unknown number" if value < 0 else f"{int(value):,}"


def _task(job: Job, index: int) -> str:
    """Return the name of the training task with this index."""
    if job.shards is not None:  # it may have joined later
        return f"worker-{index}"
    return str(job.config.cluster.training_tasks()[index]) if job.config else f"task {index}"


def _require_same_ends(job: Job, feed: Feed, last: int) -> None:
    """Compare the batch counts below `last` at which the tasks' data ended. A collective."""
    mine = sorted(end for end in list(feed.ends or ()) if end < last)
    row = (len(mine), mine[0], mine[-1]) if mine else (0, -1, -1)
    table = of_all_tasks(job, row, of="ends of the data").astype(np.int64)
    if feed.ends is not None:
        del feed.ends[: len(mine)]
    (others,) = np.nonzero((table != table[0]).any(axis=1))
    if others.size:
        absent = job.ring.absent if isinstance(job.ring, Members) else ()
        ends = ((end, index) for index, end in enumerate(table[:, 1]) if index not in absent)
        firsts = [(end if end >= 0 else last, index) for end, index in ends]
        (first, one), (later, other) = min(firsts), max(firsts)
        end = f"after {later:,} batches" if later < last else "not"
        raise UsageError(
            "data",
            f"the data ended after {first:,} batches in {_task(job, one)}, but {end} in "
            f"{_task(job, other)}",
            fix="give every task the same files, and a generator that starts again for each pass",
            code="data-ended",
        )


def require_same_batches(job: Job, feed: Feed, first: int, last: int) -> None:
    """Compare the feed's digests of the batches ``[first, last)``. A collective.

    Raises:
      UsageError: tasks read different batches, or the data ended earlier in some task.
    """
    if feed.ends is not None:
        _require_same_ends(job, feed, last)
    for step in sorted(step for step in list(feed.digests) if step < last):  # threads add to it
        digest = feed.digests.pop(step)
        if step >= first:
            _require_same(
                job, digest, where=f"batches of step {step}", inputs_too=feed.digests_cover_inputs
            )


def _require_same(job: Job, digest: Digest, *, where: str, inputs_too: bool) -> None:
    whole, targets = of_all_tasks(job, digest, of="digests of the data").T
    shown = [f"digest {int(value):012x}" for value in whole]
    if len(set(targets)) > 1 or (len(set(whole)) > 1 and inputs_too):
        raise _differ(where, shown)
    if len(set(whole)) > 1 and job.is_chief and where.startswith("batches"):
        _LOG.warning(
            "data: the inputs of the %s differ between the workers (%s), but the targets do not: "
            "right for random augmentation, wrong for anything else",
            where,
            ", ".join(shown),
        )


def _differ(what: str, seen: Sequence[str]) -> UsageError:
    names = ("the chief", *(f"worker {index}" for index in range(1, len(seen))))
    each = ", ".join(f"{name} {text}" for name, text in zip(names, seen, strict=True))
    return UsageError(
        "data",
        f"the {what} differ between the workers: {each}",
        fix="seed every shuffle and random draw, sort lists of files, and give every host the same "
        "files. To read a separate part in each worker, pass a function of "
        "tf.distribute.InputContext",
        code="tasks-differ",
    )


def require_same_weights(job: Job, model: keras.Model) -> None:
    """Compare the trainable weights of all tasks, up to rounding. A collective.

    Each task computes with its own weights. Different processors may round differently.

    Raises:
      UsageError: a weight differs, for example because only the chief loaded weights.
    """
    if not job.has_peers:
        return
    tensors = [tf.cast(variable, tf.float32) for variable in model.trainable_variables]
    pairs = [(tf.reduce_sum(t).numpy(), tf.reduce_sum(tf.abs(t)).numpy()) for t in tensors]
    table = of_all_tasks(job, np.ravel(pairs), of="sums of weights")
    table = table.reshape(job.num_tasks, len(pairs), 2)
    apart = np.abs(table - table[0]).max(axis=(0, 2), initial=0.0)
    (differing,) = np.nonzero(apart > _SAME_WEIGHTS * table[0, :, 1])
    for index in differing[:1]:
        sums = ", ".join(f"{total:g}" for total in table[:, index, 0])
        raise UsageError(
            "weights",
            f"{model.trainable_variables[index].path} has different sums in the tasks: {sums}",
            fix="set or load the weights in every task, not only in the chief",
            code="tasks-differ",
        )
