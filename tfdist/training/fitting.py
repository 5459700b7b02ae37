"""`fit` and `StepLoop`: training of a Keras model, or by a step function, under every strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from tfdist import phases
from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.publish import publish_from
from tfdist.checkpoint.warm_start import load_weights
from tfdist.data.draws import draws_nothing
from tfdist.errors import require, require_int
from tfdist.strategy import Job, broadcast, current_job, job_of
from tfdist.strategy.group import require_same_place
from tfdist.training import building, inputs, kept, keras_compat, resume
from tfdist.training.blocks import BlockRunner, naming_bad_data
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.evaluation import Evaluation, evaluate_checkpoints, evaluator_of
from tfdist.training.inputs import Length
from tfdist.training.keras_compat.trace import warn_once
from tfdist.training.loop import RunPlan, TrainLoop
from tfdist.training.metrics_file import shortened
from tfdist.training.program import (
    Engine,
    RunObserver,
    StepProgram,
    as_number,
    engine_class,
    flat_logs,
    plain,
    program_of,
    with_metric_logs,
)
from tfdist.training.run_settings import by_own_method, run_of
from tfdist.training.stop_requests import StopRequests
from tfdist.training.task_agreement import require_same_lengths

_ENDLESS_STEPS = 2**40


@by_own_method
def fit(  # noqa: D417, PLR0913, as they are Keras' arguments
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    **settings: Any,
) -> keras.callbacks.History:
    """Train a compiled model under every strategy, like `keras.Model.fit`.

    The named arguments have the same meaning as in Keras, and `batch_size` is the global batch.
    This is a collective: every training task must call it with the same arguments. Under ps only
    the chief calls it. The evaluator task evaluates checkpoints until training ends, then exits.

    For a model created in `strategy.scope()`, `model.fit` does the same.

    Args:
      settings: settings of `tfdist.Run`, as keywords.

    Returns:
      Keras' `History`, the same in every task.

    Raises:
      ValueError: the model is not compiled.
      UsageError: the model belongs to another scope. The strategy does not support the data. The
        optimizer's state cannot be sharded.
      Stopped: a task received SIGTERM, SIGUSR1 or SIGINT. With a `BackupAndRestore` callback, the
        next run resumes from its last checkpoint.
    """
    callbacks, run = run_of(callbacks, settings)
    most_epochs, most_steps = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
    job, batches = building.job_for(model, doing="fit"), run.dev_batches
    callbacks, validation_steps = shortened(job, callbacks, validation_steps, batches=batches)
    if batches:
        run = dataclasses.replace(run, virtual_epochs=None)
        most_epochs, most_steps = 1, batches
        initial_epoch, validation_freq = 0, 1
    building.require_compiled(model, doing="fit")
    optimizer, variables = model.optimizer, model.trainable_variables
    sharded = run.sharded_optimizer and building.shards(
        optimizer, variables, job, callbacks=callbacks
    )
    require_int("initial_epoch", initial_epoch, least=0)
    seed = _checked(run.seed, run.max_staleness, job)
    if not isinstance(validation_freq, list):
        fix = "pass validation_freq=2, or a list of epochs from 1 on"
        validation_freq = require_int("validation_freq", validation_freq, least=1, fix=fix)
    is_list = isinstance(validation_freq, list)
    lengths = {
        "initial_epoch": initial_epoch,
        "validation_freq": len(validation_freq) if is_list else validation_freq,
        "sets of validation data": int(bool(validation_split) or validation_data is not None),
    }
    require_same_lengths(job, lengths)
    if validation_split and validation_data is None:
        arrays = (x, y, sample_weight)
        (x, y, sample_weight), validation_data = train_validation_split(arrays, validation_split)

    def evaluation_in(job: Job, engine: Engine) -> Evaluation:
        given = keras.utils.unpack_x_y_sample_weight(validation_data)
        size = validation_batch_size or batch_size
        return Evaluation(model, job, engine, given, batch_size=size, steps=validation_steps)

    evaluator = evaluator_of(
        callbacks, job=job, validation_data=validation_data, is_dev_run=bool(batches)
    )
    if evaluator is not None and job.is_evaluator:
        evaluate_checkpoints(
            model,
            lambda alone: evaluation_in(alone, engine_class(alone)(alone)),
            job=job,
            callbacks=callbacks,
            evaluator=evaluator,
        )
    if evaluator is not None:
        validation_data = None  # the evaluator task validates
        callbacks = [c for c in keras.tree.flatten(callbacks) if c is not evaluator] + [evaluator]
    flat = keras.tree.flatten(callbacks or [])
    backups = [callback for callback in flat if isinstance(callback, BackupAndRestore)]
    observers = [callback for callback in flat if isinstance(callback, RunObserver)]
    publish_from(backups, flat)
    saved, source = resume.saved_run(backups, job)
    seed = _seed(seed, saved)
    key: Callable[[], Any] | None = None
    # Only in one process: ps workers would fetch the seed from the chief, and peers would have to
    # agree on the kept programs.
    if job.kind.is_one_process and seed < 2**31 and not (backups or observers or class_weight):
        data = (x, y, sample_weight, validation_data)
        sizes: tuple[Any, ...] = (batch_size, epochs, initial_epoch, steps_per_epoch, bool(shuffle))
        sizes += (validation_batch_size, validation_steps)
        sizes += (most_epochs, most_steps)
        key = partial(kept.key_of, model, job, run, data, *sizes)
        if (last := kept.kept_of(model, key())) is not None:
            plan, blocks = last
            variable: Any = blocks.program.seed
            variable.assign(seed)
            keras_compat.fuse(model, fused=False)
            options = {"callbacks": callbacks, "verbose": verbose}
            plan = dataclasses.replace(plan, seed=seed, validation_freq=validation_freq, **options)
            return _train(model, job, blocks.engine, plan, key=key, blocks=blocks)
    feed = inputs.prepare(
        x,
        y,
        sample_weight,
        job=job,
        length=Length(
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            virtual_epochs=run.virtual_epochs,
            overfit_batches=run.overfit_batches,
            most_epochs=most_epochs,
            most_steps=most_steps,
        ),
        shuffle=shuffle,
        seed=seed,
        class_weight=class_weight,
        model=model,
    )
    if run.initial_weights is not None and saved is None:
        building.build(model, job, feed, slots="none")  # slots may start as copies of the weights
        with draws_nothing():  # a resumed run skips this load: keep its draws the same
            load_weights(model, run.initial_weights, job=job)
    building.build(model, job, feed, slots="parts" if sharded else "whole")
    keras_compat.fuse(model, fused=run.fused_kernels)
    if key is not None:
        feed.take_seed_from_a_variable()
    engine = engine_class(job)(job)
    plan = RunPlan(
        feed=feed,
        seed=seed,
        validation=evaluation_in(job, engine) if validation_data is not None else None,
        validation_freq=validation_freq,
        initial_epoch=initial_epoch,
        callbacks=callbacks,
        verbose=verbose,
        backups=backups,
        saved=saved,
        source=source,
        run=run,
        observers=observers,
    )
    return _train(model, job, engine, plan, key=key)


def _checked(seed: int | None, max_staleness: int | None, job: Job) -> int | None:
    """Return the seed as a Python int. Raise UsageError if a value is not a valid integer."""
    if max_staleness is not None:
        require_int("max_staleness", max_staleness, least=0)
        if not job.kind.has_servers:
            warn_once(f"fit: max_staleness has no effect under strategy {job.kind}, only under ps")
    seed = None if seed is None else require_int("seed", seed, least=0)
    fix = "pass an int below 2**63, such as secrets.randbits(63)"
    require((seed or 0) < 1 << 63, "seed", f"{seed} is too large", fix=fix, code="too-large")
    return seed


def _train(
    model: keras.Model,
    job: Job,
    engine: Engine,
    plan: RunPlan,
    *,
    key: Callable[[], Any] | None,
    blocks: BlockRunner | None = None,
) -> keras.callbacks.History:
    """Run the plan on a built model, with the `blocks` of the last `fit` if given."""
    with StopRequests() as requests, _closing(engine, plan):
        if job.stages is not None:
            job.stages.chosen.exact = any(backup.exact for backup in plan.backups)
        resume.require_resumable(plan, job=job)
        if blocks is None:
            program = program_of(
                model,
                job,
                "train_step",
                plan.feed,
                seed=plan.feed.seed,
                exact=any(backup.exact for backup in plan.backups),
                max_staleness=plan.run.max_staleness,
            )
            if plan.observers:
                observers = [observer.observe(program, job) for observer in plan.observers]
                program = dataclasses.replace(program, observers=observers)
            blocks = BlockRunner(model, job, engine, program, phase="step")
        history = TrainLoop(plan, blocks, requests).run()
        if key is not None:
            kept.keep(model, key(), plan, blocks)
        return history


@contextlib.contextmanager
def _closing(engine: Engine, plan: RunPlan) -> Iterator[None]:
    """Close the engine, the backups and the feeds at the end, also after an error."""
    try:
        yield
    finally:
        engine.close()
        phases.enter("save")
        for backup in plan.backups:
            backup.close()
        plan.feed.close()
        if plan.validation is not None:
            plan.validation.feed.close()
        phases.enter("done")


def _seed(seed: int | None, saved: RunState | None) -> int:
    """Return the run's seed, the same in every task: the given, the saved or a drawn seed.

    A resumed run also draws, so that the program's later draws stay the same.
    """
    if seed is None:
        drawn = random.randrange(2**31)
        seed = drawn if saved is None else saved.seed
    return int(broadcast(seed))


# Training by a user's step function.


class StepLoop:
    """Runs a step function over data under every strategy, many steps in one compiled call.

    Use it if `fit` is not enough, for example with several models or optimizers. tfdist calls the
    step function with one replica's batch, in replica context. The function computes losses,
    applies gradients with Keras optimizers, and returns a dict of scalars. tfdist scales losses
    of `keras.losses`, and weights the gradient of any other loss at the gradient hook. Create and
    build models and optimizers inside ``strategy.scope()``. To build an optimizer, call
    ``optimizer.build(model.trainable_variables)``. Every training task creates a loop with the
    same arguments and calls it equally often. Example:
    ``logs = tfdist.StepLoop(step, (x, y), global_batch_size=64).run(100)``.

    Args:
      step: step function.
      data: data as for ``x`` of `tfdist.fit`, or a tuple ``(x, y)`` of arrays.
      global_batch_size: examples of a step over all replicas, or of one worker's step under ps.
      seed: seed of the example order and of random layers (default: drawn by the chief).
      shuffle: True to shuffle in a different order in each pass (default: True).
      metrics: Keras metrics that the step updates and `results` reads (default: none).
      first_step: first step to run (default: 0).
      max_staleness: same as in `tfdist.fit`.
      sharded_optimizers: unbuilt optimizers, each with its variables. They are built here, under
        multiworker in shards like `sharded_optimizer` of `tfdist.fit`.

    Raises:
      UsageError: the job is a pipeline or elastic, or the strategy cannot use the data.
    """

    @naming_a_lost_server()
    def __init__(
        self,
        step: Callable[[Any], Mapping[str, Any]],
        data: Any,
        *,
        global_batch_size: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        metrics: Sequence[keras.metrics.Metric] = (),
        first_step: int = 0,
        max_staleness: int | None = None,
        sharded_optimizers: Sequence[tuple[keras.optimizers.Optimizer, Sequence[Any]]] = (),
    ) -> None:
        building.require_compiled_functions(doing="StepLoop")
        require_int("first_step", first_step, least=0)
        self._job = current_job() or job_of(tf.distribute.get_strategy())
        seed = _checked(seed, max_staleness, self._job)
        require(
            not self._job.kind.has_stages and self._job.shards is None,
            "StepLoop",
            f"strategy {self._job.kind} cannot divide a step function of your own",
            fix="call model.fit, or use another strategy",
            code="unsupported",
        )
        self._metrics = list(metrics)
        for optimizer, variables in sharded_optimizers:
            building.build_in_parts(optimizer, variables, self._job)
        seed = int(broadcast(int(np.random.randint(2**31)) if seed is None else seed))
        length = Length(batch_size=global_batch_size, steps_per_epoch=_ENDLESS_STEPS)
        x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        feed = inputs.prepare(x, y, None, job=self._job, length=length, shuffle=shuffle, seed=seed)
        self._engine = engine_class(self._job)(self._job)
        self._program = StepProgram(
            function=plain(step, self._job, where="StepLoop"),
            feed=feed,
            seed=seed,
            training=True,
            keras_metrics=tuple(metrics),
            keep_logs=True,
            max_staleness=max_staleness,
        )
        self.step = first_step

    @naming_a_lost_server()
    def run(self, steps: int) -> dict[str, Any]:
        """Run the next `steps` steps and return the last step's result, over all replicas.

        A metric's result covers all steps since the metric was reset. Scalars are floats, other
        tensors are arrays.
        """
        require_int("steps", steps, least=1)
        with naming_bad_data(self._program.feed):
            logs = self._engine.run(self._program, self.step, self.step + steps)
        self.step += steps
        if self._program.metric_logs:
            self._engine.publish_metrics(self._program)
        return with_metric_logs(logs, self._program, self._job)

    @naming_a_lost_server()
    def results(self, *, reset: bool = True) -> dict[str, Any]:
        """Return each metric over all replicas and, by default, reset it. A collective.

        Scalars are floats, other results are arrays. If a metric's result is a dict, each entry
        is returned under its own name.
        """
        require_same_place(self._job, of="metrics of a StepLoop")
        self._engine.publish_metrics(self._program)
        results = flat_logs({metric.name: metric.result() for metric in self._metrics})
        found = {name: as_number(tf.convert_to_tensor(result)) for name, result in results.items()}
        if reset:
            self._engine.reset_metrics()
            for metric in self._metrics:
                metric.reset_state()
        return found
