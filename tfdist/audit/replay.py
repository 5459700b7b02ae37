"""Replay of one step of a `tfdist.train` run in one process; see `tfdist.replay`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ml_collections import ConfigDict
from tensorflow.python.distribute import values_util

from tfdist.app import recipe
from tfdist.audit.ledger import Record, merge, read_directory
from tfdist.audit.recorder import with_recorder
from tfdist.checkpoint import Checkpoint, CheckpointStore, state
from tfdist.checkpoint.state import state_sha256, weights_sha256
from tfdist.checkpoint.warm_start import load_weights
from tfdist.errors import TfdistError, UsageError, require
from tfdist.outputs.run_directory import DONE, RunDirectory
from tfdist.strategy import current_job, make_strategy
from tfdist.training import building, keras_compat
from tfdist.training.blocks import BlockRunner
from tfdist.training.engines import engine_for
from tfdist.training.inputs import Length, prepare
from tfdist.training.program import program_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a step did.

    Attributes:
      step: it follows so many others.
      restored_step: of the checkpoint it was reached from; None for the initial weights.
      strategy: under which it was run again.
      replicas: that computed it together.
      loss: of the step, over all its examples.
      metrics: of the step, the loss among them.
      learning_rate: of the update that begins with the step; of a schedule, what it gives then.
      gradient_norm: of all gradients together, summed over replicas, before clipping.
      gradient_norms: of each variable, by its path.
      updated: whether it changed a weight that is trained. Not so where its gradients are only
        accumulated, or are not finite and loss scaling left them out.
      examples: of each replica, the indices of its examples.
      passes: of each replica, the passes that they belong to.
      weights_sha256: after the step.
      state_sha256: of weights and optimizer after the step.
      equals_checkpoint: whether the run's own checkpoint after the step has these bits; None
        where it has none.
      checkpoint_difference: by how much a weight differs from that checkpoint at the most.
    """

    step: int
    restored_step: int | None
    strategy: str
    replicas: int
    loss: float
    metrics: dict[str, Any]
    learning_rate: float
    gradient_norm: float
    gradient_norms: dict[str, float]
    updated: bool
    examples: list[list[int]]
    passes: list[list[int]]
    weights_sha256: str
    state_sha256: str
    equals_checkpoint: bool | None
    checkpoint_difference: float | None


def replay(
    run_dir: str,
    settings: Mapping[str, Any],
    *,
    step: int,
    kind: str | None = None,
    replicas: int | None = None,
) -> Replay:
    """Run a step again; `settings` is the run's config.json.

    To be called once, in a process that has run nothing of TensorFlow.

    Raises:
      UsageError: the run has no such step, was a ps run, or does not say how many replicas it had.
    """
    config = ConfigDict(dict(settings))
    directory = RunDirectory(run_dir)
    store = CheckpointStore(directory.checkpoints)
    _require_step(step, recipe.plan_of(config).total_steps, directory.read_summary() or {})
    environment = step_environment_of(
        directory, store, config, step=step, kind=kind, replicas=replicas
    )
    make_strategy(
        "single" if environment.replicas == 1 else "mirrored",
        devices_per_worker=environment.replicas,
        threads=environment.threads or None,
        environ={},
    )
    keras.config.set_dtype_policy(config.precision)
    checkpoint = nearest(store, step)
    blocks = _blocks(config, fresh=checkpoint is None)
    return _replayed(blocks, store, checkpoint, step=step)


def nearest(store: CheckpointStore, step: int) -> Checkpoint | None:
    """Return the last whole checkpoint at or before a step, None where there is none."""
    for found in sorted({s for s in store.steps() if s <= step}, reverse=True):
        with contextlib.suppress(TfdistError):
            return store.read(found)
    return None


def _require_step(step: int, total: int, summary: Mapping[str, Any]) -> None:
    if summary.get("status") == DONE:  # which a callback may have ended early
        total = min(total, int(summary["steps"]))
    require(
        0 <= step < total,
        "--step",
        received=step,
        expected=f"0 to {total - 1}: the run has {total} steps",
        fix="name the number of steps that came before it",
        code="out-of-range",
    )


def _blocks(config: Any, *, fresh: bool) -> BlockRunner:
    """Return the training of the model as the run had it before its first step."""
    job = current_job()
    assert job is not None
    keras.utils.set_random_seed(config.seed)
    plan = recipe.plan_of(config)
    datasets = recipe.load_datasets(config)
    with job.strategy.scope():
        model = recipe.compiled_model(config, datasets, total_steps=plan.total_steps)
    feed = prepare(
        datasets.training,
        None,
        None,
        job=job,
        length=Length(
            batch_size=config.global_batch_size,
            virtual_epochs=recipe.virtual_epochs(config),
            overfit_batches=config.overfit_batches or None,
        ),
        shuffle=True,
        seed=config.seed,
        model=model,
    )
    building.build(model, job, feed)
    keras_compat.fuse(model, fused=config.fused_kernels)
    if config.initial_weights and fresh:
        load_weights(model, config.initial_weights, job=job)
    program = program_of(model, job, "train_step", feed, seed=config.seed)
    return BlockRunner(model, job, engine_for(job), program, phase="step")


def _replayed(
    blocks: BlockRunner,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    *,
    step: int,
) -> Replay:
    model, job = blocks.model, blocks.job
    if checkpoint is not None:
        where = f"checkpoint {store.directory}"
        state.require_same_variables(model, checkpoint.meta["variables"], where=where)
        state.restore(model, job, checkpoint.arrays)
    start = checkpoint.step if checkpoint else 0
    if start < step:
        blocks.run(start, step, looked_at=True)
    blocks.reset_metrics()
    before = state.capture(model, job)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    records: list[Record] = []
    blocks.program.feed.close()  # what is read ahead is read without what is recorded
    looking = with_recorder(blocks.program, job, mode="full", sink=records.append)
    runner = BlockRunner(model, job, engine_for(job), looking, phase="step")
    with _noting_gradients(model) as (names, values):
        runner.run(step, step + 1, looked_at=True)
    norms = dict(zip(names, map(float, values.numpy()), strict=False))
    metrics = runner.metrics(runner.logs)
    after = state.capture(model, job)
    indices, passes = (array[0] for array in records[0].arrays[:2])
    rows = [row >= 0 for row in indices]
    saved: Mapping[str, Any] | None = None
    with contextlib.suppress(TfdistError):  # there is none, or it is damaged
        saved = store.read(step + 1).arrays
    return Replay(
        step=step,
        restored_step=checkpoint.step if checkpoint else None,
        strategy=job.kind,
        replicas=job.num_replicas,
        loss=float(metrics["loss"]),
        metrics=metrics,
        learning_rate=rate,
        gradient_norm=float(np.sqrt(sum(norm**2 for norm in norms.values()))),
        gradient_norms=norms,
        updated=not _same_bits(_trained(model, before), after),
        examples=[row[there].tolist() for row, there in zip(indices, rows, strict=True)],
        passes=[row[there].tolist() for row, there in zip(passes, rows, strict=True)],
        weights_sha256=weights_sha256(model),
        state_sha256=state_sha256(model),
        equals_checkpoint=None if saved is None else _same_bits(after, saved),
        checkpoint_difference=None if saved is None else _difference(after, saved),
    )


@contextlib.contextmanager
def _noting_gradients(model: keras.Model) -> Iterator[tuple[list[str], tf.Variable]]:
    """Note the norm of each gradient as it enters the update: summed, unscaled, not clipped."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    names: list[str] = []
    norms = tf.Variable(tf.fill([len(model.trainable_variables)], np.float64(np.nan)))
    original = optimizer._backend_apply_gradients

    def apply(grads: Any, variables: Any) -> Any:
        if not values_util.get_current_replica_id_as_int():
            names[:] = [variable.path for variable in variables]
            dense = [tf.cast(tf.convert_to_tensor(grad), tf.float64) for grad in grads]
            found = [tf.norm(grad) for grad in dense]
            norms.assign(tf.pad(tf.stack(found), [[0, norms.shape[0] - len(found)]]))
        return original(grads, variables)

    optimizer._backend_apply_gradients = apply
    try:
        yield names, norms
    finally:
        del optimizer._backend_apply_gradients


def _same_bits(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether weights and optimizer are equal; totals of metrics are of other steps too."""
    names = [name for name in mine if not name.startswith("metrics/")]
    return all(
        name in theirs and np.asarray(mine[name]).tobytes() == np.asarray(theirs[name]).tobytes()
        for name in names
    )


def _trained(model: keras.Model, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = [f"weights/{i}" for i, weight in enumerate(model.weights) if weight.trainable]
    return {name: arrays[name] for name in names}


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    names = [name for name in mine if name.startswith("weights/") and np.size(mine[name])]
    pairs = [(np.asarray(mine[n], np.float64), np.asarray(theirs[n], np.float64)) for n in names]
    return max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)


# Strategy and replicas of a recorded step, from the files of its run.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEnvironment:
    """Where a step ran; `threads` is 0 where that is not known."""

    kind: str
    replicas: int
    threads: int = 0


def step_environment_of(
    directory: RunDirectory,
    store: CheckpointStore,
    config: Any,
    *,
    step: int,
    kind: str | None,
    replicas: int | None,
) -> StepEnvironment:
    """Where the run did the step, by what it wrote down; `kind` and `replicas` go before that."""
    notes = _notes_of_run(directory, store, config, step)
    noted: Mapping[str, Any] = next((each for each in notes if "replicas" in each), {})
    ran_under = noted.get("strategy", config.strategy)
    if "ps" in (ran_under, config.strategy):
        raise UsageError(
            f"run directory {directory.path}",
            received="a run under strategy ps",
            expected="single, mirrored or multiworker",
            fix="nothing: a step of ps depends on which workers' updates came before it, and not "
            "on the step alone",
            code="ps-run",
        )
    if ran_under == "pipeline" and kind is None:
        raise UsageError(
            f"run directory {directory.path}",
            received="a run under strategy pipeline, whose steps are made of micro-batches",
            expected="single, mirrored or multiworker",
            fix="say --strategy single for a step of whole batches: the run's to rounding, but for "
            "Dropout and BatchNormalization",
            code="pipeline-run",
        )
    if replicas is not None and (replicas < 1 or (kind == "single" and replicas != 1)):
        raise UsageError(
            "--replicas",
            received=f"{replicas} with --strategy {kind or 'mirrored'}",
            expected="1" if kind == "single" else "at least 1",
            fix="say --strategy mirrored and how many, or leave --replicas out",
            code="out-of-range",
        )
    count = replicas or (1 if kind == "single" else noted.get("replicas"))
    if count is None:
        raise UsageError(
            f"run directory {directory.path}",
            received="neither a ledger nor a checkpoint nor a summary that tells the replicas",
            expected="to know on how many the step ran",
            fix="say --strategy single, or --replicas N",
            code="unknown-replicas",
        )
    return StepEnvironment(
        kind=kind or noted.get("strategy", "single"),
        replicas=int(count),
        threads=int(noted.get("threads", 0)),
    )


def _notes_of_run(
    directory: RunDirectory, store: CheckpointStore, config: Any, step: int
) -> Iterator[Mapping[str, Any]]:
    """Yield what the run wrote down of where the step ran, the surest first."""
    with contextlib.suppress(TfdistError):  # no ledger, or one that is not whole
        for attempt in merge(read_directory(directory.ledger)).attempts:
            if attempt.first <= step < attempt.end:
                header = attempt.header
                replicas, threads = header.num_replicas, header.threads
                yield {"strategy": header.strategy, "replicas": replicas, "threads": threads}
    # The checkpoint after the step was written by those who did it.
    for found in sorted(set(store.steps()), key=lambda s: (s <= step, abs(s - step))):
        with contextlib.suppress(TfdistError):  # a damaged one: the next tells as well
            yield store.read(found).meta.get("place", {})
    yield directory.read_summary() or {}
    if config.strategy == "single":
        yield {"strategy": "single", "replicas": 1}
