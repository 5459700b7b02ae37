"""Strategy of a ps job: TensorFlow's, over the live workers, with variables placed by bytes.

TensorFlow assigns variables to servers in turn and ignores their size
(tensorflow/python/distribute/parameter_server_strategy_v2.py, `_create_variable_round_robin`). With
two servers, the first may hold every large kernel and the second every bias. This strategy puts a
variable on the server with the fewest bytes, or splits it over several servers. Both
strategies place a colocated variable, such as an optimizer's slot, on its variable's server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import ps_values
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.distribute.parameter_server_strategy_v2 import (
    ParameterServerStrategyV2Extended,
)
from tensorflow.python.framework import ops

from tfdist.cluster import KINDS, JobOptions, TaskConfig
from tfdist.cluster.local_only import restricting_server
from tfdist.ps.connections import Connections, VersionHandshake, serve
from tfdist.ps.split import SplitVariable, parts_of, standing_for_whole
from tfdist.strategy import Job, rendezvous
from tfdist.strategy.devices import server_of
from tfdist.strategy.make import give_sigterm_back, resolver

_LOG = logging.getLogger(__name__)


def parameter_server_job(config: TaskConfig, options: JobOptions, **of_other_kinds: Any) -> Job:
    """Return the job of a ps job's chief. On a worker or ps, serve and never return."""
    timeout_s = options.startup_timeout_s
    if config.task.type in ("worker", "ps"):
        serve(config, timeout_s=timeout_s)
    # Without this variable a call to a dead task waits until the task restarts.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    connections = Connections(config.cluster, min_workers=options.min_workers)
    versions = VersionHandshake(config)
    # The workers connect to this task meanwhile.
    with rendezvous.answering(config) as listener, versions.receiving_at(listener):
        workers = connections.wait(config, timeout_s=timeout_s, versions=versions)
    with rendezvous.last_resort(timeout_s=timeout_s), restricting_server(config):
        # A step runs on one device. A worker's second device would repeat the batch.
        strategy = ConnectedParameterServerStrategy(
            resolver(config, most_gpus=1),
            connections=connections,
            workers=workers,
            split_bytes=options.split_bytes,
        )
    give_sigterm_back()
    return Job(strategy=strategy, kind=KINDS["ps"], config=config)


class ConnectedParameterServerStrategy(tf.distribute.experimental.ParameterServerStrategy):
    """TensorFlow's strategy over the connected workers. The engine dispatches the work."""

    def __init__(
        self,
        resolver: Any,
        *,
        connections: Connections,
        workers: Collection[int],
        split_bytes: int | None = None,
    ) -> None:
        self.connections = connections
        self._first_workers = workers
        super().__init__(resolver)
        # TensorFlow's constructor accepts no other extension class: repeat its last lines.
        extended = BalancedExtended(self, resolver, split_bytes=split_bytes)
        tf.distribute.Strategy.__init__(self, extended)
        self._should_use_with_coordinator = True
        self.extended._allow_run_without_coordinator = True

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # The scope also creates TensorFlow's own coordinator, which stays idle.
        self._num_workers, self._num_ps = self.connections.num_workers, self.connections.num_ps
        self.connections.connect(self._first_workers)


def rows_of_parts(rows: int, *, size_bytes: int, split_bytes: int, num_ps: int) -> tuple[int, ...]:
    """Return the rows of each part of a variable. A variable with a single part stays whole.

    The number of parts is the smallest that keeps each within `split_bytes`, and at most `num_ps`.
    The parts have equally many rows, or one row less.
    """
    parts = max(min(num_ps, rows, -(-size_bytes // split_bytes)), 1)
    return tuple(rows // parts + (index < rows % parts) for index in range(parts))


class BalancedExtended(ParameterServerStrategyV2Extended):
    """TensorFlow's extension, with placement of variables by bytes and with split variables."""

    def __init__(
        self, strategy: tf.distribute.Strategy, resolver: Any, *, split_bytes: int | None
    ) -> None:
        super().__init__(strategy, resolver, None)
        self._split_bytes = split_bytes
        self._sizes_bytes = [0] * self._num_ps  # of the variables on each ps, by index

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        beside = kwargs.get("colocate_with")
        if isinstance(beside, SplitVariable):
            value = _initial_value(kwargs)
            if value.shape != beside.shape:
                kwargs = {**kwargs, "initial_value": value, "colocate_with": beside.parts[0]}
                return self._create_whole(next_creator, **kwargs)
            return self._create_parts(next_creator, kwargs, value, beside.rows, beside.parts)
        may_split = (
            self._num_ps > 1
            and beside is None
            and kwargs.get("trainable")
            and kwargs.get("initial_value") is not None
            and not kwargs.get("per_worker_variable")
            and tf.executing_eagerly()
        )
        if self._split_bytes and may_split:
            value = _initial_value(kwargs)
            kwargs = {**kwargs, "initial_value": value}
            rows = rows_of_parts(
                value.shape[0] if value.shape.rank else 1,
                size_bytes=size_bytes(value),
                split_bytes=self._split_bytes,
                num_ps=self._num_ps,
            )
            if len(rows) > 1:
                return self._create_parts(next_creator, kwargs, value, rows)
        return self._create_whole(next_creator, **kwargs)

    def _create_parts(
        self,
        next_creator: Any,
        kwargs: dict[str, Any],
        value: tf.Tensor,
        rows: Sequence[int],
        beside: Sequence[Any] = (),
    ) -> SplitVariable:
        parts, name = [], kwargs.get("name") or "variable"
        for number, piece in enumerate(tf.split(value, rows)):
            part = {**kwargs, "initial_value": piece, "shape": None}
            part["name"] = f"{name}/part_{number}"
            if beside:
                part["colocate_with"] = beside[number]
            parts.append(self._create_whole(next_creator, **part))
        return SplitVariable(parts, name=name)

    def _create_whole(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        index = server_of(variable)
        if index is not None:
            self._sizes_bytes[index] += size_bytes(variable)
        return variable

    def _create_variable_round_robin(self, next_creator: Any, **kwargs: Any) -> Any:
        # TensorFlow places the variable by this count modulo the number of servers.
        self._variable_count = self._sizes_bytes.index(min(self._sizes_bytes))
        return super()._create_variable_round_robin(next_creator, **kwargs)

    def _resource_creator_scope(self) -> Any:
        def table(next_creator: Any, *args: Any, **kwargs: Any) -> WorkerTable:
            return WorkerTable(self._container_strategy(), lambda: next_creator(*args, **kwargs))

        # Replaces the first of TensorFlow's scopes, which creates its own table.
        _, *others = super()._resource_creator_scope()
        return [ops.resource_creator_scope("StaticHashTable", table), *others]

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        for part in parts_of(colocate_with_variable):
            super()._validate_colocate_with_variable(part)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, SplitVariable):
            return super()._update(var, fn, args, kwargs, group)

        def of_whole(_: Any, *args: Any, **kwargs: Any) -> Any:
            return fn(var, *args, **kwargs)

        results = []
        for number, part in enumerate(var.parts):
            mine = [var.rows_of(a, number) if _is_of(a, var) else a for a in args]
            with standing_for_whole(number):
                results.append(super()._update(part, of_whole, mine, kwargs, group))
        return results


class WorkerTable(ps_values.DistributedTable):
    """Lookup table with a copy on each worker, created at its first use after each connection.

    TensorFlow's coordinator creates the copies once. It misses workers that are absent then or that
    restart later, and it would open its own connections to the workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, wrapped_creator: Any) -> None:
        self._copies: dict[int, tuple[int | None, Any]] = {}  # by worker: its `life` and table
        super().__init__(strategy, wrapped_creator)

    def _maybe_build_distributed_table(self) -> None:
        return

    def resource_handle_call_time_value(self) -> Any:
        def handle() -> Any:
            context = coordinator_context.get_current_dispatch_context()
            if context is None:
                return self._coordinator_instance.resource_handle
            worker = context.worker
            life = getattr(worker, "life", None)  # a worker of the user's own coordinator has none
            made_in, table = self._copies.get(worker.worker_index, (None, None))
            if table is None or made_in != life:
                table = self._wrapped_creator()
                self._copies[worker.worker_index] = life, table
            return table.resource_handle

        return handle, tf.TensorSpec([], tf.resource)


def _is_of(value: Any, variable: SplitVariable) -> bool:
    """Return whether an argument of an update has a row for each row of the variable.

    The shape of a gradient may be unknown until run time. Other arguments are scalars.
    """
    if isinstance(value, tf.IndexedSlices):
        return True
    return isinstance(value, tf.Tensor) and value.shape.is_compatible_with(variable.shape)


def _initial_value(kwargs: dict[str, Any]) -> tf.Tensor:
    """Return a variable's initial value. It is computed here, because its size is needed."""
    value = kwargs["initial_value"]
    with tf.device("/device:CPU:0"):
        return tf.convert_to_tensor(value() if callable(value) else value, kwargs.get("dtype"))


def size_bytes(variable: Any) -> int:
    return int((variable.shape.num_elements() or 0) * variable.dtype.size)


def bytes_on_servers(model: keras.Model, strategy: tf.distribute.Strategy) -> dict[str, int]:
    """Return the bytes of a model's variables by the ps that holds them: ``{"ps-0": 4096}``."""
    slots = model.optimizer.variables if model.optimizer is not None else []
    variables = [*model.variables, *slots, *model.metrics_variables]
    totals = {f"ps-{index}": 0 for index in range(strategy.extended._num_ps)}
    for variable in {id(v): v for v in variables}.values():
        for part in parts_of(variable.value):
            index = server_of(part)
            if index is not None:
                totals[f"ps-{index}"] += size_bytes(part)
    return totals


def log_placement(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Log the bytes that each parameter server holds."""
    held = bytes_on_servers(model, strategy)
    shown = ", ".join(f"{name} {size:,} bytes" for name, size in held.items())
    _LOG.info("variables by parameter server: %s", shown)
