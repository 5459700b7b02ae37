"""With --isolate no process outside the job reaches its ports; a kernel that refuses is named."""

import contextlib
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, GONE_S, LAUNCH, PAUSE, children
from tests.ports import in_a_row
from tfdist.errors import EXIT_OK, EXIT_USAGE

# As an ordinary user, who has to make a namespace of users first; root may do without, and needs
# CAP_SETFCAP for it (https://man7.org/linux/man-pages/man7/user_namespaces.7.html).
NO_RIGHTS = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all")
NO_RIGHTS = NO_RIGHTS if os.geteuid() == 0 else ()
FEW = ("unshare", "--map-root-user", "sh", "-c", 'echo 0 > "/proc/sys/user/$0"; exec "$@"')

TRAINS = """
import os, time
import tensorflow as tf, tfdist
from tfdist.cluster import read_environment

strategy = tfdist.make_strategy()
ones = lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(()))
total = strategy.run(tf.function(ones))
config = read_environment(os.environ)
print("sum", float(strategy.experimental_local_results(total)[0]), flush=True)
print("listens at", config.cluster.address(config.task), "as", os.geteuid(), flush=True)
while not os.path.exists("seen"):
    time.sleep(0.05)
tfdist.barrier()
"""


def reached(address):
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize("rights", [(), NO_RIGHTS], ids=["as this user", "without rights"])
def test_an_isolated_job_trains_and_is_unreachable(launch, tmp_path, rights):
    with contextlib.ExitStack() as stack:
        # Held outside of it: nobody else there listens at a port that has the number of a task's.
        first, last = (stack.enter_context(port).port for port in in_a_row(2))
        ports = f"--ports={first}-{last}"
        job = launch(
            TRAINS,
            *("--workers=2", "--isolate", ports),
            # Without a program that carries connections out.
            command=(*rights, "env", f"PATH={tmp_path}", *LAUNCH),
        )
        found = job.read_until(r"listens at (\S+) as (\d+)", count=2)
        assert job.read_until(r"sum (\S+)", count=2) == ["2.0", "2.0"]
        assert [address for address, _ in found if reached(address)] == []
    assert {user for _, user in found} == {str(os.geteuid())}
    assert "--isolate: connections to other machines fail (downloads, MLflow, W&B)" in job.text
    (tmp_path / "seen").touch()
    assert job.end() == EXIT_OK


@pytest.mark.parametrize("limit", ["max_user_namespaces", "max_net_namespaces"])
def test_a_kernel_without_namespaces_is_a_one_line_error(tmp_path, limit):
    command = [*FEW, limit, *NO_RIGHTS, *LAUNCH, "--isolate", "--run_dir=run", "-m", "this"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == EXIT_USAGE, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("--isolate: the kernel refused to create a network namespace (No ")
    assert limit in line
    assert not (tmp_path / "run").exists()


LEAVES = """
import os, signal, subprocess, sys
signal.alarm(%d)  # where the test fails
child = "import signal; signal.alarm(%d); print('child runs', flush=True); signal.pause()"
held = os.open("held", os.O_WRONLY)
options = {"pass_fds": [held], "env": {}}
subprocess.Popen([sys.executable, "-c", child], **options)
subprocess.Popen([sys.executable, "-c", child], start_new_session=True, **options)
signal.pause()
"""
LEAVES %= (DEADLINE_S, DEADLINE_S)


def descendants(pid):
    """Returns the command lines of a process and of all that it started, by process id."""
    found = {pid: Path(f"/proc/{pid}/cmdline").read_text()}
    for child in children(pid):
        found |= descendants(child)
    return found


@pytest.mark.parametrize("rights", [(), NO_RIGHTS], ids=["as this user", "without rights"])
def test_no_process_survives_killing_launcher_and_guardian(launch, rights):
    os.mkfifo("held")
    held = os.open("held", os.O_RDONLY | os.O_NONBLOCK)
    job = launch(LEAVES, "--isolate", command=(*rights, *LAUNCH))
    job.read_until("child runs", count=2)
    lines = descendants(job.process.pid)
    found = [pid for pid, line in lines.items() if "tfdist.launch" in line or "guardian" in line]
    assert len(found) >= 2
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # the kernel was faster
                os.kill(pid, signum)
    os.set_blocking(held, True)
    assert select.select([held], [], [], GONE_S)[0], "a process of the job is still there"
    assert os.read(held, 1) == b""  # closed by all that had it open
    os.close(held)


def test_isolation_passes_signals_and_survives_a_refused_namespace(launch):
    stops = "import os, signal, sys; signal.signal(10, lambda *_: sys.exit(143))\n" + PAUSE
    refused = [*FEW, "max_pid_namespaces", *LAUNCH]
    for command, is_enclosed in ((LAUNCH, True), (refused, False)):
        job = launch(stops, "--isolate", "--workers=2", command=command)
        pids = job.read_until(r"ready (\d+)", count=2)
        assert [int(pid) < 10 for pid in pids] == [is_enclosed] * 2
        job.signal(signal.SIGUSR1)
        assert job.end() == 143
