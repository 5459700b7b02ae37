"""Setup of an elastic job: one device in each task, and a connection to the launcher."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import one_device_strategy

from tfdist.cluster import KINDS, JobOptions, TaskConfig
from tfdist.cluster.address import split_address
from tfdist.elastic.host_links import HostLinks
from tfdist.elastic.mesh import Mesh
from tfdist.errors import UsageError, require
from tfdist.strategy import Job

_SHARDS = 4
"""Number of shards if the launcher does not set it."""


def elastic_job(config: TaskConfig | None, options: JobOptions, **of_other_kinds: Any) -> Job:
    """Return the job, with the mesh of its members. Without a cluster, it is one process."""
    tasks = config.cluster.training_tasks() if config else ()
    workers, shards = len(tasks), options.shards or _SHARDS
    require(
        workers <= shards,
        "--shards",
        f"{workers} workers cannot divide {shards} shards of a batch",
        fix=f"use --shards {workers} or more",
        code="too-few-shards",
    )
    mesh = None
    if config is not None and (workers > 1 or options.control):
        names = [f"worker-{index}" for index in range(shards)]
        addresses = {task.index: config.cluster.address(task) for task in tasks}
        hosts, links = {split_address(address)[0] for address in addresses.values()}, None
        if len(hosts) > 1:
            links = HostLinks(config.task.index, addresses)
        mesh = Mesh(_control(options), config.task.index, names, links)
    strategy = ElasticStrategy("/CPU:0", shards)
    strategy.extended.mesh = mesh
    return Job(strategy=strategy, kind=KINDS["elastic"], config=config, ring=mesh, shards=shards)


def _control(options: JobOptions) -> socket.socket:
    if options.control is None:
        raise UsageError(
            "make_strategy",
            "an elastic job needs the launcher, which knows its members",
            fix="start the program with python -m tfdist.launch --elastic",
            code="no-launcher",
        )
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(f"\0{options.control}")
    return control


class ElasticStrategy(tf.distribute.OneDeviceStrategy):
    """Strategy of one device, with as many replicas as a batch has shards.

    Variables start with worker 0's values in every task.
    """

    def __init__(self, device: str, shards: int) -> None:
        tf.distribute.Strategy.__init__(self, _ElasticExtended(self, device))
        self.extended.shards = shards


class _ElasticExtended(one_device_strategy.OneDeviceExtended):
    mesh: Mesh | None = None
    shards = 1

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.shards

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if self.mesh is not None and tf.executing_eagerly():
            kwargs["initial_value"] = self._of_chief(kwargs["initial_value"], kwargs.get("dtype"))
        return super()._create_variable(next_creator, **kwargs)

    def _of_chief(self, initial_value: Any, dtype: Any) -> tf.Tensor:
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, dtype=dtype)
        assert self.mesh is not None
        if value.dtype == tf.string or not value.dtype.is_numpy_compatible:
            return value
        mine = value.numpy()
        words = np.zeros(-(-mine.nbytes // 4), np.int32)
        if self.mesh.is_first or self.mesh.is_offline:  # a joining task sums on its own
            words.view(np.uint8)[: mine.nbytes] = mine.reshape(-1).view(np.uint8)
        (total,) = self.mesh.sum(words, of="the initial value of a variable")
        whole = total.view(np.uint8)[: mine.nbytes].view(mine.dtype).reshape(mine.shape)
        return tf.constant(whole, value.dtype)
