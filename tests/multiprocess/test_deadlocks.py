"""A deadlock is found wherever a real training has one: in it, before and after it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.warm import forked

PROGRAM = Path(__file__).parent / "programs" / "deadlock.py"
DEADLINE_S = 400
AT_REST = "and all its threads wait for each other for"
CAUSES = {
    "before": f"hangs: not in its training yet, {AT_REST} ",
    "data": r"hangs: in a step after \d+ steps for ",
    "callback": "hangs: in a callback after 20 steps for ",
    "py_function": r"hangs: in a step after \d+ steps for ",
    "after": f"hangs: done with its training after 40 steps, {AT_REST} ",
}


@pytest.mark.parametrize(
    ("workers", "places"), [(1, [*CAUSES]), (2, ["before", "callback", "after"])]
)
def test_a_deadlock_is_found_wherever_it_is(tmp_path, workers, places):
    strategy = "multiworker" if workers > 1 else "single"
    flags = [f"--strategy={strategy}", f"--workers={workers}", f"--run_dir={tmp_path}"]
    flags += ["--hang_timeout_s=10", "--startup_timeout_s=120", "--grace_s=1", "--max_restarts=9"]
    program = [str(PROGRAM), *places, "nowhere"]
    with forked() as (start, fds):
        job = subprocess.run(
            [sys.executable, "-m", "tfdist.launch", *flags, *start, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
            timeout=DEADLINE_S,
            check=False,
        )
    assert job.returncode == 0, job.stdout
    *failed, done = json.loads((tmp_path / "report.json").read_text())["attempts"]
    assert done["first_failure"] is None
    for place, attempt in zip(places, failed, strict=True):
        failure = attempt["first_failure"]
        assert failure["task"] == f"worker-{workers - 1}", place
        assert re.match(CAUSES[place], failure["cause"]), (place, failure["cause"])
        log = tmp_path / "logs" / f"attempt-{attempt['attempt']}" / f"{failure['task']}.log"
        assert "in stands_still" in log.read_text(), place
