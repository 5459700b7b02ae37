"""The collectives for users, each task a thread with its place in the ring."""

import threading
import tracemalloc
import types

import keras
import numpy as np
import pytest

import tfdist
from tests.refusals import refusal
from tests.unit.test_ring import at_once, ring_of, rings_end
from tfdist.errors import PeerLost, UsageError
from tfdist.strategy import collectives, group
from tfdist.strategy import ring as ring_module

__all__ = ["rings_end"]
TYPES = ["float32", "float16", "bfloat16", "int64", "uint8", "complex64"]


def job_of(ring, rank, count, *, by_ring, shards=None):
    return types.SimpleNamespace(
        ring=ring if by_ring else None,
        hidden=ring,
        task_index=rank,
        num_tasks=count,
        is_chief=rank == 0,
        name=f"worker-{rank}",
        has_peers=True,
        shards=shards,
    )


@pytest.fixture(params=["ring", "tensorflow"])
def tasks(request, monkeypatch):
    """Runs a call with the rank of each of `count` tasks, and returns their results."""
    own = threading.local()
    monkeypatch.setattr(collectives, "_own_job", lambda name: own.job)
    if request.param == "tensorflow":

        def by_tensorflow(job, values, of):
            types = ("float64", "float32", "float16", "bfloat16", "int64", "int32")
            assert values.dtype.name in types, "TensorFlow cannot sum this type"
            return job.hidden.sum(values)[0]

        monkeypatch.setattr(group, "sum_over_tasks", by_tensorflow)

    def run(count, call):
        def one(ring, rank):
            own.job = job_of(ring, rank, count, by_ring=request.param == "ring")
            try:
                return call(rank)
            except BaseException:
                ring.close()  # or the other tasks would wait
                raise

        return at_once(one, ring_of(count), range(count))

    return run


def values_of(rank, dtype):
    """A nest of task `rank`."""
    return {
        "matrix": (np.arange(6).reshape(2, 3) + rank).astype(dtype),
        "empty": [np.zeros((0, 2), dtype), np.array(rank + 1).astype(dtype)],
        "long": np.full(300_001, rank + 1).astype(dtype),
    }


def same(result, expected):
    keras.tree.assert_same_structure(result, expected)
    for one, other in zip(*map(keras.tree.flatten, (result, expected)), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


def stacked(count, dtype):
    return keras.tree.map_structure(
        lambda *each: np.stack(each), *(values_of(rank, dtype) for rank in range(count))
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [2, 3])
def test_every_collective_gives_every_task_its_result(tasks, count, dtype):
    rows, root = stacked(count, dtype), count - 1
    total = keras.tree.map_structure(lambda r: sum(r[1:], r[0]), rows)

    def call(rank):
        mine = values_of(rank, dtype)
        return [
            tfdist.all_gather(mine),
            tfdist.gather(mine, root),
            tfdist.all_reduce(mine),
            tfdist.reduce(mine, root=root),
            tfdist.scatter(rows if rank == root else None, root),
            tfdist.broadcast(mine, root),
        ]

    for rank, results in enumerate(tasks(count, call)):
        gathered, in_root, summed, sum_in_root, scattered, sent = results
        same(gathered, rows)
        same(summed, total)
        same(scattered, values_of(rank, dtype))
        same(sent, values_of(root, dtype))
        if rank == root:
            same(in_root, rows)
            same(sum_in_root, total)
        else:
            assert in_root is sum_in_root is None


def test_collectives_handle_means_and_text(tasks):
    def call(rank):
        value = {"loss": 1.0 + rank, "half": np.array([rank], np.float16)}
        return tfdist.all_reduce(value, "mean"), tfdist.all_gather(["ué", "bc"][rank])

    for means, texts in tasks(2, call):
        same(means, {"loss": np.array(1.5), "half": np.array([0.5], np.float16)})
        assert texts.tolist() == ["ué", "bc"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_nan_and_infinity_arrive(tasks, dtype):
    rows = np.array([[np.nan, 1, np.inf, np.inf], [0, np.nan, 1, -np.inf]]).astype(dtype)

    def call(rank):
        mine = rows[rank]
        given = {"rows": rows, "text": float("nan")} if rank == 0 else None
        return [
            tfdist.all_gather(mine),
            tfdist.all_reduce(mine),
            tfdist.reduce(mine, "mean", root=1),
            tfdist.scatter(given),
            tfdist.broadcast(given),
        ]

    for rank, (gathered, summed, mean, scattered, sent) in enumerate(tasks(2, call)):
        arrived = [gathered, scattered["rows"], sent["rows"]]
        assert [a.tobytes() for a in arrived] == [a.tobytes() for a in (rows, rows[rank], rows)]
        assert [np.isnan(summed).tolist(), np.isinf(summed).tolist()] == [
            [True, True, False, True],
            [False, False, True, False],
        ]
        assert mean is None if rank == 0 else np.isnan(mean[[0, 1, 3]]).all()
        assert np.isnan([scattered["text"], sent["text"]]).all()


@pytest.mark.parametrize("length", [0, 1012, 1013, 1014, 1015, 5000])
def test_a_text_of_any_length_arrives(tasks, length):
    assert tasks(2, lambda rank: tfdist.broadcast("x" * length * (rank == 0))) == ["x" * length] * 2


@pytest.mark.parametrize("tasks", ["ring"], indirect=True)
def test_a_scatter_allocates_only_the_rows_of_the_tasks(tasks):
    rows = np.arange(4 * 750_003, dtype=np.float64).reshape(4, -1)
    tracemalloc.start()
    try:
        own = tasks(4, lambda rank: tfdist.scatter(rows if rank == 0 else None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4.5 * rows[0].nbytes  # and blocks to pass on
    np.testing.assert_array_equal(own, rows)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: tfdist.all_reduce(np.zeros(2 + rank)),
        lambda rank: tfdist.all_reduce(np.zeros(2, ["f4", "f8"][rank])),
        lambda rank: tfdist.all_reduce(1.0, ["sum", "mean"][rank]),
        lambda rank: tfdist.gather(np.zeros(2), root=rank),
        lambda rank: tfdist.broadcast(1, root=rank),
        lambda rank: (tfdist.all_gather, tfdist.all_reduce)[rank](np.zeros(2)),
    ],
    ids=["shapes", "types", "operations", "roots", "broadcasters", "calls"],
)
def test_tasks_with_different_calls_get_both_calls(tasks, call):
    def failing(rank):
        with pytest.raises((UsageError, ConnectionError)) as raised:
            call(rank)
        return raised.value

    errors = tasks(2, failing)
    assert any(isinstance(error, UsageError) for error in errors)
    assert all("but" in str(error) or "different" in str(error) for error in errors)


@pytest.mark.parametrize("tasks", ["ring"], indirect=True)
def test_no_task_takes_the_next_call_for_data_of_an_interrupted_one(tasks, monkeypatch):
    empty, own = collectives.empty, threading.local()

    def too_large(shape, dtype):
        if own.rank == 1 and dtype != np.uint8:
            raise MemoryError
        return empty(shape, dtype)

    monkeypatch.setattr(collectives, "empty", too_large)

    def call(rank):
        own.rank = rank
        try:
            assert tfdist.broadcast(np.array(7.0)) == 7.0
        except MemoryError:
            assert rank == 1
        except PeerLost:
            return "lost"
        with pytest.raises(PeerLost):
            tfdist.all_reduce(1.0)
        return "lost"

    assert tasks(3, call) == ["lost"] * 3


ALONE = [
    ("all_reduce op", "unknown-value", lambda: tfdist.all_reduce(1, "max")),
    ("all_reduce", "collective-type", lambda: tfdist.all_reduce(True)),
    ("reduce", "collective-type", lambda: tfdist.reduce([1, 2], "mean")),
    ("gather", "collective-type", lambda: tfdist.gather(np.array([object()]))),
    ("all_gather", "collective-type", lambda: tfdist.all_gather({"a": np.array([1, None])})),
    ("scatter", "collective-type", lambda: tfdist.scatter(np.array([[1, None]]))),
    ("scatter", "shapes-differ", lambda: tfdist.scatter(np.zeros((2, 3)))),
    ("reduce root", "out-of-range", lambda: tfdist.reduce(1.0, root=5)),
    ("broadcast root", "out-of-range", lambda: tfdist.broadcast(1, root=1)),
    ("broadcast", "collective-type", lambda: tfdist.broadcast({0: 1.0})),
    ("broadcast", "collective-type", lambda: tfdist.broadcast(b"ab")),
]


@pytest.mark.parametrize(("where", "code", "call"), ALONE)
def test_an_unsendable_value_is_refused_in_one_process(where, code, call):
    error = refusal(call)
    assert (error.where, error.code) == (where, code)


def test_one_process_is_a_job_of_one_task():
    value = {"a": np.arange(4.0)}
    same(tfdist.all_reduce(value), value)
    same(tfdist.reduce(value), value)
    same(tfdist.all_gather(value), {"a": np.arange(4.0)[None]})
    same(tfdist.scatter({"a": np.arange(4.0)[None]}), value)


def test_a_task_that_does_not_call_is_named(monkeypatch):
    monkeypatch.setattr(ring_module, "CALL_S", 0.05)
    monkeypatch.setattr(collectives, "CALL_S", 0.05)
    for call in (tfdist.all_reduce, tfdist.all_gather, tfdist.reduce, tfdist.gather):
        ring, _ = ring_of(2)
        job = job_of(ring, 0, 2, by_ring=True)
        monkeypatch.setattr(collectives, "_own_job", lambda name, job=job: job)
        with pytest.raises(PeerLost, match="worker-1 has not called this collective"):
            call(1.0)


def test_the_chief_runs_a_block_first(monkeypatch):
    own, ran = threading.local(), []
    monkeypatch.setattr(collectives, "_own_job", lambda name: own.job)

    def run(ring, rank):
        own.job = job_of(ring, rank, 2, by_ring=True)
        with tfdist.chief_first():
            ran.append(rank)

    at_once(run, ring_of(2)[::-1], [1, 0])
    assert ran == [0, 1]


def test_a_failing_chief_block_runs_nowhere_else(monkeypatch):
    monkeypatch.setattr(collectives, "_own_job", lambda name: types.SimpleNamespace(is_chief=True))
    with pytest.raises(OSError, match="no network"), tfdist.chief_first():
        raise OSError("no network")


def test_an_elastic_job_has_no_fixed_number_of_tasks(monkeypatch):
    job = job_of(None, 0, 2, by_ring=False, shards=4)
    monkeypatch.setattr(collectives, "_own_job", lambda name: job)
    for call in (tfdist.all_reduce, tfdist.reduce, tfdist.all_gather, tfdist.gather):
        assert refusal(lambda call=call: call(1.0)).code == "other-strategy"
    assert refusal(lambda: tfdist.scatter([1])).code == "other-strategy"
