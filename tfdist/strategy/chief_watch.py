"""Whether the chief of a job is there: for tasks that it does not lead through the training."""

from __future__ import annotations

import logging
import sys
import threading
import time

from tfdist.cluster import TaskConfig
from tfdist.errors import EXIT_OK, EXIT_PEER_MISSING, EXIT_STOPPED
from tfdist.strategy.rendezvous import answers

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 1.0
_GONE_AFTER_S = 5.0


def wait_for_chief_to_end(
    config: TaskConfig,
    *,
    stop: threading.Event,
    timeout_s: float,
    met: threading.Event | None = None,
) -> int:
    """Return the exit code once the chief came and went, never came, or `stop` was set.

    Where `met` is set once the chief was seen, even if later polls miss it.
    """
    address = config.cluster.address(config.cluster.chief_task)
    seen, last = False, time.monotonic()
    while not stop.wait(_PROBE_EVERY_S):
        seen = seen or (met is not None and met.is_set())
        if answers(address):
            seen, last = True, time.monotonic()
        elif seen and time.monotonic() - last > _GONE_AFTER_S:
            _LOG.info("the chief at %s has ended; so does %s", address, config.task)
            return EXIT_OK
        elif not seen and time.monotonic() - last > timeout_s:
            print(
                f"tfdist: {config.task}: waited {timeout_s:.0f} s for {config.cluster.chief_task}"
                f" ({address}). Fix: start it, or raise --startup_timeout_s",
                file=sys.stderr,
                flush=True,
            )
            return EXIT_PEER_MISSING
    return EXIT_STOPPED


class ChiefWatch:
    """Watches over the chief's port from a thread, for a task that the chief knows nothing of.

    Attributes:
      exit_code: of this task, once the chief has ended or has not come in time; None before.
    """

    def __init__(self, config: TaskConfig, *, timeout_s: float) -> None:
        self.exit_code: int | None = None
        self._config = config
        self._timeout_s = timeout_s
        threading.Thread(target=self._watch, name="tfdist-chief-watch", daemon=True).start()

    def _watch(self) -> None:
        self.exit_code = wait_for_chief_to_end(
            self._config, stop=threading.Event(), timeout_s=self._timeout_s
        )


_watches: list[ChiefWatch] = []


def chief_watch(config: TaskConfig, *, timeout_s: float) -> ChiefWatch:
    """Return the one watch of this process; begun with the first call."""
    if not _watches:
        _watches.append(ChiefWatch(config, timeout_s=timeout_s))
    return _watches[0]
