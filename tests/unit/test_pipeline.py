"""Links, schedules and balance of the stages of a pipeline, without TensorFlow."""

import itertools
import socket

import ml_dtypes
import numpy as np
import pytest

from tfdist import phases
from tfdist.errors import PeerLost
from tfdist.pipeline.link import StageLink
from tfdist.pipeline.schedule import (
    SCHEDULES,
    Pass,
    balanced,
    micro_sizes,
    most_kept,
    passes,
    timeline,
)

ARRAYS = [
    np.float32(3.5),
    np.zeros((0, 4), np.int64),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.array([True, False]),
    np.arange(4).astype(ml_dtypes.bfloat16),
    np.ones((1 << 22,), np.float32),
]


@pytest.fixture
def sockets():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def ends(sockets):
    yield [StageLink(end, name=f"worker-{1 - i}") for i, end in enumerate(sockets)]
    for end in sockets:
        end.shutdown(socket.SHUT_RDWR)


def test_arrays_arrive_unchanged_in_both_directions_at_once(ends, monkeypatch):
    told = []
    monkeypatch.setattr(phases, "set_at_sum", told.append)
    for end, number in itertools.product(ends, range(4)):
        end.send(f"m{number}", ARRAYS)
    for end, number in itertools.product(ends, range(4)):
        for got, sent in zip(end.receive(f"m{number}"), ARRAYS, strict=True):
            assert (got.dtype, got.shape) == (np.asarray(sent).dtype, np.shape(sent))
            assert got.tobytes() == np.asarray(sent).tobytes()
    assert told == 8 * [True, False]  # while it waits for its neighbour, it says so


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda end, _: end.fail("worker-1: the disk is full"), "^worker-1: the disk is full$"),
        (lambda _, far: far.shutdown(socket.SHUT_RDWR), "lost worker-1: it closed the"),
        (lambda end, _: end.send("F2", []), "sent F2, but this stage expects F1"),
    ],
)
def test_the_failure_of_a_neighbour_follows_its_data(ends, sockets, act, says):
    near, far = ends
    far.send("F0", [np.zeros(3)])
    near.receive("F0")
    act(far, sockets[1])
    for _ in range(2):
        with pytest.raises(PeerLost, match=says):
            near.receive("F1")


SHAPES = list(itertools.product(range(1, 6), range(1, 9)))


def orders(kind, stages, micros):
    return [passes(kind, stage=stage, stages=stages, micros=micros) for stage in range(stages)]


def step_of(kind, stages, micros, *, seconds=1.0, backward=1):
    each = np.broadcast_to(seconds, stages).tolist()
    ways = {"forward_s": each, "backward_s": [backward * s for s in each]}
    return timeline(orders(kind, stages, micros), **ways)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_micro_batch_passes_once_without_deadlock(kind):
    for stages, micros in SHAPES:
        step_of(kind, stages, micros, backward=2)
        for order in orders(kind, stages, micros):
            assert sorted(order) == [Pass(f, m) for f in (False, True) for m in range(micros)]
            assert [one.micro for one in order if not one.forward] == list(range(micros))


def test_1f1b_keeps_fewer_activations_than_gpipe():
    kept = {kind: list(map(most_kept, orders(kind, 4, 20))) for kind in SCHEDULES}
    assert kept == {"1f1b": [6, 5, 4, 1], "gpipe": [20] * 4, "serial": [1] * 4}


def test_the_bubble_of_equal_stages_equals_the_papers():
    for stages, micros in SHAPES:
        expected = pytest.approx((stages - 1) / (micros + stages - 1))
        assert step_of("1f1b", stages, micros).bubble == expected
        assert step_of("gpipe", stages, micros).bubble == expected
    assert step_of("serial", 4, 3).bubble == pytest.approx(3 / 4)


def test_micro_batches_differ_by_one_example_at_the_most():
    for batch, size in itertools.product(range(1, 40), range(1, 45)):
        sizes = micro_sizes(batch, split_size=size)
        assert sum(sizes) == batch
        assert max(sizes) <= min(size, min(sizes) + 1)


def slowest(seconds, cuts):
    bounds = [0, *(cut + 1 for cut in cuts), len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_cut_has_a_faster_slowest_stage(stages):
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    every = itertools.combinations(range(7), stages - 1)
    least = min(slowest(seconds, cuts) for cuts in every)
    assert slowest(seconds, balanced(seconds, [1] * 7, stages=stages)) == least


def test_first_stages_may_have_more_work():
    assert balanced([1.0] * 21, [1] * 20, stages=2) in ((9,), (10,))
    assert balanced([1.0] * 21, [1] * 20, stages=2, lead=0.1) == (10,)
    late, early = (
        step_of("1f1b", 2, 10, seconds=each, backward=2).makespan_s for each in ((10, 11), (11, 10))
    )
    assert early < 0.96 * late


@pytest.mark.parametrize(
    ("seconds", "crossing_bytes", "trainable", "cut"),
    [
        ([1.0, 0.01, 1.0], [100, 10], None, (1,)),
        ([1.0, 0.01, 1.0], [10, 100], None, (0,)),
        ([1.0, 0.03, 1.01], [10, 10], None, (1,)),  # the faster of two as small
        ([9.0, 0.1, 5.0], [1, 1], None, (0,)),
        ([9.0, 0.1, 5.0], [1, 1], [False, True, True], (1,)),  # each stage has weights to train
    ],
)
def test_equally_fast_cuts_prefer_fewer_crossing_bytes(seconds, crossing_bytes, trainable, cut):
    assert balanced(seconds, crossing_bytes, stages=2, trainable=trainable) == cut
