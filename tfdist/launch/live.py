"""Live status of a job: `live.json`, the history of each attempt, and metrics for Prometheus.

Heartbeats arrive once a second. A heartbeat's phase counts for the time since the previous beat.

`main` reads `live.json` and serves metrics, in a separate process. The launcher forks, so it must
not start threads or wait for clients.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.errors import require_packages
from tfdist.files import write_json
from tfdist.launch.events import Awakening, Beat, Started
from tfdist.launch.guardian import bootstrap_command
from tfdist.launch.machine import memory_bytes
from tfdist.launch.state import JobState
from tfdist.phases import PHASES, SUM

LIVE_FILE = "live.json"
HISTORY_FILE = "history.json"
"""Name of the history file in the directory of an attempt's logs."""

MAX_BINS = 120
_EVERY_S = 1.0
_HISTORY_EVERY_S = 10.0
_RATE_OVER_S = 15.0


@dataclass(kw_only=True, slots=True)
class _Bin:
    """Phases, step and memory of one task in one time interval."""

    phases: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    memory_bytes: int | None = None

    def merge(self, later: _Bin) -> None:
        for phase, seconds in later.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.step = self.step if later.step is None else later.step
        self.memory_bytes = max(self.memory_bytes or 0, later.memory_bytes or 0) or None


class AttemptHistory:
    """Phases, steps and memory of the tasks over time, in at most `MAX_BINS` equal intervals.

    When all intervals are used, each pair is merged, so the size of the history is bounded.
    """

    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.width_s = 1.0
        self._bins: dict[Task, list[_Bin]] = {}

    def add(self, task: Task, phase: str, *, begin_s: float, end_s: float) -> None:
        """Record a task's phase from `begin_s` to `end_s`."""
        while begin_s < end_s:
            index, found = self._at(task, begin_s)
            until_s = min(end_s, self.begin_s + (index + 1) * self.width_s)
            if until_s <= begin_s:  # by rounding
                until_s = end_s
            found.phases[phase] = found.phases.get(phase, 0.0) + until_s - begin_s
            begin_s = until_s

    def note(self, task: Task, *, at_s: float, step: int | None, memory_bytes: int | None) -> None:
        """Record a task's step and memory."""
        _, found = self._at(task, at_s)
        found.merge(_Bin(step=step, memory_bytes=memory_bytes))

    def as_json(self, *, epoch_s: float) -> dict[str, Any]:
        """Return the history as JSON types, with the time of day of its begin."""
        return {
            "begin": round(epoch_s + self.begin_s, 3),
            "width_s": self.width_s,
            "tasks": {str(task): _columns(bins) for task, bins in self._bins.items()},
        }

    def _at(self, task: Task, at_s: float) -> tuple[int, _Bin]:
        while (index := max(0, int((at_s - self.begin_s) // self.width_s))) >= MAX_BINS:
            self._halve()
        bins = self._bins.setdefault(task, [])
        bins.extend(_Bin() for _ in range(index + 1 - len(bins)))
        return index, bins[index]

    def _halve(self) -> None:
        self.width_s *= 2
        for task, bins in self._bins.items():
            for one, later in zip(bins[::2], bins[1::2], strict=False):
                one.merge(later)
            self._bins[task] = bins[::2]


def _columns(bins: list[_Bin]) -> dict[str, Any]:
    names = dict.fromkeys(phase for one in bins for phase in one.phases)
    return {
        "phases": {name: [round(one.phases.get(name, 0.0), 2) for one in bins] for name in names},
        "step": [one.step for one in bins],
        "memory_bytes": [one.memory_bytes for one in bins],
    }


@dataclass(kw_only=True, slots=True)
class _Seen:
    """Latest heartbeat and memory of a task's current process."""

    pid: int | None = None
    beat: Beat | None = None
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    past: deque[tuple[float, int]] = field(default_factory=deque)

    def rate(self) -> float | None:
        """Return the steps per second over the last `_RATE_OVER_S` seconds."""
        if len(self.past) < 2:
            return None
        (began_s, first), (at_s, last) = self.past[0], self.past[-1]
        return round((last - first) / (at_s - began_s), 3) if at_s > began_s else None


class LiveStatus:
    """Writer of `live.json` (once a second) and of the attempt's history (every ten seconds).

    Args:
        run_dir: Directory of `live.json`.
        logs: Directory of this attempt's logs.
        attempt: Number of the attempt.
        strategy: Strategy of the job.
        epoch_s: Function that returns the time of day at which the monotonic clock was 0. The
            result changes if the system clock is set or the machine sleeps.
        hosts: Host of each task (empty for a job on one host).
        is_here: Function that returns whether a task runs on this machine (to read its memory).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        logs: Path,
        attempt: int,
        strategy: str,
        epoch_s: Callable[[], float],
        hosts: Mapping[Task, str],
        is_here: Callable[[Task], bool] = lambda task: True,
    ) -> None:
        self._path = run_dir / LIVE_FILE
        self._history_path = logs / HISTORY_FILE
        self._attempt = attempt
        self._strategy = strategy
        self._epoch_s = epoch_s
        self._hosts = hosts
        self._is_here = is_here
        self._seen: dict[Task, _Seen] = {}
        self._history: AttemptHistory | None = None
        self._written_s = self._history_written_s = -math.inf

    def see(self, state: JobState, awakening: Awakening) -> None:
        """Record new events, and write the files if one second has passed since the last write."""
        if self._history is None:
            self._history = AttemptHistory(state.started_s)
        for event in awakening.events:
            match event:
                case Started(task=task):
                    self._seen[task] = _Seen(pid=event.pid)
                case Beat(task=task):
                    self._see_beat(self._seen.setdefault(task, _Seen()), event, self._history)
        now_s = awakening.at_s
        if now_s - self._written_s >= _EVERY_S or state.is_over:
            self._written_s = now_s
            self._write(state, self._history)

    def _see_beat(self, seen: _Seen, beat: Beat, history: AttemptHistory) -> None:
        begin_s = beat.since_s if seen.beat is None else seen.beat.at_s
        history.add(beat.task, beat.phase, begin_s=begin_s, end_s=beat.at_s)
        seen.beat = beat
        if seen.pid is not None and self._is_here(beat.task):
            seen.memory_bytes = memory_bytes(seen.pid)
            seen.peak_bytes = max(seen.peak_bytes or 0, seen.memory_bytes or 0) or None
        history.note(beat.task, at_s=beat.at_s, step=beat.step, memory_bytes=seen.memory_bytes)
        if beat.step:  # 0 does not count: a restore from a checkpoint may follow
            seen.past.append((beat.at_s, beat.step))
            while seen.past[0][0] < beat.at_s - _RATE_OVER_S:
                seen.past.popleft()

    def _write(self, state: JobState, history: AttemptHistory) -> None:
        with contextlib.suppress(OSError):  # the job does not need these files
            write_json(self._path, self._status(state), durable=False)
            if self._written_s - self._history_written_s >= _HISTORY_EVERY_S or state.is_over:
                self._history_written_s = self._written_s
                document = history.as_json(epoch_s=self._epoch_s())
                write_json(self._history_path, document, durable=False)

    def _status(self, state: JobState) -> dict[str, Any]:
        rates = [seen.rate() for seen in self._seen.values()]
        epoch_s = self._epoch_s()
        return {
            "at": round(epoch_s + state.now_s, 3),
            "attempt": self._attempt,
            "began_at": round(epoch_s + state.started_s, 3),
            "strategy": self._strategy,
            "state": "ended" if state.is_over else "ending" if state.is_ending else "running",
            "step": state.step,
            "steps_per_s": max((rate for rate in rates if rate is not None), default=None),
            "failure": f"{state.failure.task}: {state.failure.cause}" if state.failure else None,
            "tasks": [self._task(state, task) for task in state.tasks],
        }

    def _task(self, state: JobState, task: Task) -> dict[str, Any]:
        seen, record = self._seen.get(task, _Seen()), state.tasks[task].records[-1]
        beat, is_running = seen.beat, state.is_running(task)
        return {
            "task": str(task),
            "host": self._hosts.get(task),
            "pid": record.pid,
            "state": "running" if is_running else "waiting" if record.pid is None else "ended",
            "status": record.status,
            "phase": beat.phase if beat and is_running else None,
            "phase_s": round(state.now_s - beat.since_s, 1) if beat and is_running else None,
            "step": beat.step if beat else None,
            "steps_per_s": seen.rate() if is_running else None,
            "memory_bytes": seen.memory_bytes if is_running else None,
            "peak_memory_bytes": seen.peak_bytes,
            "silent_s": round(state.now_s - beat.at_s, 1) if beat and is_running else None,
            "restarts": record.restart,
        }


_METRICS_TYPE = "text/plain; version=0.0.4"

_OF_JOB = (
    ("at", "tfdist_status_timestamp_seconds", "Unix time at which the launcher wrote this status."),
    ("attempt", "tfdist_attempt", "Number of the job's current attempt."),
    ("step", "tfdist_job_step", "Finished steps of the job."),
)
_OF_TASK = (
    ("step", "tfdist_step", "Finished optimizer steps of the task."),
    ("steps_per_s", "tfdist_steps_per_second", "Steps per second in the last 15 s."),
    ("memory_bytes", "tfdist_memory_bytes", "Resident memory of the task's process."),
    (
        "peak_memory_bytes",
        "tfdist_memory_peak_bytes",
        "Peak resident memory of the task.",
    ),
    ("silent_s", "tfdist_heartbeat_age_seconds", "Seconds since the task's last heartbeat."),
    ("phase_s", "tfdist_phase_age_seconds", "Seconds since the task's last progress."),
    ("restarts", "tfdist_task_restarts", "Number of restarts of only this task."),
)


def prometheus_text(status: Mapping[str, Any]) -> str:
    """Return a status of `live.json` in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry, tasks = CollectorRegistry(), status["tasks"]
    labels = ("task", "host") if any(task["host"] for task in tasks) else ("task",)
    for key, name, about in _OF_JOB:
        if status.get(key) is not None:
            Gauge(name, about, registry=registry).set(status[key])
    gauges = {key: Gauge(name, about, labels, registry=registry) for key, name, about in _OF_TASK}
    up = Gauge("tfdist_task_up", "1 if the task is running.", labels, registry=registry)
    about = "1 for the task's current phase."
    phase_of = Gauge("tfdist_task_phase", about, (*labels, "phase"), registry=registry)
    for task in tasks:
        named = [task[label] or "" for label in labels]
        up.labels(*named).set(task["state"] == "running")
        for key, gauge in gauges.items():
            if task[key] is not None:
                gauge.labels(*named).set(task[key])
        for phase in (*PHASES, SUM):
            phase_of.labels(*named, phase).set(task["phase"] == phase)
    return str(generate_latest(registry).decode())


@contextlib.contextmanager
def metrics_server(port: int, live_file: Path) -> Iterator[None]:
    """Serve the metrics of `live_file` on a port, in a separate process, while the block runs.

    The process exits when the launcher exits or is killed, because its standard input closes.

    Raises:
        UsageError: The port is in use, or prometheus-client is not installed.
    """
    require_packages("--metrics_port", "prometheus_client", extra="metrics")
    from tfdist.loopback import listen  # a slow import (HTTP server)

    with listen(port, flag="--metrics_port") as listener:
        process = subprocess.Popen(
            bootstrap_command("live", str(listener.fileno()), str(live_file)),
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C in the terminal must not stop it
        )
    with process:  # closes its input, and waits
        try:
            yield
        finally:
            process.kill()  # it writes no file, and SIGTERM has no effect if it is stopped


def main(argv: Sequence[str]) -> None:
    """Serve until standard input closes. `argv` holds the listener's descriptor and the file."""
    from tfdist.loopback import make_server

    live_file = Path(argv[1])

    def metrics() -> str:
        with contextlib.suppress(FileNotFoundError):
            return prometheus_text(json.loads(live_file.read_text(encoding="utf-8")))
        return ""  # live.json does not exist yet

    listener = socket.socket(fileno=int(argv[0]))
    with make_server(listener, metrics, path="/metrics", content_type=_METRICS_TYPE) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.buffer.read()
        server.shutdown()
