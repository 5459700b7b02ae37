"""Agreement of a job's tasks: they compare what each has read, and the weights it computes with.

Each task takes its part of the same batches. Where tasks read different ones, by a shuffle or a
generator of each process's own, another order of files or another version of them, some examples
are seen twice and some never, and nothing fails. So tasks compare what they read: examples spread
over data by index before the first step; of data that come as batches the first one that is read
and one of 512 after it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
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

if TYPE_CHECKING:
    from tfdist.training.feed import Feed

_LOG = logging.getLogger(__name__)
_DIGEST_EVERY_STEPS = 512
_EXAMPLES_BY_GRAPH = 32
_EXAMPLES_BY_PYTHON = 8
_SAME_WEIGHTS = 1e-4
"""Sums of weights that differ by less, of the sum of their sizes, differ by rounding."""

Digest = tuple[int, int]
"""Of a whole batch, and of its targets alone; 48 bits each, which a float64 holds."""


def leaves_of(batch: Any) -> list[Any]:
    """Return the tensors of a batch, those that a sparse or ragged one is made of, too."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def digest_is_due(step: Any, *, first: int) -> Any:
    """Return whether tasks compare the batch of `step`, an int or tensor, read from `first` on."""
    return (step == first) | (step % _DIGEST_EVERY_STEPS == 0)


def digest_of(leaves: Sequence[Any]) -> int:
    """Return the digest of arrays, 48 bits."""
    found = hashlib.blake2b(digest_size=6)
    for leaf in leaves:
        array = np.asarray(leaf)
        found.update(f"{array.shape}{array.dtype}".encode())
        is_text = array.dtype.kind in "OUS"
        found.update(repr(array.tolist()).encode() if is_text else array.tobytes())
    return int.from_bytes(found.digest(), "little")


def digests_of(batch: Any) -> Digest:
    """Return the digests of a batch of arrays: of all of it, and of the targets alone."""
    return digest_of(leaves_of(batch)), digest_of(leaves_of(unpack(batch)[1]))


def share_random_states(job: Job, source: Source) -> None:
    """Give the random states that a stream's functions capture the chief's values. A collective.

    Such as the seed of a `RandomFlip` that a dataset maps: each process has drawn one of its own.
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
      UsageError: the tasks do not have the same number of examples, or not the same targets or, of
        arrays, inputs at the same indices.
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


def require_same_batches(job: Job, feed: Feed, first: int, last: int) -> None:
    """Compare the batches of ``[first, last)`` of which the feed has a digest. A collective.

    Raises:
      UsageError: the tasks have read different batches.
    """
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
            "data: the inputs of the %s differ between the workers (%s) and the targets do not: "
            "right for random augmentation, wrong for anything else",
            where,
            ", ".join(shown),
        )


def _differ(what: str, seen: Sequence[str]) -> UsageError:
    names = ("the chief", *(f"worker {index}" for index in range(1, len(seen))))
    each = ", ".join(f"{name} {text}" for name, text in zip(names, seen, strict=True))
    return UsageError(
        "data",
        received=f"{what} that differ between the workers: {each}",
        expected="the same in every worker, as each takes its part of a batch",
        fix="seed whatever shuffles or draws, sort lists of files, give every host the same files, "
        "or pass a function of tf.distribute.InputContext if each worker is to read a part of its "
        "own",
        code="tasks-differ",
    )


def require_same_weights(job: Job, model: keras.Model) -> None:
    """Compare the trainable weights of all tasks, up to rounding. A collective.

    Each computes its part of a step with its own. Processors that differ may round otherwise.

    Raises:
      UsageError: a weight differs, as where the chief alone has loaded some.
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
            received=f"{model.trainable_variables[index].path}, whose sums in the tasks are {sums}",
            expected="the same weights in every task",
            fix="set or load them in every task, and not in the chief alone",
            code="tasks-differ",
        )
