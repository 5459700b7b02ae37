"""Whole pipeline jobs through the launcher: what comes out is what one process makes of it."""

import functools
import json

import keras
import numpy as np
import pytest

from tests import graphs
from tests.multiprocess.trainings import PROGRAMS, ended
from tfdist.errors import EXIT_OK

PROGRAM = PROGRAMS / "staged.py"
DEADLINE_S = 250


def run(out, does, *, stages, workers=None, flags=()):
    """Run a job to its end; return its exit code, what it said, and what each task saw at last."""
    words = ("--strategy=pipeline", f"--stages={stages}", f"--workers={workers or stages}", *flags)
    code, said = ended(
        out / f"{does}-{stages}",
        *(*words, str(PROGRAM), str(out), does),
        STAGES=str(stages),
        timeout_s=DEADLINE_S,
    )
    return code, said, seen_in(out, does.split(",")[-1], stages)


def seen_in(out, does, stages):
    """What each task of a job saw of something that it did."""
    return [json.loads(file.read_text()) for file in sorted(out.glob(f"{does}-{stages}-*.json"))]


ALIKE = "fits,looks,scales,sums"
TOGETHER = {(1, 1): f"{ALIKE},plain,shapes", (2, 2): ALIKE, (2, 4): "fits,plain"}
"""What one job does, of so many stages and workers: all that needs no options of its own."""


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory):
    """The directory of a job, and what each of its tasks saw of something that it did."""

    @functools.cache
    def job(does, stages, workers):
        out = tmp_path_factory.mktemp(f"{stages} of {workers}")
        code, said, _ = run(out, does, stages=stages, workers=workers)
        assert code == EXIT_OK, said
        return out

    def seen(does, stages, workers):
        together = TOGETHER.get((stages, workers), "")
        out = job(together if does in together.split(",") else does, stages, workers)
        return out, seen_in(out, does, stages)

    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a run on two stages that saves, and what its tasks saw."""
    out = tmp_path_factory.mktemp("saves")
    code, said, tasks = run(out, "saves", stages=2)
    assert code == EXIT_OK, said
    return out, tasks


def assert_same(seen, expected):
    assert seen["history"].keys() == expected["history"].keys()
    for what in {"history", "looked", "evaluated", "predicted", "weights", "slots"} & {*seen}:
        found, wanted = seen[what], expected[what]
        if isinstance(found, dict):
            found, wanted = list(found.values()), [wanted[key] for key in found]
        if what == "slots" and not found:  # the chief alone has them at the end
            continue
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=what)


ON_TWO = ("fits", "compiled", "looks", "scales", "sums")


@pytest.mark.parametrize(
    ("does", "stages", "workers"),
    [*((does, 2, 2) for does in ON_TWO), ("fits", 3, 3), ("plain", 2, 4)],
)
def test_stages_end_like_one_process(seen_by, does, stages, workers):
    out, tasks = seen_by(does, stages, workers)
    assert len(tasks) == workers
    alike = "fits" if does == "compiled" else does
    _, (expected,) = seen_by(alike, 1, 1)
    for seen in tasks:
        assert_same(seen, expected)
    for what in ("weights", "slots"):
        each = [seen["held"][what] for seen in tasks[:stages]]
        assert max(each) < expected["held"][what]
        assert sum(each) < 1.1 * expected["held"][what]
    if does == "sums":
        assert [file.name for file in (out / "ledger").glob("*")] == ["attempt-1-worker-0.jsonl"]


def test_graphs_of_every_shape_are_trained_evaluated_and_saved(seen_by):
    _, (expected,) = seen_by("shapes", 1, 1)
    out, tasks = seen_by("shapes", 2, 2)
    assert len(tasks) == 2
    for name in graphs.SHAPES:
        loaded = keras.models.load_model(out / f"{name}-2.keras")
        data = graphs.batches_of(loaded, 14, batch=8)
        again, *_ = keras.tree.flatten(loaded.evaluate(data, verbose=0))  # of all outputs
        for seen in tasks:
            for what, found in expected.items():
                for one, other in zip(seen[what][name], found[name], strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(again, seen["evaluated"][name][0], rtol=1e-4, err_msg=name)


def test_two_pipelines_have_the_same_state(seen_by):
    _, (first, *others) = seen_by("fits", 2, 4)
    assert len(others) == 3
    for seen in others:
        for what in ("history", "weights", "predicted", "evaluated"):
            assert seen[what] == first[what], what


def test_a_run_saved_on_two_stages_ends_on_three(undisturbed):
    out, expected = undisturbed
    code, said, tasks = run(out, "saves", stages=3)  # at its end already: restores it
    assert code == EXIT_OK, said
    assert tasks[0]["slots"] == expected[0]["slots"]
    for seen in tasks:
        assert seen["weights"] == expected[0]["weights"]


def test_a_resumed_run_reuses_its_measurements(tmp_path):
    code, said, first = run(tmp_path, "tries", stages=2)
    assert code == EXIT_OK, said
    assert "cut behind" in said
    assert " with its loss; " in said
    assert "split size" in said
    for task in (0, 1):
        assert f"worker-{task} (stage {task}): " in said
    assert first[0]["history"] == first[1]["history"]
    assert len(first[0]["chosen"]["cuts"]) == 1
    assert first[0]["chosen"]["split_size"] >= 1
    code, said, second = run(tmp_path, "tries", stages=2)  # at its end already
    assert code == EXIT_OK, said
    assert [seen["chosen"] for seen in second] == [first[0]["chosen"]] * 2
    assert second[0]["weights"] == first[0]["weights"]


def test_a_run_with_a_killed_stage_has_identical_bits(undisturbed, tmp_path):
    """Kills of the chief: test_training."""
    code, said, tasks = run(tmp_path, "kills-1", stages=2, flags=["--max_restarts=1"])
    assert code == EXIT_OK, said
    assert "worker-1 failed first: killed by SIGKILL" in said
    for seen, expected in zip(tasks, undisturbed[1], strict=True):
        assert {**seen, "held": None} == {**expected, "held": None}
