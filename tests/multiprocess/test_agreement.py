"""Data that differ between the processes of a job are made the same, warned of or refused."""

import json

import numpy as np
import pytest

from tests.multiprocess.trainings import PROGRAMS, launch

PROGRAM = PROGRAMS / "agreeing.py"
SAME = (
    "a shuffle without a seed",
    "draws in a parallel map",
    "random layers in a stream",
    "sampled datasets",
    "a PyDataset with random inputs",
)
REFUSED = {
    "a generator of each process": "batches of step 0",
    "arrays permuted in each process": "examples at the same indices",
    "a PyDataset shuffled in each process": "batches of step 0",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What both workers found, and what the job said."""
    out = tmp_path_factory.mktemp("agreeing")
    said = launch(
        out / "run", "--strategy", "multiworker", "--workers", "2", str(PROGRAM), str(out),
        timeout_s=300,
    )  # fmt: skip
    return [json.loads((out / f"agreeing-{i}.json").read_text()) for i in range(2)], said


@pytest.mark.parametrize("case", SAME)
def test_each_example_is_seen_once_by_the_workers_together(job, case):
    workers, _ = job
    counts = np.sum([worker[case]["counts"] for worker in workers], 0)
    np.testing.assert_array_equal(counts, 1)


@pytest.mark.parametrize("case", REFUSED)
def test_workers_that_read_different_data_end_with_both_digests(job, case):
    workers, _ = job
    lines = {worker[case]["refused"] for worker in workers}
    (line,) = lines  # the same in both
    assert REFUSED[case] in line
    digests = {word.strip(",;") for word in line.split() if len(word.strip(",;")) == 12}
    assert len(digests) == 2, line


def test_steps_of_workers_with_one_seed_draw_different_numbers(job):
    workers, _ = job
    assert workers[0]["drawn apart"][0] > 1e-3


@pytest.mark.parametrize("call", ["a callback", "fit", "evaluate", "predict"])
def test_weights_that_the_chief_alone_has_set_are_refused(job, call):
    workers, _ = job
    (line,) = {worker["weights"][call] for worker in workers}
    assert line.startswith("weights: received ")
    assert "only/kernel, whose sums in the tasks are " in line


def test_random_inputs_of_a_pydataset_are_warned_of(job):
    _, said = job
    assert said.count("right for random augmentation") == 1, said


def test_an_unseeded_shuffle_is_predicted_whole(job):
    workers, _ = job
    assert sorted(workers[0]["predicted"]) == list(range(96))
    assert workers[0]["predicted"] == workers[1]["predicted"]
