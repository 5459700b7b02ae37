"""A multiworker job with sharded optimizers: ``sharded.py OUT SECTION...``.

Each optimizer trains the same twice, with whole slots and with sharded ones.
"""

from __future__ import annotations

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import zoo
from tfdist.checkpoint import CheckpointStore
from tfdist.errors import UsageError
from tfdist.strategy.job import current_job

OUT = pathlib.Path(sys.argv[1])
optimizers = keras.optimizers


def without_biases():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.01),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": without_biases,
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "lion": lambda: optimizers.Lion(0.001),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(0.01),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.5),
    "accumulation": lambda: optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "ema_often": lambda: optimizers.SGD(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "loss_scaling": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=2.0**127, dynamic_growth_steps=5
    ),
    "loss_scale_factor": lambda: optimizers.Adam(0.01, loss_scale_factor=8.0),
}
OF_MANY_WORKERS = ("momentum", "adam", "adagrad", "ftrl", "clipnorm", "ema", "loss_scaling")
BY_A_NORM = ("clipnorm", "global_clipnorm")
DENSE = (*BY_A_NORM, "loss_scale_factor")  # by which Keras cannot divide a gradient by rows
REFUSED = {
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon": lambda: optimizers.Muon(0.01),
}


def made(optimizer):
    """A gradient by rows, some of which occur twice; sizes that no number of workers divides."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(203, 3),
                layers.Flatten(),
                layers.Dense(101, activation="tanh", kernel_constraint="max_norm"),
                layers.BatchNormalization(),
                layers.Dropout(0.1),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse")
    return model


def trained(model, *, sharded, epochs=3, **options):
    """Trains eight steps an epoch."""
    tfdist.fit(
        model, zoo.TOKENS, zoo.CALM, batch_size=8, epochs=epochs, seed=3, verbose=0,
        sharded_optimizer=sharded, **options,
    )  # fmt: skip
    return zoo.sha(model)


class Training:
    """An optimizer that has the gradients of some variables, for its own copies of them."""

    def __init__(self, make, variables, *, sharded):
        self.variables = variables
        with strategy.scope():
            self.optimizer = make()
            self.copies = [keras.Variable(v.numpy(), name=v.name) for v in variables]
            for copy, variable in zip(self.copies, variables, strict=True):
                copy.constraint = variable.constraint
            if not sharded:
                self.optimizer.build(self.copies)

    def weights(self):
        return np.concatenate([copy.numpy().ravel() for copy in self.copies])

    def size(self):
        """How many variables and numbers the optimizer's state has."""
        sizes = [int(np.prod(variable.shape)) for variable in self.optimizer.variables]
        return len(sizes), sum(sizes)


def train_together(model, trainings):
    """Does 24 steps of all trainings, with averages at the end."""

    def step(data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            losses = [training.optimizer.scale_loss(loss) for training in trainings]
        for training, scaled in zip(trainings, losses, strict=True):
            gradients = tape.gradient(scaled, training.variables)
            training.optimizer.apply(gradients, training.copies)
        return {"loss": loss}

    sharded = [(t.optimizer, t.copies) for t in trainings if not t.optimizer.built]
    data = (zoo.TOKENS, zoo.CALM)
    loop = tfdist.StepLoop(step, data, global_batch_size=8, seed=3, sharded_optimizers=sharded)
    loop.run(24)
    for training in trainings:
        training.optimizer.finalize_variable_values(training.copies)


def arrays_of(directory):
    """What the newest checkpoint holds, by name."""
    checkpoint = CheckpointStore(directory).read()
    return {name: array.tobytes() for name, array in checkpoint.arrays.items()}


def refusal_of(optimizer):
    try:
        trained(made(optimizer), sharded=True)
    except UsageError as error:
        return str(error)
    return ""


def weights_seen():
    """What each optimizer makes of the same gradients, and how large its state is.

    Where it clips gradients by rows by their norm, which has another last bit: how far apart.
    """
    two = current_job().num_replicas == 2
    model = made(OPTIMIZERS["sgd"])
    by_rows, dense = model.trainable_variables, model.trainable_variables[1:]
    names = [name for name in OPTIMIZERS if two or name in OF_MANY_WORKERS]
    variables = {name: dense if name in DENSE else by_rows for name in names}
    variables |= {f"{name} by rows": by_rows for name in BY_A_NORM if two}
    pairs = {
        name: [
            Training(OPTIMIZERS[name.partition(" ")[0]], mine, sharded=sharded)
            for sharded in (False, True)
        ]
        for name, mine in variables.items()
    }
    train_together(model, [training for pair in pairs.values() for training in pair])
    weights = {name: [zoo.digest(t.copies) for t in pairs[name]] for name in names}
    for name in ("ema", "loss_scaling"):
        weights[f"{name} of a model"] = [
            trained(made(OPTIMIZERS[name]), sharded=sharded) for sharded in (False, True)
        ]
    apart = {
        name: float(np.abs(whole.weights() - sharded.weights()).max())
        for name, (whole, sharded) in pairs.items()
        if name not in names
    }
    state = {name: [training.size() for training in pairs[name]] for name in names}
    return {"weights": weights, "state": state, "apart": apart}


def checkpoints_seen():
    """Whether a checkpoint is that of whole slots, and what a run ends with that goes on from it.

    That has sharded slots in some epochs, and whole ones in others.
    """
    seen, epochs = {}, (True, True, False, True)
    for sharded in (False, True):
        backup = tfdist.BackupAndRestore(OUT / f"saved-{sharded}")
        model = made(OPTIMIZERS["adam"])
        seen["expected"] = trained(model, sharded=sharded, epochs=len(epochs), callbacks=[backup])
        seen[sharded] = arrays_of(OUT / f"saved-{sharded}") if tfdist.is_chief() else None
    for epoch, sharded in enumerate(epochs):
        backup = tfdist.BackupAndRestore(OUT / "resumed", exact=True)
        model = made(OPTIMIZERS["adam"])
        seen["resumed"] = trained(model, sharded=sharded, epochs=epoch + 1, callbacks=[backup])
    seen["same checkpoint"] = seen.pop(False) == seen.pop(True)
    return seen


def refusals_seen():
    """Refusals, and whether the file of a sharded model has its weights."""
    whole = made(OPTIMIZERS["adam"])
    trained(whole, sharded=False, epochs=1)
    refused = {name: refusal_of(optimizer) for name, optimizer in REFUSED.items()}
    refused["whole"] = refusal_of(lambda: whole.optimizer)
    model = made(OPTIMIZERS["adam"])
    tfdist.evaluate(model, zoo.TOKENS, zoo.CALM, batch_size=8, verbose=0)  # leaves it without slots
    trained(model, sharded=True, epochs=1)
    same = None
    if tfdist.is_chief():
        model.save(OUT / "model.keras")
        same = zoo.sha(keras.models.load_model(OUT / "model.keras")) == zoo.sha(model)
    tfdist.barrier()
    return {"refused": refused, "file has the weights": same}


SECTIONS = {
    "weights": weights_seen,
    "checkpoints": checkpoints_seen,
    "refusals": refusals_seen,
}
strategy = tfdist.make_strategy()
for section in sys.argv[2:]:
    file = OUT / f"{section}-{current_job().name}.json"
    file.write_text(json.dumps(SECTIONS[section]()))
