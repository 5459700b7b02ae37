"""Sharded optimizer state: the weights of a run without it, and checkpoints that are the same."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.multiprocess.test_training import PROGRAMS, launch
from tests.multiprocess.warm import forked

PROGRAM, RESIZED = PROGRAMS / "sharded.py", PROGRAMS / "sharded_resized.py"
DEADLINE_S = 400


@pytest.fixture(scope="module", params=[2, 3])
def tasks(request, tmp_path_factory):
    """What each task of a job of so many workers saw."""
    out = tmp_path_factory.mktemp("sharded")
    flags = ("--strategy", "multiworker", "--workers", str(request.param))
    launch(out / "run", *flags, str(PROGRAM), str(out), timeout_s=DEADLINE_S)
    return [json.loads(file.read_text()) for file in sorted(out.glob("seen-*.json"))]


def test_weights_are_those_of_whole_slots_to_the_bit(tasks):
    for task in tasks:
        differ = [name for name, (whole, sharded) in task["weights"].items() if whole != sharded]
        assert differ == []
        assert task["weights"] == tasks[0]["weights"]


def test_gradients_by_rows_are_updated_to_the_same_bits(tasks):
    for task in tasks:
        differ = [name for name, (whole, sharded) in task["sparse"].items() if whole != sharded]
        assert differ == []


def test_a_worker_has_its_part_of_the_state(tasks):
    for name, (whole, _) in tasks[0]["state"].items():
        numbers = 8  # iterations, learning rate and the like, and what does not divide evenly
        largest = max(task["state"][name][1] for task in tasks)
        assert largest <= whole / len(tasks) + numbers * len(tasks)


def test_a_checkpoint_is_the_one_of_whole_slots(tasks):
    assert all(task["same checkpoint"] for task in tasks)


def test_runs_go_on_with_and_without_sharding_to_the_same_bits(tasks):
    for task in tasks:
        expected = task["weights"]["adam"][0]
        assert task["resumed"] == dict.fromkeys(task["resumed"], expected)


def test_optimizers_that_need_whole_variables_are_refused_by_name(tasks):
    for task in tasks:
        refused = task["refused"]
        for name in ("Adafactor", "Lamb", "Muon"):
            line = refused[name.lower()]
            assert line.startswith(f"sharded_optimizer: received {name}, whose update may need")
            assert "expected one of SGD, Adam, AdamW" in line
            assert "\n" not in line
        assert "Adam, which is built with whole slots" in refused["whole"]


def test_a_file_of_the_model_has_its_weights(tasks):
    assert tasks[0]["file has the weights"]


def trained(out, *, workers, sharded, epochs):
    """Trains so many epochs of one run with so many workers; returns the weights."""
    kind = "multiworker" if workers > 1 else "single"
    flags = ["--strategy", kind, f"--workers={workers}", f"--run_dir={out}/job-{workers}-{epochs}"]
    with forked() as (more, fds):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tfdist.launch", *flags, *more),
                *(str(RESIZED), str(out), str(int(sharded)), str(epochs)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    return np.load(out / "weights.npy")


def test_other_numbers_of_workers_go_on(tmp_path):
    whole, resized = tmp_path / "whole", tmp_path / "resized"
    for directory in (whole, resized):
        directory.mkdir()
    expected = trained(whole, workers=1, sharded=False, epochs=4)
    for epochs, (workers, sharded) in enumerate([(2, True), (3, True), (1, True), (2, False)]):
        found = trained(resized, workers=workers, sharded=sharded, epochs=epochs + 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_train_program_writes_the_digests_of_whole_slots(tmp_path):
    flags = ("--config.total_examples=2000", "--config.checkpoints=2", "--config.seed=3")
    found = []
    for sharded in (False, True):
        run_dir = tmp_path / f"run-{sharded}"
        launch(
            run_dir, "--strategy", "multiworker", "--workers", "2", "--", *flags,
            f"--config.sharded_optimizer={str(sharded).lower()}", timeout_s=DEADLINE_S,
        )  # fmt: skip
        summary = json.loads((run_dir / "summary.json").read_text())
        found.append([summary[name] for name in ("status", "weights_sha256", "state_sha256")])
    assert found[0] == found[1]
