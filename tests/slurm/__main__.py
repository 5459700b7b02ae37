"""``python -m tests.slurm [pytest's flags]``: a Slurm of two nodes, the tests on it, its end.

What the cluster and the tests have started is ended however they end, and looked for afterwards.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.slurm.cluster import Cluster, ClusterError

_ENDED = 1


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code, or 1 if there was no cluster or some of it was left."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    # A socket's path is short, so the folder is not where pytest would have it.
    with tempfile.TemporaryDirectory(prefix="tfdist-slurm-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            return _tests(cluster, arguments)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except ClusterError as error:
            print(f"test-slurm: {error}", file=sys.stderr)
            return _ENDED
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)  # what has begun is finished
            cluster.end()


def _tests(cluster: Cluster, arguments: list[str]) -> int:
    ours = "--override-ini=testpaths=tests/slurm"  # where the arguments name no files
    command = [sys.executable, "-m", "pytest", ours, *arguments]
    environ = cluster.environ(TFDIST_TEST_SLURM=str(cluster.folder))
    process = subprocess.Popen(command, env=environ)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # a terminal has sent it already; kill has not
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
