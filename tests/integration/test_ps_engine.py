"""Worker pool of a ps job, with workers that are not there or are threads."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

import tfdist
from tfdist import phases
from tfdist.cluster import KINDS
from tfdist.errors import PeerLost
from tfdist.ps import worker_pool
from tfdist.ps.worker_pool import WorkerPool
from tfdist.strategy import Job
from tfdist.training import building, engines

DEADLINE_S = 30.0


class Connections:
    """Three workers and a ps that are there, or not, as the test says."""

    num_workers = 3

    def __init__(self):
        self.connected = frozenset(range(3))
        self.silent = set()
        self.gone = []

    def answers(self, worker):
        return worker not in self.silent

    def admit(self, worker):
        if worker in self.silent:
            return False
        self.connected |= {worker}
        return True

    def lost(self, worker):
        self.connected -= {worker}

    def missing(self):
        return self.gone


@pytest.fixture
def connections(monkeypatch):
    monkeypatch.setattr(worker_pool, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(worker_pool, "_GONE_S", 0.2)
    return Connections()


@pytest.fixture
def pool(connections):
    made = WorkerPool(connections, patience_s=DEADLINE_S)
    yield made
    made._fail(PeerLost("the test is over"))


class Stuck:
    """Work that does not end on worker 1, until it is let go."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, incarnation):
        if incarnation.worker_index == 1:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_S)
        assert self.begun.wait(DEADLINE_S)  # the others do not take all of it before
        return incarnation.worker_index


def submit_until_stuck(pool, *, go_on=False):
    """Return work of which worker 1 has a unit, and the futures of its units."""
    stuck = Stuck()
    if go_on:
        stuck.go_on.set()
    futures = [pool.submit(stuck, steps=1) for _ in range(6)]
    assert stuck.begun.wait(DEADLINE_S)
    return stuck, futures


def test_the_unit_of_a_lost_worker_moves_to_another(pool, connections):
    stuck, futures = submit_until_stuck(pool)
    connections.silent.add(1)
    done = [future.result(DEADLINE_S) for future in futures]
    assert {one.worker_index for one in done} <= {0, 2}
    assert sorted(one.times for one in done)[-2:] == [1, 2]
    assert pool.shares[1].losses == 1
    assert phases.awaited() is None

    stuck.go_on.set()  # what the call returns after all is nobody's
    connections.silent.clear()
    submit_until_stuck(pool, go_on=True)  # it takes work again
    assert sum(share.losses for share in pool.shares.values()) == 1
    assert all(future.result(0).worker_index != 1 for future in futures)


@pytest.mark.parametrize("misses", [0, 1])
def test_a_worker_that_answers_keeps_its_unit(pool, connections, misses):
    """Also one that misses every second question."""
    stuck, futures = submit_until_stuck(pool)
    answers = itertools.cycle([False] * misses + [True])
    connections.answers = lambda worker: worker != 1 or next(answers)
    assert not threading.Event().wait(0.5)  # longer than a silent one is given
    stuck.go_on.set()
    assert 1 in {future.result(DEADLINE_S).worker_index for future in futures}
    assert pool.shares[1].losses == 0


def test_a_silent_ps_ends_the_work_with_its_name(pool, connections):
    stuck, futures = submit_until_stuck(pool)  # as a call that reads of a host without power
    connections.gone = ["ps-1"]
    failed = [future.exception(DEADLINE_S) for future in futures]
    assert "lost ps-1: it does not answer" in map(str, failed)
    stuck.go_on.set()


def unavailable(text="Socket closed"):
    return tf.errors.UnavailableError(None, None, text)


def cannot_reach(ps, *workers):
    """Work that some workers cannot do, as they do not reach a ps that the chief does."""

    def work(incarnation):
        if incarnation.worker_index in workers:
            raise unavailable(f"{ps}: No route to host\nand more")
        return incarnation.worker_index

    return work


def test_a_worker_without_progress_is_excluded_with_the_reason(pool, caplog):
    end_s = time.monotonic() + DEADLINE_S
    while "continuing without this worker" not in caplog.text:
        assert time.monotonic() < end_s
        assert pool.submit(cannot_reach("ps-0", 1)).result(DEADLINE_S).worker_index != 1
    (line,) = [r.message for r in caplog.records if "continuing without" in r.message]
    assert line == (
        "worker-1 answers, but failed 3 work units in a row: ps-0: No route to host; "
        "continuing without this worker"
    )
    assert pool.shares[1].losses == 3
    for _ in range(20):
        assert pool.submit(cannot_reach("ps-0", 1)).result(DEADLINE_S).times == 1
    assert pool.shares[1].losses == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_an_unreachable_ps_is_an_error_without_a_wait(connections, workers):
    """A unit that is alone is tried no more often than one that ends its workers."""
    connections.num_workers, connections.connected = workers, frozenset(range(workers))
    found = WorkerPool(connections, patience_s=DEADLINE_S)
    with pytest.raises(PeerLost, match=r"worker-\d answers, .*: ps-0: No route to host$"):
        found.submit(cannot_reach("ps-0", 0, 1, 2)).result(DEADLINE_S)
    found._fail(PeerLost("the test is over"))


def test_a_unit_that_ends_its_workers_has_limited_retries(pool, connections):
    def end(incarnation):
        connections.silent.add(incarnation.worker_index)
        raise unavailable()

    def start_again(worker):
        connections.silent.discard(worker)
        connections.connected |= {worker}
        return True

    connections.admit = start_again
    with pytest.raises(PeerLost, match=r"failed 5 times; last failure: lost worker-\d"):
        pool.submit(end).result(DEADLINE_S)


def test_workers_of_a_strategy_are_counted_without_tf_config():
    strategy = SimpleNamespace(extended=SimpleNamespace(_num_workers=3))
    assert Job(strategy=strategy, kind=KINDS["ps"]).num_workers == 3


LOST_FUNCTION = "'f' is neither a type of a primitive operation nor a name of a function registered"


@pytest.fixture
def gone(monkeypatch):
    """Which servers have died of the ps job that this process is in."""
    found = ["ps-1"]
    connections = SimpleNamespace(missing=lambda: found)
    monkeypatch.setattr("tfdist.ps.connections.Connections.of", lambda strategy: connections)
    job = SimpleNamespace(kind=KINDS["ps"], strategy=None)
    monkeypatch.setattr(engines, "current_job", lambda: job)
    return found


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (unavailable("failed to connect"), PeerLost),
        (tf.errors.CancelledError(None, None, "RPC Request was cancelled"), PeerLost),
        (tf.errors.NotFoundError(None, None, LOST_FUNCTION), PeerLost),
        (tf.errors.InvalidArgumentError(None, None, "mine"), tf.errors.OpError),
    ],
)
def test_a_ps_that_dies_during_a_read_is_named(error, raised, gone):
    with pytest.raises(raised) as told, engines.naming_a_lost_server():
        raise error
    assert raised is not PeerLost or str(told.value) == "lost ps-1: it does not answer"
    gone.clear()
    with pytest.raises(tf.errors.OpError), engines.naming_a_lost_server():
        raise error


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict", "StepLoop", "run", "results"])
def test_every_read_of_a_lost_ps_names_it(act, monkeypatch, gone):
    def lost(*args, **kwargs):
        raise unavailable()

    monkeypatch.setattr(building, "job_for", lost)
    monkeypatch.setattr(building, "require_compiled_functions", lost)
    loop = object.__new__(tfdist.StepLoop)
    loop._job = SimpleNamespace(ring=None)
    loop._engine = SimpleNamespace(run=lost, publish_metrics=lost)
    loop._program, loop.step = SimpleNamespace(feed=SimpleNamespace(failure=None)), 0
    acts = {"run": lambda: loop.run(1), "results": loop.results}
    with pytest.raises(PeerLost, match="lost ps-1: it does not answer"):
        acts.get(act, lambda: getattr(tfdist, act)(None, None))()
