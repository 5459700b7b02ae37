"""Links between stages: each end here is in the same process."""

import socket

import ml_dtypes
import numpy as np
import pytest

from tfdist import phases
from tfdist.errors import PeerLost
from tfdist.pipeline.link import StageLink


@pytest.fixture
def ends():
    before, after = socket.socketpair()
    yield StageLink(after, name="stage 1"), StageLink(before, name="stage 0")
    for end in (before, after):
        end.shutdown(socket.SHUT_RDWR)
        end.close()


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3.5),
        np.zeros((0, 4), np.int64),
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.array([True, False]),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.ones((1 << 22,), np.float32),
    ],
    ids=["scalar", "empty", "matrix", "transposed", "bool", "bfloat16", "large"],
)
def test_arrays_arrive_as_they_were_sent(ends, array):
    ends[0].send("F0", [array, np.int32(7)])
    got, seven = ends[1].receive("F0")
    assert got.dtype == np.asarray(array).dtype
    assert got.shape == np.shape(array)
    assert got.tobytes() == np.asarray(array).tobytes()
    assert seven == 7


def test_both_directions_at_once_do_not_wait_for_each_other(ends):
    large = np.ones(1 << 22, np.float32)
    for end in ends:
        for number in range(4):
            end.send(f"m{number}", [large])
    for end in ends:
        for number in range(4):
            assert end.receive(f"m{number}")[0].size == large.size


def test_a_failed_neighbour_says_why_after_what_it_had_sent(ends):
    ends[0].send("F0", [np.zeros(3)])
    ends[0].fail("worker-1 (stage 1): the disk is full")
    ends[1].receive("F0")
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"^worker-1 \(stage 1\): the disk is full$"):
            ends[1].receive("F1")


def test_a_neighbour_that_dies_is_named():
    near, far = socket.socketpair()
    link = StageLink(near, name="worker-1")
    far.close()
    with pytest.raises(PeerLost, match="worker-1 has gone: it has closed its connection"):
        link.receive("F0")
    near.close()


def test_stages_at_different_messages_are_told(ends):
    ends[0].send("F1", [])
    with pytest.raises(PeerLost, match="is at F1, where this stage is at F0"):
        ends[1].receive("F0")


def test_a_stage_that_waits_for_its_neighbour_says_that_it_waits(ends, monkeypatch):
    told = []
    monkeypatch.setattr(phases, "set_at_sum", told.append)
    ends[0].send("F0", [])
    ends[1].receive("F0")
    assert told == [True, False]
