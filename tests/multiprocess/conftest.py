"""Starts jobs for the tests here, ends what they leave, and shows all they said."""

import contextlib
import os
import signal
import subprocess
import textwrap

import pytest

from tests import forked_python
from tests.multiprocess.jobs import LAUNCH, ROOT, Job, default_signals, take_terminal


@pytest.fixture(autouse=True)
def _what_the_fork_server_said():
    yield
    print(forked_python.said(), end="")


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Starts jobs in one directory, if no other is given; prints all they said, and their logs."""
    monkeypatch.chdir(tmp_path)
    jobs = []

    def start(
        source,
        *flags,
        command=LAUNCH,
        args=(),
        env=None,
        stdout=None,
        stderr=None,
        own_terminal=False,
        directory=tmp_path,
        kind=Job,
    ):
        script = directory / "program.py"
        script.write_text(textwrap.dedent(source))
        read_fd, write_fd = os.pipe() if stdout is None else stdout
        process = subprocess.Popen(
            [*command, *flags, str(script), *args],
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=stderr or write_fd,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            start_new_session=own_terminal,
            preexec_fn=take_terminal if own_terminal else default_signals,
        )
        os.close(write_fd)
        jobs.append(kind(process, read_fd, directory))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        for pid, fd in job.pidfds.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                print(f"process {pid} was left")
            os.close(fd)
        with contextlib.suppress(OSError):
            os.close(job.fd)
        print(job.text)
    for path in sorted(tmp_path.rglob("*.log")):
        print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")
