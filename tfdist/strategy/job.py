"""The job of this process: strategy, kind and task."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import tensorflow as tf
from keras.src.backend.common import KerasVariable
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from tfdist.cluster import AUTO, KINDS, Kind, TaskConfig, read_environment, resolved_kind
from tfdist.errors import UsageError, end_mistakes_in_one_line
from tfdist.strategy.native import route_keras
from tfdist.strategy.pipeline_setup import Stages
from tfdist.strategy.ring import Members, Ring


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job, as one process sees it.

    Attributes:
      strategy: TensorFlow strategy of the model's variables.
      kind: Kind of the strategy, one of `KINDS`.
      config: Decoded TF_CONFIG, `None` for a single process.
      ring: Ring or members that sum over the workers, `None` if TensorFlow's collectives sum.
      stages: Place in the pipeline, `None` in other jobs.
      shards: Number of parts of each batch in an elastic job, `None` in other jobs.
      collective_timeout_s: Seconds for a step block or sum by TensorFlow's collectives, 0 for no
        limit.
    """

    strategy: tf.distribute.Strategy
    kind: Kind
    config: TaskConfig | None = None
    ring: Ring | Members | None = None
    stages: Stages | None = None
    shards: int | None = None
    collective_timeout_s: float = 0.0

    @property
    def has_peers(self) -> bool:
        """True if several tasks run each step together and sum over all tasks."""
        if self.kind.has_stages or self.shards is not None:
            return self.ring is not None
        return self.kind.has_collectives and self.strategy.num_replicas_in_sync > 1

    @property
    def is_chief(self) -> bool:
        """True in the task that writes files. In an elastic job, another task may replace it."""
        if isinstance(self.ring, Members):
            return self.ring.is_first
        if self.config is None or not self.config.cluster.tasks():
            return True
        return self.config.task == self.config.cluster.chief_task

    @property
    def has_evaluator(self) -> bool:
        """True in every task of a job with an evaluator."""
        return self.config is not None and self.config.options.evaluator

    @property
    def is_evaluator(self) -> bool:
        """True in the task that evaluates the checkpoints of the training tasks."""
        return self.config is not None and self.config.task.type == "evaluator"

    @property
    def name(self) -> str:
        """Name of the task, ``worker-0`` for a single process."""
        return str(self.config.task) if self.config else "worker-0"

    @property
    def num_replicas(self) -> int:
        """Number of devices that compute one step together, 1 under ps."""
        if self.shards is not None:
            return self.shards
        return self.strategy.num_replicas_in_sync if self.kind.is_synchronous else 1

    @property
    def is_replicated(self) -> bool:
        """True if several replicas, or the workers of a ps job, run the steps."""
        return self.num_replicas > 1 or self.kind.has_servers

    @property
    def num_tasks(self) -> int:
        """Number of tasks that compute one step together, including all stages of a pipeline."""
        if self.stages is not None:
            return self.stages.count * self.stages.pipelines
        if self.shards is not None:
            return self.shards if self.has_peers else 1  # maximum number of tasks
        return self.num_replicas // len(self.replica_ids)

    @property
    def task_index(self) -> int:
        """Index of this task among the `num_tasks` tasks."""
        if self.stages is not None:
            return self.stages.pipeline * self.stages.count + self.stages.index
        if self.shards is not None:
            return self.config.task.index if self.config else 0
        return self.replica_ids[0] // len(self.replica_ids)

    @property
    def num_workers(self) -> int:
        """Number of workers under ps, else 1."""
        return int(self.strategy.extended._num_workers) if self.kind.has_servers else 1

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """Global ids of this task's replicas, in the order of its devices."""
        if self.shards is not None:
            members = self.ring if isinstance(self.ring, Members) else None
            return tuple(members.own_shards(self.shards) if members else range(self.shards))
        if self.num_replicas == 1:
            return (0,)
        extended = self.strategy.extended
        local = len(extended.worker_devices)
        return tuple(extended._get_replica_id_in_sync_group(i) for i in range(local))


_made: list[Job] = []


def remember(job: Job) -> Job:
    """Register `job` for `current_job` and `job_of`."""
    is_probe = job.config is not None and job.config.options.probe_s is not None
    route_keras(autologs=job.is_chief and not is_probe)
    convert_variables_to_numbers()
    _made[:] = [job]
    return job


def current_job() -> Job | None:
    """Return the job that `make_strategy` set up in this process, `None` before that."""
    return _made[0] if _made else None


def job_of(strategy: tf.distribute.Strategy) -> Job:
    """Return the job of a strategy, including strategies that `make_strategy` did not make.

    In a job of several processes, TF_CONFIG names the task of this process.

    Raises:
      UsageError: TF_CONFIG describes another strategy, so each task would train separately.
    """
    for job in _made:
        if job.strategy is strategy:
            return job
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        config = read_environment(os.environ)
        return remember(Job(strategy=strategy, kind=KINDS["ps"], config=config))
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        config = read_environment(os.environ)
        return remember(Job(strategy=strategy, kind=KINDS["multiworker"], config=config))
    is_mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    kind = KINDS["mirrored" if is_mirrored else "single"]
    _require_agreement(kind)
    convert_variables_to_numbers()
    return Job(strategy=strategy, kind=kind)


def run_dir() -> Path:
    """Return the job's run directory, the same in every task. It may not exist yet.

    The launcher sets it with ``--run_dir``. Under a scheduler, TFDIST_RUN_DIR names it.

    Raises:
      UsageError: This process has no run directory.
    """
    config = read_environment(os.environ)
    if config is None or config.options.run_dir is None:
        end_mistakes_in_one_line()
        raise UsageError(
            "run_dir",
            "this process has no run directory",
            fix="start the program with tfdist launch, or set TFDIST_RUN_DIR in all tasks",
            code="no-run-dir",
        )
    return Path(config.options.run_dir)


def _require_agreement(kind: Kind) -> None:
    config = read_environment(os.environ)
    resolved = resolved_kind(config) if config else AUTO
    if config is None or resolved.has_one_replica or resolved in (AUTO, kind):
        return
    raise UsageError(
        "tfdist",
        f"{config.task} of a {resolved} job has a model of strategy {kind}, so the tasks would "
        "train separate models",
        fix="call strategy = tfdist.make_strategy() first, and make and compile the model inside "
        "`with strategy.scope():`",
        code="other-strategy",
    )


# Python numbers from variables.
#
# Callbacks call `int(variable)` and `float(variable)`, for example on `optimizer.learning_rate`.
# These calls, `"%d" % variable` and `math.log(variable)` raise TypeError if the variable has a copy
# on each replica. `f"{variable:.4f}"` raises TypeError for every Keras variable.
# Needed up to TensorFlow 2.22.0rc0 and Keras 3.16.0.dev2026102704.


@functools.cache
def convert_variables_to_numbers() -> None:
    """Make variables of several replicas convert to numbers, like variables of one device."""
    for name in ("__complex__", "__float__", "__int__"):
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, getattr(BaseResourceVariable, name))
    KerasVariable.__format__ = _formatted


def _formatted(variable: KerasVariable, spec: str) -> str:
    if not spec or variable.ndim:
        return object.__format__(variable, spec)
    return format(variable.numpy().item(), spec)
