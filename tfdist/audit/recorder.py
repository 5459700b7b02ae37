"""Records which examples each step consumes, from the tensors its batch was gathered with.

What is written is evidence: the indices and passes are those that `gather` and augmentation were
given in the compiled step, returned by it, and not computed again beside it. Without a ledger none
of this is in the graph.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tensorflow as tf

from tfdist.audit.ledger import MODES, SALT, Header, LedgerWriter, Record, next_attempt, to_bytes
from tfdist.data.draws import mix_tensor, stream
from tfdist.errors import UsageError, require_one_of
from tfdist.strategy import Job
from tfdist.strategy.devices import threads_of_an_operation
from tfdist.strategy.group import sum_over_tasks

if TYPE_CHECKING:
    from tfdist.training.feed import Feed
    from tfdist.training.program import StepProgram


class Ledger:
    """Writes a run's examples down, step by step; given to `tfdist.fit` by every task.

    Args:
      directory: of the ledger's files, such as ``run_dir/ledger``; each task writes its own.
      mode: ``full``: the index and pass of each example, and a checksum of the batch after
        augmentation; ``hash``: a sum of hashes for each step.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, mode: Literal["full", "hash"] = "full"
    ) -> None:
        fix = "mode='full' lists every example, mode='hash' takes less room"
        require_one_of("Ledger: mode", mode, MODES, fix=fix)
        self._directory = directory
        self._mode = mode
        self._writer: LedgerWriter | None = None

    def recording(self, program: StepProgram, job: Job) -> StepProgram:
        """Return `program` such that it is recorded. A collective: every task calls it alike.

        Raises UsageError for data that do not come by index.
        """
        # Each task of a group writes what its replicas were given; else the chief writes all.
        writes = job.kind == "multiworker" or job.is_chief
        attempts = np.zeros(job.num_replicas)
        attempts[job.replica_ids[0]] = next_attempt(self._directory) if writes else 0
        # The highest of those that write: each may have a directory of its own.
        attempt = sum_over_tasks(job, attempts, of="the ledgers' attempts").max()
        if writes:
            header = header_of(program, job, mode=self._mode, attempt=int(attempt))
            self._writer = LedgerWriter(self._directory, header)
        return with_recorder(program, job, mode=self._mode, sink=self._append)

    def close(self) -> None:
        """Close the file of this task."""
        if self._writer is not None:
            self._writer.close()

    def _append(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.append(record)


def with_recorder(
    program: StepProgram, job: Job, *, mode: str, sink: Callable[[Record], None]
) -> StepProgram:
    """Return `program` such that `sink` gets the records of each range of steps it runs."""
    feed: Feed = program.feed
    batch, examples = feed.plan.global_batch_size, feed.order.examples
    if not feed.can_record or examples is None:
        raise UsageError(
            "ledger",
            received=f"data that come ready: {feed.source.describe()}",
            expected="data by index, whose examples have numbers",
            fix="pass arrays, a map-style dataset or a TFDS name, or leave the ledger out",
            code="unsupported-data",
        )
    feed.records = True
    recorder = Recorder(
        mode=mode,
        replicas=len(job.replica_ids),
        width=-(-batch // job.num_replicas),
        passes=(batch + examples - 2) // examples + 1,
        sink=sink,
    )
    return dataclasses.replace(program, recorder=recorder)


def header_of(program: StepProgram, job: Job, *, mode: str, attempt: int) -> Header:
    """Return what this task's file says of the run."""
    feed: Feed = program.feed
    return Header(
        mode=mode,
        attempt=attempt,
        task=job.name,
        num_tasks=job.num_replicas // len(job.replica_ids),
        strategy=job.kind,
        num_replicas=job.num_replicas,
        threads=threads_of_an_operation(),
        num_examples=feed.order.examples or 0,
        shuffle=feed.order.shuffle,
        seed=program.seed,
        global_batch_size=feed.plan.global_batch_size,
        example_starts=feed.plan.example_starts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorder:
    """The part of a recorded program that is in its graph; see `ledger.Record`.

    Attributes:
      mode: ``full`` or ``hash``.
      replicas: of this task.
      width: examples of the largest share.
      passes: that one step can touch.
      sink: is given the record of each range, when it is done.
    """

    mode: str
    replicas: int
    width: int
    passes: int
    sink: Callable[[Record], None]

    def rows(self, steps: tf.Tensor) -> list[tf.TensorArray]:
        """Room for a row of each of `steps` steps; in graph, before the loop."""
        size = tf.cast(steps, tf.int32)
        return [
            tf.TensorArray(spec.dtype, size=size, element_shape=spec.shape)
            for spec in self._specs()
        ]

    def noted(
        self, rows: Sequence[tf.TensorArray], at: tf.Tensor, parts: Sequence[Any]
    ) -> tuple[tf.TensorArray, ...]:
        """Note what the replicas are given in a step; in graph, in the loop's body."""
        with tf.device("/device:CPU:*"):
            row = self._examples(parts) if self.mode == "full" else self._sums(parts)
            at = tf.cast(at, tf.int32)
            return tuple(array.write(at, value) for array, value in zip(rows, row, strict=True))

    def write(
        self, first: int, last: int, rows: Sequence[Any], *, worker: int = -1, begun: int = 1
    ) -> None:
        """Hands the rows of the steps ``[first, last)`` on."""
        payload = to_bytes([np.asarray(row) for row in rows])
        self.sink(Record(first=first, last=last, worker=worker, begun=begun, payload=payload))

    def _specs(self) -> list[tf.TensorSpec]:
        if self.mode == "full":
            each = tf.TensorSpec([self.replicas, self.width], tf.int64)
            return [each, each, tf.TensorSpec([], tf.uint64)]
        sums = [tf.TensorSpec([self.passes], dtype) for dtype in (tf.int64, tf.uint64)]
        return [tf.TensorSpec([], tf.int64), *sums]

    def _examples(self, parts: Sequence[Any]) -> list[tf.Tensor]:
        indices = tf.stack([self._padded(part.examples[0], part.count) for part in parts])
        passes = tf.stack([self._padded(part.examples[1], part.count) for part in parts])
        content = [_sum(tf.where(_counts(part), _content(part), _zero())) for part in parts]
        return [indices, passes, _sum(tf.stack(content))]

    def _sums(self, parts: Sequence[Any]) -> list[tf.Tensor]:
        counts = tf.concat([_counts(part) for part in parts], 0)
        indices = tf.boolean_mask(tf.concat([p.examples[0] for p in parts], 0), counts)
        passes = tf.boolean_mask(tf.concat([p.examples[1] for p in parts], 0), counts)
        lowest = tf.reduce_min(passes)
        hashes = _pair_hash(indices, passes)
        numbers, sums = [], []
        for more in range(self.passes):
            mine = tf.equal(passes, lowest + more)
            numbers.append(tf.reduce_sum(tf.cast(mine, tf.int64)))
            sums.append(_sum(tf.where(mine, hashes, _zero())))
        return [lowest, tf.stack(numbers), tf.stack(sums)]

    def _padded(self, values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        room = self.width - tf.cast(count, tf.int32)
        values = tf.pad(values[:count], [[0, room]], constant_values=-1)
        return tf.ensure_shape(values, [self.width])


def _counts(part: Any) -> tf.Tensor:
    """Which of a part's examples count; a share that is empty has one that does not."""
    return tf.range(tf.size(part.examples[0], tf.int64), dtype=tf.int64) < part.count


def _pair_hash(indices: tf.Tensor, passes: tf.Tensor) -> tf.Tensor:
    return stream(stream(SALT, passes), indices)


def _content(part: Any) -> tf.Tensor:
    """A checksum of each example as the model gets it, uint64[b]; a function of its bits."""
    indices, passes = part.examples
    total = _pair_hash(indices, passes)
    for number, leaf in enumerate(leaf for leaf in tf.nest.flatten(part.data) if leaf is not None):
        words = _words(leaf)
        places = tf.range(tf.shape(words, tf.int64)[1], dtype=tf.int64)
        weights = tf.bitwise.bitwise_or(stream(number + 1, places), tf.constant(1, tf.uint64))
        total = mix_tensor(total + _sum(words * weights, axis=1))
    return total


def _words(leaf: tf.Tensor) -> tf.Tensor:
    """Return the bits of a batch as integers, uint64 ``[b, numbers of an example]``."""
    size = tf.shape(leaf)[0]
    if leaf.dtype == tf.string:
        leaf = tf.strings.to_hash_bucket_fast(leaf, 2**62)
    if leaf.dtype.is_floating:
        unsigned = {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}[leaf.dtype.size]
        leaf = tf.bitcast(leaf, unsigned)
    elif leaf.dtype.is_complex:
        leaf = tf.bitcast(leaf, tf.uint8)
    width = tf.reduce_prod(tf.shape(leaf)[1:])
    return tf.reshape(tf.cast(leaf, tf.uint64), [size, width])


def _sum(values: tf.Tensor, axis: int | None = None) -> tf.Tensor:
    """Sum uint64 modulo 2**64."""
    total = tf.reduce_sum(tf.bitcast(values, tf.int64), axis=axis)
    return tf.bitcast(total, tf.uint64)


def _zero() -> tf.Tensor:
    return tf.constant(0, tf.uint64)
