"""The engine of a ps job, over workers that are threads: what is under way when something ends."""

import concurrent.futures
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.integration.test_worker_pool import DEADLINE_S, Members
from tfdist.errors import PeerLost
from tfdist.ps import engine as engine_module
from tfdist.ps.engine import ParameterServerEngine
from tfdist.ps.workers import WorkerPool
from tfdist.training import building, engines
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.program import StepProgram

LOST_FUNCTION = "'f' is neither a type of a primitive operation nor a name of a function registered"


class Work:
    """A program of pieces that do as the test says."""

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

    def take(self, numbers):
        self.logs = {"done": float(numbers[0])}
        return numbers[:0]


class Clock:
    """Counts the steps of a program that pieces of one step have applied."""

    def __init__(self, work):
        self.work = work

    @property
    def applied(self):
        return len(self.work.ended)


@pytest.fixture
def pool():
    made = WorkerPool(Members(), patience_s=DEADLINE_S)
    yield made
    made._fail(PeerLost("the test is over"))


@pytest.fixture
def engine(pool, monkeypatch):
    monkeypatch.setattr(engine_module, "worker_pool_of", lambda strategy, patience_s: pool)
    return ParameterServerEngine(SimpleNamespace(strategy=None, config=None))


def program(engine, do):
    made = StepProgram(function=None, feed=None, seed=0, training=True)
    engine._work[made] = Work(do)
    return made, engine._work[made]


def test_after_an_error_no_worker_changes_the_model_any_more(engine, pool, monkeypatch):
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


def test_what_the_last_step_says_is_told_when_all_is_done(engine):
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


def test_what_is_let_go_has_ended_and_what_nobody_had_begun_never_begins(engine, pool, monkeypatch):
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


def test_a_metric_has_the_totals_of_the_chief_whatever_was_put_into_it(engine):
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


@pytest.mark.parametrize(
    ("error", "gone", "raised"),
    [
        (tf.errors.UnavailableError(None, None, "failed to connect"), ["ps-1"], PeerLost),
        (tf.errors.CancelledError(None, None, "RPC Request was cancelled"), ["ps-1"], PeerLost),
        (tf.errors.NotFoundError(None, None, LOST_FUNCTION), ["ps-1"], PeerLost),
        (tf.errors.UnavailableError(None, None, "failed to connect"), [], tf.errors.OpError),
        (tf.errors.InvalidArgumentError(None, None, "mine"), ["ps-1"], tf.errors.OpError),
    ],
)
def test_a_ps_that_dies_while_the_chief_reads_it_is_named(error, gone, raised, monkeypatch):
    members = SimpleNamespace(missing=lambda: gone)
    monkeypatch.setattr("tfdist.ps.members.Members.of", lambda strategy: members)
    job = SimpleNamespace(kind="ps", strategy=None)
    monkeypatch.setattr(engines, "current_job", lambda: job)
    with pytest.raises(raised) as told, naming_a_lost_server():
        raise error
    assert raised is not PeerLost or str(told.value) == "ps-1 does not answer any more"


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict", "StepLoop", "run", "results"])
def test_whatever_reads_a_ps_that_has_died_names_it(act, monkeypatch):
    def lost(*args, **kwargs):
        raise tf.errors.UnavailableError(None, None, "failed to connect")

    members = SimpleNamespace(missing=lambda: ["ps-1"])
    monkeypatch.setattr("tfdist.ps.members.Members.of", lambda strategy: members)
    job = SimpleNamespace(kind="ps", strategy=None)
    monkeypatch.setattr(engines, "current_job", lambda: job)
    monkeypatch.setattr(building, "job_for", lost)
    monkeypatch.setattr(building, "require_compiled_functions", lost)
    loop = object.__new__(tfdist.StepLoop)
    loop._engine = SimpleNamespace(run=lost, publish_metrics=lost)
    loop._program, loop.step = SimpleNamespace(feed=SimpleNamespace(failure=None)), 0
    acts = {"run": lambda: loop.run(1), "results": loop.results}
    with pytest.raises(PeerLost, match="ps-1 does not answer any more"):
        acts.get(act, lambda: getattr(tfdist, act)(None, None))()
