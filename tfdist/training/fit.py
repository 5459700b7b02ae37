"""`fit`: what `keras.Model.fit` does, under every strategy."""

from __future__ import annotations

import logging
import random
from typing import Any

import keras

from tfdist.strategy import broadcast
from tfdist.training import building, inputs
from tfdist.training.callbacks import callback_list, steps_between_calls, wants_logs
from tfdist.training.epochs import VirtualEpochs
from tfdist.training.evaluate import Evaluation
from tfdist.training.inputs import Length
from tfdist.training.loop import Loop
from tfdist.training.session import Session

_LOG = logging.getLogger(__name__)


def fit(
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
    *,
    virtual_epochs: VirtualEpochs | None = None,
    seed: int | None = None,
    overfit_batches: int | None = None,
) -> keras.callbacks.History:
    """Trains a compiled model; what `keras.Model.fit` does, under every strategy.

    The arguments and their meaning are Keras' own; `batch_size` is the global batch. A collective:
    every training task calls it alike (under ps only the chief gets this far).

    Args:
      virtual_epochs: the length of the run in examples, instead of `epochs`.
      seed: of the order of the examples, of augmentation and of Dropout; by default the chief
        draws one from Python's `random`, which `keras.utils.set_random_seed` seeds.
      overfit_batches: train on the first so many batches of the data only, on purpose.

    Returns:
      Keras' `History`, the same in every task.

    Raises:
      UsageError: the model is of another scope, or not compiled; the data cannot be had under
        this strategy; the global batch is smaller than the number of replicas.
    """
    job = building.job_for(model, doing="fit")
    building.require_compiled(model, doing="fit")
    if validation_split and validation_data is None:
        arrays = (x, y, sample_weight)
        (x, y, sample_weight), validation_data = inputs.split(
            arrays, validation_split=validation_split
        )
    seed = _seed(seed)
    data = inputs.prepare(
        x,
        y,
        sample_weight,
        job=job,
        length=Length(
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            virtual_epochs=virtual_epochs,
            overfit_batches=overfit_batches,
        ),
        shuffle=shuffle,
        seed=seed,
        class_weight=class_weight,
    )
    building.build(model, job, data.batch_spec)
    session = Session(model, job)
    validation = None
    if validation_data is not None:
        validation = Evaluation(
            session,
            keras.utils.unpack_x_y_sample_weight(validation_data),
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
        )
    run = Run(session, data, validation, seed=seed, validation_freq=validation_freq)
    return run.train(callbacks, verbose=verbose, initial_epoch=initial_epoch)


class Run:
    """One training run: epochs of ranges, validation between them."""

    def __init__(
        self,
        session: Session,
        data: inputs.Data,
        validation: Evaluation | None,
        *,
        seed: int,
        validation_freq: Any,
    ) -> None:
        self.session = session
        self.plan = data.plan
        self.seed = seed
        self._program = session.program("train_step", data.feed, seed=seed)
        self._validation = validation
        self._validation_freq = validation_freq

    def train(self, callbacks: Any, *, verbose: Any, initial_epoch: int) -> Any:
        """Runs the epochs; returns Keras' History."""
        session, model = self.session, self.session.model
        steps = len(self.plan.steps(0)) if self.plan.num_epochs else 0
        listed = callback_list(
            callbacks,
            job=session.job,
            model=model,
            verbose=verbose,
            epochs=self.plan.num_epochs,
            steps=steps,
        )
        loop = self._loop(listed)
        model.stop_training = False
        listed.on_train_begin()
        logs: dict[str, Any] = {}
        for epoch in range(initial_epoch, self.plan.num_epochs):
            logs = self._epoch(epoch, loop, listed)
            if model.stop_training:
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and self.plan.num_epochs:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        listed.on_train_end(logs)
        return model.history

    def _loop(self, listed: Any) -> Loop:
        every = [n for n in map(steps_between_calls, listed.callbacks) if n]
        return Loop(
            self.session,
            self._program,
            self.plan,
            callbacks=listed,
            parties=[],
            every=every,
            with_logs=bool(broadcast(wants_logs(listed.callbacks))),
        )

    def _epoch(self, epoch: int, loop: Loop, listed: Any) -> dict[str, Any]:
        session = self.session
        loop.step = max(loop.step, self.plan.steps(epoch).start)
        session.reset_metrics()
        listed.on_epoch_begin(epoch)
        loop.run_epoch(epoch)
        logs = session.metrics(self._program, loop.step_logs)
        validation = self._validation
        if validation is not None and session.model._should_eval(epoch, self._validation_freq):
            values = validation.run(listed)
            logs.update({f"val_{name}": value for name, value in values.items()})
        listed.on_epoch_end(epoch, logs)
        return logs


def _seed(seed: int | None) -> int:
    """The run's seed, the same in every task: the chief's."""
    return int(broadcast(random.randrange(2**31) if seed is None else seed))
