"""Sharded optimizer state: the weights of a run without it, and checkpoints that are the same.

Other numbers of workers go on with it in test_resized.
"""

import functools
import json

import pytest

from tests.multiprocess.trainings import PROGRAMS, launch

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "sharded.py"
DEADLINE_S = 500


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory):
    """What each task of a job of so many workers saw, by section; run when first asked for."""

    def run(workers):
        out = tmp_path_factory.mktemp(f"{workers} workers")
        flags = ("--strategy", "multiworker", "--workers", str(workers))
        sections = ("weights", "checkpoints", "refusals")[: 1 if workers > 2 else None]
        launch(out / "run", *flags, str(PROGRAM), str(out), *sections, timeout_s=DEADLINE_S)
        return {
            section: [json.loads(file.read_text()) for file in sorted(out.glob(f"{section}-*"))]
            for section in sections
        }

    return functools.cache(run)


def differing(pairs):
    return [name for name, (whole, sharded) in pairs.items() if whole != sharded]


@pytest.mark.parametrize("workers", [2, 3])
def test_sharding_does_not_change_the_weights(seen_by, workers):
    tasks = seen_by(workers)["weights"]
    assert len(tasks) == workers
    for task in tasks:
        assert differing(task["weights"]) == []
        assert task["weights"] == tasks[0]["weights"]
        assert len(task["apart"]) == (2 if workers == 2 else 0)
        assert all(apart < 1e-6 for apart in task["apart"].values())
    for name, ((count, whole), _) in tasks[0]["state"].items():
        largest = max(task["state"][name][1][1] for task in tasks)
        assert largest <= whole / len(tasks) + 32 * count  # parts are of whole vectors


def test_sharding_does_not_change_the_checkpoints(seen_by):
    for task in seen_by(2)["checkpoints"]:
        assert task["same checkpoint"]
        assert task["resumed"] == dict.fromkeys(task["resumed"], task["expected"])


def test_unsupported_optimizers_are_refused_and_models_are_saved(seen_by):
    tasks = seen_by(2)["refusals"]
    assert [task["refused"] for task in tasks] == ["unsupported"] * 2
    assert tasks[0]["file has the weights"]
    for task in tasks:
        assert task["frozen stays"]
        assert len(set(task["over sequences"])) == 1
