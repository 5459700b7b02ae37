"""Functions as jobs, from a program."""

import os
import re
import select
import signal
import sys

import pytest

from tests.multiprocess.jobs import ROOT, children

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "multiprocess" / "programs" / "spawned.py"
# The fork server as it is, but for what it imports: no function here needs TensorFlow.
LIGHT = "import tfdist.launch.fork_server as f; f.IMPORTS = ('json',)"


@pytest.fixture
def start(launch, tmp_path):
    """Starts the program in a directory of its own, after a line of another."""
    site = tmp_path / "site"
    site.mkdir()

    def start(*args, light=LIGHT):
        (site / "sitecustomize.py").write_text(light)
        path = {"PYTHONPATH": f"{ROOT}:{site}"}
        return launch(PROGRAM.read_text(), command=(sys.executable,), args=args, env=path)

    return start


@pytest.mark.parametrize("method", ["exec", "fork"])
def test_results_errors_and_restarts_reach_the_caller(start, method):
    job = start(method)
    assert job.end() == 0, job.text
    assert job.text.endswith("all True\n"), job.text
    assert len(re.findall(r"^\[worker-[01]\] value 7$", job.text, re.MULTILINE)) == 2


def test_a_job_trains_from_a_process_using_tensorflow(start):
    job = start("train", light="")
    assert job.end() == 0, job.text


def test_an_interrupt_stops_the_job_and_is_raised(start):
    job = start("wait")
    job.read_until(r"\[worker-0\] ready\n")
    job.signal(signal.SIGINT)
    assert job.end() == 0
    assert job.text.endswith("interrupted: the job was stopped, exit code 130\n")
    assert "[worker-0] saved\n" in job.text


def test_the_job_ends_with_its_caller(start):
    job = start("wait")
    job.read_until(r"\[worker-0\] ready\n")
    (launcher,) = children(job.process.pid)
    gone = os.pidfd_open(launcher)
    job.process.kill()
    assert select.select([gone], [], [], 60)[0]
    os.close(gone)
    assert job.process.wait(60) == -signal.SIGKILL
