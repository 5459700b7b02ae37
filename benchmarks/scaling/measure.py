"""Jobs of several sizes, run in turn through the launcher: examples per second, time to a loss.

A job is written in one word: ``2W1PS``, two workers and one ps; ``2W``, two of multiworker;
``2W1PS@50``, the same behind one wire of 50 Mbit/s; ``2W1PS@20%``, each task with 20 % of a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scaling.limits import CpuLimits
from tfdist.errors import TfdistError, UsageError
from tfdist.launch.live import LIVE_FILE
from tfdist.outputs.run_directory import DONE, RunDirectory, read_json

_LOG = logging.getLogger(__name__)
_WORD = re.compile(r"([1-9]\d{0,3})W(?:([1-9]\d{0,3})PS)?(?:@(\d+(?:\.\d+)?)(%?))?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How many workers a job has, and how many ps; without ps it is a multiworker job."""

    workers: int
    ps: int = 0
    rate_mbit: float | None = None
    cpu_percent: float | None = None

    @classmethod
    def parse(cls, word: str) -> Shape:
        """Returns the shape that `word` names; `UsageError` where it names none."""
        found = _WORD.fullmatch(word.strip().upper())
        if found is None or (found[3] and not float(found[3])):
            raise UsageError(
                "--shapes",
                f"{word!r} is not a shape such as 2W1PS, 2W (multiworker), 2W1PS@50 (50 Mbit/s) "
                "or 2W1PS@20% (20 % of a CPU for each task)",
                fix="write --shapes 1W1PS,2W1PS,2W",
            )
        limit = float(found[3]) if found[3] else None
        return cls(
            workers=int(found[1]),
            ps=int(found[2] or 0),
            rate_mbit=None if found[4] else limit,
            cpu_percent=limit if found[4] else None,
        )

    @property
    def name(self) -> str:
        """The word for it."""
        limit = f"@{self.rate_mbit:g}" if self.rate_mbit else ""
        limit += f"@{self.cpu_percent:g}%" if self.cpu_percent else ""
        return f"{self.workers}W" + (f"{self.ps}PS" if self.ps else "") + limit

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags for it."""
        workers: tuple[str, ...] = ("--workers", str(self.workers))
        if self.cpu_percent:  # a part of one CPU
            workers += ("--threads_per_task", "1")
        if self.ps:
            return ("--strategy", "ps", *workers, "--ps", str(self.ps))
        return ("--strategy", "multiworker", *workers)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the shapes of ``1W1PS,2W``, each once."""
    return tuple(dict.fromkeys(Shape.parse(word) for word in text.split(",")))


_DEADLINE_S = 20
# Packets as of Ethernet, and not of 64 kB, which the limit would never let through. The queue
# holds what 300 ms take: senders wait then, as nothing is lost on the way.
_LIMIT = (
    "ip link set lo mtu 1500 up && "
    'tc qdisc add dev lo root tbf rate "$1mbit" burst 64kb latency 300ms && shift && exec "$@"'
)


def behind(rate_mbit: float) -> list[str]:
    """What to write before a command that is to run there; Linux, with `tc`."""
    maps = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *maps, "sh", "-c", _LIMIT, "sh", f"{rate_mbit:g}"]


def possible(rate_mbit: float) -> bool:
    """Whether this machine lets this user have one; where not, says why in one line."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        why = f"{', '.join(missing)} not found"
    else:
        done = subprocess.run(
            [*behind(rate_mbit), "true"], capture_output=True, text=True, timeout=_DEADLINE_S
        )
        if done.returncode == 0:
            return True
        why = (done.stderr.strip().splitlines() or ["refused"])[-1]
    _LOG.warning("nothing is measured behind a wire: %s", why)
    return False


_END_S = 30.0
_POLL_S = 0.01
_LAST_LINES = 12


def run_job(
    shape: Shape,
    run_dir: Path,
    *,
    arguments: Sequence[str],
    timeout_s: float,
) -> dict[str, Any]:
    """Runs a job to its end; returns its summary, with the lines of its metrics.

    The strategy is the launcher's: a config that names one would refuse the other jobs. A CPU limit
    begins after the first virtual epoch, so that it does not slow the start and the tracing. The
    examples per second of such a job are those of the other virtual epochs.

    Raises:
      TfdistError: the job failed, or was not done in time and has been ended; its last lines.
    """
    launch = [sys.executable, "-m", "tfdist.launch", *shape.flags, "--run_dir", str(run_dir)]
    if shape.rate_mbit:
        launch = [*behind(shape.rate_mbit), *launch]
    run_dir.mkdir(parents=True, exist_ok=True)
    said, directory = run_dir / "said.log", RunDirectory(run_dir)
    with said.open("w") as output, contextlib.ExitStack() as stack:
        limits = CpuLimits(shape.cpu_percent) if shape.cpu_percent else None
        if limits:
            stack.callback(limits.close)
        job = subprocess.Popen(
            [*launch, "-m", "tfdist.train", *arguments, "--config.strategy=auto"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        code = _code(job, timeout_s, directory, limits)
    summary = directory.read_summary() or {}
    if code != 0 or summary.get("status") != DONE:
        ended = f"was not done in {timeout_s:.0f} s" if code is None else f"ended with code {code}"
        last = "\n".join(said.read_text().splitlines()[-_LAST_LINES:])
        raise TfdistError(f"{shape.name}: the job {ended}; its last lines:\n{last}")
    lines = directory.read_metrics()
    if limits:
        curve = loss_curve(lines, is_limited=True)
        examples = lines[-1]["examples"] - lines[0]["examples"]
        summary["examples_per_second"] = examples / curve[-1][0] if curve else None
    return {**summary, "lines": lines}


def _code(
    job: subprocess.Popen[bytes],
    timeout_s: float,
    directory: RunDirectory,
    limits: CpuLimits | None,
) -> int | None:
    """Waits for the launcher; at the deadline, or when interrupted, has it end its tasks."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while limits and job.poll() is None and time.monotonic() < deadline_s:
            if directory.read_metrics():
                live = read_json(directory.path / LIVE_FILE) or {}
                limits.set({task["task"]: task["pid"] for task in live["tasks"]})
                break
            time.sleep(_POLL_S)
        return job.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_END_S)
            job.kill()
            job.wait()


def loss_curve(
    lines: Sequence[Mapping[str, Any]], *, is_limited: bool = False
) -> list[tuple[float, float]] | None:
    """Return seconds of training and mean loss at each virtual epoch, None without all figures.

    Only training counts: the time of a virtual epoch is its examples by its examples per second.
    The time of a job with a CPU limit begins with the limit, after the first virtual epoch.
    """
    curve: list[tuple[float, float]] = []
    seconds, examples = 0.0, 0
    if is_limited and lines:
        curve, examples = [(0.0, lines[0]["loss"])], lines[0]["examples"]
    for line in lines[1:] if is_limited else lines:
        rate = line.get("examples_per_second")
        if not rate or line.get("loss") is None:
            return None
        seconds += (line["examples"] - examples) / rate
        examples = line["examples"]
        curve.append((seconds, line["loss"]))
    return curve


def seconds_to_loss(curve: Sequence[tuple[float, float]] | None, loss: float) -> float | None:
    """Return seconds of training until the mean loss of a virtual epoch was `loss`.

    Between two virtual epochs on the line between them. None if the loss was not reached.
    """
    before: tuple[float, float] | None = None
    for seconds, value in curve or ():
        if value <= loss:
            if before is None:
                return seconds
            then_s, then = before
            return then_s + (seconds - then_s) * (then - loss) / (then - value)
        before = seconds, value
    return None


Run = Callable[[Shape, Path], Mapping[str, Any]]


def measure(
    shapes: Sequence[Shape], *, repeats: int, loss: float | None, out: Path, run: Run
) -> dict[str, Any]:
    """Runs every shape `repeats` times, in turn; returns the table as JSON.

    In turn, so that a machine that is slow for a while is slow for all of them. Without `loss` it
    is the highest of the last losses of all jobs: what all of them came to.
    """
    results: dict[Shape, list[Mapping[str, Any]]] = {shape: [] for shape in shapes}
    for repeat in range(repeats):
        for shape in shapes:
            found = run(shape, out / "runs" / f"{shape.name}-{repeat}")
            rate = found["examples_per_second"] or 0.0
            _LOG.info("%s, %d of %d: %.0f examples/s", shape.name, repeat + 1, repeats, rate)
            results[shape].append(found)
    every = [found for listed in results.values() for found in listed]
    target = max(found["metrics"]["loss"] for found in every) if loss is None else loss
    return {
        "loss": target,
        "repeats": repeats,
        "cpus": len(os.sched_getaffinity(0)),
        "shapes": [_row(shape, listed, target) for shape, listed in results.items()],
    }


def _row(shape: Shape, listed: Sequence[Mapping[str, Any]], loss: float) -> dict[str, Any]:
    is_limited = shape.cpu_percent is not None
    curves = [loss_curve(found["lines"], is_limited=is_limited) for found in listed]
    to_loss = [seconds_to_loss(curve, loss) for curve in curves]
    return {
        "shape": shape.name,
        "workers": shape.workers,
        "ps": shape.ps,
        "rate_mbit": shape.rate_mbit,
        "cpu_percent": shape.cpu_percent,
        "batch": listed[0]["examples"] / listed[0]["steps"],
        "examples_per_second": _spread([found["examples_per_second"] for found in listed]),
        "seconds_to_loss": _spread(to_loss),
        "last_loss": _spread([found["metrics"]["loss"] for found in listed]),
        "loss_curves": curves,
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median and range of what was measured; None where one of the jobs has no such figure."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    median = statistics.median(known)
    return {"median": median, "least": min(known), "most": max(known), "all": known}


def lines(table: Mapping[str, Any]) -> list[str]:
    """The table for a person: medians, and the range of the repeats."""
    loss = f"s to loss {table['loss']:.4g}"
    text = [f"{'job':<10} {'examples/s':>12} {'range':>17} {loss:>22} {'range':>15}"]
    for row in table["shapes"]:
        rate, seconds = row["examples_per_second"], row["seconds_to_loss"]
        cells = [_cells(rate, 12, 17, ",.0f"), _cells(seconds, 22, 15, ".2f")]
        text.append(f"{row['shape']:<10} {cells[0]} {cells[1]}")
    return text


def _cells(spread: Mapping[str, Any] | None, width: int, range_width: int, form: str) -> str:
    if spread is None:
        return f"{'-':>{width}} {'':>{range_width}}"
    between = f"{spread['least']:{form}} to {spread['most']:{form}}"
    return f"{spread['median']:>{width}{form}} {between:>{range_width}}"
