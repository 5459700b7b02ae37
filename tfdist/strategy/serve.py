"""What a worker or ps task of a ps job does: serve until the chief is gone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

import tensorflow as tf

from tfdist.cluster import TaskConfig, phases
from tfdist.errors import EXIT_OK, EXIT_PEER_MISSING, EXIT_STOPPED
from tfdist.strategy.introductions import introduce
from tfdist.strategy.memory import keep_freed_memory
from tfdist.strategy.rendezvous import answers

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 1.0
_GONE_AFTER_S = 5.0


def serve(config: TaskConfig, *, timeout_s: float) -> NoReturn:
    """Serves this task's devices to the chief, and ends the process when the chief has gone.

    `tf.distribute.Server.join` never returns; so the chief's port is asked once a second. The
    exit code is 0 after a chief that was there, 75 when none came within `timeout_s`, 143 on
    SIGTERM.
    """
    stop = threading.Event()
    # A scheduler's warning goes to all tasks: the chief saves, and needs its servers for that.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_freed_memory(os.environ)
    server = _start(config)
    met = introduce(config, version=tf.__version__)
    phases.enter("serve")
    # TensorFlow's own handler swallows SIGTERM: ours is set once the server is up.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _LOG.info("%s serves at %s", config.task, config.cluster.address(config.task))
    code = wait_for_chief_to_end(config, stop=stop, timeout_s=timeout_s, met=met)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    del server
    os._exit(code)


def wait_for_chief_to_end(
    config: TaskConfig,
    *,
    stop: threading.Event,
    timeout_s: float,
    met: threading.Event | None = None,
) -> int:
    """Returns the exit code once the chief came and went, never came, or `stop` was set.

    Where `met` is set it has come, though it may have gone between two looks.
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
    """The one watch of this process; begun with the first call."""
    if not _watches:
        _watches.append(ChiefWatch(config, timeout_s=timeout_s))
    return _watches[0]


def _start(config: TaskConfig) -> tf.distribute.Server:
    cluster = config.cluster.as_dict()
    cluster.pop("evaluator", None)
    protos = tf.compat.v1.ConfigProto()
    if "TF_NUM_INTEROP_THREADS" not in os.environ:
        # Fewer threads than closures in flight can deadlock a server on a small machine.
        protos.inter_op_parallelism_threads = max(len(config.cluster.worker) + 2, 4)
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=config.task.type,
        task_index=config.task.index,
        protocol="grpc",
        config=protos,
        start=True,
    )
