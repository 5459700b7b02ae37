"""Data that differ between the processes of a job are made the same, warned of or refused."""

import contextlib
import json
import os

import numpy as np
import pytest

from tests import forked_python
from tests.multiprocess.test_missing_peer import held, line_of
from tests.multiprocess.trainings import PROGRAMS, launch
from tfdist.cluster import ClusterSpec, Task, TaskConfig, encode
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE

PROGRAM = PROGRAMS / "agreeing.py"
REFUSED = {
    "a generator of each process": "batches of step 0",
    "arrays permuted in each process": "examples at the same indices",
    "a PyDataset shuffled in each process": "batches of step 0",
}
OF_THEIR_OWN = "weights", "predicted", "hooks"


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
    assert len(found) == 6
    for case in found:
        counts = np.sum([worker[case]["counts"] for worker in job[0]], 0)
        np.testing.assert_array_equal(counts, 1, case)


def test_workers_that_read_different_data_end_with_both_digests(job):
    for case, where in REFUSED.items():
        (line,) = {worker[case]["refused"] for worker in job[0]}  # the same in both
        assert where in line
        digests = {word.strip(",.") for word in line.split() if len(word.strip(",.")) == 12}
        assert len(digests) == 2, line


def test_weights_set_only_in_the_chief_are_refused(job):
    for call in ("a callback", "fit", "evaluate", "predict"):
        (line,) = {worker["weights"][call] for worker in job[0]}
        assert line.startswith("weights: ")
        assert "only/kernel has different sums in the tasks: " in line


def test_each_worker_calls_the_hooks_of_a_pydataset_as_keras_does(job):
    assert [worker["hooks"] for worker in job[0]] == [["end", "begin", "end"]] * 2


def test_random_inputs_of_a_pydataset_warn(job):
    assert job[1].count("right for random augmentation") == 1, job[1]


def test_an_unseeded_shuffle_is_predicted_whole(job):
    first, second = (worker["predicted"] for worker in job[0])
    assert sorted(first) == list(range(96))
    assert first == second


BEFORE_TRAINING = {
    **dict.fromkeys(
        ("dataset", "generator", "PyDataset", "validation", "evaluate", "predict"),
        "batches: 3 in worker-0 and 5 in worker-1. Fix: ",
    ),
    "function": "steps of an epoch: 2 in worker-0 and 3 in worker-1. Fix: ",
    "nothing": "batches: 3 in worker-0 and 0 in worker-1. Fix: ",
    "batch_size": "batch_size: 24 in worker-0 and 40 in worker-1. Fix: ",
    "epochs": "epochs: 3 in worker-0 and 5 in worker-1. Fix: ",
    "steps_per_epoch": "steps of an epoch: 3 in worker-0 and 5 in worker-1. Fix: ",
    "no validation": "sets of validation data: 0 in worker-0 and 1 in worker-1. Fix: ",
}
ENDS = "data: the data ended after 3 batches in worker-0, but after 5 batches in worker-1. Fix: "
UNEVEN = BEFORE_TRAINING | dict.fromkeys(("passes", "skipped"), ENDS)


def test_runs_of_different_lengths_end_with_both_counts(tmp_path):
    words = ("--strategy=multiworker", "--workers=2", str(PROGRAMS / "uneven.py"), str(tmp_path))
    launch(tmp_path / "run", *words, *UNEVEN, timeout_s=200)
    found = [json.loads((tmp_path / f"uneven-{i}.json").read_text()) for i in range(2)]
    assert found[0] == found[1]
    for case, line in UNEVEN.items():
        assert found[0][case].startswith(line), case


def job_by_hand(case, path):
    """Start both tasks of a job without the launcher, then yield their exit codes and errors."""
    path.mkdir()
    tasks = [Task("worker", index) for index in range(2)]
    with contextlib.ExitStack() as stack:
        cluster = ClusterSpec(worker=tuple(stack.enter_context(held(2))))
        programs = []
        for task in tasks:
            file = stack.enter_context((path / str(task)).open("w"))
            env = {**os.environ, "TF_CONFIG": encode(TaskConfig(cluster=cluster, task=task))}
            argv = str(PROGRAMS / "uneven.py"), case
            programs.append(forked_python.Program(*argv, env=env, stderr=file))
            stack.callback(programs[-1].kill)
        yield
        codes = [program.wait(150) for program in programs]
    said = [(path / str(task)).read_text() for task in tasks]
    yield codes, [line_of(text).removeprefix("tfdist: ") for text in said]


def test_runs_of_different_lengths_end_without_the_launcher_too(tmp_path):
    ends = "function, only once"
    jobs = {case: job_by_hand(case, tmp_path / case) for case in (ends, "steps", "results")}
    for job in jobs.values():
        next(job)
    codes, (first, second) = next(jobs.pop(ends))
    assert codes == [EXIT_USAGE, EXIT_PEER_MISSING], (first, second)
    assert first.startswith("data: the dataset ended before the requested step. Fix: ")
    assert second.startswith("worker-1: lost worker-0")
    for case, job in jobs.items():
        codes, lines = next(job)
        assert codes == [EXIT_USAGE] * 2, (case, *lines)
        for index, line in enumerate(lines):
            place = f"sums over the workers: worker-{1 - index} runs sum "
            assert line.startswith(place), case
            assert f", but worker-{index} runs sum " in line, case
