"""Live status of a job: phases by heartbeats, the history's size, and Prometheus' text."""

import io
import itertools
import json
import os
import socket
import threading
import urllib.request

import psutil
import pytest
from rich.console import Console

from tests.unit.histories import job_state
from tests.unit.test_report import RUNS
from tfdist import top
from tfdist.cluster import Task, hold_ports
from tfdist.launch.events import Awakening, Beat, Ended, Started
from tfdist.launch.live import MAX_BINS, AttemptHistory, LiveStatus, metrics_server, prometheus_text
from tfdist.loopback import listen, make_server
from tfdist.report.run_records import read_run
from tfdist.top import view

DEADLINE_S = 60
WORKER = Task("worker", 0)


def beat(at_s, phase, step, since_s):
    told = Beat(task=WORKER, phase=phase, step=step, since_s=since_s, first_step_s=None, at_s=at_s)
    return at_s, told


def observed(run_dir, events, **options):
    """Has a job of one worker go through these events, each with its time; returns its status."""
    logs = run_dir / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    options = {"epoch_s": lambda: 1_800_000_000.0, **options}
    live = LiveStatus(run_dir, logs=logs, attempt=1, strategy="single", **options, hosts={})
    state = job_state([WORKER], logs=logs, now_s=100.0)
    state.tasks[WORKER].is_running = True
    for at_s, event in events:
        state.now_s = at_s
        if isinstance(event, Ended):
            state.tasks[WORKER].is_running = False
        live.see(state, Awakening(at_s=at_s, events=(event,)))
    path = run_dir / "live.json"
    return json.loads(path.read_text()) if path.exists() else None


HISTORY = [
    (100.5, Started(task=WORKER, pid=os.getpid(), at_s=100.5)),
    beat(102.0, "import", None, 100.5),
    beat(103.0, "trace", 0, 102.25),
    beat(104.0, "step", 10, 103.5),
    beat(105.0, "step", 30, 104.9),
    (106.0, Ended(task=WORKER, status=0, at_s=106.0)),
]


def test_the_status_shows_phase_step_rate_and_memory(tmp_path):
    (task,) = observed(tmp_path / "running", HISTORY[:-1])["tasks"]
    assert (task["phase"], task["step"], task["steps_per_s"]) == ("step", 30, 20.0)
    assert task["memory_bytes"] > 1_000_000
    status = observed(tmp_path / "over", HISTORY)
    assert (status["state"], status["tasks"][0]["phase"]) == ("ended", None)
    (elsewhere,) = observed(tmp_path / "host", HISTORY, is_here=lambda task: False)["tasks"]
    assert elsewhere["peak_memory_bytes"] is None


def test_a_heartbeat_reports_the_time_since_the_last_one(tmp_path):
    live = observed(tmp_path, HISTORY)
    (tmp_path / "report.json").write_text('{"exit_code": null, "attempts": []}')
    (tmp_path / "live.json").write_text(json.dumps({**live, "state": "running"}))
    (attempt,) = read_run(tmp_path).attempts  # as the report does
    history = attempt.history["worker-0"]
    spent = {phase: sum(seconds) for phase, seconds in history.phases.items()}
    assert spent == pytest.approx({"import": 1.5, "trace": 1.0, "step": 2.0})
    assert history.rates()[-1][1] == pytest.approx(20.0)
    assert max(size or 0 for size in history.memory_bytes) > 1_000_000


def test_the_status_follows_a_clock_that_is_set(tmp_path):
    """As after the machine has slept: who alarms by the age of the status would always do so."""
    epochs = itertools.count(1_800_000_000.0, 3600.0)  # it is set at each look
    events = [beat(at_s, "step", 1, at_s) for at_s in (102.0, 104.0)]
    told = observed(tmp_path, events, epoch_s=lambda: next(epochs))
    assert told["at"] >= 1_800_003_600 + 104
    assert told["at"] - told["began_at"] == 4.0


def test_a_full_disk_does_not_stop_the_job(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfdist.launch.live.write_json", full)
    assert observed(tmp_path, HISTORY) is None


def test_a_history_of_any_length_has_the_same_size():
    history = AttemptHistory(0.0)
    for second in range(10_000):
        history.add(WORKER, "step", begin_s=second, end_s=second + 1)
        history.note(WORKER, at_s=second, step=second, memory_bytes=second)
    told = history.as_json(epoch_s=0.0)
    columns = told["tasks"]["worker-0"]
    assert MAX_BINS / 2 <= len(columns["step"]) <= MAX_BINS
    assert told["width_s"] * MAX_BINS >= 10_000
    assert (columns["step"][-1], max(columns["memory_bytes"])) == (9_999, 9_999)
    assert sum(columns["phases"]["step"]) == 10_000


STATUS = json.loads((RUNS / "multiworker" / "live.json").read_text())


def test_prometheus_gets_each_metric_with_its_type_once():
    text = prometheus_text(STATUS)
    lines = text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert {line.split("{")[0].split()[0] for line in lines if line[0] != "#"} <= set(types)
    assert 'tfdist_step{task="worker-0"} 900.0' in lines
    assert text.endswith("\n")


def test_a_hanging_metrics_server_does_not_block_the_launcher(tmp_path):
    before = psutil.Process().children()
    with metrics_server(0, tmp_path / "live.json"):
        (child,) = (one for one in psutil.Process().children() if one not in before)
        child.suspend()
    assert not child.is_running()


def test_files_of_the_user_replace_no_module_of_the_metrics_server(tmp_path, monkeypatch):
    (tmp_path / "socketserver.py").touch()
    monkeypatch.chdir(tmp_path)
    with hold_ports(1)[0] as held, metrics_server(held.port, tmp_path / "live.json"):
        url = f"http://127.0.0.1:{held.port}/metrics"
        assert urllib.request.urlopen(url, timeout=20).read() == b""


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


def test_the_table_shows_each_task_and_last_metrics(tmp_path):
    task = {**STATUS["tasks"][0], "host": "[fd00::1]"}  # no markup
    (tmp_path / "live.json").write_text(json.dumps({**STATUS, "step": 25, "tasks": [task]}))
    line = {"step": 100, "loss": 2.5, "val_loss": None, "examples_per_second": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    text = shown(RUNS / "ps")
    assert all(name in text for name in ("chief-0", "worker-0", "worker-1", "ps-0", "over"))
    text = shown(tmp_path)
    assert "step 100 " in text
    assert "[fd00::1]" in text
    assert "last epoch: loss 2.5  val_loss not finite\n" in text


def test_a_job_of_a_killed_launcher_is_not_running(tmp_path):
    task = {**STATUS["tasks"][0], "state": "running", "phase": "step"}
    status = {**STATUS, "state": "running", "tasks": [task]}
    (tmp_path / "live.json").write_text(json.dumps(status))
    text = shown(tmp_path)
    assert "its launcher was killed" in text
    assert "running" not in text


def test_the_newest_job_is_shown_without_an_argument(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("old", "new", "no-job"), 1):
        live = tmp_path / "runs" / name / ("live.json" if at < 3 else "metrics.jsonl")
        live.parent.mkdir(parents=True)
        live.write_text(json.dumps(STATUS))
        os.utime(live, (at, at))
    for argv in ([], ["runs"], ["runs/new"]):
        assert top.main([*argv, "--once"]) == 0
        assert capsys.readouterr().out.startswith("runs/new  over")
    monkeypatch.chdir(tmp_path / "runs")
    assert top.main([]) == 2


@pytest.mark.parametrize("text", [None, "{", '{"state": "running", "tasks": 3}'])
def test_a_directory_without_a_job_is_one_line(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "live.json").write_text(text)
    assert top.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
