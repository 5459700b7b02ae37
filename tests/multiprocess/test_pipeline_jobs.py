"""Whole pipeline jobs through the launcher: what comes out is what one process makes of it."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from tests.multiprocess.jobs import report
from tests.multiprocess.trainings import PROGRAMS, TrainingJob, ended, summary_of
from tfdist import bench
from tfdist.cluster import hold_ports
from tfdist.errors import EXIT_OK, EXIT_USAGE
from tfdist.outputs.run_directory import Evaluations

PROGRAM = PROGRAMS / "staged.py"
DEADLINE_S = 250


def run(out, does, *, stages, workers=None, flags=()):
    """Run a job to its end; return its exit code, what it said, and what each task saw."""
    words = ("--strategy=pipeline", f"--stages={stages}", f"--workers={workers or stages}", *flags)
    code, said = ended(
        out / f"{does}-{stages}",
        *(*words, str(PROGRAM), str(out), does),
        STAGES=str(stages),
        timeout_s=DEADLINE_S,
    )
    files = [out / f"{does}-{stages}-worker-{i}.json" for i in range(workers or stages)]
    seen = [json.loads(file.read_text()) for file in files if file.exists()]
    return code, said, seen


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """The same micro-batches, all stages in one process."""

    @functools.cache
    def of(does):
        code, said, (seen,) = run(tmp_path_factory.mktemp("one"), does, stages=1)
        assert code == EXIT_OK, said
        return seen

    return of


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a run on two stages that saves, and what its tasks saw."""
    out = tmp_path_factory.mktemp("saves")
    code, said, tasks = run(out, "saves", stages=2)
    assert code == EXIT_OK, said
    return out, tasks


def assert_same(seen, expected):
    assert seen["history"].keys() == expected["history"].keys()
    for what in ("history", "looked", "evaluated", "predicted", "weights", "slots"):
        found, wanted = seen[what], expected[what]
        if isinstance(found, dict):
            found, wanted = list(found.values()), [wanted[key] for key in found]
        if what == "slots" and not found:  # the chief alone has them at the end
            continue
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=what)


@pytest.mark.parametrize(
    ("does", "stages", "workers"),
    [
        ("fits", 2, 2),
        ("again", 2, 2),
        ("compiled", 2, 2),
        ("undivided", 2, 2),
        ("auto", 2, 2),
        ("looks", 2, 2),
        ("scales", 2, 2),
        ("sums", 2, 2),
        ("fits", 3, 3),
        ("plain", 2, 4),
    ],
)
def test_stages_end_with_what_one_process_ends_with(
    in_one_process, tmp_path, does, stages, workers
):
    code, said, tasks = run(tmp_path, does, stages=stages, workers=workers)
    assert code == EXIT_OK, said
    assert len(tasks) == workers
    for seen in tasks:
        assert_same(seen, in_one_process("fits" if does in ("again", "compiled", "auto") else does))
    whole = in_one_process(does if does in ("scales", "sums", "undivided") else "fits")["held"]
    for what in ("weights", "slots"):
        each = [seen["held"][what] for seen in tasks[:stages]]
        assert max(each) < whole[what]
        assert sum(each) < 1.1 * whole[what]
    ledgers = [file.name for file in (tmp_path / "ledger").glob("*")]
    assert ledgers == ["attempt-1-worker-0.bin"] * (does == "sums")


def test_two_pipelines_have_one_state(tmp_path):
    code, said, tasks = run(tmp_path, "fits", stages=2, workers=4)
    assert code == EXIT_OK, said
    for seen in tasks[1:]:
        for what in ("history", "weights", "predicted", "evaluated"):
            assert seen[what] == tasks[0][what], what


def test_a_run_saved_on_two_stages_ends_on_three(undisturbed):
    out, expected = undisturbed
    code, said, tasks = run(out, "saves", stages=3)  # at its end already: restores it
    assert code == EXIT_OK, said
    assert tasks[0]["slots"] == expected[0]["slots"]
    for seen in tasks:
        assert seen["weights"] == expected[0]["weights"]


def test_a_resumed_run_goes_on_with_what_was_measured(tmp_path):
    code, said, first = run(tmp_path, "tries", stages=2)
    assert code == EXIT_OK, said
    assert "cut behind" in said
    assert "split size" in said
    for task in (0, 1):
        assert f"worker-{task} (stage {task}): " in said
    assert first[0]["history"] == first[1]["history"]
    assert first[0]["chosen"].keys() == {"cut", "cut_of", "split_size"}
    code, said, second = run(tmp_path, "tries", stages=2)  # at its end already
    assert code == EXIT_OK, said
    assert [seen["chosen"] for seen in second] == [first[0]["chosen"]] * 2
    assert second[0]["weights"] == first[0]["weights"]


@pytest.mark.parametrize("task", [0, 1])
def test_a_run_whose_stage_was_killed_ends_with_the_bits_of_one_that_was_not(
    undisturbed, tmp_path, task
):
    code, said, tasks = run(tmp_path, f"kills-{task}", stages=2, flags=["--max_restarts=1"])
    assert code == EXIT_OK, said
    assert f"worker-{task} failed first: killed by SIGKILL" in said
    for seen, expected in zip(tasks, undisturbed[1], strict=True):
        assert {**seen, "held": None} == {**expected, "held": None}


@pytest.mark.timeout(2 * DEADLINE_S)
def test_stages_on_two_hosts_train_beside_an_evaluator(tmp_path):
    hosts = ("127.0.0.1", "127.0.0.2")
    flags = ("--config.total_examples=3000", "--config.checkpoints=2", "--config.seed=3")
    flags += ("--config.strategy=pipeline",)
    with hold_ports(1)[0] as held:
        job, other = (
            TrainingJob(
                tmp_path, "--strategy=pipeline", "--stages=2", f"--hosts={','.join(hosts)}",
                f"--node_rank={rank}", f"--rendezvous_port={held.port}", "--evaluator",
                program=("--", *flags, "--config.global_batch_size=50"),
            )
            for rank in (0, 1)
        )  # fmt: skip
        assert (job.end(), other.end()) == (0, 0), job.logs()
    (attempt,) = report(tmp_path)["attempts"]
    ended = {task["task"]: (task["exit_code"], task["host"]) for task in attempt["tasks"]}
    stages = {f"worker-{rank}": (0, host) for rank, host in enumerate(hosts)}
    assert ended == {**stages, "evaluator-0": (0, hosts[0])}, job.logs()
    lines = Evaluations(tmp_path / "checkpoints").lines()
    assert (lines[-1]["step"], lines[-1]["examples"]) == (60, 3000), job.logs()
    assert summary_of(tmp_path)["status"] == "done"


def test_a_cut_behind_no_layer_ends_every_task_in_one_line(tmp_path):
    code, said, tasks = run(tmp_path, "wrong", stages=2)
    assert code == EXIT_USAGE
    assert "'addz' (did you mean 'adds'?)" in said
    assert "Traceback" not in said
    assert not tasks


def test_stages_that_read_different_data_are_refused(tmp_path):
    code, said, tasks = run(tmp_path, "differs", stages=2)
    assert code == EXIT_USAGE
    assert "examples at the same indices" in said
    assert not tasks


def test_a_stage_that_dies_is_named(tmp_path):
    code, said, _ = run(tmp_path, "dies", stages=2)
    assert code != EXIT_OK
    assert "worker-1" in said
    assert code != EXIT_USAGE, said


def test_every_split_size_is_measured_beside_one_device(tmp_path, capfd):
    words = ("--batch_size=12", "--sizes=auto,3", "--one_device=3", "--steps=1", "--timeout_s=120")
    lines = tmp_path / "split.jsonl"
    program = f"{PROGRAMS / 'split_subject.py'}:make"
    assert bench.main(["pipeline", program, *words, "--json", str(lines)]) == EXIT_OK
    cells = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(cell["stages"], cell["size"]) for cell in cells if not cell["found"]] == [
        *((2, 3), (2, 12), (1, 3), (1, 12))
    ]
    (auto,) = [cell for cell in cells if cell["found"]]
    assert auto["stages"] == 2
    assert auto["size"] in (12, 6, 3, 2, 1)
    assert all(len(cell["seconds"]) == 1 for cell in cells)


def test_a_subject_that_fails_is_said_by_the_bench(tmp_path, capfd):
    program = f"{PROGRAMS / 'split_subject.py'}:made"
    assert bench.main(["pipeline", program, "--batch_size=12", "--sizes=3", "--steps=1"]) == 1
    assert "did you mean 'make'" in capfd.readouterr().err
