"""Where the variables of a ps job are, in jobs of several parameter servers."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist
from tests.multiprocess.programs import zoo
from tests.multiprocess.test_training import assert_as_on_one_device
from tests.multiprocess.trainings import PROGRAMS, launch

pytestmark = pytest.mark.slow


def job(out: Path, *parts: str, ps: int, workers=2, flags=()):
    """What the chief saw, and what the job printed."""
    out.mkdir(exist_ok=True)
    said = launch(
        out / "run", "--strategy", "ps", "--workers", str(workers), "--ps", str(ps), *flags,
        str(PROGRAMS / "placement.py"), str(out), *parts, timeout_s=200,
    )  # fmt: skip
    return json.loads((out / "seen.json").read_text()), said


@pytest.fixture(scope="module")
def two_ps(tmp_path_factory):
    return job(tmp_path_factory.mktemp("two"), "placement", ps=2)


def test_variables_are_balanced_by_bytes_with_their_slots(two_ps):
    seen, said = two_ps[0]["placement"], two_ps[1]
    assert seen["iterations"] == 45
    assert seen["losses"][-1] < seen["losses"][0]
    servers, sizes = seen["servers"], seen["sizes"]
    kernels = [path for path in servers if path.startswith("sequential/") and "kernel" in path]
    # In turn, as TensorFlow has it, all three would be on ps-0.
    assert [servers[path] for path in kernels] == [0, 1, 0]
    for path in servers:
        if path.startswith("sequential/"):
            slot = "adam/" + path.replace("/", "_")
            beside = {servers[f"{slot}_{kind}"] for kind in ("momentum", "velocity")}
            assert beside == {servers[path]}
    told = re.search(r"parameter server: ps-0 ([\d,]+) bytes, ps-1 ([\d,]+) bytes", said)
    for ps in (0, 1):  # and the loss' total and count, of 4 bytes each
        held = sum(sizes[path] for path in servers if servers[path] == ps)
        assert held <= int(told[ps + 1].replace(",", "")) <= held + 16


@pytest.fixture(scope="module")
def out_of_parts(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def in_parts(out_of_parts):
    flags = ("--split_bytes", "1024")
    return job(out_of_parts, "split", ps=2, workers=1, flags=flags)[0]["split"]


def test_a_model_in_parts_equals_one_device(in_parts):
    data = (zoo.TOKENS, zoo.CALM)
    model = zoo.tokens(recurrent=True)
    history = tfdist.fit(model, *data, batch_size=8, epochs=3, seed=3, verbose=0)
    np.testing.assert_allclose(in_parts["weights"], zoo.flat(model), atol=1e-5)
    np.testing.assert_allclose(in_parts["losses"], history.history["loss"], rtol=1e-5)
    found = in_parts["every optimizer"]
    assert_as_on_one_device(found, make=zoo.looked_up, data=data, steps=12, atol=1e-5)


def test_a_step_of_two_partitioned_updates_equals_one_device(in_parts):
    model = zoo.two_updates()
    tfdist.fit(model, zoo.X, zoo.CALM, batch_size=8, epochs=2, seed=3, verbose=0)
    np.testing.assert_allclose(in_parts["two updates"], zoo.flat(model), atol=1e-5)


def test_large_variables_are_in_parts_with_their_slots(in_parts):
    parts = in_parts["parts"]
    kernels = [path for path in parts if path.endswith(("embeddings", "/kernel", "_kernel"))]
    kernels = [path for path in kernels if not path.startswith("adam")]
    assert len(kernels) == 6
    for path in kernels:
        assert len(parts[path]) == (1 if path == kernels[-1] else 2), path
        slots = [p for p in parts if path.replace("/", "_") in p and p != path]
        assert slots
        assert all(parts[slot] == parts[path] for slot in slots)
    assert {1, 2} == {len(set(servers)) for servers in parts.values()}


def test_an_optimizer_that_needs_variables_whole_is_refused(in_parts):
    for optimizer in ("Adafactor", "Lamb"):  # of the model, and of its own step
        assert f"optimizer: {optimizer} cannot update " in in_parts[optimizer]
        assert "Fix: leave out --split_bytes" in in_parts[optimizer]
    for way in ("checkpoint", "export"):
        assert "is split over " in in_parts[way]
        assert "Fix: save the model with model.save" in in_parts[way]


def test_checkpoints_do_not_depend_on_the_number_of_servers(tmp_path, monkeypatch):
    jobs = {
        "2": {"ps": 2, "flags": ("--split_bytes", "1024")},
        "3": {"ps": 3},
        "5": {"ps": 3, "flags": ("--split_bytes", "2000")},
    }
    parts = []
    for epochs, options in jobs.items():
        monkeypatch.setenv("EPOCHS", epochs)
        out = tmp_path / f"until {epochs}"
        seen = job(out, "resume", workers=1, **options)[0]["resume"]
        parts.append(seen["parts"])
    assert parts == [2, 1, 3]

    whole = zoo.tokens()
    fit = {"batch_size": 8, "epochs": 5, "seed": 3, "verbose": 0}
    history = tfdist.fit(whole, zoo.TOKENS, zoo.CALM, **fit)
    np.testing.assert_allclose(seen["weights"], zoo.flat(whole), atol=1e-5)
    np.testing.assert_allclose(seen["losses"], history.history["loss"], rtol=1e-5)
    saved = keras.models.load_model(out / "model.keras")
    np.testing.assert_array_equal(zoo.flat(saved), seen["weights"])
    np.testing.assert_array_equal(
        saved.optimizer.variables[2].numpy().shape, saved.layers[0].embeddings.shape
    )
    predicted = saved.predict(zoo.TOKENS, verbose=0)
    np.testing.assert_allclose(seen["predicted"], predicted, atol=1e-5)
    evaluated = saved.evaluate(zoo.TOKENS, zoo.CALM, batch_size=8, verbose=0)
    assert seen["evaluated"] == pytest.approx(evaluated, rel=1e-5)
