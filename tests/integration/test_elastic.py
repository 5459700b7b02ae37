"""The cells of the conformance table in an elastic job of one worker with three shards."""

import dataclasses
import socket
import types
from unittest import mock

import keras
import numpy as np
import pytest
from keras.src.callbacks import CallbackList

import tfdist
from tests.integration import test_conformance as table
from tests.refusals import refusal, refused
from tfdist.elastic.job import ElasticStrategy
from tfdist.elastic.mesh import Mesh
from tfdist.kinds import KINDS
from tfdist.strategy import job as jobs
from tfdist.strategy.group import of_all_tasks
from tfdist.training.succession import Succession
from tfdist.training.task_agreement import require_same_batches


class Strategies(dict):
    """The strategies by their number of replicas, with an elastic job in place of 3."""

    def __getitem__(self, number):
        if number != 3:
            jobs._made.clear()
            return super().__getitem__(number)
        strategy = ElasticStrategy("/CPU:0", 3)
        jobs.remember(jobs.Job(strategy=strategy, kind=KINDS["elastic"], shards=3))
        return strategy


@pytest.fixture
def elastic(strategies, monkeypatch):
    monkeypatch.setattr(jobs, "_made", [])
    return Strategies(strategies)


REFUSED = {
    "metrics with a state and of several results": "metric",
    **dict.fromkeys(
        (
            *("several optimizers", "two optimizers that its step builds", "trackers of the guide"),
            *("a step that takes a dict apart", "a step whose targets are its inputs"),
            *("more figures", "weighted by a variable", "no optimizer", "activities"),
            *("losses read after the update", "a mean by hand beside a sum", "a mean with weights"),
            *("summed by the tape, 9 a step", "summed by the tape, 8 a step"),
            *(c for c in table.CELLS if c.startswith("masks")),
        ),
        "elastic-step",
    ),
}
"""Codes of the cells that an elastic job refuses (see docs/elastic.md)."""


def test_a_task_that_joins_compares_its_own_values():
    first_start = np.array([1.0, 2.0, 1.0, 2.0])
    ring = mock.Mock(spec=Mesh, absent=[], lost="")
    ring.sum.return_value = [first_start]
    job = mock.Mock(num_tasks=2, task_index=1, has_peers=True, ring=ring)
    assert of_all_tasks(job, [1.0, 3.0], of="data").tolist() == [[1.0, 2.0], [1.0, 3.0]]


def test_an_early_end_of_data_names_two_members():
    def tasks_ended_after(end, *, in_tasks, members):
        absent = [index for index in range(4) if index not in members]
        ring = mock.Mock(spec=Mesh, absent=absent, lost="")
        row = np.array([1.0, end, end])
        rows = np.array([row if i in in_tasks else (0.0, -1.0, -1.0) for i in range(4)])
        ring.sum.return_value = [np.where(np.isin(range(4), members)[:, None], rows, 0).ravel()]
        job = mock.Mock(num_tasks=4, task_index=3, has_peers=True, ring=ring, shards=4)
        job.config.cluster.training_tasks.return_value = ["worker-0", "worker-1"]  # two more joined
        feed = types.SimpleNamespace(ends=[end], digests={})
        return str(refusal(lambda: require_same_batches(job, feed, 0, 8)))

    found = tasks_ended_after(5, in_tasks=[3], members=[1, 3])
    assert "after 5 batches in worker-3, but not in worker-1" in found


X = np.ones((8, 2), np.float32)
EARLY = {
    "evaluate": lambda model: model.evaluate(X, X[:, :1], verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "broadcast": lambda model: tfdist.broadcast(1),
    "load_weights": lambda model: tfdist.load_weights(model, "a.weights.h5"),
}


@pytest.fixture
def joining(monkeypatch):
    """Strategy of a task that joins, before its first step."""
    monkeypatch.setattr(jobs, "_made", [])
    launcher, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with launcher, end:
        mesh = Mesh(end, 0, ["worker-0", "worker-1"])
        mesh.is_offline = True
        strategy = ElasticStrategy("/CPU:0", 2)
        strategy.extended.mesh = mesh
        jobs.remember(jobs.Job(strategy=strategy, kind=KINDS["elastic"], ring=mesh, shards=2))
        yield strategy


def test_a_joining_task_runs_no_early_collective_operation(joining):
    with joining.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for name, call in EARLY.items():
        assert refused(lambda call=call: call(model)) == ("elastic", "other-start"), name


def test_a_hook_of_a_joining_task_can_make_a_variable(joining):
    with joining.scope():
        assert float(keras.Variable(1.5)) == 1.5


def test_weights_swapped_between_epochs_are_refused(elastic):
    with elastic[3].scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(use_ema=True), "mse")

    def fit(*swap):
        return model.fit(X, X[:, :1], callbacks=[keras.callbacks.SwapEMAWeights(*swap)], verbose=0)

    assert refused(lambda: fit(True)) == ("callbacks", "unsupported")
    fit()


class First(keras.callbacks.Callback):
    """A callback of the chief with a state."""

    chief_only, state = True, None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Second(First):
    pass


def test_a_successor_skips_states_if_the_callback_count_differs(caplog):
    job = types.SimpleNamespace(is_chief=False, name="worker-1", ring=None)
    succession = Succession(job)
    succession.take({"epoch": 0, "step": 0, "states": {"First-0": 1, "First-1": 2, "Second-0": 3}})
    job.is_chief, listed = True, [First(), Second()]
    succession.take_over(CallbackList(listed), [], step=0)
    assert [callback.state for callback in listed] == [None, 3]
    assert "First-0, First-1: other callbacks than in the lost chief" in caplog.text


@pytest.mark.parametrize("cell", [c for c in table.CELLS if c not in REFUSED])
def test_shards_end_alike(elastic, cell):
    table.require_alike(elastic, dataclasses.replace(table.CELLS[cell], replicas=(3,)))


@pytest.mark.parametrize("cell", [c for c in REFUSED if c in table.CELLS])
def test_unsupported_cells_are_refused_in_elastic_jobs(elastic, cell):
    one = dataclasses.replace(table.CELLS[cell], replicas=(3,))
    assert refused(lambda: table.require_alike(elastic, one))[1] == REFUSED[cell]
