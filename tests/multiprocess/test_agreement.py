"""Data that differ between the processes of a job are made the same, warned of or refused."""

import json

import numpy as np
import pytest

from tests.multiprocess.trainings import PROGRAMS, launch

PROGRAM = PROGRAMS / "agreeing.py"
REFUSED = {
    "a generator of each process": "batches of step 0",
    "arrays permuted in each process": "examples at the same indices",
    "a PyDataset shuffled in each process": "batches of step 0",
}
OF_THEIR_OWN = "weights", "columns", "drawn apart", "predicted"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What both workers found, and what the job said."""
    out = tmp_path_factory.mktemp("agreeing")
    said = launch(
        out / "run", "--strategy", "multiworker", "--workers", "2", str(PROGRAM), str(out),
        timeout_s=300,
    )  # fmt: skip
    return [json.loads((out / f"agreeing-{i}.json").read_text()) for i in range(2)], said


def test_each_example_is_seen_once_by_the_workers_together(job):
    found = job[0][0].keys() - REFUSED.keys() - {*OF_THEIR_OWN}
    assert len(found) == 5
    for case in found:
        counts = np.sum([worker[case]["counts"] for worker in job[0]], 0)
        np.testing.assert_array_equal(counts, 1, case)


def test_workers_that_read_different_data_end_with_both_digests(job):
    for case, where in REFUSED.items():
        (line,) = {worker[case]["refused"] for worker in job[0]}  # the same in both
        assert where in line
        digests = {word.strip(",;") for word in line.split() if len(word.strip(",;")) == 12}
        assert len(digests) == 2, line


def test_steps_of_workers_with_one_seed_draw_different_numbers(job):
    assert job[0][0]["drawn apart"][0] > 1e-3


def test_weights_that_the_chief_alone_has_set_are_refused(job):
    for call in ("a callback", "fit", "evaluate", "predict"):
        (line,) = {worker["weights"][call] for worker in job[0]}
        assert line.startswith("weights: received ")
        assert "only/kernel, whose sums in the tasks are " in line


def test_random_inputs_of_a_pydataset_are_warned_of(job):
    assert job[1].count("right for random augmentation") == 1, job[1]


def test_an_unseeded_shuffle_is_predicted_whole(job):
    first, second = (worker["predicted"] for worker in job[0])
    assert sorted(first) == list(range(96))
    assert first == second


def test_rows_of_a_batch_that_have_other_shapes_in_the_workers_are_refused(job):
    """Where one has a single column, its values filled the columns of the other."""
    (line,) = {worker["columns"] for worker in job[0]}
    assert "received rows of shapes (1,), (3,) in the tasks" in line
