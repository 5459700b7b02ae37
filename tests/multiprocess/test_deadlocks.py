"""A deadlock is found in a real training, in each place where a program may have one."""

import re

import pytest

from tests.multiprocess.jobs import report
from tests.multiprocess.trainings import PROGRAMS, launch

pytestmark = pytest.mark.slow

DEADLINE_S = 400
CAUSES = {
    "data": r"hangs: in phase step after \d+ steps for ",
    "callback": "hangs: in phase callback after 20 steps for ",
    "py_function": r"hangs: in phase step after \d+ steps for ",
}


def test_a_deadlock_is_found_wherever_it_is(tmp_path):
    flags = ["--strategy=multiworker", "--workers=2", "--hang_timeout_s=10"]
    flags += ["--startup_timeout_s=120", "--grace_s=1", "--max_restarts=9"]
    words = (*flags, str(PROGRAMS / "deadlock.py"), *CAUSES, "nowhere")
    launch(tmp_path / "run", *words, timeout_s=DEADLINE_S)
    *failed, done = report(tmp_path / "run")["attempts"]
    assert done["first_failure"] is None
    for place, attempt in zip(CAUSES, failed, strict=True):
        failure = attempt["first_failure"]
        assert failure["task"] == "worker-1", place
        assert re.match(CAUSES[place], failure["cause"]), (place, failure["cause"])
        log = tmp_path / f"run/logs/attempt-{attempt['attempt']}/{failure['task']}.log"
        assert "in stands_still" in log.read_text(), place
