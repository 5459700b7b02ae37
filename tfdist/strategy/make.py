"""`make_strategy`: the one call that turns a TF_CONFIG into a strategy, or serves and ends."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.cluster import (
    JobOptions,
    Task,
    TaskConfig,
    read_environment,
    resolved_strategy,
    settings,
)
from tfdist.cluster.address import shown
from tfdist.errors import UsageError, near
from tfdist.strategy import devices, initial_values, neighbours, rendezvous
from tfdist.strategy.chief_watch import chief_watch
from tfdist.strategy.exit_code import end_mistakes_in_one_line
from tfdist.strategy.job import KINDS, Job, current_job, remember

_LOG = logging.getLogger(__name__)
_NEIGHBOURS_S = 20.0


def make_strategy(
    kind: str = "auto",
    *,
    devices_per_worker: int | None = None,
    threads: int | None = None,
    startup_timeout_s: float | None = None,
    min_workers: int | None = None,
    split_bytes: int | None = None,
    communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    environ: Mapping[str, str] | None = None,
) -> tf.distribute.Strategy:
    """Make the strategy of this task. Every task of the job calls it, before any TensorFlow work.

    In a worker or ps task of a ps job it does not return: it serves the chief, and ends the
    process when the chief has gone.

    Args:
      kind: ``single``, ``mirrored``, ``multiworker``, ``ps``, or ``auto``: what TF_CONFIG says,
        and without one, every GPU of this machine, or its one CPU.
      devices_per_worker: replicas on this machine; default what TF_CONFIG says, else all GPUs.
      threads: threads of one operation; TF_NUM_INTRAOP_THREADS goes before it.
      startup_timeout_s: how long to wait for peers before naming them and giving up.
      min_workers: under ps, start with so many of the declared workers when the others have not
        come in that time; default what TF_CONFIG says, else all.
      split_bytes: under ps, divide a trainable variable of more bytes over the parameter servers;
        default what TF_CONFIG says, else none is divided.
      communication_options: of the all-reduce; default tfdist's own ring on CPUs,
        TensorFlow's choice on GPUs.
      environ: where TF_CONFIG, or what a scheduler set, is read; default `os.environ`.

    Raises:
      UsageError: TF_CONFIG is wrong or contradicts `kind`; more devices than there are;
        TensorFlow has already run an operation.
    """
    end_mistakes_in_one_line()
    config = read_environment(os.environ if environ is None else environ)
    kind = _resolve(kind, config)
    made = current_job()
    if made is not None:
        return _same(made, kind).strategy
    legacy = settings.legacy_keras(os.environ)
    if legacy and settings.LAUNCHED not in os.environ:  # else the launcher has said so
        _LOG.warning("%s", legacy)
    devices.require_unused_runtime()
    _check_arguments(
        devices_per_worker=devices_per_worker,
        threads_per_task=threads,
        startup_timeout_s=startup_timeout_s,
        min_workers=min_workers,
        split_bytes=split_bytes,
    )
    options = config.options if config else None
    devices.set_threads(threads or (options.threads_per_task if options else None))
    devices.grow_gpu_memory()
    count = devices_per_worker or (options.devices_per_worker if options else None)
    timeout_s = startup_timeout_s or (options.startup_timeout_s if options else 60.0)
    min_workers = min_workers or (options.min_workers if options else None)
    split_bytes = split_bytes or (options.split_bytes if options else None)
    with phases.entered("rendezvous"):
        if kind == "single":
            strategy = _single(count)
        elif kind == "mirrored":
            strategy = tf.distribute.MirroredStrategy(devices.replica_devices(count))
        elif kind == "multiworker":
            strategy = _multiworker(_needed(config, kind), count, timeout_s, communication_options)
        else:
            _require_one_device(count)
            from tfdist.ps.strategy import parameter_server

            described = _needed(config, kind)
            strategy = parameter_server(
                described,
                _resolver(described),
                timeout_s=timeout_s,
                min_workers=min_workers,
                split_bytes=split_bytes,
            )
    _hear_sigterm()
    job = Job(strategy=strategy, kind=kind, config=config)
    if kind == "multiworker" and communication_options is None:
        with phases.starting_runtime():
            job = _in_ring(job)
    remember(job)
    if config is not None and config.task.type == "evaluator":
        chief_watch(config, timeout_s=timeout_s)  # it may be done before this task needs to know
    _LOG.info("%s: strategy %s, %d replicas", job.name, kind, job.num_replicas)
    return strategy


def _resolve(kind: str, config: TaskConfig | None) -> str:
    if kind not in (*KINDS, "auto"):
        raise UsageError(
            "make_strategy",
            received=f"kind={kind!r}{near(kind, KINDS)}",
            expected=f"one of {', '.join(KINDS)}, auto",
            fix="name one of them",
        )
    told = resolved_strategy(config) if config else "auto"
    if config is not None and config.task.type == "evaluator" and kind in ("ps", "multiworker"):
        kind = told  # that of the training, which it takes no part in
    if kind != "auto" and told not in ("auto", kind):
        raise UsageError(
            "make_strategy",
            received=f"kind={kind!r} where TF_CONFIG describes a {told} job",
            expected="the two to agree",
            fix=f"call make_strategy() without a kind, or start the job with --strategy {kind}",
        )
    if kind == "auto":
        kind = told
    if kind == "auto":
        kind = "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "single"
    return kind


def _check_arguments(**given: Any) -> None:
    """Raise UsageError for what TF_CONFIG could not say either."""
    for name, value in given.items():
        try:
            JobOptions(**{} if value is None else {name: value})
        except UsageError as error:
            argument = name.removesuffix("_per_task")  # as `threads`
            raise UsageError(
                f"make_strategy({argument})",
                received=shown(value),
                expected=error.expected,
                fix=f"pass {argument} so, or leave it out",
            ) from None


def _same(made: Job, kind: str) -> Job:
    if made.kind != kind:
        raise UsageError(
            "make_strategy",
            received=f"kind={kind!r} after a {made.kind} strategy was made in this process",
            expected="one strategy a process",
            fix="make it once, and pass it on",
        )
    return made


def _needed(config: TaskConfig | None, kind: str) -> TaskConfig:
    if config is None or not config.cluster.tasks():
        raise UsageError(
            "make_strategy",
            received=f"kind={kind!r} and no cluster in TF_CONFIG",
            expected="TF_CONFIG with the job's tasks",
            fix=f"start the program by python -m tfdist.launch --strategy {kind} ...",
        )
    return config


def _single(count: int | None) -> tf.distribute.Strategy:
    if count not in (None, 1):
        raise UsageError(
            "make_strategy",
            received=f"devices_per_worker={count} with strategy single",
            expected="1",
            fix="use strategy mirrored for several devices",
        )
    gpus = tf.config.list_physical_devices("GPU")
    return tf.distribute.OneDeviceStrategy("/GPU:0" if gpus else "/CPU:0")


def _multiworker(
    config: TaskConfig,
    count: int | None,
    timeout_s: float,
    options: tf.distribute.experimental.CommunicationOptions | None,
) -> tf.distribute.Strategy:
    gpus = tf.config.list_physical_devices("GPU")
    local = len(gpus) or 1
    if count is not None and count != local:
        # TensorFlow takes all visible GPUs of a worker, and exactly one CPU.
        raise UsageError(
            "make_strategy",
            received=f"devices_per_worker={count}",
            expected=f"{local}: a worker of a multiworker job has each visible GPU, or one CPU",
            fix="start more workers, or set CUDA_VISIBLE_DEVICES",
        )
    implementation = tf.distribute.experimental.CommunicationImplementation
    ring = implementation.AUTO if gpus else implementation.RING
    devices.send_in_large_pieces()
    options = options or tf.distribute.experimental.CommunicationOptions(implementation=ring)
    rendezvous.await_peers(config, timeout_s=timeout_s)
    with (
        rendezvous.last_resort(timeout_s=timeout_s + rendezvous.LATER_S),
        phases.starting_runtime(),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=_resolver(config), communication_options=options
        )
    expected = local * config.cluster.num_replica_tasks
    if strategy.num_replicas_in_sync != expected:
        raise UsageError(
            "make_strategy",
            received=f"{strategy.num_replicas_in_sync} replicas",
            expected=f"{expected}: {config.cluster.num_replica_tasks} tasks of {local} devices",
            fix="give every task the same number of visible devices",
        )
    return strategy


def _in_ring(job: Job) -> Job:
    """Return the same job, with a ring for its gradients where they are on CPUs."""
    config = job.config
    if config is None or job.num_replicas == 1 or tf.config.list_physical_devices("GPU"):
        return job
    tasks = config.cluster.training_tasks()
    ring = neighbours.join(
        job.replica_ids[0],
        [config.cluster.address(task) for task in tasks],
        [f"{task} ({config.cluster.address(task)})" for task in tasks],
        total=functools.partial(_sum_untraced, job.strategy),
        timeout_s=_NEIGHBOURS_S,
        ports=settings.from_environ(os.environ).ports,
    )
    job = dataclasses.replace(job, ring=ring)
    if ring is not None:
        initial_values.go_by_ring(job)
    return job


def _sum_untraced(strategy: tf.distribute.Strategy, values: np.ndarray) -> np.ndarray:
    """Sum over workers of one replica each, as `sum_over_tasks`, which traces a function first."""
    with phases.waiting_for_all():
        total: np.ndarray = strategy.reduce("SUM", tf.constant(values), axis=None).numpy()
    return total


def _require_one_device(count: int | None) -> None:
    if count not in (None, 1):
        # Keras' optimizers have no updates for what TensorFlow makes of a worker's several devices.
        raise UsageError(
            "make_strategy",
            received=f"devices_per_worker={count} with strategy ps",
            expected="1: a worker of a ps job computes on one device",
            fix="start more workers",
        )


def _resolver(config: TaskConfig) -> tf.distribute.cluster_resolver.ClusterResolver:
    cluster = config.cluster.as_dict()
    cluster.pop("evaluator", None)
    gpus = len(tf.config.list_physical_devices("GPU"))
    task: Task = config.task
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster),
        task_type=task.type,
        task_id=task.index,
        rpc_layer="grpc",
        # Under ps a step is one device's: a second one of a worker would repeat its batch.
        num_accelerators={"GPU": 1 if config.cluster.kind == "ps" else gpus} if gpus else {},
    )


def _hear_sigterm() -> None:
    """Give SIGTERM back to Python: TensorFlow's handler swallows it once a server is up."""
    try:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    except ValueError:
        _LOG.debug("not the main thread: SIGTERM stays as it is")
