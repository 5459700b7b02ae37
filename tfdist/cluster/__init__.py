"""Tasks of a job, their addresses and settings; without TensorFlow."""

from __future__ import annotations

from tfdist.cluster.environment import read_environment
from tfdist.cluster.job import STRATEGIES, JobOptions, addressed_tasks, build_cluster
from tfdist.cluster.ports import HeldPort, hold_ports, is_port_free
from tfdist.cluster.spec import TASK_TYPES, ClusterSpec, Task
from tfdist.cluster.tf_config import (
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
    "addressed_tasks",
    "build_cluster",
    "decode",
    "encode",
    "from_environ",
    "hold_ports",
    "is_port_free",
    "job_configs",
    "read_environment",
    "resolved_strategy",
]
