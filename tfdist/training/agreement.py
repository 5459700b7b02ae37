"""Agreement check: the tasks of a job compare digests of the data they read.

Each task takes its part of the same batches. Where tasks read different ones, by a shuffle or a
generator of each process's own, another order of files or another version of them, some examples
are seen twice and some never, and nothing fails. So tasks compare what they read: examples spread
over data by index before the first step; of data that come as batches the first one that is read
and one of 512 after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.data.arrays import ArraySource
from tfdist.data.python_indexed import PythonSource
from tfdist.data.source import GraphSource, Source
from tfdist.data.stream import StreamSource
from tfdist.data.stream_graph import random_states
from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.feed import Digest, Feed, Layout, digests_of

_LOG = logging.getLogger(__name__)
_EXAMPLES_BY_GRAPH = 32
_EXAMPLES_BY_PYTHON = 8
_FIX = (
    "seed whatever shuffles or draws, sort lists of files, give every host the same files, or pass "
    "a function of tf.distribute.InputContext if each worker is to read a part of its own"
)


def share_random_states(job: Job, source: Source) -> None:
    """Give the random states that a stream's functions capture the chief's values. A collective.

    Such as the seed of a `RandomFlip` that a dataset maps: each process has drawn one of its own.
    """
    if not isinstance(source, StreamSource) or Layout.of(job).num_tasks == 1:
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
    if Layout.of(job).num_tasks == 1 or not isinstance(source, GraphSource | PythonSource):
        return
    count = source.num_examples or 0
    most = _EXAMPLES_BY_GRAPH if isinstance(source, GraphSource) else _EXAMPLES_BY_PYTHON
    indices = np.unique(np.linspace(0, max(count - 1, 0), most).astype(np.int64))
    if isinstance(source, GraphSource):
        found = source.gather(tf.constant(indices))
        found = tf.nest.map_structure(lambda leaf: leaf.numpy(), found)
    else:
        found = source.fetch(indices)
    counts = _of_all_tasks(job, [float(count)])
    if len({tuple(row) for row in counts}) > 1:
        raise _differ(job, "numbers of examples", [f"{int(row[0]):,}" for row in counts])
    whole = isinstance(source, ArraySource)
    _require_same(job, digests_of(found), where="examples at the same indices", inputs_too=whole)


def require_same_batches(job: Job, feed: Feed, first: int, last: int) -> None:
    """Compare the batches of ``[first, last)`` of which the feed has a digest. A collective.

    Raises:
      UsageError: the tasks have read different batches.
    """
    for step in sorted(step for step in feed.digests if step < last):
        digest = feed.digests.pop(step)
        if step >= first:
            _require_same(
                job, digest, where=f"batches of step {step}", inputs_too=feed.digests_cover_inputs
            )


def _require_same(job: Job, digest: Digest, *, where: str, inputs_too: bool) -> None:
    words = [float(part) for value in digest for part in divmod(value, 2**32)]
    rows = _of_all_tasks(job, words)
    whole, targets = ({tuple(row[part]) for row in rows} for part in (slice(0, 2), slice(2, 4)))
    if len(targets) > 1 or (len(whole) > 1 and inputs_too):
        raise _differ(job, where, [f"digest {_hex(row)}" for row in rows])
    if len(whole) > 1 and job.is_chief and where.startswith("batches"):
        _LOG.warning(
            "data: the inputs of the %s differ between the workers (%s) and the targets do not: "
            "right for random augmentation, wrong for anything else",
            where,
            ", ".join(map(_hex, rows)),
        )


def _hex(row: np.ndarray) -> str:
    return f"{int(row[0]) * 2**32 + int(row[1]):016x}"


def _of_all_tasks(job: Job, values: Sequence[float]) -> np.ndarray:
    """Return each task's numbers, float64 ``[tasks, len(values)]``. A collective."""
    layout = Layout.of(job)
    table = np.zeros((layout.num_tasks, len(values)))
    table[layout.task_index] = values
    whole = sum_over_tasks(job, table.reshape(-1), of="digests of the data")
    return whole.reshape(table.shape)


def _differ(job: Job, what: str, seen: Sequence[str]) -> UsageError:
    names = ("the chief", *(f"worker {index}" for index in range(1, len(seen))))
    each = ", ".join(f"{name} {text}" for name, text in zip(names, seen, strict=True))
    return UsageError(
        "data",
        received=f"{what} that differ between the workers: {each}",
        expected="the same in every worker, as each takes its part of a batch",
        fix=_FIX,
        code="tasks-differ",
    )
