"""Waiting for peers with a deadline, and saying who is missing.

TensorFlow waits for ever for a task that never starts, and names nobody
(https://github.com/tensorflow/tensorflow/issues/46169). While it waits in C++, a thread here
asks every peer's port and ends the process when the deadline has passed.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from tfdist.cluster import Task, TaskConfig
from tfdist.errors import StartupTimeout

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 1.0
_SAY_EVERY_S = 10.0


def answers(address: str, *, timeout_s: float = 0.5) -> bool:
    """True when something accepts connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def missing_peers(config: TaskConfig, peers: Iterable[Task]) -> list[Task]:
    """The tasks of `peers` at whose address nothing answers now."""
    return [task for task in peers if not answers(config.cluster.address(task))]


class PeerWatch:
    """Ends this process when the cluster has not formed within `timeout_s`.

    A context manager around the call that waits for the cluster.
    """

    def __init__(
        self,
        config: TaskConfig,
        *,
        timeout_s: float,
        give_up: Callable[[StartupTimeout], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._give_up = give_up or end_process
        self._clock = clock
        self._formed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdist-peers", daemon=True)

    def __enter__(self) -> PeerWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._formed.set()
        self._thread.join()

    def _watch(self) -> None:
        others = [t for t in self._config.cluster.training_tasks() if t != self._config.task]
        start = said = self._clock()
        missing: list[Task] = others
        while not self._formed.wait(_PROBE_EVERY_S):
            missing = missing_peers(self._config, missing)
            waited_s = self._clock() - start
            if waited_s >= self._timeout_s:
                self._give_up(StartupTimeout(self._message(missing, waited_s)))
                return
            if self._clock() - said >= _SAY_EVERY_S:
                said = self._clock()
                _LOG.warning("%s", self._message(missing, waited_s))

    def _message(self, missing: list[Task], waited_s: float) -> str:
        where = f"{self._config.task}: waited {waited_s:.0f} s of {self._timeout_s:.0f} s for"
        if not missing:
            return f"{where} the cluster to form, although every peer answers"
        named = ", ".join(f"{t} ({self._config.cluster.address(t)})" for t in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return f"{where} {named}{more}. Fix: start them, or raise --startup_timeout_s"


def end_process(error: StartupTimeout) -> None:
    """Says `error` and ends the process at once: its main thread is in C++ and hears nothing."""
    print(f"tfdist: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
