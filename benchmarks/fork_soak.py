"""Many forked jobs in a row: do they hang, and do they differ in one bit from those by exec?

    python benchmarks/fork_soak.py --jobs 500

Each result is a line of the results file as soon as there is one, so the run can be stopped
and started again at any time. A job that does not end in time has its tasks print their
Python stacks into their logs, which are kept, as are those of a job that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("fork_soak_job.py")


def main() -> int:
    """Runs the jobs that are missing, prints a summary; exit code 1 if forking broke anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500, help="forked jobs (500)")
    parser.add_argument("--exec_every", type=int, default=25, help="forked jobs per one by exec")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout_s", type=float, default=180.0, help="when a job counts as hung")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "fork_soak.jsonl")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results = _read(args.results)
    with args.results.open("a") as file:
        for number, start in _missing(results, jobs=args.jobs, exec_every=args.exec_every):
            run_dir = args.results.with_suffix("") / f"{start}-{number}"
            result = {"number": number, "start": start}
            result |= _run(start, run_dir=run_dir, workers=args.workers, timeout_s=args.timeout_s)
            file.write(json.dumps(result) + "\n")
            file.flush()
            results.append(result)
            print(_line(result), flush=True)
    return _summary(results)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _missing(
    results: list[dict[str, Any]], *, jobs: int, exec_every: int
) -> Iterator[tuple[int, str]]:
    done = {(result["number"], result["start"]) for result in results}
    for number in range(jobs):
        wanted = ["exec", "fork"] if number % exec_every == 0 else ["fork"]
        yield from ((number, start) for start in wanted if (number, start) not in done)


def _run(start: str, *, run_dir: Path, workers: int, timeout_s: float) -> dict[str, Any]:
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "tfdist.launch", f"--start={start}", f"--workers={workers}"]
    command += ["--strategy=multiworker", f"--run_dir={run_dir}", str(JOB)]
    began_s = time.monotonic()
    launcher = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    hung = False
    try:
        text, _ = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        hung = True
        _print_stacks(launcher.pid)
        text = _end(launcher)
    seconds = time.monotonic() - began_s
    hashes = sorted(set(re.findall(r"weights_sha256 (\w{64})", text)))
    whole = len(re.findall(r"weights_sha256 \w{64}", text)) == workers
    code = launcher.returncode
    if code == 0 and whole and len(hashes) == 1:
        shutil.rmtree(run_dir)
    return {"seconds": seconds, "exit_code": code, "hung": hung, "whole": whole, "hashes": hashes}


def _print_stacks(pid: int) -> None:
    """Has every Python below `pid` print its stacks: PYTHONFAULTHANDLER is on in all tasks."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        _print_stacks(int(child))
        if "guardian" not in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGABRT)


def _end(launcher: subprocess.Popen[str]) -> str:
    launcher.terminate()
    try:
        return launcher.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.communicate()[0]


def _line(result: dict[str, Any]) -> str:
    state = "HUNG" if result["hung"] else f"exit code {result['exit_code']}"
    hashes = " ".join(digest[:12] for digest in result["hashes"])
    return f"{result['start']} {result['number']}: {state}, {result['seconds']:.1f} s, {hashes}"


def _summary(results: list[dict[str, Any]]) -> int:
    for start in ("exec", "fork"):
        of_start = [result for result in results if result["start"] == start]
        if of_start:
            hung = sum(result["hung"] for result in of_start)
            failed = sum(result["exit_code"] != 0 or not result["whole"] for result in of_start)
            seconds = statistics.median(result["seconds"] for result in of_start)
            jobs = f"{len(of_start)} jobs, {hung} hung, {failed} failed"
            print(f"{start}: {jobs}, median {seconds:.2f} s")
    hashes = Counter(digest for result in results for digest in result["hashes"])
    print(f"different weights: {len(hashes)}")
    broken = [r for r in results if r["start"] == "fork" and (r["exit_code"] or not r["whole"])]
    return 1 if broken or len(hashes) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
