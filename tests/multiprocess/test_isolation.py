"""With --isolate no process outside the job reaches its ports; a kernel that refuses is named."""

import contextlib
import os
import socket
import subprocess

import pytest

from tests.multiprocess.jobs import DEADLINE_S, LAUNCH
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
