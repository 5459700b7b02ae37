"""Metrics of a job for Prometheus, on loopback, by a process that reads `live.json`.

One of its own, since the launcher forks and so has one thread, and waits for no client.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.loopback import listen, make_server
from tfdist.phases import PHASES, SUM

_TYPE = "text/plain; version=0.0.4"

_OF_JOB = (
    ("at", "tfdist_status_timestamp_seconds", "When the launcher wrote this, in Unix time."),
    ("attempt", "tfdist_attempt", "Number of the job's present attempt."),
    ("step", "tfdist_job_step", "Steps of the job."),
)
_OF_TASK = (
    ("step", "tfdist_step", "Optimizer steps that the task has done."),
    ("steps_per_s", "tfdist_steps_per_second", "Steps per second of the last 15 s."),
    ("memory_bytes", "tfdist_memory_bytes", "Resident memory of the task's process."),
    ("peak_memory_bytes", "tfdist_memory_peak_bytes", "The most of it that was seen."),
    ("silent_s", "tfdist_heartbeat_age_seconds", "Since the task's last heartbeat."),
    ("phase_s", "tfdist_phase_age_seconds", "Since the task's last progress."),
    ("restarts", "tfdist_task_restarts", "How often it was restarted alone."),
)


def render(status: Mapping[str, Any]) -> str:
    """Return a status of `live.json` in Prometheus' text format."""
    lines: list[str] = []
    for key, name, about in _OF_JOB:
        if status.get(key) is not None:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {status[key]}"]
    tasks: Sequence[Mapping[str, Any]] = status["tasks"]
    lines += ["# HELP tfdist_task_up Whether the task runs.", "# TYPE tfdist_task_up gauge"]
    lines += [f"tfdist_task_up{_labels(t)} {int(t['state'] == 'running')}" for t in tasks]
    for key, name, about in _OF_TASK:
        values = [f"{name}{_labels(task)} {task[key]}" for task in tasks if task[key] is not None]
        lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge", *values] if values else []
    lines += ["# HELP tfdist_task_phase 1 for the task's phase.", "# TYPE tfdist_task_phase gauge"]
    lines += [
        f"tfdist_task_phase{_labels(task, phase=phase)} {int(task['phase'] == phase)}"
        for task in tasks
        for phase in (*PHASES, SUM)
    ]
    return "\n".join(lines) + "\n"


def _labels(task: Mapping[str, Any], **more: str) -> str:
    labels = {"task": task["task"], **({"host": task["host"]} if task["host"] else {}), **more}
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """A process that serves the metrics of `live_file` on a port; a context manager.

    It ends with the launcher, of whatever that dies: its standard input does.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, port: int, live_file: Path) -> None:
        with listen(port, flag="--metrics_port") as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(live_file)],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                process_group=0,  # not that of the terminal, whose Ctrl-C is for the launcher
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(listener_fd: int, live_file: Path) -> None:
    """Serve until the standard input ends."""

    def metrics() -> str:
        with contextlib.suppress(FileNotFoundError):
            return render(json.loads(live_file.read_text(encoding="utf-8")))
        return ""  # nothing has been written yet

    listener = socket.socket(fileno=listener_fd)
    with make_server(listener, metrics, path="/metrics", content_type=_TYPE) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.buffer.read()
        server.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
