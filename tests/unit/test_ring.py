"""The ring of workers, each here a thread: its sums, and what it says when one has gone."""

import contextlib
import itertools
import os
import socket
import threading
import time
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tfdist import phases
from tfdist.cluster import hold_ports
from tfdist.errors import PeerLost, UsageError
from tfdist.strategy import group
from tfdist.strategy import ring as ring_module
from tfdist.strategy.group import MESSAGE_FAILED, naming_lost_peer
from tfdist.strategy.ring import Ring, accepted, connect

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def rings_end():
    """Closes the rings that a test has made."""
    with contextlib.closing(made):
        yield


made = contextlib.ExitStack()


def ring_of(size):
    pairs = [socket.socketpair() for _ in range(size)]
    names = [f"worker-{i}" for i in range(size)]
    ends = [(pairs[rank][0], pairs[rank - 1][1]) for rank in range(size)]
    return [to_be_closed(Ring(rank, names, each)) for rank, each in enumerate(ends)]


def to_be_closed(ring):
    made.callback(ring.close)
    return ring


def at_once(call, *each):
    """What a call gives in a thread of its own for each of these."""
    with ThreadPoolExecutor(len(each[0])) as pool:
        futures = [pool.submit(call, *arguments) for arguments in zip(*each, strict=True)]
        return [future.result(timeout=DEADLINE_S) for future in futures]


def failure_of(ring, *arrays, of=""):
    with pytest.raises(ConnectionError) as raised:
        ring.sum(*arrays, of=of)
    return str(raised.value)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize(
    "shapes",
    [
        [(5,)],
        [()],
        [(3, 4), (1,), (2, 2, 2)],
        [(0,), (3,), (0, 2)],
        [(1 << 20,), (7,)],
        [(1,)] * 300,
    ],
    ids=["vector", "scalar", "several", "empty", "large", "many"],
)
def test_every_worker_gets_the_same_sum(size, shapes):
    draw = np.random.default_rng(size)
    mine = [[draw.normal(size=s).astype(np.float32) for s in shapes] for _ in range(size)]
    rings = ring_of(size)
    kept = [[array.copy() for array in arrays] for arrays in mine]
    results = at_once(lambda ring, arrays: ring.sum(*arrays), rings, mine)
    kept_results = [[array.copy() for array in arrays] for arrays in results]
    at_once(lambda ring: ring.sum(*map(np.zeros, shapes)), rings)  # does not write to a result
    for index, shape in enumerate(shapes):
        expected = np.sum([arrays[index].astype(np.float64) for arrays in mine], axis=0)
        for result in results:
            assert result[index].shape == shape
            np.testing.assert_allclose(result[index], expected, rtol=1e-5, atol=1e-5)
            assert result[index].tobytes() == results[0][index].tobytes()
    # What is summed may be TensorFlow's own memory.
    for arrays, before in zip([*mine, *results], [*kept, *kept_results], strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, before, strict=True))


def test_types_are_kept_and_an_overflow_travels():
    rings = ring_of(3)
    mine = (
        np.array([6e4, 1.0], np.float16),
        np.array([1.0, np.inf]),
        np.array([2**30, -3], np.int32),
        np.array([2**40], np.int64),
    )
    for result in at_once(lambda ring: ring.sum(*mine), rings):
        assert [a.dtype for a in result] == [a.dtype for a in mine]
        assert np.isinf(result[0][0])
        assert result[0][1] == 3.0
        assert result[1].tolist() == [3.0, np.inf]
        assert result[3].tolist() == [3 * 2**40]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parts_of_a_sum_gathered_are_the_sum(size):
    draw = np.random.default_rng(size)
    shapes = [(1,), (7, 3), (1001,), (0,), ()]
    mine = [[draw.normal(size=s).astype(np.float32) for s in shapes] for _ in range(size)]
    sizes = [array.size for array in mine[0]]

    def both(ring, arrays):
        parts = ring.reduce_scatter(*arrays, of="a test")
        assert [part.size for part in parts] == [np.diff(ring.part(size))[0] for size in sizes]
        assert all(ring.part(size)[0] % 32 == 0 for size in sizes)  # no element leaves its vector
        return ring.all_gather(*parts, sizes=sizes, of="a test"), ring.sum(*arrays)

    for wholes, sums in at_once(both, ring_of(size), mine):
        for whole, total in zip(wholes, sums, strict=True):
            np.testing.assert_allclose(whole, total.reshape(-1), rtol=1e-5, atol=1e-6)
            assert size > 2 or whole.tobytes() == total.tobytes()


ROOTED = {
    "scatter": lambda ring, rows, rank: ring.rows_from_root(rows, 0),
    "gather": lambda ring, rows, rank: ring.rows_to_root(rows[rank], 0, of="a gather"),
    "reduce": lambda ring, rows, rank: ring.sum_to_root(rows[rank], 0, of="a reduce"),
}


@pytest.mark.parametrize(("name", "results"), [("scatter", 4), ("gather", 4), ("reduce", 1)])
def test_workers_allocate_only_their_results(name, results):
    rings = ring_of(4)
    rows = np.arange(4 * 750_001, dtype=np.float64).reshape(4, -1)
    tracemalloc.start()
    try:
        each = at_once(lambda ring, rank: ROOTED[name](ring, rows, rank), rings, range(4))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (results + 0.5) * rows[0].nbytes  # and blocks to pass on
    if name == "scatter":
        assert [row.tobytes() for row in each] == [row.tobytes() for row in rows]
        each[0][:] = 0  # the root has a copy
        assert rows[0].any()
    else:
        assert each[0].tobytes() == (rows if name == "gather" else rows.sum(axis=0)).tobytes()
        assert each[1:] == [None] * 3


@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_the_root_copies_a_large_row_while_it_waits(monkeypatch, name):
    root, other = ring_of(2)
    rows, copied, relay = np.ones((2, 2**20)), threading.Event(), root._relay
    copy = ring_module._copy

    def then_set(source, target):
        copy(source, target)
        copied.set()

    def after_copy(*blocks, **options):
        assert copied.wait(5.0)
        relay(*blocks, **options)

    monkeypatch.setattr(ring_module, "_copy", then_set)
    monkeypatch.setattr(root, "_relay", after_copy)
    result, _ = at_once(lambda ring, rank: ROOTED[name](ring, rows, rank), (root, other), (0, 1))
    assert (result == 1).all()


def test_large_results_use_memory_again_that_no_array_uses():
    def taken():
        return ring_module.empty([2**10, 2**11], np.float32)

    first = taken()
    address = first.ctypes.data
    view = memoryview(first[1:])
    del first
    second = taken()
    assert second.ctypes.data != address
    view.release()
    third = taken().view(np.int32)
    assert third.ctypes.data == address
    others = [taken() for _ in range(40)]
    places = {each.ctypes.data for each in (second, third, *others)}
    assert len(places) == 42
    assert sum(data.size for data in ring_module._kept) <= 2**28


@pytest.mark.parametrize("count", [4, 5])
def test_rows_travel_in_both_directions(count):
    rows = np.arange(count * 300_000, dtype=np.float32).reshape(count, -1)
    for root in range(count):
        own = at_once(
            lambda ring, rank, root=root: ring.rows_from_root(
                rows if rank == root else np.empty_like(rows), root
            ),
            ring_of(count),
            range(count),
        )
        np.testing.assert_array_equal(own, rows)


def test_equal_shapes_in_two_places_are_not_mixed():
    one, other = ring_of(2)
    message, _ = at_once(
        lambda ring, of: failure_of(ring, np.ones(3), of=of),
        (one, other),
        ("place 1 of a step", "place 2 of a step"),
    )
    mine = "sum 0 of the run, place 1 of a step [('float64', (3,))]"
    theirs = "sum 0 of the run, place 2 of a step [('float64', (3,))]"
    assert message == f"worker-1 runs {theirs}, but this worker runs {mine}"
    assert (one.differs, other.differs) == ((theirs, mine), (mine, theirs))
    job = types.SimpleNamespace(ring=one, name="worker-0")
    with pytest.raises(UsageError) as told, naming_lost_peer(job):
        raise ConnectionError(message)
    assert told.value.code == "different-sums"
    assert told.value.problem == f"worker-1 runs {theirs}, but worker-0 runs {mine}"


def test_a_reduce_scatter_does_not_match_a_sum():
    def sums_or_scatters(ring, name):
        with pytest.raises(ConnectionError, match="but this worker runs"):
            getattr(ring, name)(np.ones(4), of="a step")

    at_once(sums_or_scatters, ring_of(2), ("sum", "reduce_scatter"))


def test_an_ended_worker_is_named_to_all_workers():
    rings = ring_of(4)
    rings[1].close()
    first, second = at_once(lambda ring: failure_of(ring, np.ones(10**6)), rings[2:])
    assert first == rings[2].lost == "lost worker-1: it closed the connection"
    assert second.startswith("lost worker-2")
    assert failure_of(rings[2], np.ones(1)) == first


def test_a_worker_that_ends_within_a_sum_is_named():
    one, other = ring_of(2)
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(failure_of, one, np.ones(10**6))
        other._agree([np.ones(10**6)], "")
        other.close()
        assert failed.result(DEADLINE_S).startswith("lost worker-1")


def test_an_interrupted_sum_is_the_last_one(monkeypatch):
    one, other = ring_of(2)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.sum(np.ones(10**6))
    assert failure_of(other, np.ones(10**6)).startswith("lost worker-0")
    assert failure_of(one, np.ones(1)) == "a sum of this worker was interrupted: KeyboardInterrupt"


def test_threads_of_a_worker_do_not_mix_sums():
    one, other = ring_of(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.sum, np.ones(3))
        other._from_previous.setblocking(True)
        other._from_previous.recv(1, socket.MSG_PEEK)  # it is under way
        other._from_previous.setblocking(False)
        with pytest.raises(RuntimeError, match="two threads"):
            one.sum(np.zeros(3))
        assert (other.sum(np.ones(3))[0] == 2).all()
        assert (first.result(DEADLINE_S)[0] == 2).all()


def test_a_forked_process_does_not_keep_the_connection():
    one, other = ring_of(2)
    asleep, awake = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(awake)
        os.read(asleep, 1)
        os._exit(0)
    try:
        other.close()
        one._from_previous.settimeout(DEADLINE_S)
        assert one._from_previous.recv(1) == b""
    finally:
        os.close(awake)
        os.close(asleep)
        os.waitpid(child, 0)


ABORTED = "Collective ops is aborted by: "
HEARTBEATS = f"{ABORTED}Error reported: unhealthy:\n/job:worker/replica:0/task:1\nThe tasks"
LOST = types.SimpleNamespace(lost="lost worker-1: reset", differs=None)


def job_of(ring, timeout_s=0.0):
    return types.SimpleNamespace(
        ring=ring, has_peers=True, name="worker-0", collective_timeout_s=timeout_s
    )


@pytest.mark.parametrize(
    ("ring", "kind", "text", "raised", "says"),
    [
        *(
            (LOST, kind, text, PeerLost, "lost worker-1: reset")
            for kind, text in (
                (tf.errors.UnknownError, "ConnectionError: lost worker-1: reset [[PyFunc]]"),
                (tf.errors.InvalidArgumentError, f"assertion failed: [{MESSAGE_FAILED}]"),
                (tf.errors.UnavailableError, "Socket closed"),
            )
        ),
        (LOST, tf.errors.InvalidArgumentError, "bad input", None, "bad input"),
        (None, tf.errors.UnavailableError, HEARTBEATS, PeerLost, "lost worker-1"),
        (None, tf.errors.UnavailableError, f"{ABORTED}reset", PeerLost, "another worker: reset"),
        (None, tf.errors.UnavailableError, "of a data service", None, "data"),
        (None, tf.errors.InternalError, "cuDNN", None, "cuDNN"),
    ],
)
def test_only_errors_from_a_lost_peer_name_it(ring, kind, text, raised, says):
    with pytest.raises(raised or kind, match=says), naming_lost_peer(job_of(ring)):
        raise kind(None, None, text)


def test_a_collective_of_tensorflow_is_aborted_after_its_timeout(monkeypatch):
    aborted, said = threading.Event(), []

    def abort(code, text):
        said.append((code, text))
        aborted.set()

    def abortion():
        assert aborted.wait(DEADLINE_S)
        return said[0][1]

    monkeypatch.setattr(group, "context", lambda: types.SimpleNamespace(abort_collective_ops=abort))
    with (
        pytest.raises(PeerLost, match="no answer in a collective"),
        naming_lost_peer(job_of(None, 0.01)),
    ):
        raise tf.errors.DeadlineExceededError(None, None, f"{ABORTED}{abortion()}")
    assert said[0][0] == tf.errors.DEADLINE_EXCEEDED
    with naming_lost_peer(job_of(None, DEADLINE_S)):
        pass
    assert len(said) == 1


def joined(size, *, timeout_s=30.0, replace=None):
    """The rings of `size` threads, whose collective is a barrier and an array."""
    barrier, lock = threading.Barrier(size), threading.Lock()
    sums: list[np.ndarray] = []

    def worker(rank):
        calls = iter(range(10))

        def total(values):
            number = next(calls)
            with lock:
                if len(sums) <= number:
                    sums.append(np.zeros_like(values))
                sums[number] += values
            barrier.wait(DEADLINE_S)
            if number == 0 and replace is not None:
                return replace(sums[0].copy())
            return sums[number].copy()

        addresses, names = ["127.0.0.1:1"] * size, [f"worker-{i}" for i in range(size)]
        ends = connect(rank, addresses, names, total=total, timeout_s=timeout_s)
        return None if ends is None else to_be_closed(Ring(rank, names, ends))

    return at_once(worker, range(size))


@pytest.fixture
def apart(monkeypatch):
    """Workers who do not find each other on one machine."""
    place, calls = ring_module._local_name, itertools.count()
    monkeypatch.setattr(
        ring_module, "_local_name", lambda secret: place(secret) + b"%d" % next(calls)
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("on_one_machine", [True, False])
def test_workers_find_their_neighbours(request, on_one_machine, size):
    if not on_one_machine:
        request.getfixturevalue("apart")
    rings = joined(size)
    family = socket.AF_UNIX if on_one_machine else socket.AF_INET
    assert {ring._to_next.family for ring in rings} == {family}
    results = at_once(lambda ring: ring.sum(np.arange(9.0)), rings)
    assert all((result[0] == size * np.arange(9.0)).all() for result in results)
    for ring in rings:
        if on_one_machine:  # the bytes in flight fit into the cache (the system doubles the size)
            assert ring._to_next.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2**21
        else:
            # With a limit who is slow to read would be given up: the system counts a full buffer,
            # though the other side answers.
            for end in (ring._to_next, ring._from_previous):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_the_ring_binds_a_port_of_the_given_range():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert ring_module._listen_for_others(range(port, port + 1)) is None
        with ring_module._listen_for_others(range(port, port + 50)) as listener:
            assert listener.getsockname()[1] in range(port + 1, port + 50)


@pytest.mark.parametrize(("said", "count"), [(b"\0" * 20, 1), (b"\0", 100)])
def test_unauthenticated_peers_are_not_let_in(apart, said, count):
    """Those with another secret, and so many that do not say who they are."""
    strangers, calls = [], itertools.count()

    def knock(table):
        if next(calls):
            return table
        for port in table.reshape(2, -1)[:, 0]:
            for _ in range(count):
                stranger = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
                stranger.sendall(said)
                strangers.append(stranger)
        return table

    rings = joined(2, replace=knock)
    at_once(lambda ring: ring.sum(np.ones(3)), rings)
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


def test_a_client_without_a_hello_is_disconnected(monkeypatch):
    monkeypatch.setattr(ring_module, "_HELLO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        deadline_s = time.monotonic() + DEADLINE_S
        found = pool.submit(accepted, [listener], [b"hello"], deadline_s)
        with socket.create_connection(listener.getsockname(), DEADLINE_S) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(listener.getsockname()) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(b"hel")
            peer.sendall(b"lo")
            found.result(DEADLINE_S)[b"hello"].close()


def test_an_unreachable_worker_disables_the_ring_for_all(apart, caplog):
    (closed,) = hold_ports(1)

    def firewall(table):
        table = table.reshape(3, -1)
        table[1, 0] = closed.port  # where nobody listens
        return table.reshape(-1)

    with closed:
        assert joined(3, replace=firewall, timeout_s=3.0) == [None] * 3
    assert f"worker-0 cannot connect to worker-1 at {closed.address}" in caplog.text


def test_a_worker_at_a_sum_reports_the_sum_phase(monkeypatch):
    monkeypatch.setattr(phases, "_state", phases.PhaseState(phase="step", step=7))
    one, other = ring_of(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.sum, np.ones(3))
        while not waiting.done() and phases.reported() != "sum":
            time.sleep(0.01)
        other.close()
        with pytest.raises(ConnectionError):
            waiting.result(timeout=DEADLINE_S)
    assert phases.reported() == "step"
