"""``python -m tests.stress.service``: faults of a service under load; no request may be lost.

50 replicas are killed, 5 hang, and 10 versions come, while clients ask once; then the front is
killed 3 times, while clients of both protocols try again what a broken connection had. The model
needs no TensorFlow, so that replicas are back at once. Exit code 1 where a request has failed.
"""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.multiprocess.test_serve import (
    Service,
    front_of,
    load,
    load_by_grpc,
    make_version,
    send_again,
    service,
    wait_for_more,
)

KILLS, HANGS, VERSIONS, FRONTS = 50, 5, 10, 3


def main() -> int:
    """Do it all; say how many requests were answered."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_version(directory / "m", 1)
        try:
            with service(directory, replicas=2, limits={"hang_s": 1.0}) as running:
                _disturb_replicas(running, directory)
                _disturb_fronts(running)
        except AssertionError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


def _disturb_replicas(running: Service, directory: Path) -> None:
    start = time.monotonic()
    with load(running) as outcomes:
        for signum, count in ((signal.SIGKILL, KILLS), (signal.SIGSTOP, HANGS)):
            for _ in range(count):
                _until_another_is_ready(running, signum)
        for version in range(2, 2 + VERSIONS):
            make_version(directory / "m", version)
            running.wait_for(f"m: version {version} is served")
        wait_for_more(outcomes)
    faults = f"{KILLS} kills, {HANGS} hangs, {VERSIONS} version changes"
    print(f"{faults}: {dict(outcomes)}, {time.monotonic() - start:.0f} s", flush=True)


def _until_another_is_ready(running: Service, signum: int) -> None:
    before = len(re.findall("is ready", running.said()))
    living = [pid for pid in running.replicas() if Path(f"/proc/{pid}").exists()]
    with contextlib.suppress(ProcessLookupError):
        os.kill(living[0], signum)
    running.wait_for("is ready", before + 1)


def _disturb_fronts(running: Service) -> None:
    with load(running, send=send_again) as rest, load_by_grpc(running.grpc) as by_grpc:
        for number in range(1, FRONTS + 1):
            wait_for_more(rest)
            wait_for_more(by_grpc)
            os.kill(front_of(running.process.pid), signal.SIGKILL)
            running.wait_for("front: was killed by SIGKILL", number)
        wait_for_more(rest)
        wait_for_more(by_grpc)
    print(f"{FRONTS} kills of the front: REST {dict(rest)}, gRPC {dict(by_grpc)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
