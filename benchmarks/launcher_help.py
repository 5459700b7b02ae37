"""How long a person waits for the help text of the launcher, and of torchrun."""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import row

NAME = "launcher_help"
RUNS = 7
COMMANDS = {
    "tfdist": [harness.PROJECT_PYTHON, "-m", "tfdist.launch", "--help"],
    "torchrun": [str(Path(harness.PEER_PYTHON).with_name("torchrun")), "--help"],
}


def measure(side: str, args: argparse.Namespace) -> None:
    """The median of several runs, after one that fills the file cache."""
    seconds = [_seconds(COMMANDS[side]) for _ in range(RUNS + 1)][1:]
    harness.emit(NAME, side, help_s=statistics.median(seconds), runs_s=seconds)


def _seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=harness.ROOT, timeout=60.0)
    return time.perf_counter() - start


def _of_torchrun(pair: row.Pair) -> float:
    return row.figure(pair, "tfdist", "help_s") / row.figure(pair, "torchrun", "help_s")


ROW = row.Row(
    name=NAME,
    title="python -m tfdist.launch --help",
    sides={
        side: functools.partial(row.script, f"{NAME}.py", side, core=harness.core_of(0))
        for side in COMMANDS
    },
    claims=(
        row.Claim(
            what="seconds / those of torchrun --help",
            value=_of_torchrun,
            target=0.2,
            at_least=False,
            unit="x",
            expected="0.05: the launcher imports the standard library only, about 0.1 s; "
            "torchrun imports torch, about 2 s",
        ),
    ),
    notes=f"Each measurement is the median of {RUNS} runs.",
)


if __name__ == "__main__":
    row.main(ROW, {side: functools.partial(measure, side) for side in COMMANDS})
