"""What others see of a job while it runs: `live.json`, `tfdist.top`, and the report."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, ROOT, report
from tests.multiprocess.trainings import PROGRAMS
from tests.multiprocess.trainings import launch as launch_training
from tests.processes import python, until
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


def live_tasks(run_dir, *, steps):
    """Wait until `live.json` has these steps by task. Return the tasks by name."""

    def tasks():
        try:
            status = json.loads(Path(run_dir, "live.json").read_text())
        except FileNotFoundError:
            return None
        found = {task["task"]: task for task in status["tasks"]}
        return found if {name: found[name]["step"] for name in steps} == steps else None

    return until(tasks, within_s=DEADLINE_S, why=lambda: f"no task reached {steps}")


def run(module, *args):
    env = {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    return python("-m", module, *args, timeout=DEADLINE_S, env=env)


def test_a_running_job_is_visible_and_has_a_report(launch):
    job = launch(SOURCE, "--workers=2", "--run_dir=run")
    job.ready(2)
    tasks = live_tasks("run", steps={"worker-0": 7, "worker-1": 8})
    assert tasks["worker-0"]["phase"] == "step"
    assert tasks["worker-0"]["memory_bytes"] > 1_000_000
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
