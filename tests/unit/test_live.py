"""Live status of a job: phases by heartbeats, the history's size, and Prometheus' text."""

import io
import itertools
import json
import os
import socket
import threading

import psutil
import pytest
from rich.console import Console

from tests.unit.test_report import RUNS
from tfdist import top
from tfdist.cluster import Task
from tfdist.launch.diagnosis import Watchdog
from tfdist.launch.events import Awakening, Beat, Ended, Started
from tfdist.launch.live import (
    MAX_BINS,
    AttemptHistory,
    LiveStatus,
    metrics_server,
    prometheus_text,
)
from tfdist.launch.run_dir import description_of_job
from tfdist.launch.state import JobState, RestartPolicy
from tfdist.loopback import listen, make_server
from tfdist.report.run import read_run
from tfdist.top import view

DEADLINE_S = 60
WORKER = Task("worker", 0)


def state_of_job(tmp_path):
    watchdog = Watchdog(
        hang_timeout_s=300,
        startup_timeout_s=60,
        is_ps=False,
        chief=WORKER,
        state_of=lambda task: "R",
    )
    state = JobState(
        job_tasks=[WORKER],
        logs=tmp_path,
        is_ps=False,
        grace_s=10,
        policy=RestartPolicy(max_restarts=0, window_s=3600),
        watchdog=watchdog,
        now_s=100.0,
    )
    state.tasks[WORKER].is_running = True
    return state


def beat(at_s, phase, step, since_s):
    return Beat(task=WORKER, phase=phase, step=step, since_s=since_s, first_step_s=None, at_s=at_s)


def observed(tmp_path, events, **options):
    """Has a job of one worker go through these events, each with its time."""
    logs = tmp_path / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    live = LiveStatus(
        tmp_path,
        logs=logs,
        attempt=1,
        strategy="single",
        **{"epoch_s": lambda: 1_800_000_000.0, **options},
        hosts={},
    )
    state = state_of_job(tmp_path)
    for at_s, event in events:
        state.now_s = at_s
        if isinstance(event, Ended):
            state.tasks[WORKER].is_running = False
        live.see(state, Awakening(at_s=at_s, events=(event,)))
    return live


HISTORY = [
    (100.5, Started(task=WORKER, pid=os.getpid(), at_s=100.5)),
    (102.0, beat(102.0, "import", None, 100.5)),
    (103.0, beat(103.0, "trace", 0, 102.25)),
    (104.0, beat(104.0, "step", 10, 103.5)),
    (105.0, beat(105.0, "step", 30, 104.9)),
    (106.0, Ended(task=WORKER, status=0, at_s=106.0)),
]


def test_what_a_task_says_at_a_heartbeat_is_what_it_did_since_the_one_before(tmp_path):
    observed(tmp_path, HISTORY)
    written = json.loads((tmp_path / "logs" / "attempt-1" / "history.json").read_text())
    columns = written["tasks"]["worker-0"]
    spent = {phase: sum(seconds) for phase, seconds in columns["phases"].items()}
    assert spent == pytest.approx({"import": 1.5, "trace": 1.0, "step": 2.0})
    assert max(size or 0 for size in columns["memory_bytes"]) > 1_000_000
    status = json.loads((tmp_path / "live.json").read_text())
    assert (status["state"], status["tasks"][0]["phase"]) == ("ended", None)


def test_the_status_tells_phase_step_rate_and_memory(tmp_path):
    observed(tmp_path, HISTORY[:-1])
    task = json.loads((tmp_path / "live.json").read_text())["tasks"][0]
    assert (task["phase"], task["step"], task["steps_per_s"]) == ("step", 30, 20.0)
    assert task["memory_bytes"] > 1_000_000


def test_the_status_follows_a_clock_that_is_set(tmp_path):
    """As after the machine has slept: who alarms by the age of the status would always do so."""
    epochs = itertools.count(1_800_000_000.0, 3600.0)  # it is set at each look
    events = [(at_s, beat(at_s, "step", 1, at_s)) for at_s in (102.0, 104.0)]
    observed(tmp_path, events, epoch_s=lambda: next(epochs))
    told = json.loads((tmp_path / "live.json").read_text())
    assert told["at"] >= 1_800_003_600 + 104
    assert told["at"] - told["began_at"] == 4.0


def test_memory_is_not_read_of_a_process_on_another_host(tmp_path):
    observed(tmp_path, HISTORY, is_here=lambda task: False)
    task = json.loads((tmp_path / "live.json").read_text())["tasks"][0]
    assert task["peak_memory_bytes"] is None


def test_a_disk_that_is_full_stops_nothing(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfdist.launch.live.write_json", full)
    observed(tmp_path, HISTORY)
    assert not (tmp_path / "live.json").exists()


def test_the_report_reads_what_the_launcher_writes(tmp_path):
    observed(tmp_path, HISTORY)
    (tmp_path / "report.json").write_text('{"exit_code": null, "attempts": []}')
    live = json.loads((tmp_path / "live.json").read_text())
    (tmp_path / "live.json").write_text(json.dumps({**live, "state": "running"}))
    (attempt,) = read_run(tmp_path).attempts
    assert attempt.history["worker-0"].rates()[-1][1] == pytest.approx(20.0)
    spent = attempt.history["worker-0"].phases.values()
    assert sum(map(sum, spent)) == pytest.approx(4.5)


def test_a_history_of_any_length_has_the_same_size():
    history = AttemptHistory(0.0)
    for second in range(10_000):
        history.add(WORKER, "step", begin_s=second, end_s=second + 1)
        history.note(WORKER, at_s=second, step=second, memory_bytes=second)
    told = history.as_json(epoch_s=0.0)
    columns = told["tasks"]["worker-0"]
    assert MAX_BINS / 2 <= len(columns["step"]) <= MAX_BINS
    assert told["width_s"] * MAX_BINS >= 10_000
    assert columns["step"][-1] == 9_999
    assert max(columns["memory_bytes"]) == 9_999
    assert sum(columns["phases"]["step"]) == 10_000


def test_secrets_of_the_command_are_not_written_down():
    secrets = [
        "--api_key=abc",
        "--wandb_key",
        "abc",
        "--auth=abc",
        "--pwd",
        "-abc",
        "hf_abcdefghijkl",
    ]
    usual = ["--lr=1", "--auth", "--keys=2", "--monkey", "3", "https://a.b/c"]
    argv = ["python", "train.py", *secrets, "--store=s3://me:abc@host/?a=b", *usual]
    told = description_of_job("single", argv=argv)
    assert "abc" not in told["command"]
    assert told["command"].endswith(" ".join(usual))


STATUS = json.loads((RUNS / "multiworker" / "live.json").read_text())


def test_prometheus_gets_each_metric_with_its_type_once():
    text = prometheus_text(STATUS)
    lines = text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert {line.split("{")[0].split()[0] for line in lines if line[0] != "#"} == set(types)
    assert 'tfdist_step{task="worker-0"} 900' in lines
    assert text.endswith("\n")


def test_metrics_that_do_not_answer_hold_nothing_up(tmp_path):
    before = psutil.Process().children()
    with metrics_server(0, tmp_path / "live.json"):
        (child,) = (one for one in psutil.Process().children() if one not in before)
        child.suspend()
    assert not child.is_running()


def test_a_reader_that_leaves_is_no_error(capfd):
    with listen(0, flag="--port") as listener:
        address, asked, left = listener.getsockname(), threading.Event(), threading.Event()

        def text():
            asked.set()
            left.wait(DEADLINE_S)
            return "x" * (64 << 20)

        with make_server(listener, text, path="/", content_type="text/plain") as server:
            server.daemon_threads = False  # their end is waited for
            with socket.create_connection(address) as reader:
                reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                server.handle_request()
                assert asked.wait(DEADLINE_S)
            left.set()
    assert capfd.readouterr().err == ""


def shown(run_dir):
    console = Console(file=io.StringIO(), width=140)
    console.print(view(run_dir))
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_task():
    text = shown(RUNS / "ps")
    for name in ("chief-0", "worker-0", "worker-1", "ps-0", "over", "last epoch"):
        assert name in text


def test_of_a_job_that_is_over_the_last_line_of_its_metrics_tells_the_step(tmp_path):
    (tmp_path / "live.json").write_text(json.dumps({**STATUS, "step": 25}))
    line = {"step": 100, "loss": 2.5, "val_loss": None, "examples_per_second": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    text = shown(tmp_path)
    assert "step 100 " in text
    assert "last epoch: loss 2.5  val_loss not finite\n" in text


def test_a_job_of_a_killed_launcher_is_not_shown_as_running(tmp_path):
    task = {**STATUS["tasks"][0], "state": "running", "phase": "step"}
    status = {**STATUS, "state": "running", "tasks": [task]}
    (tmp_path / "live.json").write_text(json.dumps(status))
    text = shown(tmp_path)
    assert "its launcher was killed" in text
    assert "running" not in text


@pytest.mark.parametrize("text", [None, "{", '{"state": "running", "tasks": 3}'])
def test_a_directory_of_no_job_is_one_line(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "live.json").write_text(text)
    assert top.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
