"""``python -m benchmarks.scaling`` over real jobs."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.scaling import limits
from tests.multiprocess.jobs import ROOT
from tests.processes import python

pytestmark = pytest.mark.slow

DEADLINE_S = 500


def measured(out, *words):
    words = ("-m", "benchmarks.scaling", "--out", out, *words)
    return python(*words, cwd=ROOT, timeout=DEADLINE_S)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_measured_job_gets_a_row_and_a_picture(tmp_path):
    out = tmp_path / "out"
    words = ("--shapes", "1W1PS", "--repeats", "1", "--timeout_s", "200", "--")
    config = (f"--config={ROOT / 'configs' / 'digits_ps.py'}", "--config.model=dense")
    config += ("--config.total_examples=6400", "--config.checkpoints=4", "--config.seed=1")
    done = measured(out, *words, *config, "--config.validation_split=")
    logs = "".join(log.read_text() for log in sorted(out.glob("runs/*/said.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    table = json.loads((out / "scaling.json").read_text())
    (row,) = table["shapes"]
    summary = json.loads((out / "runs" / "1W1PS-0" / "summary.json").read_text())
    assert summary["steps"] == 100
    assert (row["shape"], row["batch"]) == ("1W1PS", 64)
    assert row["examples_per_second"]["median"] == summary["examples_per_second"] > 0
    assert row["last_loss"]["median"] <= table["loss"]
    assert row["seconds_to_loss"]["median"] > 0
    ((*_, (seconds, loss)),) = row["loss_curves"]
    assert (seconds > 0, loss) == (True, row["last_loss"]["median"])
    assert matplotlib.image.imread(out / "scaling.png").shape[0] == 600
    assert str(out / "scaling.png") in done.stdout


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_limited_job_uses_its_part_of_a_cpu(tmp_path):
    if not limits.possible():
        pytest.skip("the system does not allow CPU limits")
    out = tmp_path / "out"
    words = ("--shapes", "1W1PS@20%", "--repeats", "1", "--timeout_s", "300", "--")
    config = (f"--config={ROOT / 'configs' / 'digits_ps.py'}", "--config.seed=1")
    config += ("--config.total_examples=6400", "--config.checkpoints=5")
    command = (sys.executable, "-m", "benchmarks.scaling", "--out", out, *words, *config)
    with subprocess.Popen((*command, "--config.validation_split="), cwd=ROOT) as program:
        code = program.wait(DEADLINE_S)
    assert code == 0, "".join(log.read_text() for log in sorted(out.glob("runs/*/said.log")))
    (row,) = json.loads((out / "scaling.json").read_text())["shapes"]
    assert (row["shape"], row["cpu_percent"]) == ("1W1PS@20%", 20)
    ((start, *_, (seconds, loss)),) = row["loss_curves"]
    assert (start[0], loss) == (0, row["last_loss"]["median"])
    assert row["examples_per_second"]["median"] == pytest.approx(6400 * 4 / 5 / seconds)
    # Each of three tasks has a fifth of a CPU. Without the limit, a step takes about 12 ms.
    assert seconds / 80 > 0.03
    assert not list(Path("/sys/fs/cgroup").glob(f"**/tfdist-scaling-{program.pid}-*"))


def test_a_failing_job_fails_the_measurement_with_last_lines(tmp_path):
    done = measured(tmp_path / "out", "--shapes", "2W", "--", "--config.modle=dense")
    assert done.returncode == 1
    assert "2W: the job ended with code 2; its last lines" in done.stderr
    assert "did you mean 'model'?" in done.stderr


def test_naive_and_ring_all_reduce_give_the_sum(tmp_path):
    record = tmp_path / "record.json"
    words = ("--tasks", "3", "--mib", "1", "--rounds", "2", "--json", record)
    done = python("-m", "benchmarks.all_reduce", *words, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["tasks"], len(row["naive_s"]), len(row["ring_s"])) == (3, 2, 2)
