"""Strategy of a ps job: TensorFlow's, over the workers that are alive."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfdist.cluster import JobOptions, TaskConfig
from tfdist.errors import require
from tfdist.ps.members import Members, VersionHandshake
from tfdist.ps.placement import BalancedExtended
from tfdist.ps.serve import serve
from tfdist.strategy import rendezvous
from tfdist.strategy.versions import own_versions


def parameter_server(
    config: TaskConfig,
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
    options: JobOptions,
) -> tf.distribute.Strategy:
    """Make the strategy of a ps job in its chief; any other task serves, and does not return."""
    timeout_s = options.startup_timeout_s
    if config.task.type in ("worker", "ps"):
        serve(config, timeout_s=timeout_s)
    require(
        config.task == config.cluster.chief_task,
        "make_strategy",
        received=f"task {config.task} of a ps job",
        expected="chief-0, a worker or a ps",
        fix="run an evaluator outside the training cluster",
        code="task-type",
    )
    # Without it a call to a task that has died waits for the task to come back.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    members = Members(config.cluster, min_workers=options.min_workers)
    clients = VersionHandshake(config, versions=own_versions())
    # As the workers ask for this task meanwhile.
    with rendezvous.answering(config) as listener, clients.receiving_at(listener):
        workers = members.wait(timeout_s=timeout_s, clients=clients)
    with rendezvous.last_resort(timeout_s=timeout_s):
        return ElasticParameterServerStrategy(
            resolver, members=members, workers=workers, split_bytes=options.split_bytes
        )


class ElasticParameterServerStrategy(tf.distribute.experimental.ParameterServerStrategy):
    """TensorFlow's strategy over the workers that are there; work is given out by the engine."""

    def __init__(
        self,
        resolver: Any,
        *,
        members: Members,
        workers: Collection[int],
        split_bytes: int | None = None,
    ) -> None:
        self.members = members
        self._first_workers = workers
        super().__init__(resolver)
        # TensorFlow's constructor takes no extension of another class: its last lines once more.
        extended = BalancedExtended(self, resolver, split_bytes=split_bytes)
        tf.distribute.Strategy.__init__(self, extended)
        self._should_use_with_coordinator = True
        self.extended._allow_run_without_coordinator = True

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # Its scope makes TensorFlow's own coordinator, which then has nothing to do.
        self._num_workers, self._num_ps = self.members.num_workers, self.members.num_ps
        self.members.connect(self._first_workers)
