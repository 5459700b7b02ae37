"""Tasks of a job, their addresses and settings. Does not import TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.ports import HeldPort, hold_ports, is_port_free
from tfdist.cluster.tf_config import (
    TASK_TYPES,
    ClusterSpec,
    Task,
    TaskConfig,
    decode,
    encode,
    from_environ,
    job_configs,
    resolved_kind,
)
from tfdist.kinds import AUTO, KINDS, Kind, kind_of
from tfdist.options import LAUNCHED, STRATEGIES, JobOptions

__all__ = [
    "AUTO",
    "KINDS",
    "STRATEGIES",
    "TASK_TYPES",
    "ClusterSpec",
    "HeldPort",
    "JobOptions",
    "Kind",
    "Task",
    "TaskConfig",
    "decode",
    "encode",
    "from_environ",
    "hold_ports",
    "is_port_free",
    "job_configs",
    "kind_of",
    "read_environment",
    "resolved_kind",
]


def read_environment(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return the config of this process's task, or `None` for a single process.

    Raises:
        UsageError: a source is wrong, or two sources disagree. The message names both.
    """
    config = from_environ(environ) if LAUNCHED in environ else None
    if config is not None:
        return config
    from tfdist.cluster import environment  # tasks of tfdist's launcher do not need it

    return environment.detect(environ)
