"""A ledger: the examples that each step of a run consumed, and the proof that it missed none.

`Ledger` is a callback of `tfdist.fit`. Each task appends JSON lines to a file of its own: the
indices and passes that the compiled step gathered, returned by the step and not computed again,
and a checksum of each step's batch after augmentation. `read` joins the files of all attempts, and
`prove` checks that each example of each pass was consumed exactly once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.draws import example_at_numpy, mix_tensor, stream
from tfdist.strategy import Job
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.epochs import EpochPlan
from tfdist.training.program import RunObserver, StepProgram


class Ledger(RunObserver):
    """Writes the examples of each step to `directory`; every task passes one to `fit`."""

    def __init__(self, directory: Any) -> None:
        super().__init__()
        self._directory = Path(directory)

    def observe(self, program: StepProgram, job: Job) -> Recorder:
        feed = program.feed
        assert feed.can_record, f"no indices: {feed.source.describe()}"
        feed.records = True
        # Under multiworker each task writes its replicas' examples; else the chief writes all.
        writes = job.kind.name == "multiworker" or job.is_chief
        attempts = np.zeros(job.num_replicas)
        known = [int(path.name.split("-")[1]) for path in self._directory.glob("attempt-*")]
        attempts[job.replica_ids[0]] = max(known, default=0) + 1 if writes else 0
        attempt = int(sum_over_tasks(job, attempts, of="the ledgers' attempts").max())
        header = {
            "num_tasks": job.num_replicas // len(job.replica_ids),
            "num_replicas": job.num_replicas,
            "num_examples": feed.order.examples,
            "shuffle": feed.order.shuffle,
            "seed": program.seed,
            "global_batch_size": feed.plan.global_batch_size,
            "example_starts": list(feed.plan.example_starts),
        }
        path = self._directory / f"attempt-{attempt}-{job.name}.jsonl"
        width = -(-feed.plan.global_batch_size // job.num_replicas)
        return Recorder(len(job.replica_ids), width, header, path if writes else None)


class Recorder:
    """The part of a recorded program that is in its graph.

    Args:
      replicas: Number of replicas of this task.
      width: Number of examples of the largest batch fraction.
      header: First line of the file.
      path: File of this task; None if the task writes none.
    """

    def __init__(self, replicas: int, width: int, header: dict[str, Any], path: Path | None):
        self._replicas, self._width, self._header, self._path = replicas, width, header, path

    def rows(self, steps: tf.Tensor) -> list[tf.TensorArray]:
        each = tf.TensorSpec([self._replicas, self._width], tf.int64)
        specs = [each, each, tf.TensorSpec([], tf.int64)]
        size = tf.cast(steps, tf.int32)
        return [tf.TensorArray(s.dtype, size=size, element_shape=s.shape) for s in specs]

    def noted(self, rows: Sequence[Any], at: tf.Tensor, parts: Sequence[Any]) -> list[Any]:
        with tf.device("/device:CPU:*"):
            row = [
                tf.stack([self._padded(part.examples[0], part.count) for part in parts]),
                tf.stack([self._padded(part.examples[1], part.count) for part in parts]),
                tf.add_n([tf.reduce_sum(_content(part)[: part.count]) for part in parts]),
            ]
            at = tf.cast(at, tf.int32)
            return [array.write(at, value) for array, value in zip(rows, row, strict=True)]

    def write(
        self, first: int, last: int, rows: Sequence[Any], *, worker: int = -1, begun: int = 1
    ) -> None:
        if self._path is None:
            return
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._header) + "\n")
        indices, passes, content = (np.asarray(row)[: last - first].tolist() for row in rows)
        line = {"first": first, "last": last, "worker": worker, "begun": begun}
        line |= {"indices": indices, "passes": passes, "content": content}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _padded(self, values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        room = self._width - tf.cast(count, tf.int32)
        values = tf.pad(values[:count], [[0, room]], constant_values=-1)
        return tf.ensure_shape(values, [self._width])


def _content(part: Any) -> tf.Tensor:
    """Return a checksum of the bits of each example that the model gets, int64 ``[b]``."""
    indices, passes = part.examples
    total = stream(stream(1, passes), indices)
    for number, leaf in enumerate(leaf for leaf in tf.nest.flatten(part.data) if leaf is not None):
        if leaf.dtype.is_floating:
            leaf = tf.bitcast(leaf, {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}[leaf.dtype.size])
        size, width = tf.shape(leaf)[0], tf.reduce_prod(tf.shape(leaf)[1:])
        words = tf.bitcast(tf.reshape(tf.cast(leaf, tf.uint64), [size, width]), tf.int64)
        weights = tf.bitcast(stream(number + 1, tf.range(width, dtype=tf.int64)), tf.int64)
        mixed = tf.bitcast(tf.reduce_sum(words * (2 * weights + 1), axis=1), tf.uint64)
        total = mix_tensor(total + mixed)
    return tf.bitcast(total, tf.int64)


@dataclasses.dataclass
class Run:
    """What the attempts of a run consumed together.

    Attributes:
      header: First line of the newest file.
      attempts: First step of each attempt.
      steps: By step, the sorted ``(pass, index)`` of its examples, its checksum, and how often
        some worker began it.
    """

    header: dict[str, Any]
    attempts: list[int]
    steps: dict[int, tuple[list[tuple[int, int]], int, int]]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First example of each step of the run, and the end of its last one."""
        starts, batch = self.header["example_starts"], self.header["global_batch_size"]
        plan = EpochPlan.from_boundaries(tuple(starts), global_batch_size=batch)
        return [
            (first, min(first + batch, end))
            for begin, end in itertools.pairwise(plan.example_starts)
            for first in range(begin, end, batch)
        ]


def read(directory: Path) -> Run:
    """Join the files of all attempts; a later attempt's first step voids what followed it."""
    by_attempt: dict[int, list[Path]] = {}
    for path in Path(directory).glob("attempt-*.jsonl"):
        by_attempt.setdefault(int(path.name.split("-")[1]), []).append(path)
    run = Run({}, [], {})
    for _, paths in sorted(by_attempt.items()):
        found: dict[int, list[Any]] = {}
        for path in sorted(paths):
            head, *lines = path.read_text().split("\n")[:-1]  # a cut last line does not count
            run.header = json.loads(head)
            for line in map(json.loads, lines):
                for step in range(line["first"], line["last"]):
                    found.setdefault(step, []).append((line, step - line["first"]))
        run.attempts.append(min(found, default=0))
        run.steps = {s: known for s, known in run.steps.items() if s < run.attempts[-1]}
        for step, rows in sorted(found.items()):
            if len(rows) >= run.header["num_tasks"]:  # all tasks of the attempt recorded it
                run.steps[step] = _joined(rows)
    return run


def _joined(rows: Sequence[tuple[dict[str, Any], int]]) -> tuple[list[tuple[int, int]], int, int]:
    examples: list[tuple[int, int]] = []
    for line, at in rows:
        indices, passes = np.ravel(line["indices"][at]), np.ravel(line["passes"][at])
        pairs = zip(passes.tolist(), indices.tolist(), strict=True)
        examples += [pair for pair in pairs if pair[1] >= 0]
    content = sum(line["content"][at] for line, at in rows) % 2**64
    return sorted(examples), content, max(line["begun"] for line, _ in rows)


def prove(directory: Path) -> list[str]:
    """Return what contradicts that each example of each pass was consumed exactly once."""
    run = read(directory)
    size, spans = run.header["num_examples"], run.spans
    problems = [f"step {step}: begun {n} times" for step, (_, _, n) in run.steps.items() if n > 1]
    done = sorted(run.steps)
    problems += [f"no record of step {step}" for step in range(len(done)) if step not in run.steps]
    positions = np.concatenate([np.arange(*spans[step]) for step in done])
    order = {"num_examples": size, "seed": run.header["seed"], "shuffle": run.header["shuffle"]}
    due = Counter(
        zip(
            (positions // size).tolist(), example_at_numpy(positions, **order).tolist(), strict=True
        )
    )
    seen = Counter(pair for step in done for pair in run.steps[step][0])
    problems += [f"pass {p}, example {i}: missed" for p, i in sorted((due - seen).elements())]
    problems += [f"pass {p}, example {i}: repeated" for p, i in sorted((seen - due).elements())]
    whole = Counter(p for p, _ in due)
    for number, count in whole.items():
        indices = {i for p, i in seen if p == number}
        if count == size and indices != set(range(size)):
            problems.append(f"pass {number}: {len(indices)} of {size} examples")
    return problems


def seen_by_pass(directory: Path) -> list[int]:
    """Return the number of examples that each pass consumed."""
    counts = Counter(p for examples, _, _ in read(directory).steps.values() for p, _ in examples)
    return [counts[number] for number in sorted(counts)]


def differences(directory: Path, other: Path) -> tuple[list[int], list[int]]:
    """Return the steps that had other examples, and those with other bits after augmentation."""
    mine, theirs = read(directory).steps, read(other).steps
    steps = sorted(mine.keys() & theirs.keys())
    assert steps
    return (
        [step for step in steps if mine[step][0] != theirs[step][0]],
        [step for step in steps if mine[step][1] != theirs[step][1]],
    )
