"""Server loop of a worker or ps task: serve the chief until it is gone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

import tensorflow as tf

from tfdist import phases
from tfdist.cluster import TaskConfig
from tfdist.ps.members import send_versions
from tfdist.strategy.chief_watch import wait_for_chief_to_end
from tfdist.strategy.versions import own_versions

_LOG = logging.getLogger(__name__)


def serve(config: TaskConfig, *, timeout_s: float) -> NoReturn:
    """Serve this task's devices to the chief, and end the process when the chief has gone.

    `tf.distribute.Server.join` never returns; so the chief's port is asked once a second. The
    exit code is 0 after a chief that was there, 75 when none came within `timeout_s`, 143 on
    SIGTERM.
    """
    stop = threading.Event()
    # A scheduler's warning goes to all tasks: the chief saves, and needs its servers for that.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_freed_memory(os.environ)
    server = _start(config)
    met = send_versions(config, versions=own_versions())
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


# Memory allocator settings of a ps server: freed tensor memory is kept.


# Of <malloc.h>. The values are those to which glibc goes by itself in a process that has freed a
# block of 32 MiB: larger ones are of their own, less than twice as much free memory is kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**25


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let freed blocks of up to 32 MiB serve the next ones; False where that is not for us to say.

    Where a server has freed nothing so large yet, glibc gives the memory of a step's tensors back
    to the kernel and gets it again at the next one, page by page, filled with zeros. A user's own
    settings of glibc's malloc go before these; another C library has none.
    """
    tuned = environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if tuned or set_option is None:
        return False
    large = set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    return bool(large and set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES))
