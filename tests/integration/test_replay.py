"""`python -m tfdist.replay`: a step again is the step."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from tests import forked_python
from tests.refusals import refusal
from tfdist import replay
from tfdist.audit.replay import step_environment_of
from tfdist.checkpoint import CheckpointStore
from tfdist.configs import base
from tfdist.outputs.run_directory import RunDirectory

pytestmark = pytest.mark.slow

DEADLINE_S = 200
STEPS = 12
LENGTH = (
    "--config.total_examples=700",
    "--config.checkpoints=2",
    "--config.global_batch_size=60",
    "--config.seed=5",
    "--config.backup_every_steps=1",
    "--config.keep_checkpoints=100",
)
KINDS = {
    "single": ["--config.strategy=single", "--config.clip_norm=0.5", "--config.schedule=cosine",
               "--config.gradient_accumulation_steps=2",
               "--config.augmentation.random_crop_padding=1"],
    "mirrored": ["--config.strategy=mirrored", "--config.devices_per_worker=2",
                 "--config.precision=mixed_float16", "--config.ledger=full",
                 "--config.model=dense"],
}  # fmt: skip


def run(module: str, *arguments: str) -> Any:
    return forked_python.run("-m", module, *arguments, timeout=DEADLINE_S)


def replayed(run_dir: Path, step: int, *more: str) -> dict[str, Any]:
    done = run("tfdist.replay", str(run_dir), "--step", str(step), "--json", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def files(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.is_file()
    }


def without_checkpoints(run_dir: Path, target: Path, steps: range) -> Path:
    """A copy of a run from which the checkpoints of some steps are gone."""
    shutil.copytree(run_dir, target)
    for step in steps:
        for path in (target / "checkpoints").glob(f"step-{step:09d}.*"):
            shutil.rmtree(path)
    return target


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / request.param
    done = run("tfdist.train", *LENGTH, *KINDS[request.param], f"--config.run_dir={run_dir}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert CheckpointStore(run_dir / "checkpoints").steps() == list(range(1, STEPS + 1))
    return request.param, run_dir


def test_a_step_from_an_earlier_checkpoint_gives_the_bits_of_the_run(trained, tmp_path):
    kind, run_dir = trained
    copy = without_checkpoints(run_dir, tmp_path / "run", range(4, 9))
    before = files(copy)
    found = replayed(copy, 8)
    assert (found["restored_step"], found["strategy"]) == (3, kind)
    assert found["equals_checkpoint"] is True
    replicas = 2 if kind == "mirrored" else 1
    assert [len(e) for e in found["examples"]] == [60 // replicas] * replicas
    assert found["gradient_norm"] > 0
    assert found["learning_rate"] == pytest.approx(2.5e-4 if kind == "single" else 1e-3)
    assert found["updated"] is (kind == "mirrored")  # the gradients of two steps are one update
    assert len(found["gradient_norms"]) == (6 if kind == "mirrored" else 8)  # variables
    assert files(copy) == before


def test_a_step_without_a_checkpoint_starts_from_the_initial_weights(trained, tmp_path):
    _, run_dir = trained
    found = replayed(without_checkpoints(run_dir, tmp_path / "a run", range(1, 6)), 5)
    assert found["restored_step"] is None
    assert (found["equals_checkpoint"], found["updated"]) == (True, True)


def test_a_step_by_fused_kernels_gives_the_bits_of_the_run(tmp_path):
    run_dir = tmp_path / "run"
    fused = ("--config.model=resnet20", "--config.fused_kernels=true")
    arguments = (*LENGTH, *fused, "--config.strategy=single", f"--config.run_dir={run_dir}")
    done = run("tfdist.train", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert replayed(run_dir, 3)["equals_checkpoint"] is True


def test_where_a_step_ran_is_told_by_the_nearest_checkpoint_that_is_whole(tmp_path):
    directory = RunDirectory(tmp_path)
    store = CheckpointStore(directory.checkpoints)

    def saved(step: int, **place: Any) -> Path:
        return store.write(step, {"x": np.ones(3)}, meta={"place": place})

    def place_at(step: int, kind: str | None = None) -> tuple[str, int, int]:
        config = ConfigDict({"strategy": "mirrored"})
        found = step_environment_of(directory, store, config, step=step, kind=kind, replicas=None)
        return found.kind, found.replicas, found.threads

    for step, replicas in ((5, 2), (9, 3), (12, 4)):
        newest = saved(step, strategy="mirrored", replicas=replicas, threads=replicas + 1)
    assert place_at(6) == ("mirrored", 3, 4)
    assert place_at(10) == ("mirrored", 4, 5)
    damaged = bytearray((newest / "arrays.bin").read_bytes())
    damaged[0] ^= 1
    (newest / "arrays.bin").write_bytes(damaged)
    assert place_at(10) == ("mirrored", 3, 4)
    # A run in stages is replayed on whole batches where that is asked for alone.
    saved(13, strategy="pipeline", replicas=1, threads=2)
    assert refusal(lambda: place_at(12)).code == "pipeline-run"
    assert place_at(12, "single") == ("single", 1, 2)


def test_what_cannot_be_replayed_is_one_line(tmp_path, capsys):
    length = {"total_examples": 100, "checkpoints": 1, "global_batch_size": 10, "seed": 1}
    ended_early = {"status": "done", "steps": 5, "strategy": "single", "replicas": 1}
    for summary, words, says in (
        (None, "3", "no config.json"),
        ({}, "10", "received 10; expected 0 to 9"),
        ({}, "-1", "received -1; expected 0 to 9"),
        ({}, "9", "say --strategy single"),
        ({}, "9 --replicas 0", "received 0 with"),
        (ended_early, "5", "received 5; expected 0 to 4: the run has 5 steps"),
        ({"strategy": "ps", "replicas": 2}, "9", "a run under strategy ps"),
    ):
        if summary is not None:
            (tmp_path / "config.json").write_text(json.dumps({**base().to_dict(), **length}))
            (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert replay.main([str(tmp_path), "--step", *words.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert says in error
