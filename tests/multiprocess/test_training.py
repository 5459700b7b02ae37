"""Whole jobs through the launcher: what comes out is what one device makes of it."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfdist
from tests.multiprocess.programs import zoo
from tests.multiprocess.warm import forked

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def launch(run_dir, *arguments, timeout_s, start=forked):
    """Runs a job to its end; on failure or past its deadline, shows every task's log."""
    command = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(run_dir)]
    with start() as (flags, fds):
        process = subprocess.Popen(
            [*command, *flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
        )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"{' '.join(arguments)}: not done in {timeout_s} s\n{output[-20000:]}")
    assert process.returncode == 0, output[-20000:]
    return output


def on_one_device(optimizer="sgd", kind=keras.Sequential, examples=60, **fit):
    model = zoo.dense(optimizer, kind)
    options = {"batch_size": 8, "seed": 3, "verbose": 0, **fit}
    tfdist.fit(model, zoo.X[:examples], zoo.Y[:examples], **options)
    return zoo.flat(model)


@pytest.fixture(scope="module", params=[2, 3])
def synchronous(request, tmp_path_factory):
    """What each task of a multiworker job saw."""
    out = tmp_path_factory.mktemp(f"workers {request.param}")
    launch(
        out / "run", "--strategy", "multiworker", "--workers", str(request.param),
        str(PROGRAMS / "synchronous.py"), str(out), timeout_s=400,
    )  # fmt: skip
    tasks = [json.loads((out / f"seen-{i}.json").read_text()) for i in range(request.param)]
    return out, tasks


@pytest.mark.parametrize("optimizer", list(zoo.OPTIMIZERS))
def test_workers_equal_one_device(synchronous, optimizer):
    expected = on_one_device(optimizer, epochs=2)
    for task in synchronous[1]:
        np.testing.assert_allclose(task[f"weights {optimizer}"], expected, atol=1e-6)


def test_a_custom_step_and_an_empty_batch_fraction_equal_one_device(synchronous):
    for task in synchronous[1]:
        expected = on_one_device(kind=zoo.CustomStep)
        np.testing.assert_allclose(task["weights custom step"], expected, atol=1e-6)
        expected = on_one_device(examples=41, batch_size=4)
        np.testing.assert_allclose(task["weights empty share"], expected, atol=1e-6)


def test_masks_and_losses_per_example_equal_one_device(synchronous):
    expected = zoo.tagged(zoo.tagger(), keras.Model.fit, keras.Model.evaluate)
    for task in synchronous[1]:
        for seen, wanted in zip(task["masked"], expected, strict=True):
            np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-6)


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
        assert np.isfinite([task["mixed_bfloat16"], task["mixed_float16"]]).all()


def test_tasks_agree_in_everything(synchronous):
    first, *others = synchronous[1]
    for task in others:
        assert {**task, "chief": True} == {**first, "chief": True}
        assert (first["chief"], task["chief"]) == (True, False)
    assert first["broadcast"] == [0, 1, 2]


def test_callbacks_decide_alike_and_the_chief_alone_writes(synchronous):
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


def test_a_cut_run_ends_with_the_same_bits(synchronous):
    assert all(task["resumed equals whole"] for task in synchronous[1])


def test_a_step_of_the_users_own_runs_on_all_workers(synchronous):
    _, step, results, _ = synchronous[1][0]["own step"]
    assert step == 8
    assert results == {"examples": 64.0}


@pytest.fixture(scope="module", params=[1, 2, 4])
def parameter_server(request, tmp_path_factory):
    """What the chief of a ps job saw."""
    out = tmp_path_factory.mktemp(f"ps {request.param}")
    launch(
        out / "run", "--strategy", "ps", "--workers", str(request.param), "--ps", "1",
        str(PROGRAMS / "parameter_server.py"), str(out), timeout_s=400,
    )  # fmt: skip
    return request.param, out, json.loads((out / "seen.json").read_text())


@pytest.mark.parametrize("optimizer", list(zoo.OPTIMIZERS))
def test_ps_counts_every_step_and_example_once(parameter_server, optimizer):
    workers, _, seen = parameter_server
    assert seen[f"iterations {optimizer}"] == 7 * 15
    assert seen[f"examples {optimizer}"] == [60.0] * 7
    assert seen[f"val_examples {optimizer}"] == [41.0] * 7
    if workers == 1:
        expected = on_one_device(optimizer, batch_size=4, epochs=7)
        np.testing.assert_allclose(seen[f"weights {optimizer}"], expected, atol=1e-5)


def test_ps_evaluates_predicts_and_saves(parameter_server):
    _, out, seen = parameter_server
    saved = keras.models.load_model(out / "cnn.keras")
    predicted = saved.predict(zoo.IMAGES[:37], verbose=0)
    evaluated = saved.evaluate(zoo.IMAGES[:37], zoo.LABELS[:37], verbose=0)
    np.testing.assert_allclose(seen["cnn predicted"], predicted, atol=1e-5)
    np.testing.assert_allclose(seen["cnn evaluated"], evaluated, rtol=1e-5)
    assert seen["two inputs"][-1] < seen["two inputs"][0]
    assert np.isfinite(seen["mixed"]).all()
    assert seen["custom step"] == ["mine"]


def test_ps_takes_streams_and_refuses_python(parameter_server):
    _, _, seen = parameter_server
    for name in ("dataset", "function"):
        assert seen[f"iterations {name}"] == 10
        assert seen[f"predicted {name}"] == 60
        # Each of 10 batches is transformed by numbers of its own, whichever worker has it.
        examples = 10 * {"dataset": 8, "function": 6}[name]
        assert seen[f"numbers {name}"] == sum(range(examples))
        np.testing.assert_allclose(seen[f"evaluated {name}"], seen[f"expected {name}"], rtol=1e-5)
    assert "Python" in seen["python source"]


def test_ps_serves_callbacks_and_resumes(parameter_server):
    _, out, seen = parameter_server
    assert seen["epochs"] == 2
    assert seen["batches"] == [*range(8), *range(8)]
    assert len((out / "log.csv").read_text().splitlines()) == 3
    (first, losses), (longer, all_losses) = seen["first"], seen["longer"]
    assert (first, longer) == (12, 24)
    assert all_losses[:2] == losses
    assert len(all_losses) == 4
    assert seen["own step"] == [["each", "loss"], 8, {"examples": 64.0}]


def test_ps_workers_do_not_wait_for_each_other_between_ranges(parameter_server):
    workers, _, seen = parameter_server
    found = seen["ranges that go on"]
    assert found["examples"] == [1200.0] * 2 + [540.0] * 2
    assert found["iterations"] == 1200
    assert any(found["left"])  # so the next range was handed out before that one had ended
    assert found["left"][-1] == 0
    assert seen["under way after an error"] == 0
    # One step takes more than half of a range, and yet each worker has one.
    ages = {int(age): count for age, count in seen["staleness of slow steps"].items()}
    assert sum(ages.values()) == 12
    assert max(ages) >= min(workers - 1, 1)


def test_ps_puts_metrics_of_every_kind_together(parameter_server):
    _, _, seen = parameter_server
    model = zoo.judged()
    found = model.evaluate(zoo.IMAGES, zoo.JUDGED, batch_size=7, verbose=0, return_dict=True)
    assert seen["judged"].keys() == found.keys()
    for name, value in found.items():
        np.testing.assert_allclose(seen["judged"][name], value, rtol=1e-5, err_msg=name)
    assert "metrics: received a metric whose least/least does not begin at 0" in seen["least"]
    assert "metrics: received Most, whose update_state may do anything" in seen["most"]


def test_ps_optimizers_go_by_the_step_that_was_dispatched(parameter_server):
    """Whatever the workers' order: each learning rate once, and one update of three steps."""
    _, _, seen = parameter_server
    assert seen["went down by ramp"] == sum(range(2 * 7 * 15 + 1))
    assert seen["went down by accumulation"] == 2 * 7 * 15 / 3
    assert seen["went down by two loops"] == sum(range(48 + 1))


def test_ps_loses_no_part_of_an_update(parameter_server):
    """Each momentum is the one before and a gradient of 1, and goes into the weight once."""
    _, _, seen = parameter_server
    assert seen["went down by momentum"] == sum(range(2 * 7 * 15 + 1))
    # Of gradients that are accumulated by all, none is lost, and none counts twice.
    assert 4 * seen["went down by sums"] + seen["still to go down"] == 2 * 7 * 15


def test_ps_measures_the_staleness_of_every_step_and_bounds_it(parameter_server):
    workers, _, seen = parameter_server
    for bound in (None, 0, 1, 5):
        ages = {int(age): count for age, count in seen[f"staleness {bound}"].items()}
        assert sum(ages.values()) == 7 * 15
        assert bound is None or max(ages) <= bound
        if workers == 1:
            assert ages == {0: 7 * 15}
    # Each worker has begun a step before the first of them is written.
    assert seen["staleness of a meeting"] == {str(age): 3 for age in range(workers)}
    assert (seen["applied twice"], seen["repeated"]) == (0, [])


@pytest.mark.parametrize("job", ["multiworker", "ps"])
def test_what_stock_keras_cannot_do_in_a_job_is_refused_in_one_line(tmp_path, job):
    """https://github.com/keras-team/keras/issues/20585. It fails on the day that Keras can."""
    tasks = ("--strategy", job, "--workers", "2")
    seen, program = tmp_path / "seen", PROGRAMS / "stock.py"
    launch(tmp_path / "run", *tasks, str(program), str(seen), timeout_s=150)
    found = json.loads(seen.read_text())
    assert set(found["a model of no strategy"].values()) == {"works"}
    failing = {name for name, outcome in found["stock"].items() if outcome != "works"}
    assert failing > {"fit", "evaluate"}
    for where in ("in the program", "in a callback"):
        for name, outcome in found[where].items():
            if name not in failing:
                assert outcome == "works"
                continue
            line = (
                rf"UsageError: {re.escape(str(program))}:\d+: model\.{name}: received Keras' own "
            )
            line += rf"{name}, which .* strategy {job}; expected .*\. Fix: write tfdist\..*"
            assert re.fullmatch(line, outcome), outcome
