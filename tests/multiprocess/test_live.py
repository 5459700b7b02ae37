"""What others see of a job while it runs: `live.json`, Prometheus, `tfdist.top`, and the report."""

import json
import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, ROOT, report
from tests.multiprocess.trainings import PROGRAMS
from tests.multiprocess.trainings import launch as launch_training
from tests.processes import python, until
from tfdist.cluster import hold_ports
from tfdist.outputs.run_directory import RunDirectory
from tfdist.report.page import render
from tfdist.report.run_records import read_run

pytestmark = pytest.mark.slow

SOURCE = """
import json, os, signal
from tfdist import phases
config = json.loads(os.environ["TF_CONFIG"])
phases.enter("step", step=0)
phases.enter("step", step=7 + config["task"]["index"])
print("ready", os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def port():
    """A port that nobody else is given, on which the launcher can listen."""
    with hold_ports(1)[0] as held:
        yield held.port


def is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def metrics_with(port, wanted):
    """Asks until the metrics have a line; returns them."""

    def metrics():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return text if wanted in text.splitlines() else None

    return until(metrics, within_s=DEADLINE_S, why=lambda: f"{wanted} never came")


def run(module, *args):
    env = {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    return python("-m", module, *args, timeout=DEADLINE_S, env=env)


def test_a_running_job_is_visible_and_has_a_report(launch, port):
    job = launch(SOURCE, "--workers=2", f"--metrics_port={port}", "--run_dir=run")
    job.ready(2)
    text = metrics_with(port, 'tfdist_step{task="worker-1"} 8.0')
    assert 'tfdist_task_phase{phase="step",task="worker-0"} 1.0' in text
    assert re.search(r'tfdist_memory_bytes\{task="worker-0"\} [1-9][\d.]*e\+0[6-9]', text)
    shown = run("tfdist.top", "--once", "run")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"worker-1 +running +step .* 8 ", shown.stdout)
    made = run("tfdist.report", "run", "--out", "going.html")
    assert made.returncode == 0, made.stderr
    assert 'data-state="going"' in Path("going.html").read_text()
    job.signal(signal.SIGTERM)
    assert job.end() == 143
    assert report("run")["job"]["command"].endswith("program.py")
    assert "keras" in report("run")["job"]["versions"]
    assert json.loads(Path("run/live.json").read_text())["state"] == "ended"
    (attempt,) = read_run(Path("run")).attempts
    assert "step" in attempt.history["worker-0"].phases
    assert max(filter(None, attempt.history["worker-1"].memory_bytes)) > 1_000_000
    with socket.create_server(("127.0.0.1", port)):  # given back
        pass


def test_metrics_end_with_a_launcher_that_is_killed(launch, port):
    job = launch(SOURCE, f"--metrics_port={port}", "--run_dir=run")
    job.ready(1)
    metrics_with(port, 'tfdist_step{task="worker-0"} 7.0')
    job.signal(signal.SIGKILL)
    until(lambda: not is_listening(port), within_s=DEADLINE_S)


def test_plain_fits_have_curves_without_repeated_steps(tmp_path):
    program = (str(PROGRAMS / "plain.py"), str(tmp_path))
    said = launch_training(
        tmp_path / "run", "--strategy", "multiworker", "--workers", "2", "--max_restarts", "1",
        *program, timeout_s=DEADLINE_S,
    )  # fmt: skip
    assert all(f"[{task}] steps 27" in said for task in ("worker-0", "worker-1")), said
    lines = RunDirectory(tmp_path / "run").read_metrics()
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24, 27]
    assert [line["examples"] for line in lines] == [8 * line["step"] for line in lines]
    assert [line["virtual_epoch"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line.get("fit", 1) for line in lines] == [1, 1, 1, 2, 2, 2, 3]
    keys = {"loss", "mae", "val_loss", "val_mae", "learning_rate", "examples_per_second"}
    assert all(keys <= set(line) for line in lines)
    page = render([read_run(tmp_path / "run")])
    for title in ("Loss", "Mae", "Learning rate", "Examples per second"):
        assert f">{title}<" in page
    shown = run("tfdist.top", "--once", str(tmp_path / "run"))
    assert "last epoch: loss" in shown.stdout
    assert "learning_rate 0.01" in shown.stdout
