"""A sweep whose trials run on two hosts by ssh, beside a host on which none can start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.jobs import report
from tfdist.outputs.sweep_journal import fold, read

ROOT = Path(__file__).parents[2]
TUNE = (
    *("--config", str(ROOT / "configs" / "digits_sweep.py"), "--config.total_examples=960"),
    *("--config.checkpoints=3", "--max_trials", "4", "--seed", "2", "--sweep_dir", "sweep"),
)


@pytest.mark.timeout(420)
def test_trials_run_on_the_hosts_and_a_host_that_refuses_gets_no_more(
    network, sshd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    hosts = ("--hosts", "gamma:1,beta:1,alpha:1", "--rsh", sshd.command, "--retrain_best")
    command = (sys.executable, "-m", "tfdist.tune", *TUNE, *hosts)
    done = subprocess.run(
        [*network.inside("alpha"), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = done.stdout + done.stderr
    for log in sorted(Path("sweep").rglob("launch.log")):
        said += f"--- {log}\n{log.read_text(errors='replace')}"
    assert done.returncode == 0, said
    state = fold(read(Path("sweep/journal.jsonl")))
    assert [trial.status for trial in state.trials.values()] == ["completed"] * 4, said
    assert "gamma: no more trials on this host: gamma: cannot start an agent: ssh: " in said
    ran_on = []
    for trial in state.trials.values():
        (attempt,) = report(Path("sweep/trials") / trial.run)["attempts"]
        ran_on += [task.get("host", "alpha") for task in attempt["tasks"]]
    assert set(ran_on) == {"alpha", "beta"}, said
    assert json.loads(Path("sweep/best/summary.json").read_text())["status"] == "done"
