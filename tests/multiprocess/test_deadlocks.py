"""A deadlock is found in a real training, in each place where a program may have one.

Of one task, and of one of two: the jobs wait for their limits side by side.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.warm import forked

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "deadlock.py"
DEADLINE_S = 400
CAUSES = {
    "data": r"hangs: in phase step after \d+ steps for ",
    "callback": "hangs: in phase callback after 20 steps for ",
    "py_function": r"hangs: in phase step after \d+ steps for ",
}


PLACES = {1: ["data"], 2: [*CAUSES]}
"""Where tasks deadlock, one attempt after the other, by the number of workers."""


def started(run_dir, workers):
    strategy = "multiworker" if workers > 1 else "single"
    flags = [f"--strategy={strategy}", f"--workers={workers}", f"--run_dir={run_dir}"]
    flags += ["--hang_timeout_s=10", "--startup_timeout_s=120", "--grace_s=1", "--max_restarts=9"]
    program = [str(PROGRAM), *PLACES[workers], "nowhere"]
    with forked() as (start, fds, env), run_dir.with_suffix(".log").open("w") as said:
        command = [sys.executable, "-m", "tfdist.launch", *flags, *start, *program]
        env = {**os.environ, **env}
        return subprocess.Popen(command, stdout=said, stderr=said, pass_fds=fds, env=env)


def test_a_deadlock_is_found_wherever_it_is(tmp_path):
    jobs = {workers: started(tmp_path / str(workers), workers) for workers in PLACES}
    try:
        codes = {workers: job.wait(DEADLINE_S) for workers, job in jobs.items()}
    finally:
        for workers, job in jobs.items():
            job.kill()
            job.wait()
            print((tmp_path / f"{workers}.log").read_text())
    assert codes == {1: 0, 2: 0}
    for workers in PLACES:
        require_found(tmp_path / str(workers), workers)


def require_found(run_dir, workers):
    *failed, done = json.loads((run_dir / "report.json").read_text())["attempts"]
    assert done["first_failure"] is None
    for place, attempt in zip(PLACES[workers], failed, strict=True):
        failure = attempt["first_failure"]
        assert failure["task"] == f"worker-{workers - 1}", (workers, place)
        assert re.match(CAUSES[place], failure["cause"]), (workers, place, failure["cause"])
        log = run_dir / "logs" / f"attempt-{attempt['attempt']}" / f"{failure['task']}.log"
        assert "in stands_still" in log.read_text(), (workers, place)
