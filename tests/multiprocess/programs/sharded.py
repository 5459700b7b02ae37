"""A multiworker job with sharded optimizers: ``sharded.py OUT SECTION...``.

Each optimizer trains the same model twice, with whole slots and with sharded ones.
"""

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
BY_ROWS = (
    *("momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam"),
    *("ftrl", "lion", "schedule_free", "clipvalue", "accumulation", "ema", "loss_scaling"),
)
REFUSED = {
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon": lambda: optimizers.Muon(0.01),
}


def made(optimizer, *, by_rows=False):
    """Sizes that no number of workers divides, and one variable of one element.

    Besides, if asked for, a gradient by rows, some of which occur twice.
    """
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        rows = [keras.Input((5,), dtype="int32"), layers.Embedding(203, 3), layers.Flatten()]
        model = keras.Sequential(
            [
                *(rows if by_rows else [keras.Input((6,))]),
                layers.Dense(101, activation="tanh", kernel_constraint="max_norm"),
                layers.BatchNormalization(),
                layers.Dropout(0.1),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse")
    return model


def embedding(optimizer):
    """A gradient by rows before one layer, which a last bit does not grow in."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        rows = [keras.Input((5,), dtype="int32"), layers.Embedding(203, 3), layers.Flatten()]
        model = keras.Sequential([*rows, layers.Dense(1)])
        model.compile(optimizer(), "mse")
    return model


def trained(model, *, sharded, epochs=3, **options):
    """Trains eight steps an epoch."""
    x = zoo.TOKENS if model.inputs[0].dtype == "int32" else zoo.X
    tfdist.fit(
        model, x, zoo.CALM, batch_size=8, epochs=epochs, seed=3, verbose=0,
        sharded_optimizer=sharded, **options,
    )  # fmt: skip
    return zoo.sha(model)


def arrays_of(directory):
    """What the newest checkpoint holds, by name."""
    checkpoint = CheckpointStore(directory).read()
    return {name: array.tobytes() for name, array in checkpoint.arrays.items()}


def resumed(first, second):
    """Trains an epoch with the first kind of slots and goes on with the second."""
    directory = OUT / f"resumed-{first}-{second}"
    backups = [tfdist.BackupAndRestore(directory, exact=True)]
    trained(made(OPTIMIZERS["adam"]), sharded=first, epochs=1, callbacks=backups)
    backups = [tfdist.BackupAndRestore(directory, exact=True)]
    return trained(made(OPTIMIZERS["adam"]), sharded=second, callbacks=backups)


def refusal_of(optimizer):
    try:
        trained(made(optimizer), sharded=True)
    except UsageError as error:
        return str(error)
    return ""


def weights_seen():
    """What each optimizer trains, and how many variables and numbers its state has.

    Where it clips gradients by rows by their norm, which has another last bit: how far apart.
    """
    weights, state, apart = {}, {}, {}
    for name, optimizer in OPTIMIZERS.items():
        if current_job().num_replicas > 2 and name not in OF_MANY_WORKERS:
            continue
        for sharded in (False, True):
            model = made(optimizer, by_rows=name in BY_ROWS)
            weights.setdefault(name, []).append(trained(model, sharded=sharded))
            sizes = [int(np.prod(variable.shape)) for variable in model.optimizer.variables]
            state.setdefault(name, []).append((len(sizes), sum(sizes)))
        if name in BY_A_NORM and current_job().num_replicas == 2:
            models = [embedding(optimizer) for _ in range(2)]
            for model, sharded in zip(models, (False, True), strict=True):
                trained(model, sharded=sharded)
            apart[name] = float(np.abs(np.subtract(*map(zoo.flat, models))).max())
    return {"weights": weights, "state": state, "apart": apart}


def checkpoints_seen():
    """Whether a checkpoint is that of whole slots, and what runs that go on from one end with."""
    saved = {}
    for sharded in (False, True):
        backup = tfdist.BackupAndRestore(OUT / f"saved-{sharded}")
        saved["weights"] = trained(made(OPTIMIZERS["adam"]), sharded=sharded, callbacks=[backup])
        saved[sharded] = arrays_of(OUT / f"saved-{sharded}") if tfdist.is_chief() else None
    goes_on = ((True, True), (True, False), (False, True))
    return {
        "same checkpoint": saved[False] == saved[True],
        "expected": saved["weights"],
        "resumed": {f"{first}-{second}": resumed(first, second) for first, second in goes_on},
    }


def step_loop_seen():
    """What a step function with an optimizer of its own trains, with averages at the end."""
    seen = []
    for sharded in (False, True):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(101), keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)
            if not sharded:
                optimizer.build(model.trainable_variables)

        def step(data, model=model, optimizer=optimizer):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
            return {"loss": loss}

        built = [(optimizer, model.trainable_variables)] if sharded else []
        data = (zoo.X, zoo.CALM)
        loop = tfdist.StepLoop(step, data, global_batch_size=8, seed=3, sharded_optimizers=built)
        loop.run(20)
        optimizer.finalize_variable_values(model.trainable_variables)
        seen.append(zoo.sha(model))
    return seen


def refusals_seen():
    """Refusals, and whether the file of a sharded model has its weights."""
    whole = made(OPTIMIZERS["adam"])
    trained(whole, sharded=False, epochs=1)
    refused = {name: refusal_of(optimizer) for name, optimizer in REFUSED.items()}
    refused["whole"] = refusal_of(lambda: whole.optimizer)
    model = made(OPTIMIZERS["adam"])
    tfdist.evaluate(model, zoo.X, zoo.CALM, batch_size=8, verbose=0)  # leaves it without slots
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
    "step_loop": step_loop_seen,
    "refusals": refusals_seen,
}
strategy = tfdist.make_strategy()
for section in sys.argv[2:]:
    file = OUT / f"{section}-{current_job().name}.json"
    file.write_text(json.dumps(SECTIONS[section]()))
