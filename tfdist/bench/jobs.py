"""One job of `tfdist.train` through the launcher, and what its run directory says of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench import wire
from tfdist.bench.shapes import Shape
from tfdist.errors import TfdistError
from tfdist.outputs.run_directory import DONE, RunDirectory

_END_S = 30.0
_LAST_LINES = 12


def run(
    shape: Shape,
    run_dir: Path,
    *,
    arguments: Sequence[str],
    timeout_s: float,
    profile_ps: bool = False,
) -> dict[str, Any]:
    """Runs a job to its end; returns its summary, with the lines of its metrics.

    The strategy is the launcher's: a config that names one would refuse the other jobs.

    Raises:
      TfdistError: the job failed, or was not done in time and has been ended; its last lines.
    """
    launch = [sys.executable, "-m", "tfdist.launch", *shape.flags, "--run_dir", str(run_dir)]
    if profile_ps and shape.ps:
        launch.append("--profile_ps")
    if shape.rate_mbit:
        launch = [*wire.behind(shape.rate_mbit), *launch]
    run_dir.mkdir(parents=True, exist_ok=True)
    said = run_dir / "said.log"
    with said.open("w") as output:
        job = subprocess.Popen(
            [*launch, "-m", "tfdist.train", *arguments, "--config.strategy=auto"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        code = _code(job, timeout_s)
    directory = RunDirectory(run_dir)
    summary = directory.read_summary() or {}
    if code != 0 or summary.get("status") != DONE:
        ended = f"was not done in {timeout_s:.0f} s" if code is None else f"ended with code {code}"
        last = "\n".join(said.read_text().splitlines()[-_LAST_LINES:])
        raise TfdistError(f"{shape.name}: the job {ended}; its last lines:\n{last}")
    return {**summary, "lines": directory.read_metrics()}


def _code(job: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Waits for the launcher; at the deadline, or when interrupted, has it end its tasks."""
    try:
        return job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_END_S)
            job.kill()
            job.wait()


def seconds_to_loss(lines: Sequence[Mapping[str, Any]], loss: float) -> float | None:
    """Seconds of training until the mean loss of a virtual epoch was `loss`, None if it never was.

    Between two virtual epochs on the line between them. Only training counts: the time of a
    virtual epoch is its examples by its examples per second.
    """
    seconds, examples = 0.0, 0
    before: tuple[float, float] | None = None
    for line in lines:
        rate = line.get("examples_per_second")
        if not rate or line.get("loss") is None:
            return None
        seconds += (line["examples"] - examples) / rate
        examples = line["examples"]
        if line["loss"] <= loss:
            if before is None:
                return seconds
            then_s, then = before
            return then_s + (seconds - then_s) * (then - loss) / (then - line["loss"])
        before = seconds, line["loss"]
    return None
