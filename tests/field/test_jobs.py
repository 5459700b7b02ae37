"""Failures of jobs of several tasks, replayed: one job for each strategy runs all their scripts."""

import json
import os
import pathlib

import keras
import numpy as np
import pytest

import tfdist
from tests.field.programs import models
from tests.multiprocess.trainings import launch

pytestmark = pytest.mark.slow

PROGRAMS = pathlib.Path(__file__).parent / "programs"
DEADLINE_S = 250
WORKERS = 3


def lines(path):
    """What each script saw, by its name."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["script"]: line for line in found}


def seen(tasks, script):
    """What each task saw of a script, without which the test fails by the script's own error."""
    for task in tasks:
        assert "error" not in task[script], task[script]["error"]
    return [task[script]["saw"] for task in tasks]


@pytest.fixture(scope="module")
def multiworker(tmp_path_factory):
    """The directory of the job, what each of its workers saw, and what was said."""
    out = tmp_path_factory.mktemp("multiworker")
    for index in range(1, WORKERS):
        os.mkfifo(out / f"leaving-{index}")
    tasks = ("--strategy", "multiworker", "--workers", str(WORKERS))
    said = launch(
        out / "run", *tasks, str(PROGRAMS / "multiworker.py"), str(out), timeout_s=DEADLINE_S
    )
    return out, [lines(out / f"seen-{i}.jsonl") for i in range(WORKERS)], said


@pytest.fixture(scope="module")
def parameter_server(tmp_path_factory):
    """What the chief of the ps job saw."""
    out = tmp_path_factory.mktemp("ps")
    tasks = ("--strategy", "ps", "--workers", "2", "--ps", "1")
    launch(
        out / "run", *tasks, str(PROGRAMS / "parameter_server.py"), str(out), timeout_s=DEADLINE_S
    )
    return [lines(out / "seen-0.jsonl")]


def on_one_device(model, *data, **fit):
    history = tfdist.fit(model, *data, seed=3, verbose=0, **fit)
    return models.flat(model), history.history


def test_keras_20585_fit_of_several_workers_trains(multiworker):
    """`Model.fit` was a ValueError before the first step; it equals one device.

    https://github.com/keras-team/keras/issues/20585, with the script of TensorFlow's tutorial.
    """
    data = models.digits_dataset()
    weights, history = on_one_device(models.digits(), data, epochs=3, steps_per_epoch=7)
    for task in seen(multiworker[1], "keras_20585"):
        np.testing.assert_allclose(task["weights"], weights, atol=1e-5)
        np.testing.assert_allclose(task["history"]["loss"], history["loss"], rtol=1e-4)


def test_tensorflow_72388_logs_of_several_workers_are_reduced(multiworker):
    """Logs, which are scalars, were reduced along an axis; all tasks have one History.

    https://github.com/tensorflow/tensorflow/issues/72388
    """
    first, *others = seen(multiworker[1], "tensorflow_72388")
    assert set(first["history"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert np.isfinite(list(first["history"].values())).all()
    assert others == [first] * (WORKERS - 1)


def test_keras_20329_inputs_with_names_on_several_workers(multiworker):
    """A `PyDataset` of named inputs failed on several workers; it trains as on one device.

    https://github.com/keras-team/keras/issues/20329
    """
    model = models.named_inputs()
    weights, _ = on_one_device(model, models.Named(), epochs=2)
    evaluated = tfdist.evaluate(model, models.Named(), verbose=0)
    for task in seen(multiworker[1], "keras_20329"):
        np.testing.assert_allclose(task["weights"], weights, atol=1e-6)
        np.testing.assert_allclose(task["evaluated"], evaluated, rtol=1e-5)


def test_recommenders_274_two_towers_on_three_workers_end(multiworker):
    """Three machines with 100 users, items and events hung; the job ends, equal to one device.

    https://github.com/tensorflow/recommenders/issues/274
    """
    events = {"user": models.USERS, "item": models.ITEMS}
    weights, _ = on_one_device(models.two_towers(), events, models.RATINGS, batch_size=32, epochs=2)
    for task in seen(multiworker[1], "recommenders_274"):
        np.testing.assert_allclose(task["weights"], weights, atol=1e-5)


def test_mlflow_5817_a_tracker_on_the_chief_has_one_run(multiworker):
    """A tracker made a run in each process; within `on_chief` it makes one, of the whole job.

    https://github.com/mlflow/mlflow/issues/5817
    """
    out, tasks, _ = multiworker
    first, *_ = seen(tasks, "mlflow_5817")
    assert len(list((out / "everywhere").iterdir())) == WORKERS
    (run,) = (out / "chief").iterdir()
    logged = [json.loads(line) for line in run.read_text().splitlines()]
    assert [line["epoch"] for line in logged] == [0, 1]
    assert [line["loss"] for line in logged] == first["history"]["loss"]


def test_tensorflow_58434_workers_that_end_first_disturb_nobody(multiworker):
    """Workers that ended before the chief were errors there; the job ends with exit code 0.

    https://github.com/tensorflow/tensorflow/issues/58434
    """
    out, tasks, said = multiworker
    chief, *_ = seen(tasks, "tensorflow_58434")
    assert chief["left"] == ["done"] * (WORKERS - 1)
    assert keras.models.load_model(out / "model.keras") is not None
    report = json.loads((out / "run" / "report.json").read_text())
    assert [task["exit_code"] for task in report["attempts"][-1]["tasks"]] == [0] * WORKERS
    logs = "".join(path.read_text() for path in out.glob("run/logs/**/*.log"))
    for words in ("UnavailableError", "UNAVAILABLE", "CoordinationServiceError"):
        assert words not in said + logs


def test_keras_18668_updates_of_several_workers_are_none_lost(parameter_server):
    """Updates of two workers raced and were lost; each of 320 of plain SGD counts, and each step.

    https://github.com/keras-team/keras/issues/18668
    """
    (chief,) = seen(parameter_server, "keras_18668")
    assert (chief["steps"], chief["weights"]) == (320, [-320.0])
    assert chief["adam steps"] == 240
    assert chief["adam weights are finite"]
    assert chief["adam loss"][-1] < chief["adam loss"][0] / 2


def test_keras_18624_the_counter_and_the_rate_of_an_optimizer_on_a_server(parameter_server):
    """Counter and rate, as variables of a server, were a crash; each rate is used once.

    https://github.com/keras-team/keras/issues/18624
    """
    (chief,) = seen(parameter_server, "keras_18624")
    assert (chief["steps"], chief["weights"]) == (80, [-80 * 81 / 2])
