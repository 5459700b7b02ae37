"""``python -m benchmarks.soak``: memory growth of four jobs, over hours.

Runs a job of single, mirrored, multiworker and ps side by side (`soak_job`) and records the memory,
threads and open files of each task and launcher in `soak.jsonl` every 30 s. At the end, also when
it is interrupted, it writes `benchmarks/SOAK.md` and `docs/images/soak.png`; ``--report FILE``
writes them from the records, also during the soak. A job that ends is started again, and the page
says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where its modules look for each other

import machine  # noqa: E402
import soak_report  # noqa: E402

from tfdist.launch.guardian import bound_command  # noqa: E402

JOB = ROOT / "benchmarks" / "soak_job.py"
PAGE = ROOT / "benchmarks" / "SOAK.md"
PICTURE = ROOT / "docs" / "images" / "soak.png"
JOBS = {
    "single": ["--strategy=single"],
    "mirrored": ["--strategy=mirrored", "--devices_per_worker=2"],
    "multiworker": ["--strategy=multiworker", "--workers=2"],
    "ps": ["--strategy=ps", "--workers=2", "--ps=1"],
}
PATIENT = ["--hang_timeout_s=0", "--startup_timeout_s=900", "--start=exec", "--threads_per_task=1"]
STOP_S = 60.0


@dataclass(kw_only=True, slots=True)
class Running:
    """A job and its current launcher."""

    name: str
    out: Path
    launcher: subprocess.Popen[bytes] | None = None
    starts: int = 0
    known: dict[int, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start the job; the run directory keeps the logs of earlier starts."""
        self.starts += 1
        self.known.clear()
        (self.out / "progress.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tfdist.launch", *JOBS[self.name], *PATIENT]
        command += [f"--run_dir={self.out / 'run'}", str(JOB)]
        command += [f"--out={self.out}", f"--start={self.starts}"]
        environ = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        with open(self.out / "output.log", "ab") as output:
            self.launcher = subprocess.Popen(
                bound_command(command),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    def sample(self) -> dict[str, dict[str, int]]:
        """Return the memory of each task and of the launcher."""
        assert self.launcher is not None
        found = {"launcher": _memory(self.launcher.pid)}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.launcher.pid).children():
                if name := self.known.get(child.pid) or _task(child):
                    self.known[child.pid] = name
                    found[name] = _memory(child.pid)
        return {name: memory for name, memory in found.items() if memory}

    def progress(self) -> dict[str, Any]:
        """Return what the chief wrote last: steps, fits, phase."""
        with contextlib.suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads((self.out / "progress.json").read_text())
            return told
        return {"steps": 0, "fits": 0, "phase": "start"}


def main() -> int:
    args = _arguments()
    if args.report:
        soak_report.write(args.report, page=PAGE, picture=PICTURE)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit(143))
    records = args.out / "soak.jsonl"
    jobs = [Running(name=name, out=args.out / name) for name in args.jobs.split(",")]
    with open(records, "w") as file:
        try:
            _soak(jobs, file, hours=args.hours, every_s=args.every_s)
        finally:
            _stop(jobs)
            soak_report.write(records, page=PAGE, picture=PICTURE)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every_s", type=float, default=30.0, help="between two samples")
    parser.add_argument("--jobs", default=",".join(JOBS), help="names, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("--report", type=Path, help="write the page from these records only")
    return parser.parse_args()


def _soak(jobs: list[Running], file: TextIO, *, hours: float, every_s: float) -> None:
    began_s = time.monotonic()
    head = {"hours": hours, "every_s": every_s, "at": time.time()}
    _write(file, kind="soak", **head, machine=machine.describe(with_peers=False))
    due_s = 0.0
    while (since_s := time.monotonic() - began_s) < hours * 3600:
        for job in jobs:
            _look_after(job, file, since_s=since_s)
        due_s = max(due_s + every_s, since_s)
        time.sleep(max(0.0, due_s - (time.monotonic() - began_s)))


def _look_after(job: Running, file: TextIO, *, since_s: float) -> None:
    if job.launcher is not None and job.launcher.poll() is None:
        about = {"job": job.name, "start": job.starts, **job.progress()}
        for task, memory in job.sample().items():
            _write(file, kind="sample", since_s=round(since_s, 1), **about, task=task, **memory)
        return
    if job.launcher is not None:
        code = job.launcher.returncode
        _write(file, kind="ended", since_s=since_s, job=job.name, start=job.starts, exit_code=code)
    job.out.mkdir(parents=True, exist_ok=True)
    job.start()


def _write(file: TextIO, **record: Any) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def _task(process: psutil.Process) -> str:
    """Return the name of a task; "" for a helper of the launcher."""
    with contextlib.suppress(psutil.Error, KeyError, ValueError):
        task = json.loads(process.environ()["TF_CONFIG"])["task"]
        return f"{task['type']}-{task['index']}"
    return ""


def _memory(pid: int) -> dict[str, int]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        info = process.memory_full_info()
        held = {"threads": process.num_threads(), "fds": process.num_fds()}
        return {"pss": info.pss, "uss": info.uss, "rss": info.rss, **held}
    return {}


def _stop(jobs: list[Running]) -> None:
    """End every job; the guardian of a killed launcher kills its tasks."""
    launchers = [job.launcher for job in jobs if job.launcher is not None]
    for launcher in launchers:
        launcher.terminate()
    until_s = time.monotonic() + STOP_S
    for launcher in launchers:
        try:
            launcher.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


if __name__ == "__main__":
    sys.exit(main())
