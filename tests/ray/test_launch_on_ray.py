"""``tfdist.launch --on ray`` on a Ray cluster of three nodes, one more than a job needs."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

from tests.multiprocess.jobs import report

ROOT = Path(__file__).parents[2]
DEADLINE_S = 250.0
STORE = {"object_store_memory": 100 << 20}
LAUNCH = (sys.executable, "-m", "tfdist.launch", "--workers", "2", "--threads_per_task", "1")
LONG = ("--config.total_examples=20480", "--config.global_batch_size=32", "--config.checkpoints=8")
TRAIN = ("-m", "tfdist.train", *LONG, "--config.backup_every_steps=5", "--config.seed=3")


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE}
    )
    for _ in range(3):
        made.add_node(num_cpus=2, **STORE)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the same job leaves behind on one machine."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    command = [*LAUNCH, "--run_dir", str(run_dir), *TRAIN]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=250)
    return summary(run_dir)


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


class Job:
    def __init__(self, cluster, folder, *flags, launch=LAUNCH, program=TRAIN):
        self.run_dir, self.out = folder / "run", folder / "out"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
        command = [*launch, "--on", "ray", "--run_dir", str(self.run_dir), *flags, *program]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)

    @property
    def text(self):
        return self.out.read_text(errors="replace")

    def until(self, pattern, within_s=DEADLINE_S):
        deadline_s = time.monotonic() + within_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline_s, self.text
            assert self.process.poll() is None, self.text
            select.select([], [], [], 0.05)

    def end(self):
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            print(self.text)


def agent_of(cluster):
    """Returns the process ids of an agent on the cluster and of the raylet of its node."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, AssertionError):
            line = (path / "cmdline").read_bytes()
            if line.startswith(sys.executable.encode()) and b"bootstrap.py\0agent" in line:
                raylet = parent_with(int(path.name), b"raylet")
                if raylet in raylets:
                    return int(path.name), raylet
    raise AssertionError("no agent")


def parent_with(pid, words):
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        if words in (Path("/proc") / str(pid) / "cmdline").read_bytes().partition(b"\0-")[0]:
            return pid
    raise AssertionError(f"no {words!r} above")


@pytest.mark.timeout(900)
def test_kills_on_ray_leave_the_weights_unchanged(cluster, undisturbed, tmp_path):
    for what in ("nothing", "agent", "node"):
        (folder := tmp_path / what).mkdir()
        job = Job(cluster, folder, "--max_restarts", "2")
        if what != "nothing":
            job.until(r"Epoch [2-9]")
            agent, raylet = agent_of(cluster)
            began_s = time.monotonic()
            os.kill(agent if what == "agent" else raylet, signal.SIGKILL)
            job.until(r"worker-\d on (node-\d) failed first: lost host \1")
            assert time.monotonic() - began_s < 20
        assert job.end() == 0, job.text
        assert summary(job.run_dir)["weights_sha256"] == undisturbed["weights_sha256"]
        codes = [attempt["exit_code"] for attempt in report(job.run_dir)["attempts"]]
        assert codes == ([0] if what == "nothing" else [75, 0])


SAVE = (
    "import os, signal, sys, time\n"
    "def save(*_): time.sleep(3); print('saved', flush=True); sys.exit(143)\n"
    "for one in (signal.SIGTERM, signal.SIGINT): signal.signal(one, save)\n"
    "os.write(1, b'ready %d\\n' % os.getpid())\n"
    "while True: signal.pause()\n"
)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_tasks_save_if_the_launcher_stops_or_dies(cluster, tmp_path, signum, code):
    (tmp_path / "program.py").write_text(SAVE)
    job = Job(cluster, tmp_path, program=("program.py",))
    job.until(r"(?s)ready.*ready")
    fds = [os.pidfd_open(int(pid)) for pid in re.findall(r"ready (\d+)", job.text)]
    job.process.send_signal(signum)
    assert job.end() == code
    for fd in fds:
        assert select.select([fd], [], [], 30)[0]
        os.close(fd)
    for index in range(2):
        log = job.run_dir / "logs" / "attempt-1" / f"worker-{index}.log"
        assert log.read_text().endswith("saved\n")


def test_missing_room_and_missing_clusters_are_one_line(cluster, tmp_path):
    (tmp_path / "program.py").write_text("")
    launch = (*LAUNCH[:3], "--workers", "40", "--startup_timeout_s", "3")
    job = Job(cluster, tmp_path, launch=launch, program=("program.py",))
    assert job.end() == 75
    assert job.text.splitlines()[-1].startswith("--on ray: the cluster had no room for 40 tasks")
    nowhere = type("Nowhere", (), {"address": "127.0.0.1:1"})
    job = Job(nowhere, tmp_path, program=("program.py",))
    assert job.end() == 2
    assert job.text.splitlines()[-1].startswith("--on ray: cannot connect to a Ray cluster: ")


def test_trials_of_a_sweep_run_on_ray_nodes(cluster, tmp_path):
    sweep = ("--config", str(ROOT / "configs/digits_sweep.py"), "--config.total_examples=960")
    flags = ("--config.checkpoints=3", "--max_trials", "3", "--seed", "2", "--sweep_dir", "sweep")
    command = [sys.executable, "-m", "tfdist.tune", "--on", "ray", "--parallel_trials", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [*command, *sweep, *flags], env=env, cwd=tmp_path, timeout=DEADLINE_S, capture_output=True
    )
    logs = [log.read_text() for log in (tmp_path / "sweep").rglob("launch.log")]
    assert done.returncode == 0, (done.stderr.decode(), logs)
    assert len(logs) == 3
    assert all(" node-1 at " in log for log in logs), logs


def test_each_node_that_ray_gives_is_checked(cluster, tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "tfdist.check", "--on", "ray", "--run_dir", "file/run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    found = re.findall("^error    (node-.): run directory: ", done.stdout, re.MULTILINE)
    assert sorted(found) == ["node-1", "node-2", "node-3"], done.stdout
