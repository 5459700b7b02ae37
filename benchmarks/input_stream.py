"""A shuffled `tf.data` stream as one of two tasks reads it, with digests that tasks compare."""

from __future__ import annotations

import argparse
import functools
import types
from typing import Any

import harness
import input_by_index
import row

NAME = "input_stream"
SIDES = ("compared", "alone", "stock")


def measure(side: str, args: argparse.Namespace) -> None:
    """As one of two tasks, as a task that has nobody to compare with, or by TensorFlow alone."""
    import tensorflow as tf

    x, y = input_by_index.arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shuffle(input_by_index.EXAMPLES).repeat().batch(input_by_index.BATCH)
    if side == "stock":
        input_by_index.drain(NAME, side, dataset.prefetch(2), args)
        return
    parts = _feed(dataset.prefetch(2), tasks=2 if side == "compared" else 1).dataset(0, 10**9)
    input_by_index.drain(NAME, side, parts.map(lambda part: part[0]), args)


def _feed(dataset: Any, *, tasks: int) -> Any:
    from tfdist.cluster import KINDS
    from tfdist.data.stream import StreamSource
    from tfdist.training.epochs import EpochPlan
    from tfdist.training.feed import Order, StreamFeed

    batch = input_by_index.BATCH
    return StreamFeed(
        StreamSource(dataset),
        EpochPlan.uniform(epochs=1, examples=batch * 10**9, global_batch_size=batch),
        job=types.SimpleNamespace(
            kind=KINDS["multiworker" if tasks > 1 else "single"],
            num_replicas=1,
            replica_ids=(0,),
            num_tasks=tasks,
            task_index=0,
            num_workers=1,
        ),
        seed=7,
        order=Order(examples=None, shuffle=True),
    )


def _of(side: str, other: str) -> Any:
    def ratio(pair: row.Pair) -> float:
        mine = row.figure(pair, side, "examples_per_s")
        return mine / row.figure(pair, other, "examples_per_s")

    return ratio


ROW = row.Row(
    name=NAME,
    title="input: the same images as a shuffled tf.data stream, read by one of two tasks",
    sides={
        side: functools.partial(row.script, f"{NAME}.py", side, core=harness.core_of(0))
        for side in SIDES
    },
    claims=(
        row.Claim(
            what="examples/s with digests that tasks compare / without",
            value=_of("compared", "alone"),
            target=0.97,
            at_least=True,
            unit="x",
            expected="0.99: one batch of 512 is hashed, and each is handed on by one map more",
        ),
        row.Claim(
            what="examples/s as fit reads the stream / the same dataset by TensorFlow alone",
            value=_of("alone", "stock"),
            target=None,
            at_least=True,
            unit="x",
            expected="0.9: the parts of a batch are made by one map more",
        ),
    ),
    notes="Each task reads the whole batch and takes its part; here the part is the whole.",
)


if __name__ == "__main__":
    row.main(ROW, {side: functools.partial(measure, side) for side in SIDES})
