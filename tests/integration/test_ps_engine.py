"""Worker pool and engine of a ps job, with workers that are not there or are threads."""

import concurrent.futures
import itertools
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import phases
from tfdist.cluster import KINDS
from tfdist.data import StreamSource
from tfdist.errors import PeerLost
from tfdist.ps import engine as engine_module
from tfdist.ps import worker_pool
from tfdist.ps.engine import ParameterServerEngine
from tfdist.ps.worker_pool import WorkerIncarnation, WorkerPool
from tfdist.strategy import Job, job_of
from tfdist.training import building, engines
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import Order, StreamFeed
from tfdist.training.program import StepProgram

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


# The engine, over workers that are threads: what is under way when something ends.


class Work:
    """A program of units that do as the test says."""

    def __init__(self, do):
        self.do = do
        self.logs = {}
        self.begun, self.ended = set(), set()

    def count_from(self, step):
        pass

    def rests(self):
        pass

    def __call__(self, first, last, place):
        self.begun.add(first)
        try:
            self.do(first)
        finally:
            self.ended.add(first)
        return np.array([last]), []

    def take(self, numbers, *, steps):
        self.logs = {"done": float(numbers[0])}
        return numbers[:0]


class Clock:
    """Counts the steps of a program that units of one step have applied."""

    def __init__(self, work):
        self.work = work

    @property
    def applied(self):
        return len(self.work.ended)


@pytest.fixture
def engine(pool, monkeypatch):
    monkeypatch.setattr(engine_module, "worker_pool_of", lambda strategy, patience_s: pool)
    return ParameterServerEngine(SimpleNamespace(strategy=None, config=None))


def program(engine, do):
    made = StepProgram(function=None, feed=None, seed=0, training=True)
    engine._work[made] = Work(do)
    return made, engine._work[made]


def test_after_an_error_no_worker_changes_the_model(engine, pool, monkeypatch):
    others, waited_for = threading.Barrier(3), threading.Event()
    wait = concurrent.futures.wait
    monkeypatch.setattr(concurrent.futures, "wait", lambda fs: (waited_for.set(), wait(fs))[1])

    def do(step):
        if step < 3:
            others.wait(DEADLINE_S)
        if step == 0:
            raise LookupError("mine")
        assert waited_for.wait(DEADLINE_S)  # what has begun goes on until the engine waits for it

    made, work = program(engine, do)
    engine._clock = Clock(work)
    with pytest.raises(LookupError, match="mine"):
        engine.run(made, 0, 6)
    assert work.begun >= {0, 1, 2}
    assert work.ended == work.begun
    assert engine.steps_under_way == 0
    work.do = lambda step: None
    assert engine.run(made, 6, 12) == {"done": 12.0}
    assert pool.account.applied_twice == 0  # those of the error are nobody's


def test_logs_of_the_last_step_follow_its_completion(engine):
    last, go_on = threading.Event(), threading.Event()

    def do(step):
        if step == 5:
            last.set()
            assert go_on.wait(DEADLINE_S)

    made, _ = program(engine, do)
    assert engine.finish(made) == {}
    told = engine.run(made, 0, 6, goes_on=True)
    assert last.wait(DEADLINE_S)
    assert told.get("done", 0.0) < 6.0
    assert engine.steps_under_way >= 1
    go_on.set()
    assert engine.finish(made) == {"done": 6.0}
    assert engine.steps_under_way == 0


def test_dropped_units_end_and_queued_units_never_start(engine, pool, monkeypatch):
    begun, go_on = threading.Barrier(4), threading.Event()
    drop = pool.drop
    monkeypatch.setattr(pool, "drop", lambda: (drop(), go_on.set()))
    made, work = program(engine, lambda step: (begun.wait(DEADLINE_S), go_on.wait(DEADLINE_S)))
    engine._under_way = [
        engine_module.DispatchedBlock(made, step, step + 1, engine._dispatch(made, step, step + 1))
        for step in range(9)
    ]
    begun.wait(DEADLINE_S)
    engine.close()
    assert len(work.begun) == len(work.ended) == 3
    assert not pool._waiting


def test_workers_of_a_strategy_are_counted_without_tf_config():
    strategy = SimpleNamespace(extended=SimpleNamespace(_num_workers=3))
    assert Job(strategy=strategy, kind=KINDS["ps"]).num_workers == 3


def test_a_worker_reads_a_stream_in_order_once():
    """Workers compute the steps of an evaluation in turn, again after a loss, and once more."""
    read = []

    def noted(number):
        number = tf.numpy_function(lambda n: (read.append(n), n)[1], [number], tf.int64)
        return tf.ensure_shape(number, [])

    source = StreamSource(tf.data.Dataset.range(40).map(noted).batch(2))
    plan = EpochPlan.uniform(epochs=1, examples=40, global_batch_size=2)
    job, order = job_of(tf.distribute.get_strategy()), Order(examples=40, shuffle=False)
    feed = StreamFeed(source, plan, job=job, seed=1, order=order)
    made = StepProgram(function=lambda batch: batch, feed=feed, seed=0, training=False)
    work = engine_module.Work(made, job.strategy, outputs=True)
    one, other = (WorkerIncarnation(worker_index=index, life=1) for index in range(2))
    again = WorkerIncarnation(worker_index=0, life=2)

    def batch(step, worker):
        return work(step, step + 1, worker).tolist()

    for _ in range(2):
        read.clear()
        found = [batch(step, (one, other)[step % 3 % 2]) for step in range(20)]
        assert np.ravel(found).tolist() == [*range(40)]
        assert len(read) < 3 * 40
    assert [batch(7, again), batch(3, other), batch(8, again)] == [[14, 15], [6, 7], [16, 17]]


def test_a_metric_has_the_totals_of_the_chief(engine):
    metric = keras.metrics.Sum()
    made = StepProgram(function=None, feed=None, seed=0, training=True, keras_metrics=[metric])
    work = engine._work[made] = Work(None)
    for total in (3.0, 5.0):
        work.totals = np.array([total])
        made.metrics[0].assign(0.0)  # as `reset_state` of a program that has no say in it
        engine.publish_metrics(made)
        assert made.metrics[0].numpy() == total
    engine.reset_metrics()
    made.metrics[0].assign(0.0)
    engine.publish_metrics(made)
    assert made.metrics[0].numpy() == 0.0


def test_the_length_of_a_work_unit_does_not_change_the_bits_of_a_metric():
    types, ends = [np.float32, tf.bfloat16.as_numpy_dtype, np.int32], [2, 3, 4]
    steps = np.random.RandomState(0).rand(12, 4).astype(np.float32)
    steps[:, 2], steps[:, 3] = steps[:, 2].astype(types[1]), 2**22 + 1

    def totals(*lengths):
        work = SimpleNamespace(totals=None, _num_totals=4, _types=types, _ends=ends, _log_shapes={})
        for rows in np.split(steps, np.cumsum(lengths)[:-1]):
            numbers = np.concatenate([rows.ravel(), np.ones(len(rows))])
            assert engine_module.Work.take(work, numbers, steps=len(rows)).tolist() == [1] * len(
                rows
            )
        return work.totals.tolist()

    one_by_one = [kind(0) for kind in (types[0], *types)]
    for row in steps:
        one_by_one = [
            kind(total + kind(n))
            for kind, total, n in zip((types[0], *types), one_by_one, row, strict=True)
        ]
    assert totals(12) == totals(5, 7) == totals(1, 1, 10) == [float(total) for total in one_by_one]


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
