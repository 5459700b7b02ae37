"""A pipeline of one stage trains as one device does; tasks meet without a server."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import tfdist
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, hold_ports
from tfdist.errors import StartupTimeout, UsageError
from tfdist.pipeline.cuts import LayerGraph
from tfdist.pipeline.timing import chosen_places
from tfdist.pipeline.union import owners_of
from tfdist.strategy import job as jobs
from tfdist.strategy import stages

L = keras.layers
DEADLINE_S = 60.0
random = np.random.default_rng(0)
X = random.random((26, 5)).astype("float32")
Y = random.integers(0, 3, (26,))


def model_with(optimizer="adam", loss="sparse_categorical_crossentropy", **compiled):
    keras.utils.set_random_seed(1)
    layers = [L.Dense(8, activation="relu", kernel_regularizer="l2") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((5,)), *layers, L.Dense(3, activation="softmax", name="head")]
    )
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **compiled)
    return model


@pytest.fixture
def one_stage(strategies, monkeypatch):
    """The job of a pipeline with one stage."""
    place = stages.Stages(
        index=0, count=1, names=("worker-0",), before=None, after=None,
        options=stages.PipelineOptions(split_size=3),
    )  # fmt: skip
    job = jobs.Job(strategy=strategies[1], kind="pipeline", stages=place)

    def begin():
        monkeypatch.setattr(jobs, "_made", [job])
        return job.strategy

    return begin


def trained(strategy, **given):
    with strategy.scope():
        model = model_with(**given)
    validation = (X[:7], Y[:7])
    history = tfdist.fit(
        model, X, Y, batch_size=8, epochs=2, seed=3, verbose=0, validation_data=validation
    )
    predicted = tfdist.predict(model, X, batch_size=8, verbose=0)
    evaluated = tfdist.evaluate(model, X, Y, batch_size=8, verbose=0)
    return model.get_weights(), history.history, predicted, evaluated


def optimizers():
    return {
        "sgd": keras.optimizers.SGD(0.1, momentum=0.9),
        "adamw": keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
        "ema": keras.optimizers.Adam(0.01, use_ema=True),
    }


@pytest.mark.parametrize("name", list(optimizers()))
def test_micro_batches_end_with_the_weights_and_logs_of_whole_batches(strategies, one_stage, name):
    expected = trained(strategies[1], optimizer=optimizers()[name])
    found = trained(one_stage(), optimizer=optimizers()[name])
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for key in expected[1]:
        np.testing.assert_allclose(found[1][key], expected[1][key], rtol=1e-4, err_msg=key)
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-4)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_a_step_of_the_models_own_is_refused(one_stage):
    with one_stage().scope():
        model = OwnStep([keras.Input((5,)), L.Dense(3)])
        model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(UsageError) as caught:
        tfdist.fit(model, X, X[:, :3], batch_size=8, verbose=0)
    assert caught.value.code == "own-step"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"optimizer": keras.optimizers.LossScaleOptimizer("sgd")}, "loss-scale"),
        (
            {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum")},
            "loss-reduction",
        ),
    ],
)
def test_what_cannot_be_trained_in_stages_is_refused(one_stage, given, code):
    with one_stage().scope():
        model = model_with(**given)
    with pytest.raises(UsageError) as caught:
        tfdist.fit(model, X, Y, batch_size=8, verbose=0)
    assert caught.value.code == code


def test_a_slot_belongs_to_the_stage_of_its_variable():
    model = model_with("adam")
    model.optimizer.build(model.trainable_variables)
    graph = LayerGraph(model)
    parts = graph.cut(graph.behind([1]), num_stages=2)
    owners = owners_of(model, parts)
    stage_of = {v.path.replace("/", "_"): owners[id(v)] for v in model.trainable_variables}
    slots = [v for v in model.optimizer.variables if tuple(v.shape)]
    assert len(slots) == 2 * len(stage_of)
    for slot in slots:
        (owner,) = {stage for path, stage in stage_of.items() if path in slot.path}
        assert owners[id(slot)] == owner


def test_the_places_that_are_chosen_cut_the_model():
    graph = LayerGraph(model_with())
    places = chosen_places(graph, num_stages=3, rows=4)
    assert len(graph.cut(graph.behind([p.position for p in places]), num_stages=3)) == 3
    with pytest.raises(UsageError) as caught:
        chosen_places(graph, num_stages=9, rows=4)
    assert caught.value.code == "too-many-stages"


def configs(count):
    ports = hold_ports(count)
    cluster = ClusterSpec(worker=tuple(port.address for port in ports))
    options = JobOptions(strategy="pipeline", stages=count)
    return [
        TaskConfig(cluster=cluster, task=Task("worker", index), options=options)
        for index in range(count)
    ]


def joined(config, timeout_s=DEADLINE_S):
    options = stages.PipelineOptions()
    return stages.join(config, options, timeout_s=timeout_s, ports=None)


def test_tasks_meet_at_the_chief_and_connect_in_a_line_and_a_ring():
    tasks = configs(3)
    with ThreadPoolExecutor(3) as pool:
        places = list(pool.map(joined, tasks, timeout=DEADLINE_S))
        sums = list(
            pool.map(lambda p: p[1].sum(np.float64([p[0].index]))[0], places, timeout=DEADLINE_S)
        )
    assert sums == [3, 3, 3]
    lines = [place for place, _ in places]
    assert lines[0].before is None
    assert lines[-1].after is None
    for one, other in itertools.pairwise(lines):
        one.after.sendall(b"x")
        assert other.before.recv(1) == b"x"
    for place, ring in places:
        ring.close()
        for end in (place.before, place.after):
            if end is not None:
                end.close()


def test_a_stage_that_does_not_come_is_named():
    tasks = configs(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(joined, task, 1.0) for task in tasks[:2]]
        with pytest.raises(StartupTimeout, match="worker-2"):
            waiting[0].result(DEADLINE_S)
        with pytest.raises(StartupTimeout):
            waiting[1].result(DEADLINE_S)
