"""A sweep of 20 trials over the digits: two at once, beside KerasTuner with two workers and alone.

``--steps N`` searches N trials instead.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import harness
import row

NAME = "sweep_digits"
TRIALS = 20
DEADLINE_S = 900.0
PROGRAM = str(harness.HERE / "sweep_program.py")
SIDES = ("tfdist", "workers", "alone")


def measure(side: str, args: argparse.Namespace) -> None:
    """Times one side from the command to the end of the last process that runs trials."""
    trials = args.steps or TRIALS
    # As pip installs a project, and as its peers are: else each of its processes compiles anew.
    compiled = [harness.PROJECT_PYTHON, "-m", "compileall", "-q", str(harness.ROOT / "tfdist")]
    subprocess.run(compiled, check=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [harness.PROJECT_PYTHON, PROGRAM, "tfdist" if side == "tfdist" else "search"]
        command += [scratch, str(trials)]
        began = time.perf_counter()
        if side == "workers":
            _chief_and_two_workers(command)
        else:
            _run(command)
        seconds = time.perf_counter() - began
        values = _values_of_all(Path(scratch), trials)
    harness.emit(NAME, side, seconds=seconds, trials=trials, values=values)


def _run(command: list[str], **variables: str) -> None:
    subprocess.run(command, env=_with(variables), timeout=DEADLINE_S, check=True)


def _chief_and_two_workers(command: list[str]) -> None:
    """The chief is ended with the workers: it sleeps 20 s before it would end by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = ("chief", "worker0", "worker1")
    where = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": port}
    processes = {
        name: subprocess.Popen(command, env=_with({**where, "KERASTUNER_TUNER_ID": name}))
        for name in names
    }
    try:
        for name in names[1:]:
            if processes[name].wait(DEADLINE_S):
                raise harness.MeasurementError(f"KerasTuner's {name} failed")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _with(variables: Mapping[str, str]) -> dict[str, str]:
    path = f"{harness.ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, **variables, "PYTHONPATH": path}


def _values_of_all(scratch: Path, trials: int) -> str:
    """Returns a digest of what was tried; raises MeasurementError unless all was completed."""
    found = [json.loads(path.read_text()) for path in scratch.rglob("trial.json")]
    done = [trial for trial in found if trial["status"] == "COMPLETED"]
    if len(done) != trials:
        raise harness.MeasurementError(f"{len(done)} of {trials} trials were completed")
    values = sorted(
        json.dumps(trial["hyperparameters"]["values"], sort_keys=True) for trial in done
    )
    return hashlib.sha256("\n".join(values).encode()).hexdigest()


def _of(other: str, pair: row.Pair) -> float:
    tried = {record["values"] for side in SIDES for record in pair[side]}
    if len(tried) != 1:
        raise ValueError("the sides have tried different values: their times do not compare")
    return row.figure(pair, "tfdist", "seconds") / row.figure(pair, other, "seconds")


ROW = row.Row(
    name=NAME,
    title=f"sweep: {TRIALS} trials of a CNN on the digits, 5 passes each",
    sides={
        side: functools.partial(row.script, f"{NAME}.py", side, timeout_s=DEADLINE_S + 60)
        for side in SIDES
    },
    claims=(
        row.Claim(
            what="seconds with parallel_trials 2 / of KerasTuner's chief and two workers",
            value=functools.partial(_of, "workers"),
            target=0.8,
            at_least=False,
            unit="x",
            expected="0.8: nothing is imported for a trial, and an epoch of tfdist.fit takes "
            "less than one of Keras; a trial's process has to be made and traces anew, as theirs",
        ),
        row.Claim(
            what="seconds with parallel_trials 2 / of KerasTuner in one process",
            value=functools.partial(_of, "alone"),
            target=0.6,
            at_least=False,
            unit="x",
            expected="0.6: two at once on two cores, and the start of the sweep on top",
        ),
    ),
    notes="The program is `sweep_program.py` on all sides; that the 20 trials are the same is "
    "compared. Nothing is pinned. KerasTuner's sides share their processes among trials; each of "
    "ours is a job, and saves at the end of each epoch what it would go on from, as well as the "
    "best weights, which all sides save. All have their bytecode on the disk. The clock stops when "
    "the last of KerasTuner's workers has ended, before its chief has; ours ends with the "
    "leaderboard and the picture.",
)


if __name__ == "__main__":
    row.main(ROW, {side: functools.partial(measure, side) for side in SIDES})
