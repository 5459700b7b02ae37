"""The demo's six tasks, from the command to the first step: forked after one import, and not."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import selectors
import signal
import subprocess
import tempfile
import time
from typing import IO

import harness
import row

NAME = "demo_start"
DEADLINE_S = 150.0
FIRST_STEP = b"first step"


def measure(start: str, args: argparse.Namespace) -> None:
    """Starts the demo, waits for the first line that tells of a step, and asks it to stop."""
    with tempfile.TemporaryDirectory() as run_dir:
        job = ["--strategy", "ps", "--workers", "4", "--ps", "1"]
        command = [harness.PROJECT_PYTHON, "-m", "tfdist.launch", *job]
        command += ["--start", start, "--run_dir", os.path.join(run_dir, "run")]
        command += [str(harness.HERE / "demo_first_step.py")]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=harness.ROOT
        )
        try:
            assert process.stdout is not None
            _wait_for_step(process.stdout, deadline=began + DEADLINE_S)
            first_step_s = time.perf_counter() - began
        finally:
            _stop(process)
    harness.emit(NAME, start, first_step_s=first_step_s)


def _wait_for_step(output: IO[bytes], *, deadline: float) -> None:
    """Returns at the first line that tells of a step; raises MeasurementError without one."""
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while FIRST_STEP not in seen:
            if not selector.select(deadline - time.perf_counter()):
                raise harness.MeasurementError(f"no step in {DEADLINE_S:.0f} s:\n{_end(seen)}")
            chunk = os.read(output.fileno(), 65536)
            if not chunk:
                raise harness.MeasurementError(f"the demo ended before a step:\n{_end(seen)}")
            seen += chunk


def _end(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-12:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to stop; kills it if it does not, and its tasks then notice."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=40.0)
    if process.poll() is None:
        process.kill()
        process.wait()


def _prepare() -> None:
    """One run that is not counted: prepares the digits, and fills the file cache."""
    row.script(f"{NAME}.py", "exec")


def _of_exec(pair: row.Pair) -> float:
    return row.figure(pair, "fork", "first_step_s") / row.figure(pair, "exec", "first_step_s")


ROW = row.Row(
    name=NAME,
    title="demo: 4 workers, 1 ps, from the command to the first step",
    prepare=_prepare,
    sides={side: functools.partial(row.script, f"{NAME}.py", side) for side in ("fork", "exec")},
    claims=(
        row.Claim(
            what="seconds with --start fork / with --start exec",
            value=_of_exec,
            target=0.6,
            at_least=False,
            unit="x",
            expected="0.6: a prototype took 10 to 14 s where six interpreters that import "
            "TensorFlow took 19 to 22 s",
        ),
    ),
    notes="Six processes share the cores, as a user starts them; nothing is pinned.",
)


if __name__ == "__main__":
    row.main(ROW, {side: functools.partial(measure, side) for side in ("fork", "exec")})
