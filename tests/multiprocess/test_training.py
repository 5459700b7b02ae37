"""Whole jobs through the launcher: what comes out is what one device makes of it."""

import functools
import json
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import written
from tests.multiprocess.programs import figures, zoo
from tests.multiprocess.trainings import PROGRAMS, ended, launch
from tests.multiprocess.warm import executed
from tfdist.chatter import CHATTER


def on_one_device(optimizer="sgd", kind=keras.Sequential, examples=60, **fit):
    model = zoo.dense(optimizer, kind)
    options = {"batch_size": 8, "seed": 3, "verbose": 0, **fit}
    tfdist.fit(model, zoo.X[:examples], zoo.Y[:examples], **options)
    return zoo.flat(model)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """What each task of a multiworker job saw."""
    out = tmp_path_factory.mktemp("workers")
    for index in (1, 2):
        os.mkfifo(out / f"leaving-{index}")
    launch(
        out / "run", "--strategy", "multiworker", "--workers", "3",
        str(PROGRAMS / "synchronous.py"), str(out), timeout_s=400,
    )  # fmt: skip
    tasks = [json.loads((out / f"seen-{i}.json").read_text()) for i in range(3)]
    return out, tasks


def assert_as_on_one_device(found, *, atol, **options):
    """Fails where an optimizer has not made the same updates, or not of the same gradients."""
    expected = zoo.by_every_optimizer(tf.distribute.get_strategy(), **options)
    for name, (updates, weights) in expected.items():
        assert found[name][0] == updates, name
        np.testing.assert_allclose(found[name][1], weights, rtol=0, atol=atol, err_msg=name)


def test_workers_equal_one_device(synchronous):
    task = synchronous[1][0]  # in which all agree
    assert_as_on_one_device(task["every optimizer"], steps=8, atol=1e-6)
    expected = on_one_device("loss_scaling", epochs=2)
    np.testing.assert_allclose(task["weights loss scaling"], expected, atol=1e-6)


def test_a_custom_step_and_empty_fraction_equal_one_device(synchronous):
    task = synchronous[1][0]
    expected = on_one_device(kind=zoo.CustomStep, examples=41, batch_size=4)
    np.testing.assert_allclose(task["weights custom step"], expected, atol=1e-6)


def test_workers_that_exit_before_the_chief_are_no_errors(synchronous):
    """https://github.com/tensorflow/tensorflow/issues/58434"""
    out, _ = synchronous
    assert json.loads((out / "left.json").read_text()) == ["done", "done"]
    logs = "".join(path.read_text() for path in out.glob("run/logs/**/*.log"))
    for words in ("UnavailableError", "UNAVAILABLE", "CoordinationServiceError"):
        assert words not in logs


def test_an_overflow_on_one_worker_is_seen_by_all(synchronous):
    assert all(task["overflow left the weights"] for task in synchronous[1])


def test_evaluate_predict_and_save_see_one_model(synchronous):
    out, tasks = synchronous
    saved = keras.models.load_model(out / "cnn.keras")
    predicted = saved.predict(zoo.IMAGES[:37], verbose=0)
    evaluated = saved.evaluate(zoo.IMAGES[:37], zoo.LABELS[:37], verbose=0)
    for task in tasks:
        assert task["cnn sha"] == zoo.sha(saved)
        np.testing.assert_allclose(task["cnn predicted"], predicted, atol=1e-5)
        np.testing.assert_allclose(task["cnn evaluated"], evaluated, rtol=1e-5)
        assert np.isfinite(task["mixed_float16"]).all()


def test_tasks_agree_in_everything(synchronous):
    first, *others = synchronous[1]
    for task in others:
        own = {"chief": True, "collectives": 0}
        assert {**task, **own} == {**first, **own}
        assert (first["chief"], task["chief"]) == (True, False)
    assert first["broadcast"] == [0, 1, 2]
    for index, task in enumerate([first, *others]):
        scattered, *in_all, gathered, total = task["collectives"]
        assert scattered == np.eye(3)[index].tolist()
        assert in_all == [[1.0, 1.0], [0, 1, 2]]
        assert (gathered, total) == (([1, 2, 3], 6) if index == 1 else (None, None))
    assert first["search"] == ["tuner.search", "search-in-a-job"]


def test_callbacks_decide_alike_and_only_the_chief_writes(synchronous):
    out, tasks = synchronous
    assert tasks[0]["epochs after one task stopped"] == 2
    assert len(tasks[0]["history"]["loss"]) == 2
    assert len((out / "log.csv").read_text().splitlines()) == 3
    assert keras.models.load_model(out / "saved.keras") is not None
    assert len(list((out / "board" / "train").iterdir())) == 1


def test_streams_are_divided_among_the_tasks(synchronous):
    for task in synchronous[1]:
        for name in ("dataset", "function"):
            np.testing.assert_allclose(
                task[f"evaluated {name}"], task[f"expected {name}"], rtol=1e-5
            )


def test_a_custom_step_loop_runs_on_all_workers(synchronous):
    _, step, results, _ = synchronous[1][0]["own step"]
    assert step == 8
    assert results == {"examples": 64.0}


def test_step_metrics_equal_one_device_under_any_key(synchronous):
    expected = figures.by_keras()
    for task in synchronous[1]:
        figures.require_equal(task["figures"], expected)


def assert_exported(seen, out):
    """Fails where an export gives other answers than the model of the job."""
    place, answers = seen
    assert place == str(out / "exports" / "mlp" / "1")
    call = tf.saved_model.load(place).signatures["serving_default"]
    found = call(features=tf.constant(zoo.X))["logits"].numpy()
    np.testing.assert_allclose(found, answers, atol=1e-6)


def test_a_job_exports_its_trained_model(synchronous):
    out, tasks = synchronous
    assert_exported(tasks[0]["exported"], out)


def assert_left_no_trace(found):
    """Fails where a range test has not ended as it should."""
    assert found["same"]
    assert found["same after NaN"]
    assert "no suggestion" in found["diverged"]
    assert len(found["rates"]) == len(found["losses"]) >= 10


def test_a_range_test_leaves_no_trace(synchronous):
    assert_left_no_trace(synchronous[1][0]["range test"])


def assert_methods_of_keras_are_the_engines(seen, *, refused=()):
    found, beside = seen["in the program"], ("evaluate", "predict")
    zoo_py = re.escape(str(PROGRAMS / "zoo.py"))
    for name in refused:
        line = rf"{zoo_py}:\d+: model\.{name}: unsupported\. Fix: call model\.fit.*"
        assert re.fullmatch(line, found.pop(name)), name
    assert {name: found[name] for name in beside} == pytest.approx(seen["by tfdist"], rel=1e-6)
    for name in beside:
        assert found[f"{name.replace('evaluate', 'test')}_on_batch"] == pytest.approx(
            found[name], rel=1e-6
        )
    assert set(seen["in a callback"]) > set(beside)
    assert [type(value) for value in seen["in a callback"].values()] == [float] * 4
    assert set(seen["outside"]) > {"fit", "train_on_batch"}
    assert not any("unsupported" in str(outcome) for outcome in seen["outside"].values())


def test_keras_methods_run_on_the_engine(synchronous):
    for task in synchronous[1]:
        seen = task["methods of Keras"]
        assert seen["by model.fit"] == seen["by tfdist.fit"] == seen["cut and resumed"]
        assert_methods_of_keras_are_the_engines(seen, refused=["train_on_batch"])
        assert task["predicted by the chief only"]


def left_by(out, flags, *kills):
    """What every callback of Keras has left of a training with validation data."""
    kind = flags[0]
    (out / kind).mkdir()
    words = ("--strategy", *flags, "--max_restarts=1", str(PROGRAMS / "written.py"))
    said = launch(out / f"{kind}.run", *words, str(out / kind), *kills, timeout_s=200)
    assert said.count("killed by SIGKILL") >= len(kills), said
    found = {n: left for n, left in written(out / kind).items() if " batch_" not in n}  # of blocks
    found["history"] = json.loads((out / kind / "history.json").read_text())
    for name in ("rates.txt", "posted.jsonl"):  # of the epoch of the kill there are two
        found[name] = sorted(set((out / kind / name).read_text().splitlines()))
    return found


def test_callbacks_of_a_killed_job_write_identical_files(tmp_path):
    expected = left_by(tmp_path, ("single", "--workers=1"))
    found = left_by(tmp_path, ("multiworker", "--workers=2"), "kills")
    rates, posted = expected.pop("rates.txt"), expected.pop("posted.jsonl")
    assert found.pop("rates.txt") == rates
    assert all(len(set(line.split()[2:])) == 1 for line in rates)
    assert len(found.pop("posted.jsonl")) == len(posted) == 4
    assert list(found) == list(expected)
    for name, values in expected.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5, err_msg=name)
        keras.tree.map_structure(close, found[name], values)


@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy=mirrored", "--devices_per_worker=2"),
        ("--strategy=multiworker", "--workers=2"),
        ("--strategy=ps", "--workers=1", "--ps=1"),
        ("--strategy=pipeline", "--workers=2", "--stages=2"),
        ("--strategy=multiworker", "--workers=3", "--elastic"),
    ],
    ids=["mirrored", "multiworker", "ps of one worker", "pipeline", "elastic"],
)
def test_both_fits_have_identical_bits_even_after_kills(tmp_path, flags):
    words = (*flags, "--max_restarts=2", str(PROGRAMS / "killed.py"), str(tmp_path))
    said = launch(tmp_path / "run", *words, timeout_s=200)
    assert len(list(tmp_path.glob("*.killed"))) == 2, said
    assert said.count("killed by SIGKILL") >= 2, said
    lines = [line.partition("TRAINED ")[2] for line in said.splitlines() if "TRAINED" in line]
    trained = list(map(json.loads, lines))
    assert len(trained) >= 4, said
    assert len({digest for _, digest in trained}) == 1, said
    assert all(history == trained[0][0] for history, _ in trained), said


FAILING = {
    "a lost worker": ("kill", "--strategy=multiworker", "--workers=2"),
    "unreadable data": ("data", "--strategy=mirrored", "--devices_per_worker=2"),
}


@pytest.mark.parametrize("what", FAILING)
def test_an_error_is_reported_once_at_the_default_log_level(tmp_path, monkeypatch, what):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    does, *flags = FAILING[what]
    words = ("--grace_s=60", *flags, str(PROGRAMS / "failing.py"), does)
    code, said = ended(tmp_path, *words, start=executed, timeout_s=200)
    lines = (tmp_path / "logs/attempt-1/worker-0.log").read_bytes().splitlines()
    lines = [line.decode() for line in lines if not CHATTER.match(line)]
    assert not [line for line in lines if "op_kernel.cc" in line], said
    if does == "kill":
        assert code == 137
        # The launcher names the task that failed first, and may stop the others before they do.
        assert "worker-1 failed first: killed by SIGKILL" in said
        assert sum("lost worker-1" in line for line in lines) < 2
        assert len(lines) < 6, lines
    else:
        assert code == 1
        assert lines.count("Traceback (most recent call last):") == 1
        assert lines.count("KeyError: 'a file that is not there'") == 1
