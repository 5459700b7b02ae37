"""Jobs that are started again: as a group, a worker of a ps job alone, or not at all."""

import os
import re
import signal
import textwrap
from pathlib import Path

import pytest

from tests.multiprocess.jobs import FORK, STARTS, children, report
from tfdist.launch import guardian

PRELUDE = """
import json, os, signal, sys
config = json.loads(os.environ["TF_CONFIG"])
me = "{type}-{index}".format(**config["task"])
attempt = config["tfdist"]["attempt"]
def ready():
    os.write(1, b"%s attempt %d ready %d\\n" % (me.encode(), attempt, os.getpid()))
"""


def program(text):
    return PRELUDE + textwrap.dedent(text)


def ready(job, attempt, count):
    """Waits for `count` tasks of an attempt; returns their process ids by task."""
    job.read_until(rf"\S+ attempt {attempt} ready \d+\n", count=count)
    found = re.findall(rf"(\S+) attempt {attempt} ready (\d+)\n", job.text)
    job.ready(len(re.findall(r"ready \d+\n", job.text)))
    return {task: int(pid) for task, pid in found}


# the whole job


def test_a_task_knows_the_number_of_restarts(launch):
    """And not of the starts by commands before it in the same directory."""
    source = """
    print("attempt", attempt, "started again", os.environ.get("TFDIST_RESTARTS", "never"))
    sys.exit(attempt == 1)
    """
    for _ in range(2):
        job = launch(program(source), "--max_restarts=1", "--run_dir=run")
        assert job.end() == 0
    said = [log.read_text() for log in sorted(Path("run/logs").glob("*/worker-0.log"))]
    again = ("never", "1", "never")
    assert said == [f"attempt {n} started again {told}\n" for n, told in enumerate(again, 1)]


@pytest.mark.alone
@STARTS
def test_a_killed_task_restarts_the_whole_job(launch, command):
    source = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits inside TensorFlow
    ready()
    if attempt < 3:
        signal.pause()
    """
    flags = ("--workers=3", "--max_restarts=2", "--grace_s=600", "--run_dir=run")
    job = launch(program(source), *flags, command=command)
    started, servers = {}, set()
    for attempt, signum in ((1, signal.SIGKILL), (2, signal.SIGSEGV)):
        started[attempt] = ready(job, attempt, 3)
        servers |= {p for p, line in children(job.process.pid).items() if "fork server" in line}
        os.kill(started[attempt][f"worker-{attempt}"], signum)
    started[3] = ready(job, 3, 3)
    assert job.end() == 0
    assert len({pid for pids in started.values() for pid in pids.values()}) == 9
    job.assert_gone(0)
    assert "worker-1 failed first: killed by SIGKILL, not by the launcher\n" in job.text
    assert "restarting as attempt 2 (restart 1 of 2 within 3600 s)\n" in job.text
    for attempt, pids in started.items():
        for task, pid in pids.items():
            log = Path(f"run/logs/attempt-{attempt}/{task}.log").read_text()
            assert log.startswith(f"{task} attempt {attempt} ready {pid}\n")
    *failed, done = report("run")["attempts"]
    assert [entry["exit_code"] for entry in (*failed, done)] == [137, 139, 0]
    assert [entry["first_failure"]["task"] for entry in failed] == ["worker-1", "worker-2"]
    assert report("run")["exit_code"] == 0
    for entry in failed:
        assert entry["detect_s"] < 0.5
    assert [done[name] for name in ("first_failure", "first_step_s")] == [None] * 2
    # One fork server serves every attempt.
    logs = [path.parent.name for path in Path("run").rglob("fork-server.log")]
    assert (len(servers), logs) == ((1, ["attempt-1"]) if command == FORK else (0, []))
    assert not guardian.occupied(servers)


def test_a_killed_fork_server_is_replaced_before_the_restart(launch):
    source = "ready()\nif attempt == 1: signal.pause()"
    job = launch(program(source), "--workers=2", "--max_restarts=1", "--run_dir=run", command=FORK)
    ready(job, 1, 2)
    (server,) = (p for p, line in children(job.process.pid).items() if "fork server" in line)
    os.kill(server, signal.SIGKILL)
    ready(job, 2, 2)
    assert job.end() == 0
    assert re.search(r"failed first: the fork server exited: see .*fork-server.log\n", job.text)
    assert [attempt["exit_code"] for attempt in report("run")["attempts"]] == [137, 0]


# a ps job


PS_JOB = """
print("listens at", config["cluster"][config["task"]["type"]][config["task"]["index"]])
ready()
if me == "chief-0":
    os.open("fifo", os.O_RDONLY)
else:
    signal.pause()
"""


@pytest.mark.alone
@STARTS
def test_a_ps_worker_restarts_alone(launch, command):
    os.mkfifo("fifo")
    flags = ("--strategy=ps", "--workers=2", "--max_restarts=1", "--run_dir=run")
    job = launch(program(PS_JOB), *flags, command=command)
    before = ready(job, 1, 4)
    os.kill(before["worker-1"], signal.SIGKILL)
    after = ready(job, 1, 5)
    os.close(os.open("fifo", os.O_WRONLY))
    assert job.end() == 0
    assert {task for task in before if before[task] != after[task]} == {"worker-1"}
    assert (
        "worker-1 failed: killed by SIGKILL, not by the launcher; restarting only this" in job.text
    )
    logs = Path("run/logs/attempt-1")
    first, again = (logs / name for name in ("worker-1.log", "worker-1.restart-1.log"))
    assert first.read_text().splitlines()[0] == again.read_text().splitlines()[0]  # the address
    assert first.read_text().endswith(f"ready {before['worker-1']}\n")
    assert again.read_text().endswith(f"ready {after['worker-1']}\n")
    (entry,) = report("run")["attempts"]
    assert [
        (t["task"], t["restart"], t["pid"]) for t in entry["tasks"] if t["task"] == "worker-1"
    ] == [
        ("worker-1", 0, before["worker-1"]),
        ("worker-1", 1, after["worker-1"]),
    ]
    (restart,) = entry["restarts"]
    assert restart["task"] == "worker-1"
    assert restart["detect_s"] < 0.5
