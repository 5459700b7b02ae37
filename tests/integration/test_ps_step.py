"""What a step of a ps job makes, and what its servers keep, without the job."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import GraphFeed, Layout, Order

X = np.arange(60, dtype=np.float32).reshape(20, 3)


def shifted(batch, **which):
    return keras.tree.map_structure(lambda leaf: leaf + 1.0, batch)


@pytest.mark.parametrize("transform", [None, shifted])
def test_a_worker_makes_its_batches_itself_unless_they_are_transformed(transform):
    source = ArraySource(X).with_transform(transform)
    plan = EpochPlan.uniform(epochs=2, examples=20, global_batch_size=4)
    order = Order(examples=20, shuffle=True)
    feed = GraphFeed(source, plan, layout=Layout(), seed=1, order=order)
    steps = range(3, 9)

    @tf.function(autograph=False)
    def parts(given):
        part_of = feed.worker_parts(given, steps.start, steps.stop)
        return [part_of(tf.constant(step, tf.int64)).data for step in steps]

    given = iter(feed.worker_dataset())
    expected = [feed.at(tf.constant(step, tf.int64))[0].data for step in steps]
    for found, batch in zip(parts(given), expected, strict=True):
        for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(batch), strict=True):
            np.testing.assert_array_equal(one, other)
    # A dataset is traced, optimized and started anew in each piece of work.
    kinds = {op.type for op in parts.get_concrete_function(given).graph.get_operations()}
    assert any("Dataset" in kind for kind in kinds) == (transform is not None)


FREED = """
import ctypes, os, resource, sys
from tfdist.strategy.memory import keep_freed_memory
assert keep_freed_memory(os.environ) == (sys.argv[1] == "kept")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(5_000_000) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 5_000_000)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_server_keeps_the_memory_of_freed_tensors(monkeypatch):
    def faults(expected):
        command = [sys.executable, "-c", FREED, expected]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)

    assert faults("kept") < 1000
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")  # the user's word goes before ours
    assert faults("given back") > 40_000
