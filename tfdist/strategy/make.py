"""`make_strategy`: make the TensorFlow strategy of this task from TF_CONFIG."""

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

from tfdist import chatter, phases
from tfdist.cluster import (
    AUTO,
    KINDS,
    STRATEGIES,
    JobOptions,
    Kind,
    TaskConfig,
    kind_of,
    read_environment,
    resolved_kind,
    settings,
)
from tfdist.cluster.local_only import restricting_server
from tfdist.errors import UsageError, end_mistakes_in_one_line, require, require_one_of
from tfdist.kinds import load
from tfdist.renamed import without_renamed
from tfdist.strategy import devices, rendezvous
from tfdist.strategy.collectives import share_generators
from tfdist.strategy.group import broadcast_initial_values
from tfdist.strategy.job import Job, current_job, remember
from tfdist.strategy.layer_devices import PlacedStrategy, Placement
from tfdist.strategy.pipeline_setup import PipelineOptions
from tfdist.strategy.ring import Ring, connect

_LOG = logging.getLogger(__name__)
_NEIGHBOURS_S = 20.0
_COLLECTIVE_S = 3600.0  # workers also wait for a callback of the chief that evaluates or uploads


@without_renamed("make_strategy")
def make_strategy(  # noqa: PLR0913
    strategy: str = "auto",
    *,
    devices_per_worker: int | None = None,
    threads: int | None = None,
    startup_timeout_s: float | None = None,
    min_workers: int | None = None,
    split_bytes: int | None = None,
    elastic: bool = False,
    shards: int | None = None,
    pipeline: PipelineOptions | None = None,
    placement: Placement | None = None,
    communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    environ: Mapping[str, str] | None = None,
) -> tf.distribute.Strategy:
    """Make the strategy of this task. Every task calls it once, before any TensorFlow operation.

    In a worker or ps task of a ps job this call never returns. It serves the chief, and exits the
    process after the chief exits.

    Args:
      strategy: ``single``, ``mirrored``, ``multiworker``, ``elastic``, ``ps``, ``pipeline`` or
        ``auto`` (default): TF_CONFIG decides. Without TF_CONFIG, all GPUs or one CPU.
      devices_per_worker: Replicas on this machine (default: TF_CONFIG, else all GPUs, or under
        mirrored without GPUs one logical CPU for each core).
      threads: Threads of an operation (default: TF_CONFIG), unless TF_NUM_INTRAOP_THREADS is set.
      startup_timeout_s: Seconds to wait for peers before raising (default: TF_CONFIG, else 60).
      min_workers: Workers that a ps job needs to start after `startup_timeout_s` (default:
        TF_CONFIG, else all).
      split_bytes: Size in bytes above which a ps job splits a trainable variable over the
        parameter servers (default: TF_CONFIG, else no split).
      elastic: Let a multiworker job on CPUs continue if a worker is lost (default: TF_CONFIG,
        else False). A single process computes the same results as an elastic job.
      shards: Parts of each batch in an elastic job (default: TF_CONFIG, else 4, or 8 for more
        than 4 workers).
      pipeline: Division of the model into stages and of a batch into micro-batches, for pipeline.
      placement: Map from regular expressions over layer paths to devices, for single. Example:
        ``{"embedding": "CPU", "block3": ["GPU:0", "GPU:1"]}``. A layer uses the first expression
        that matches its path. Other layers use the first GPU, or the CPU. Several devices divide
        the layer's batch. The first of them has the weights and gathers the results.
      communication_options: Options of the all-reduce under multiworker (default: tfdist's ring
        on CPUs, TensorFlow's choice on GPUs). Without tfdist's ring, a step block or sum that
        takes longer than the options' `timeout_seconds` raises PeerLost (default: 3600, 0: never).
      environ: Environment with TF_CONFIG or a scheduler's variables (default: `os.environ`).

    Raises:
      UsageError: TF_CONFIG is wrong or contradicts `strategy`, `devices_per_worker` is too large,
        or TensorFlow has already run an operation.
    """
    end_mistakes_in_one_line()
    config = read_environment(os.environ if environ is None else environ)
    with chatter.hidden():  # the first call loads the driver
        tf.config.list_physical_devices("GPU")
    kind = _resolve(strategy, config, placement, elastic=elastic)
    made = current_job()
    if made is not None:
        return _same(made, kind, placement).strategy
    devices.require_unused_runtime()
    of_some = {"min_workers": min_workers, "split_bytes": split_bytes}
    options = _options(
        config,
        devices_per_worker=devices_per_worker,
        threads_per_task=threads,
        startup_timeout_s=startup_timeout_s,
        **of_some,
        shards=shards,
    )
    require(
        shards is None or kind.is_elastic,
        "make_strategy(shards)",
        f"strategy {kind} does not divide a batch into shards",
        fix="use elastic=True, or leave out shards",
        code="unsupported",
    )
    devices.set_threads(options.threads_per_task)
    devices.grow_gpu_memory()
    _require_devices(options, kind, config)
    if kind.has_several_tasks and not (kind.is_elastic and config is None):
        _require_cluster(config, kind)
    with phases.entered("rendezvous"):
        job: Job = load(kind.make)(
            config,
            options,
            placement=placement,
            pipeline=pipeline,
            communication_options=communication_options,
        )
    remember(job)
    if job.has_peers and job.shards is None:  # elastic survivors do not call this again
        share_generators()
    if config is not None and config.task.type == "evaluator":
        # Start the watch now, because the chief may exit before the evaluator uses the watch.
        rendezvous.chief_watch(config, timeout_s=options.startup_timeout_s)
    _LOG.info("%s: strategy %s, %d replicas", job.name, kind, job.num_replicas)
    if job.is_chief and os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        _LOG.warning("TF_USE_LEGACY_KERAS: tf.keras is Keras 2, whose models tfdist refuses")
    uses = {**dict.fromkeys(of_some, kind.has_servers), "pipeline": kind.has_stages}
    uses["communication_options"] = kind.has_tensorflow_servers and kind.is_synchronous
    given = {**of_some, "pipeline": pipeline, "communication_options": communication_options}
    for name in given:
        if given[name] is not None and not uses[name] and job.is_chief:
            _LOG.warning("make_strategy: %s has no effect under strategy %s", name, kind)
    return job.strategy


def _resolve(
    strategy: str,
    config: TaskConfig | None,
    placement: Placement | None,
    *,
    elastic: bool,
) -> Kind:
    require_one_of("make_strategy(strategy)", strategy, STRATEGIES)
    kind, resolved = kind_of(strategy), resolved_kind(config) if config else AUTO
    if elastic:
        require(
            bool(kind.elastic_form),
            "make_strategy(elastic)",
            f"a job of strategy {kind} cannot continue if a worker is lost",
            fix="use strategy multiworker, or leave out elastic",
            code="unsupported",
        )
        kind = KINDS[kind.elastic_form]
    if config is not None and config.task.type == "evaluator" and kind.has_several_tasks:
        kind = resolved  # the evaluator does not join the training strategy
    require(
        kind is AUTO or resolved in (AUTO, kind),
        "make_strategy",
        f"strategy={kind.name!r} contradicts TF_CONFIG, which describes a {resolved} job",
        fix="call make_strategy() without a strategy, or start the job with "
        + ("--elastic" if kind.is_elastic else f"--strategy {kind}"),
        code="other-strategy",
    )
    if kind is AUTO:
        kind = resolved
    if kind is AUTO:
        several = len(devices.logical_devices("GPU")) > 1 and not placement
        kind = KINDS["mirrored" if several else "single"]
    require(
        kind.has_one_replica or not placement,
        "make_strategy(placement)",
        f"strategy {kind} does not support a placement",
        fix="use --strategy single, or leave out placement (a pipeline divides a model by cuts)",
        code="unsupported",
    )
    return kind


def _options(config: TaskConfig | None, **given: Any) -> JobOptions:
    """Return the job's options, overridden by the `given` values that are not `None`."""
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config.options if config else JobOptions(), **given)


def _same(made: Job, kind: Kind, placement: Placement | None) -> Job:
    other = placement is not None and placement != getattr(made.strategy, "placement", None)
    require(
        made.kind is kind and not other,
        "make_strategy",
        f"strategy={kind.name!r}{' with another placement' * other} conflicts with the {made.kind} "
        "strategy of this process",
        fix="call make_strategy once, and pass its strategy on",
        code="other-strategy",
    )
    return made


def _require_cluster(config: TaskConfig | None, kind: Kind) -> None:
    if config is None or not config.cluster.tasks():
        raise UsageError(
            "make_strategy",
            f"strategy={kind.name!r} needs the job's tasks in TF_CONFIG, "
            "but TF_CONFIG has no cluster",
            fix=f"start the program with python -m tfdist.launch --strategy {kind}",
            code="no-cluster",
        )


def one_device_job(
    config: TaskConfig | None,
    options: JobOptions,
    *,
    placement: Placement | None,
    **of_other_kinds: Any,
) -> Job:
    """Return the job of one process with one replica."""
    device = devices.one_device()
    strategy = (
        PlacedStrategy(device, placement) if placement else tf.distribute.OneDeviceStrategy(device)
    )
    return Job(strategy=strategy, kind=KINDS["single"], config=config)


def mirrored_job(config: TaskConfig | None, options: JobOptions, **of_other_kinds: Any) -> Job:
    """Return the job of one process with a replica on each device."""
    replicas = devices.replica_devices(options.devices_per_worker)
    strategy = tf.distribute.MirroredStrategy(replicas)
    return Job(strategy=strategy, kind=KINDS["mirrored"], config=config)


def multiworker_job(
    config: TaskConfig,
    options: JobOptions,
    *,
    communication_options: tf.distribute.experimental.CommunicationOptions | None,
    **of_other_kinds: Any,
) -> Job:
    """Return the job of several workers, with a ring on CPUs unless options choose otherwise."""
    is_ours = communication_options is None
    gpus, timeout_s = devices.logical_devices("GPU"), options.startup_timeout_s
    made = tf.distribute.experimental.CommunicationOptions
    chosen = communication_options or made(implementation="AUTO" if gpus else "RING")
    limit_s = chosen.timeout_seconds
    # TensorFlow starts a thread for each collective that sleeps for the whole timeout. The job has
    # one timer instead (`group.naming_lost_peer`).
    communication_options = made(chosen.bytes_per_pack, implementation=chosen.implementation)
    rendezvous.await_peers(config, timeout_s=timeout_s)
    with (
        rendezvous.last_resort(timeout_s=timeout_s + rendezvous.LATER_S),
        restricting_server(config),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver(config), communication_options=communication_options
        )
    local = len(gpus) or 1
    expected = local * config.cluster.num_replica_tasks
    require(
        strategy.num_replicas_in_sync == expected,
        "make_strategy",
        f"TensorFlow has {strategy.num_replicas_in_sync} replicas instead of {expected} "
        f"({config.cluster.num_replica_tasks} tasks with {local} devices each)",
        fix="give every task the same number of visible devices",
        code="devices",
    )
    job = Job(
        strategy=strategy,
        kind=KINDS["multiworker"],
        config=config,
        collective_timeout_s=_COLLECTIVE_S if limit_s is None else limit_s,
    )
    give_sigterm_back()
    return _in_ring(job) if is_ours else job


def _in_ring(job: Job) -> Job:
    """Return the same job with a ring for its gradients, if it trains on CPUs."""
    config = job.config
    if config is None or job.num_replicas == 1 or devices.logical_devices("GPU"):
        return job
    rank, tasks = job.replica_ids[0], config.cluster.training_tasks()
    addresses = [config.cluster.address(task) for task in tasks]
    names = [f"{task} ({address})" for task, address in zip(tasks, addresses, strict=True)]
    ends = connect(
        rank,
        addresses,
        names,
        total=functools.partial(_sum_untraced, job.strategy),
        timeout_s=_NEIGHBOURS_S,
        ports=settings.ports_of(config.options),
    )
    if ends is None:
        if job.is_chief:
            _LOG.warning(
                "ring setup failed (a worker cannot connect to the next worker); using "
                "TensorFlow's collectives, which are slower on CPUs"
            )
        return job
    job = dataclasses.replace(job, ring=Ring(rank, names, ends))
    broadcast_initial_values(job)
    return job


def _sum_untraced(strategy: tf.distribute.Strategy, values: np.ndarray) -> np.ndarray:
    """Sum over workers with one replica each. Unlike `sum_over_tasks`, trace no function."""
    with phases.waiting_for_all():
        total: np.ndarray = strategy.reduce("SUM", tf.constant(values), axis=None).numpy()
    return total


def _require_devices(options: JobOptions, kind: Kind, config: TaskConfig | None) -> None:
    """Raise UsageError if `devices_per_worker` is not the number of devices that a worker uses.

    Under multiworker TensorFlow uses all visible GPUs, or exactly one CPU. Under ps Keras'
    optimizers cannot update the variables of several devices, and TensorFlow would repeat each
    batch on every GPU that a worker sees. A single process can choose its devices. An evaluator
    ignores the option.
    """
    gpus = len(devices.logical_devices("GPU"))
    if kind.has_servers and config is not None and config.task.type == "worker":
        require(
            gpus < 2,
            f"{config.task}",
            f"a {kind} worker computes on one device, but {gpus} GPUs are visible",
            fix="set CUDA_VISIBLE_DEVICES to one GPU, and start a worker for each GPU",
            code="devices",
        )
    can_choose = kind.is_one_process and not kind.has_one_device
    if can_choose or (config is not None and config.task.type == "evaluator"):
        return
    count = 1 if kind.has_one_device else gpus or 1
    each = "one device" if kind.has_one_device else "each visible GPU, or a CPU"
    require(
        options.devices_per_worker in (None, count),
        "make_strategy",
        f"a {kind} worker uses {each}, not devices_per_worker={options.devices_per_worker}",
        fix="leave out devices_per_worker, start more tasks, or use strategy mirrored",
        code="devices",
    )


def resolver(
    config: TaskConfig, *, most_gpus: int | None = None
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Return TensorFlow's description of the cluster, with at most `most_gpus` in each task."""
    gpus = len(devices.logical_devices("GPU")[:most_gpus])
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(config.cluster.as_dict()),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        num_accelerators={"GPU": gpus} if gpus else {},
    )


def give_sigterm_back() -> None:
    """Restore Python's handler of SIGTERM, which TensorFlow replaces when a server starts."""
    try:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    except ValueError:
        _LOG.debug("not in the main thread: SIGTERM keeps TensorFlow's handler")
