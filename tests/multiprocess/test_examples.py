"""The scripts of docs/examples do what docs/start.md says of them."""

from __future__ import annotations

import os

import keras
import pytest

from tests import forked_python
from tests.multiprocess.jobs import ROOT
from tests.multiprocess.test_training import launch
from tests.multiprocess.warm import QUIET
from tfdist.checkpoint import CheckpointStore

EXAMPLES = ROOT / "docs" / "examples"
EPOCH_STEPS = 24
DEADLINE_S = 240


@pytest.mark.parametrize("strategy", ["multiworker", "ps"])
def test_the_script_trains_goes_on_and_leaves_a_model(tmp_path, strategy):
    job = ("--strategy", strategy, "--workers", "2")
    command = (*job, str(EXAMPLES / "train.py"), "--dir", str(tmp_path / "out"))
    for epochs in (1, 2):
        launch(tmp_path / "run", *command, "--epochs", str(epochs), timeout_s=DEADLINE_S)
        assert CheckpointStore(tmp_path / "out" / "backup").steps()[-1] == EPOCH_STEPS * epochs
    assert keras.saving.load_model(tmp_path / "out" / "model.keras").count_params() > 0


def test_two_models_train_in_a_step_of_ones_own(tmp_path):
    saved = tmp_path / "generator.keras"
    flags = ("--strategy", "multiworker", "--workers", "2", str(EXAMPLES / "gan.py"))
    said = launch(
        tmp_path / "run", *flags, "--steps", "4", "--save", str(saved), timeout_s=DEADLINE_S
    )
    assert "step 4: critic" in said
    assert saved.exists()


def test_the_search_runs_its_trials_and_can_be_shown(tmp_path):
    def run(*words):
        done = forked_python.run(*words, timeout=DEADLINE_S, env={**os.environ, **QUIET})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    search = str(EXAMPLES / "search.py")
    said = run(search, "--max_trials", "1", "--epochs", "1", "--dir", str(tmp_path))
    assert "'learning_rate': " in said
    shown = run("-m", "tfdist.tune", "--show", str(tmp_path / "search-sweep"))
    assert "units" in shown
