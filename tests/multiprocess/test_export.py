"""Exports from jobs of several processes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess.trainings import PROGRAMS, launch

PROGRAM = PROGRAMS / "exporting.py"


@pytest.mark.parametrize(
    "job",
    [
        ["--strategy", "multiworker", "--workers", "2"],
        ["--strategy", "ps", "--workers", "1", "--ps", "2", "--split_bytes", "512"],
    ],
    ids=lambda job: job[1],
)
def test_a_job_exports_what_it_has_trained(tmp_path, job):
    said = launch(tmp_path / "run", *job, str(PROGRAM), str(tmp_path / "out"), timeout_s=120)
    place = tmp_path / "out" / "mlp" / "1"
    assert f"exported {place}" in said, said
    call = tf.saved_model.load(str(place)).signatures["serving_default"]
    x = np.random.RandomState(0).rand(64, 6).astype("float32")
    found = call(features=tf.constant(x))["logits"].numpy()
    np.testing.assert_allclose(found, np.load(tmp_path / "out" / "answers.npy"), atol=1e-6)
