"""`python -m tfdist.train` in one process, from the command line to the run directory."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import forked_python
from tests.refusals import refused
from tfdist.checkpoint.model_state import weights_sha256
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import JOURNAL, Journal

DEADLINE_S = 150
SHORT = ("--config.total_examples=1000", "--config.checkpoints=3", "--config.global_batch_size=50")


def train(run_dir: Path | None, *arguments: str, cwd: Path | None = None) -> Any:
    """Runs the program to its end."""
    where = [f"--config.run_dir={run_dir}"] if run_dir else []
    program = ("-m", "tfdist.train", *arguments, *where)
    return forked_python.run(*program, timeout=DEADLINE_S, cwd=cwd)


def trained(run_dir: Path, *arguments: str) -> dict[str, Any]:
    done = train(run_dir, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = RunDirectory(run_dir).read_summary()
    assert summary is not None
    return {**summary, "stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 22 steps; tests that change it copy what they need. It alone is no fork."""
    run_dir = tmp_path_factory.mktemp("runs") / "digits"
    flags = (*SHORT, "--config.seed=5", "--config.save_model=true", f"--config.run_dir={run_dir}")
    flags += (f"--config.objective_file={run_dir.parent / 'katib' / 'metrics.log'}",)
    command = [sys.executable, "-m", "tfdist.train", *flags]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return run_dir


def test_the_run_directory_has_its_documented_files(finished):
    names = {"config.json", "metrics.jsonl", "summary.json"}
    assert names | {"tensorboard", "checkpoints"} <= set(os.listdir(finished))
    config = json.loads((finished / "config.json").read_text())
    assert (config["seed"], config["total_examples"]) == (5, 1000)
    lines = RunDirectory(finished).read_metrics()
    ends = [(line["virtual_epoch"], line["examples"]) for line in lines]
    assert ends == [(1, 333), (2, 666), (3, 1000)]
    keys = {"step", "loss", "accuracy", "val_loss", "val_accuracy", "examples_per_second"}
    assert all(keys <= set(line) for line in lines)
    summary = json.loads((finished / "summary.json").read_text())
    expected = {"status": "done", "strategy": "single", "workers": 1, "ps": 0, "replicas": 1}
    expected |= {"steps": 21, "examples": 1000, "virtual_epochs": 3, "resumed_from_step": None}
    assert {name: summary[name] for name in expected} == expected
    assert lines[-1]["step"] == 21
    assert summary["metrics"]["val_accuracy"] == lines[-1]["val_accuracy"]
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert re.fullmatch("[0-9a-f]{64}", summary["state_sha256"])
    assert summary["state_sha256"] != summary["weights_sha256"]


KATIB = r"([\w|-]+)\s*=\s*((-?\d+)(\.\d+)?)"
"""Default pattern of Katib's file metrics collector (pkg/metricscollector/v1beta1/common)."""


def reported(path: Path) -> list[tuple[str, float]]:
    """Return names and values as Katib reads them, and check that the times increase."""
    lines = path.read_text().splitlines()
    times = [datetime.fromisoformat(line.split(" ", 1)[0]) for line in lines]
    assert times == sorted(times)
    assert all(time.tzinfo == UTC for time in times)
    return [(name, float(value)) for line in lines for name, value, *_ in re.findall(KATIB, line)]


def test_katib_reads_the_metrics_of_each_virtual_epoch(finished, tmp_path):
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    lines = RunDirectory(finished).read_metrics()
    found = reported(finished.parent / "katib" / "metrics.log")
    assert sorted(found) == sorted((name, line[name]) for line in lines for name in names)
    # A pod that starts again finds a finished run, and no file.
    again = tmp_path / "again" / "metrics.log"
    flags = ("--config.seed=5", "--config.save_model=true", f"--config.objective_file={again}")
    assert train(finished, *SHORT, *flags).returncode == 0
    assert sorted(reported(again)) == sorted(found)


def test_an_exported_run_includes_its_normalisation(finished, tmp_path):
    import keras
    import numpy as np
    import tensorflow as tf

    words = ("-m", "tfdist.export", str(finished), str(tmp_path), "--name", "digits", "--best")
    done = forked_python.run(*words, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "digits" / "1"
    assert done.stdout.strip().splitlines()[-1] == str(place)
    assert not re.search("cuInit|I absl", done.stderr), done.stderr
    images = np.random.RandomState(0).randint(0, 256, (4, 8, 8, 1)).astype("float32")
    call = tf.saved_model.load(str(place)).signatures["serving_default"]
    (found,) = call(image=tf.constant(images)).values()
    config = json.loads((finished / "config.json").read_text())["augmentation"]
    model = keras.saving.load_model(finished / "model.keras")
    summary = RunDirectory(finished).read_summary() or {}
    assert weights_sha256(model) == summary["weights_sha256"]
    wanted = model((images - config["mean"]) / config["std"], training=False)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["run"], manifest["step"]) == (str(finished), 21)


def test_a_sweep_exports_the_model_of_its_best_trial(finished, tmp_path):
    from tfdist.serving.export import read_model

    sweep = tmp_path / "sweep"
    (sweep / "trials").mkdir(parents=True)
    journal = Journal(sweep / JOURNAL, time_of_day=lambda: 1.0)
    journal.add("begun", objective="val_loss", direction="min")
    assert refused(lambda: read_model(sweep)) == (str(sweep), "no-best")
    for trial, score in ("0", 0.5), ("1", 0.3):
        journal.add("asked", trial=trial, values={}, run=trial, until=None)
        ended = {"history": [], "reason": "", "last_lines": [], "best_virtual_epoch": 1}
        journal.add("ended", trial=trial, status="COMPLETED", score=score, **ended)
    # A program in Python: its checkpoints have no model, and are not of the best epoch.
    for make in (None, f"{__file__}:make"):
        assert refused(lambda make=make: read_model(sweep, make=make)) == (str(sweep), "no-model")
    # A config file.
    shutil.copytree(finished, sweep / "trials" / "1")
    model, origin = read_model(sweep)
    wanted, best = read_model(finished, best=True)
    assert (origin["run"], origin["step"]) == (str(sweep / "trials" / "1"), best["step"])
    assert weights_sha256(model) == weights_sha256(wanted)
    words = ("-m", "tfdist.export", str(sweep), str(tmp_path), "--follow")
    assert "--follow: " in forked_python.run(*words, timeout=DEADLINE_S).stderr


def test_a_run_is_exported_in_its_precision(finished):
    from tfdist.serving import export

    config = json.loads((finished / "config.json").read_text())
    served, model = export._of_run({**config, "precision": "mixed_bfloat16"})
    assert served.get_layer("normalize").compute_dtype == "float32"
    hidden, logits = [layer.compute_dtype for layer in model.layers if layer.weights][-2:]
    assert (hidden, logits) == ("bfloat16", "float32")


def without_rate(run_dir: Path) -> list[dict[str, Any]]:
    lines = RunDirectory(run_dir).read_metrics()
    return [{k: v for k, v in line.items() if k != "examples_per_second"} for line in lines]


def test_a_run_killed_just_before_its_summary_gets_it(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    before = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").unlink()
    after = trained(run_dir, *SHORT, "--config.seed=5")
    for name in ("status", "steps", "examples", "virtual_epochs", "metrics", "state_sha256"):
        assert after[name] == before[name], name
    assert without_rate(run_dir) == without_rate(finished)


def test_overwrite_starts_again_and_keeps_the_old_run(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "run")
    with monkeypatch.context() as patch:  # started again by a launcher, it goes on
        patch.setenv("TFDIST_RESTARTS", "1")
        again = trained(tmp_path / "run", *SHORT, "--config.seed=5", "--overwrite")
    assert "ignoring --overwrite" in again["stderr"]
    assert not (tmp_path / "run" / "old-1").exists()
    again = trained(tmp_path / "run", *SHORT, "--config.seed=6", "--overwrite")
    first = RunDirectory(finished).read_summary() or {}
    assert again["weights_sha256"] != first["weights_sha256"]
    old = RunDirectory(tmp_path / "run" / "old-1").read_summary() or {}
    assert old["weights_sha256"] == first["weights_sha256"]


def test_patience_stops_a_run_in_its_own_directory(tmp_path):
    arguments = ["--config.early_stopping_patience=1", "--config.learning_rate=1e-30"]
    done = train(None, *SHORT, *arguments, "--config.checkpoints=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-tfdist_digits-cnn-[0-9a-f]{4}", run_dir.name)
    assert str(run_dir.relative_to(tmp_path)) in done.stderr
    summary = RunDirectory(run_dir).read_summary() or {}
    assert summary["status"] == "done"
    assert summary["virtual_epochs"] < 10


def test_runs_started_in_one_second_have_separate_directories():
    from tfdist.app.run import _run_dir

    config, now = Mock(run_dir="", dataset="mnist", model="cnn"), datetime.now(UTC)
    assert _run_dir(config, None, now=now) != _run_dir(config, None, now=now)


def test_a_nan_loss_is_a_one_line_error(tmp_path):
    wild = ["--config.model=dense", "--config.optimizer=sgd", "--config.learning_rate=1e20"]
    done = train(tmp_path / "run", *SHORT, *wild)
    assert done.returncode == 1
    assert "the loss is nan" in done.stderr
    assert "Fix: lower learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert RunDirectory(tmp_path / "run").read_summary() is None


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.dataset=tfdist_digit", "did you mean 'tfdist_digits'"),
        ("--config.strategy=multiworker", "TF_CONFIG has no cluster"),
    ],
)
def test_errors_from_data_or_cluster_are_one_line(tmp_path, argument, says):
    done = train(tmp_path / "run", argument)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    # The corrected run may have the directory.
    assert not (tmp_path / "run").exists()
