"""Sharded optimizer state: the weights of a run without it, and checkpoints that are the same.

Other numbers of workers: test_resized.
"""

import json

import pytest

from tests.multiprocess.trainings import PROGRAMS, launch

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "sharded.py"
DEADLINE_S = 500


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each task of a job saw, by section."""
    out = tmp_path_factory.mktemp("sharded")
    flags = ("--strategy", "multiworker", "--workers", "2")
    launch(out / "run", *flags, str(PROGRAM), str(out), timeout_s=DEADLINE_S)
    return {
        section: [json.loads(file.read_text()) for file in sorted(out.glob(f"{section}-*"))]
        for section in ("weights", "checkpoints", "refusals")
    }


def differing(pairs):
    return [name for name, (whole, sharded) in pairs.items() if whole != sharded]


def test_sharding_does_not_change_the_weights(seen):
    tasks = seen["weights"]
    assert len(tasks) == 2
    for task in tasks:
        assert differing(task["weights"]) == []
        assert task["weights"] == tasks[0]["weights"]
        assert len(task["apart"]) == 2
        assert all(apart < 1e-6 for apart in task["apart"].values())
    for name, ((count, whole), _) in tasks[0]["state"].items():
        largest = max(task["state"][name][1][1] for task in tasks)
        assert largest <= whole / len(tasks) + 32 * count  # parts are of whole vectors


def test_sharding_does_not_change_the_checkpoints(seen):
    for task in seen["checkpoints"]:
        assert task["same checkpoint"]
        assert task["resumed"] == dict.fromkeys(task["resumed"], task["expected"])


def test_unsupported_optimizers_are_refused_and_models_are_saved(seen):
    tasks = seen["refusals"]
    assert [task["refused"] for task in tasks] == ["unsupported"] * 2
    assert tasks[0]["file has the weights"]
    for task in tasks:
        assert task["frozen stays"]
        assert len(set(task["over sequences"])) == 1
