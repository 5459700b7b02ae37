"""Live status of a job: `live.json`, and the history of each attempt.

Heartbeats arrive once a second. A heartbeat's phase counts for the time since the previous beat.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.files import write_json
from tfdist.launch.events import Awakening, Beat, Started
from tfdist.launch.machine import memory_bytes
from tfdist.launch.state import JobState

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
