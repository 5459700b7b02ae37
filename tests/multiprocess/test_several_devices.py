"""Several devices in each of several workers: what one device makes of it."""

import json

import keras
import numpy as np
import pytest

import tfdist
from tests.multiprocess.programs import zoo
from tests.multiprocess.trainings import PROGRAMS, launch


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """What each task of a job of two workers with two devices saw."""
    out = tmp_path_factory.mktemp("devices")
    flags = ("--strategy", "multiworker", "--workers", "2")
    launch(
        out / "run", *flags, str(PROGRAMS / "several_devices.py"), str(out), timeout_s=200,
    )  # fmt: skip
    return [json.loads(file.read_text()) for file in sorted(out.glob("seen-*.json"))]


@pytest.mark.parametrize("shared", [False, True])
def test_added_losses_and_synchronized_statistics_equal_one_device(tasks, shared):
    keras.utils.set_random_seed(1)
    model = zoo.with_activities(shared=shared)
    history = tfdist.fit(
        model, zoo.X[:57], zoo.CALM[:57], batch_size=16, epochs=3, seed=3, verbose=0
    )
    assert len(tasks) == 2
    for task in tasks:
        assert task["replicas"] == 4
        losses, weights = task[f"shared={shared}"]
        np.testing.assert_allclose(losses, history.history["loss"], rtol=1e-5)
        np.testing.assert_allclose(weights, zoo.flat(model), atol=1e-5)
