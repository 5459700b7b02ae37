"""What the launcher itself costs: 200 tasks that sleep."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import psutil
import row

NAME = "launcher_tasks"
TASKS = 200
DEADLINE_S = 60.0
SETTLE_S = 2.0
WATCH_S = 10.0
MEBIBYTE = 2**20

SLEEPER = """
import os, sys, time
os.close(os.open(os.path.join(sys.argv[1], str(os.getpid())), os.O_CREAT))
time.sleep(300)
"""


def measure_tfdist(args: argparse.Namespace) -> None:
    """Starts the job, waits until every task has run its first line, and watches it sleep."""
    with tempfile.TemporaryDirectory() as scratch:
        started = Path(scratch, "started")
        started.mkdir()
        program = Path(scratch, "sleeper.py")
        program.write_text(SLEEPER)
        job = ["--strategy", "multiworker", "--workers", str(TASKS), "--run_dir", f"{scratch}/run"]
        command = [harness.PROJECT_PYTHON, "-m", "tfdist.launch", *job, str(program), str(started)]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=harness.ROOT
        )
        try:
            _wait(lambda: _count(started) == TASKS, process)
            start_s = time.perf_counter() - began
            time.sleep(SETTLE_S)
            figures = _watch(process.pid, tasks={int(name) for name in os.listdir(started)})
        finally:
            stop_s = _stop(process)
        left = [pid for pid in os.listdir(started) if psutil.pid_exists(int(pid))]
        if left:
            raise harness.MeasurementError(f"{len(left)} tasks outlived the launcher: {left}")
    harness.emit(NAME, "tfdist", start_s=start_s, stop_s=stop_s, **figures)


def _wait(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.perf_counter() + DEADLINE_S
    while not done():
        if process.poll() is not None:
            raise harness.MeasurementError(f"the launcher ended with {process.returncode}")
        if time.perf_counter() > deadline:
            raise harness.MeasurementError(f"not all tasks in {DEADLINE_S:.0f} s")
        time.sleep(0.02)


def _count(directory: Path) -> int:
    with os.scandir(directory) as entries:
        return sum(1 for _ in entries)


def _watch(launcher: int, *, tasks: set[int]) -> dict[str, float]:
    """Percent of a core over some seconds, and MiB, of the launcher and of its tasks."""
    tree = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    own = [p for p in tree if p.pid not in tasks]
    theirs = [p for p in tree if p.pid in tasks]
    start, before = time.perf_counter(), (_cpu_s(own), _cpu_s(theirs))
    time.sleep(WATCH_S)
    elapsed_s, after = time.perf_counter() - start, (_cpu_s(own), _cpu_s(theirs))
    return {
        "launcher_cpu_percent": 100 * (after[0] - before[0]) / elapsed_s,
        "tasks_cpu_percent": 100 * (after[1] - before[1]) / elapsed_s,
        "launcher_rss_mib": sum(p.memory_info().rss for p in own) / MEBIBYTE,
        "launcher_processes": len(own),
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [p.cpu_times() for p in processes]
    return sum(t.user + t.system for t in times)


def _stop(process: subprocess.Popen[bytes]) -> float:
    start = time.perf_counter()
    process.terminate()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.perf_counter() - start


def _figure(key: str) -> Callable[[row.Pair], float]:
    return lambda pair: row.figure(pair, "tfdist", key)


def _cpu_percent(pair: row.Pair) -> float:
    return _figure("launcher_cpu_percent")(pair) + _figure("tasks_cpu_percent")(pair)


ROW = row.Row(
    name=NAME,
    title=f"launcher with {TASKS} tasks that sleep",
    sides={"tfdist": functools.partial(row.script, f"{NAME}.py", "tfdist")},
    claims=(
        row.Claim(
            what="seconds from the command until every task has run its first line",
            value=_figure("start_s"),
            target=3.0,
            at_least=False,
            unit="s",
            expected="2.5: 200 bare interpreters at about 15 ms each on two cores are 1.5 s, and "
            "a fork and exec of each by one process about 1 s",
        ),
        row.Claim(
            what="percent of a core, launcher and tasks together, while they sleep",
            value=_cpu_percent,
            target=2.0,
            at_least=False,
            unit="%",
            expected="0.5: everything waits for events, a few timers tick",
        ),
        row.Claim(
            what="memory of the launcher (RSS)",
            value=_figure("launcher_rss_mib"),
            target=80.0,
            at_least=False,
            unit="MiB",
            expected="30: an interpreter of 10 MiB, asyncio or selectors, 200 tasks' records",
        ),
    ),
    notes="The CPU percentage counts the tasks' side too, where they watch for the launcher's "
    "death; a bare interpreter that sleeps takes none.",
)


if __name__ == "__main__":
    row.main(ROW, {"tfdist": measure_tfdist})
