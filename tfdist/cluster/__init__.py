"""Tasks of a job, their addresses and settings; without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.ports import HeldPort, hold_ports, is_port_free
from tfdist.cluster.tf_config import (
    STRATEGIES,
    TASK_TYPES,
    ClusterSpec,
    JobOptions,
    Task,
    TaskConfig,
    decode,
    encode,
    from_environ,
    job_configs,
    resolved_strategy,
)

__all__ = [
    "STRATEGIES",
    "TASK_TYPES",
    "ClusterSpec",
    "HeldPort",
    "JobOptions",
    "Task",
    "TaskConfig",
    "decode",
    "encode",
    "from_environ",
    "hold_ports",
    "is_port_free",
    "job_configs",
    "read_environment",
    "resolved_strategy",
]


def read_environment(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return which task of which job this process is, or None: a process by itself.

    Raises:
        UsageError: a source is wrong, or two of them disagree; the message has both.
    """
    config = from_environ(environ) if "TFDIST_JOB" in environ else None
    if config is not None:
        return config
    from tfdist.cluster import environment  # a task that our launcher starts needs none of it

    return environment.detect(environ)
