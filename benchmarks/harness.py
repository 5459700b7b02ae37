"""Runs one measurement as processes of its own: pinned, with a deadline, stopped as a group.

A measuring script prints one JSON object a line, ``{"benchmark": ..., "side": ..., ...}``; all
else it prints is kept for the error message only. The launcher prefixes the lines of its tasks,
so an object is looked for anywhere in a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROJECT_PYTHON = sys.executable
PEER_PYTHON = str(HERE / ".venv" / "bin" / "python")
MARK = '{"benchmark": '

# One intra-op thread for every framework, and the processor only.
QUIET_ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class MeasurementError(RuntimeError):
    """A measuring process failed, ran out of time or printed nothing; the message has its end."""


def emit(benchmark: str, side: str, **values: Any) -> None:
    """Prints one measurement. `benchmark` comes first: `records` looks for it."""
    print(json.dumps({"benchmark": benchmark, "side": side, **values}), flush=True)


def core_of(index: int) -> int:
    """The core for the process with this index: from the last one down.

    Core 0 serves most interrupts, so that what needs one core only does not get that one.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    return cores[index % len(cores)]


def pin(index: int) -> None:
    """Pins this process to one core. To be called before TensorFlow or torch is imported."""
    os.sched_setaffinity(0, {core_of(index)})


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pins processes started in this block to `core`; None leaves them every core."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(
    command: Sequence[str],
    *,
    timeout_s: float,
    core: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs one measuring command and returns the objects it printed.

    The command is the leader of a process group that is killed at the deadline and swept at the
    end. Each object also gets ``others_cores``: how many cores everything else on the machine
    took meanwhile; a figure with more than a tenth of a core there is not worth much. Raises
    MeasurementError if the command fails or prints no measurement.
    """
    began, busy_s, own_s = time.perf_counter(), _machine_busy_s(), _own_busy_s()
    with tempfile.TemporaryFile("w+") as output:
        with pinned(core):
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env={**os.environ, **QUIET_ENVIRON, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _sweep(process)
        output.seek(0)
        text = output.read()
    found = records(text)
    if code != 0 or not found:
        ended = f"no end after {timeout_s:.0f} s" if code is None else f"exit code {code}"
        last = "\n".join(text.splitlines()[-12:])
        raise MeasurementError(f"{' '.join(command)}: {ended}\n{last}")
    others_s = (_machine_busy_s() - busy_s) - (_own_busy_s() - own_s)
    others_cores = max(others_s / (time.perf_counter() - began), 0.0)
    return [{**record, "others_cores": others_cores} for record in found]


def records(text: str) -> list[dict[str, Any]]:
    """The measurements in the output of a measuring process, in order."""
    found = []
    for line in text.splitlines():
        start = line.find(MARK)
        if start >= 0:
            found.append(json.loads(line[start:]))
    return found


def _machine_busy_s() -> float:
    """Processor seconds of the whole machine since it started, time taken by its host too."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    by_name = dict(zip(names, map(int, ticks), strict=False))
    busy = sum(count for name, count in by_name.items() if name not in ("idle", "iowait"))
    return busy / os.sysconf("SC_CLK_TCK")


def _own_busy_s() -> float:
    """Processor seconds of this process and of every child that has ended."""
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _sweep(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of the process group, the launcher's way first."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
