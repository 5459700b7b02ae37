"""A run that goes on with another number of workers: the same examples, and the same loss."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.trainings import PROGRAMS, ended
from tests.tools.ledger import differences, prove, read

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "resized.py"
DEADLINE_S = 200
KILLED = 128 + 9
# Workers, the step at which the chief is killed, and whether optimizer state is in shards; the
# others go on two or three steps before it, in the middle of an epoch.
RESIZED = ((2, 58, "sharded"), (3, 114, "sharded"), (1, 163, "sharded"), (2, 0, "whole"))
GOES_ON_AT = [0, 56, 112, 161]


def train(out: Path, *, workers: int, kill_at: int, slots: str) -> None:
    flags = ["--strategy", "multiworker" if workers > 1 else "single", f"--workers={workers}"]
    program = [str(PROGRAM), str(out), str(kill_at), slots]
    code, said = ended(out / f"job-{workers}-{kill_at}", *flags, *program, timeout_s=DEADLINE_S)
    assert code == (KILLED if kill_at else 0), said


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directories of a run on one device, and of one that was resized three times."""
    whole, resized = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resized")
    train(whole, workers=1, kill_at=0, slots="whole")
    for workers, kill_at, slots in RESIZED:
        train(resized, workers=workers, kill_at=kill_at, slots=slots)
    return whole, resized


def test_each_step_sees_the_same_examples_augmented_alike(runs):
    whole, resized = (directory / "ledger" for directory in runs)
    assert differences(resized, whole) == ([], [])
    assert prove(resized) == []
    assert [len(list(resized.glob(f"attempt-{n}-*"))) for n in (1, 2, 3, 4)] == [2, 3, 1, 2]
    assert read(resized).attempts == GOES_ON_AT


def test_the_loss_is_the_same_over_two_hundred_steps(runs):
    whole, resized = (json.loads((directory / "found.json").read_text()) for directory in runs)
    assert len(whole["loss"]) == 40
    assert whole["loss"][-1] < 0.5 * whole["loss"][0]
    np.testing.assert_allclose(resized["loss"], whole["loss"], rtol=1e-4)
    np.testing.assert_allclose(resized["weights"], whole["weights"], rtol=1e-4)
