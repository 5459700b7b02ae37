"""Whole ps jobs through the launcher: each step and example counts once, whoever did it."""

import json

import keras
import numpy as np
import pytest

from tests.multiprocess.programs import figures, zoo
from tests.multiprocess.test_training import (
    assert_as_on_one_device,
    assert_methods_of_keras_are_the_engines,
    on_one_device,
)
from tests.multiprocess.trainings import PROGRAMS, launch

WORKERS = 3


def job(out, *parts, workers):
    """What the chief of a ps job saw of some parts of the program, or of all."""
    launch(
        out / "run", "--strategy", "ps", "--workers", str(workers), "--ps", "1",
        str(PROGRAMS / "parameter_server.py"), str(out), *parts, timeout_s=400,
    )  # fmt: skip
    return json.loads((out / "seen.json").read_text())


@pytest.fixture(scope="module")
def parameter_server(tmp_path_factory):
    out = tmp_path_factory.mktemp("ps")
    return out, job(out, workers=WORKERS)


@pytest.fixture(scope="module")
def of_one_worker(tmp_path_factory):
    """Where one worker trains, steps come one after the other, as on one device."""
    parts = ("counts", "staleness", "methods_of_keras")
    return job(tmp_path_factory.mktemp("one worker"), *parts, workers=1)


def test_ps_counts_every_step_and_example_once(parameter_server, of_one_worker):
    for seen in (parameter_server[1], of_one_worker):
        assert seen["iterations"] == 7 * 15
        assert seen["examples"] == [60.0] * 7
        assert seen["val_examples"] == [41.0] * 7
    expected = on_one_device("loss_scaling", batch_size=4, epochs=7)
    np.testing.assert_allclose(of_one_worker["weights"], expected, atol=1e-5)


def test_ps_updates_by_every_optimizer(parameter_server, of_one_worker):
    found = of_one_worker["every optimizer"]
    assert_as_on_one_device(found, steps=18, batch_size=4, atol=1e-5)
    for name, (updates, _) in parameter_server[1]["every optimizer"].items():
        assert updates == found[name][0], name


def test_ps_evaluates_predicts_and_saves(parameter_server):
    out, seen = parameter_server
    saved = keras.models.load_model(out / "cnn.keras")
    predicted = saved.predict(zoo.IMAGES[:37], verbose=0)
    evaluated = saved.evaluate(zoo.IMAGES[:37], zoo.LABELS[:37], verbose=0)
    np.testing.assert_allclose(seen["cnn predicted"], predicted, atol=1e-5)
    np.testing.assert_allclose(seen["cnn evaluated"], evaluated, rtol=1e-5)
    assert seen["custom step"] == ["mine"]


def test_ps_takes_streams_and_refuses_python(parameter_server):
    _, seen = parameter_server
    for name in ("dataset", "function"):
        assert seen[f"iterations {name}"] == 10
        assert seen[f"predicted {name}"] == 60
        # Each of 10 batches is transformed by numbers of its own, whichever worker has it.
        examples = 10 * {"dataset": 8, "function": 6}[name]
        assert seen[f"numbers {name}"] == sum(range(examples))
        np.testing.assert_allclose(seen[f"evaluated {name}"], seen[f"expected {name}"], rtol=1e-5)
    assert "Python" in seen["python source"]
    assert "no operation NormalizeUTF8" in seen["unknown operation"]


def test_ps_runs_callbacks_and_custom_steps(parameter_server):
    out, seen = parameter_server
    assert seen["epochs"] == 2
    assert seen["batches"] == [*range(8), *range(8)]
    assert len((out / "log.csv").read_text().splitlines()) == 3
    assert seen["own step"] == [["each", "loss"], 8, {"examples": 64.0}]


def test_ps_workers_do_not_wait_between_ranges(parameter_server):
    _, seen = parameter_server
    found = seen["ranges that go on"]
    assert found["examples"] == [600.0] * 2 + [300.0] * 2
    assert found["iterations"] == 600
    assert any(found["left"])  # so the next range was handed out before that one had ended
    assert found["left"][-1] == 0
    assert seen["under way after an error"] == 0
    # One step takes more than half of a range, and yet each worker has one.
    ages = {int(age): count for age, count in seen["staleness of slow steps"].items()}
    assert sum(ages.values()) == 12
    assert max(ages) >= 1


def test_keras_methods_run_on_the_ps_engine(parameter_server, of_one_worker):
    """Several workers end with the same number of steps, and a single one with the same bits."""
    ways = ("by model.fit", "by tfdist.fit", "cut and resumed")
    for found in (parameter_server[1], of_one_worker):
        seen = found["methods of Keras"]
        assert [seen[way][0] for way in ways] == [16] * 3
        assert [len(seen[way][1]["loss"]) for way in ways] == [2] * 3
        assert_methods_of_keras_are_the_engines(seen)
    by_keras, *others = (of_one_worker["methods of Keras"][way] for way in ways)
    assert others == [by_keras] * 2


def test_keras_tuner_searches_in_the_chief_of_ps_jobs(parameter_server):
    seen = parameter_server[1]["search"]
    (status, best), other = seen["trials"]
    assert (status, other[0], seen["best"]) == ("COMPLETED", "COMPLETED", 0.1)
    assert best < other[1]
    assert seen["evaluated"] == pytest.approx(best, rel=1e-5)


def test_ps_puts_metrics_of_every_kind_together(parameter_server):
    _, seen = parameter_server
    model = zoo.judged()
    found = model.evaluate(zoo.IMAGES, zoo.JUDGED, batch_size=7, verbose=0, return_dict=True)
    assert seen["judged"].keys() == found.keys()
    for name, value in found.items():
        np.testing.assert_allclose(seen["judged"][name], value, rtol=1e-5, err_msg=name)
    assert (seen["Least"], seen["Most"]) == ("metric-adds-up", "metric-adds-up")
    by_step, by_hand = seen["without call"]
    np.testing.assert_allclose(by_step, by_hand, rtol=1e-5)


def test_ps_refuses_objects_made_outside_the_scope(parameter_server):
    assert parameter_server[1]["made outside"] == [["model", "another-scope"]] * 4


def test_ps_step_metrics_equal_one_device_under_any_key(parameter_server):
    figures.require_equal(parameter_server[1]["figures"], figures.by_keras())


def test_ps_optimizers_use_the_dispatched_step(parameter_server):
    """Whatever the workers' order: each learning rate once, and one update of three steps."""
    _, seen = parameter_server
    assert seen["went down by ramp"] == sum(range(2 * 7 * 15 + 1))
    assert seen["went down by accumulation"] == 7 * 15 / 3
    assert seen["went down by two loops"] == sum(range(48 + 1))


def test_ps_loses_no_part_of_an_update(parameter_server):
    """Each momentum is the one before and a gradient of 1, and goes into the weight once."""
    _, seen = parameter_server
    assert seen["went down by momentum"] == sum(range(7 * 15 + 1))
    assert seen["went down by decay"] == pytest.approx(7 * 15, rel=1e-3)
    # Of gradients that are accumulated by all, none is lost, and none counts twice.
    assert seen["still to go down"] >= 0
    assert 4 * seen["went down by sums"] + seen["still to go down"] == 7 * 15


def test_ps_measures_and_bounds_the_staleness_of_steps(parameter_server, of_one_worker):
    for workers, seen in ((WORKERS, parameter_server[1]), (1, of_one_worker)):
        for bound in (None, 0, 1):
            ages = {int(age): count for age, count in seen[f"staleness {bound}"].items()}
            assert sum(ages.values()) == 7 * 15
            assert bound is None or max(ages) <= bound
            assert workers > 1 or ages == {0: 7 * 15}
        # Each worker has begun a step before the first of them is written.
        assert seen["staleness of a meeting"] == {str(age): 3 for age in range(workers)}
        assert (seen["applied twice"], seen["repeated"]) == (0, [])
