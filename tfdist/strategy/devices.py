"""Setup of threads, logical devices and GPU memory before TensorFlow starts."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from tfdist.errors import require

_LOG = logging.getLogger(__name__)
_LOGICAL_CPUS_PER_CORE = 4


def require_unused_runtime() -> None:
    """Raise UsageError if TensorFlow has already run an operation in this process.

    Threads, devices and collectives can only be configured before the first operation.
    """
    require(
        tf_context.context()._context_handle is None,
        "make_strategy",
        "TensorFlow has already run an operation in this process",
        fix="move tfdist.make_strategy() to the top of the program",
        code="tensorflow-has-run",
    )


def set_threads(threads: int | None) -> None:
    """Give each operation `threads` threads, unless TF_NUM_INTRAOP_THREADS is set."""
    if threads and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(threads)


def threads_of_an_operation() -> int:
    """Return the number of threads of an operation, which affects rounding on a CPU."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if not threads and os.environ.get("TF_NUM_INTRAOP_THREADS", "").isdecimal():
        threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    return threads or usable_cores()


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def grow_gpu_memory() -> None:
    """Let TensorFlow allocate GPU memory on demand, so that processes can share a GPU.

    If the program has divided a GPU, TensorFlow refuses this, because each part has a limit.
    """
    for gpu in tf.config.list_physical_devices("GPU"):
        if not tf.config.get_logical_device_configuration(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)


def logical_devices(kind: str) -> list[str]:
    """Return the names of the visible ``GPU`` or ``CPU`` devices, or of their parts.

    TensorFlow's own function would start the devices.
    """
    parts = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices(kind))
    return [f"{kind}:{i}" for i in range(sum(len(part or [None]) for part in parts))]


def one_device() -> str:
    """Return the name of the first GPU, or of the CPU if there is no GPU."""
    return "/GPU:0" if logical_devices("GPU") else "/CPU:0"


def replica_devices(count: int | None) -> list[str]:
    """Return the names of `count` GPUs, or of `count` logical CPUs if there is no GPU.

    The default is every GPU, or one logical CPU for each core. Raises UsageError if `count` is
    too large.
    """
    gpus = logical_devices("GPU")
    if gpus:
        _require_at_most(len(gpus), count, of="visible GPUs")
        return [f"/GPU:{i}" for i in range(count or len(gpus))]
    cores = usable_cores()
    most = _LOGICAL_CPUS_PER_CORE * cores
    _require_at_most(most, count, of=f"logical devices on {cores} cores without a GPU")
    count = count or cores
    if count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        tf.config.set_logical_device_configuration(cpu, logical)
        _LOG.info("no GPU found: using %d logical devices of the CPU", count)
    return [f"/CPU:{i}" for i in range(count)]


def server_of(variable: Any) -> int | None:
    """Return the index of the ps that holds a variable, `None` if no ps holds the variable."""
    device = tf.DeviceSpec.from_string(variable.device or "")
    return device.task if device.job == "ps" else None


def _require_at_most(most: int, count: int | None, *, of: str) -> None:
    require(
        count is None or count <= most,
        "devices_per_worker",
        f"{count} is more than {most}, the number of {of}",
        fix="lower --devices_per_worker, or make more devices visible",
        code="devices",
    )
