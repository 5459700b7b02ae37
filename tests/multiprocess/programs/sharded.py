"""A multiworker job with sharded optimizers: ``sharded.py OUT``.

Each optimizer trains the same model twice, with whole slots and with sharded ones: all of them in
the steps of one loop, and by `tfdist.fit` those that do more there than to apply gradients.
"""

import json
import pathlib
import shutil
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import zoo
from tfdist.checkpoint import CheckpointStore
from tfdist.errors import UsageError
from tfdist.strategy import current_job
from tfdist.training.keras_compat.reduction import times

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
BY_FIT = {"ema_often": 1, "accumulation": 1, "loss_scaling": 3}  # epochs
BY_A_NORM = ("clipnorm", "global_clipnorm")
BY_ROWS = (
    *("momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam"),
    *("ftrl", "lion", "schedule_free", "clipvalue", "accumulation", "ema", "loss_scaling"),
)


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


def variables():
    """A table, a kernel and a bias of one element."""
    random = np.random.RandomState(1)
    shapes = {"table": (203, 3), "kernel": (15, 101), "bias": (1,)}
    with strategy.scope():
        made = [
            keras.Variable(random.randn(*shape).astype("f"), name=name)
            for name, shape in shapes.items()
        ]
    made[1].constraint = keras.constraints.MaxNorm(2.0)
    return made


def trained(model, *, sharded, epochs=2, **options):
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
    """Goes on, with the second kind of slots, where a run with the first has saved."""
    directory = OUT / f"resumed-{first}-{second}"
    if tfdist.is_chief():
        shutil.copytree(OUT / f"saved-{first}", directory)
    tfdist.barrier()
    backups = [tfdist.BackupAndRestore(directory, exact=True)]
    return trained(made(OPTIMIZERS["adam"]), sharded=second, callbacks=backups)


def state_of(variables, optimizer):
    """Of what bytes the weights are, and how many variables and numbers the optimizer has."""
    sizes = [int(np.prod(variable.shape)) for variable in optimizer.variables]
    return zoo.digest(variables), (len(sizes), sum(sizes))


def trained_together(names, *, sharded, by_rows=BY_ROWS):
    """What optimizers make of the same gradients, in the steps of one loop: variables, and them.

    The gradient of the table is by rows, some of which occur twice. Averages are taken at the end.
    """
    start = variables()
    trained_by = {name: variables()[name not in by_rows :] for name in names}
    with strategy.scope():
        optimizers = {name: OPTIMIZERS[name]() for name in names}
        if not sharded:
            for name, optimizer in optimizers.items():
                optimizer.build(trained_by[name])

    def step(data):
        tokens, y = data
        table, kernel, bias = start
        with tf.GradientTape() as tape:
            rows = tf.reshape(keras.ops.take(table, tokens, axis=0), [-1, 15])
            seen = tf.reduce_sum(tf.tanh(tf.matmul(rows, kernel)), -1, keepdims=True)
            loss = tf.reduce_mean((seen + bias - y) ** 2)
        gradients = tape.gradient(loss, start)
        for name, optimizer in optimizers.items():
            scale = optimizer.scale_loss(tf.ones([]))
            mine = gradients[-len(trained_by[name]) :]
            known = () if name == "ema" else (trained_by[name],)  # it is built for them
            optimizer.apply([times(gradient, scale) for gradient in mine], *known)
        return {"loss": loss}

    built = [(optimizers[name], trained_by[name]) for name in names] if sharded else []
    data = (zoo.TOKENS, zoo.CALM)
    tfdist.StepLoop(step, data, global_batch_size=8, seed=3, sharded_optimizers=built).run(9)
    for name, optimizer in optimizers.items():
        optimizer.finalize_variable_values(trained_by[name])
    return {name: (trained_by[name], optimizer) for name, optimizer in optimizers.items()}


def weights_seen():
    """What each optimizer trains, and how many variables and numbers its state has.

    Where it clips gradients by rows by their norm, which has another last bit: how far apart.
    """
    both = [trained_together(OPTIMIZERS, sharded=sharded) for sharded in (False, True)]
    seen = {name: [state_of(*one[name]) for one in both] for name in OPTIMIZERS}
    for name, epochs in BY_FIT.items():
        models = [made(OPTIMIZERS[name], by_rows=name in BY_ROWS) for _ in range(2)]
        for model, sharded in zip(models, (False, True), strict=True):
            trained(model, sharded=sharded, epochs=epochs)
        seen[f"{name} by fit"] = [state_of(model.weights, model.optimizer) for model in models]
    weights, state = ({name: [one[n] for one in seen[name]] for name in seen} for n in (0, 1))
    return {"weights": weights, "state": state, "apart": apart_by_a_norm()}


def apart_by_a_norm():
    """How far weights are apart that were clipped by norms of gradients by rows."""
    whole, sharded = (
        trained_together(BY_A_NORM, sharded=sharded, by_rows=BY_A_NORM) for sharded in (False, True)
    )
    pairs = {name: zip(whole[name][0], sharded[name][0], strict=True) for name in BY_A_NORM}
    return {
        name: max(float(np.abs(one.numpy() - other.numpy()).max()) for one, other in two)
        for name, two in pairs.items()
    }


def checkpoints_seen():
    """Whether a checkpoint is that of whole slots, and what runs that go on from one end with."""
    saved = {}
    for sharded in (False, True):
        backup = tfdist.BackupAndRestore(OUT / f"saved-{sharded}", exact=True)
        trained(made(OPTIMIZERS["adam"]), sharded=sharded, epochs=1, callbacks=[backup])
        saved[sharded] = arrays_of(OUT / f"saved-{sharded}") if tfdist.is_chief() else None
    goes_on = ((True, False), (False, True))  # each is read and written in both ways
    return {
        "same checkpoint": saved[False] == saved[True],
        "expected": trained(made(OPTIMIZERS["adam"]), sharded=False),
        "resumed": {f"{first}-{second}": resumed(first, second) for first, second in goes_on},
    }


def refusals_seen():
    """How whole slots are refused, and whether the file of a sharded model has its weights."""
    whole, refused = made(OPTIMIZERS["adam"]), ""
    trained(whole, sharded=False, epochs=1)
    try:
        trained(made(lambda: whole.optimizer), sharded=True)
    except UsageError as error:
        refused = error.code
    model = made(OPTIMIZERS["adam"])
    tfdist.evaluate(model, zoo.X, zoo.CALM, batch_size=8, verbose=0)  # leaves it without slots
    trained(model, sharded=True, epochs=1)
    same = None
    if tfdist.is_chief():
        model.save(OUT / "model.keras")
        same = zoo.sha(keras.models.load_model(OUT / "model.keras")) == zoo.sha(model)
    tfdist.barrier()
    over_sequences = [weights_over_sequences(sharded=one) for one in (False, True)]
    return {
        "refused": refused,
        "file has the weights": same,
        "frozen stays": frozen_stays(),
        "over sequences": over_sequences,
    }


def weights_over_sequences(*, sharded):
    """Of a model whose gradients have shapes that a step alone knows."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        hidden = layers.Dense(7), layers.GlobalAveragePooling1D(), layers.Dense(1)
        model = keras.Sequential([keras.Input((None, 1)), *hidden])
        model.compile("adam", "mse")
    x = zoo.X[:, :, None]
    tfdist.fit(model, x, zoo.CALM, batch_size=8, seed=3, verbose=0, sharded_optimizer=sharded)
    return zoo.sha(model)


def frozen_stays():
    """Whether a bias that is frozen and set before a second fit with averages stays as it is."""
    model = made(OPTIMIZERS["ema"])
    trained(model, sharded=True, epochs=1)
    layer = model.layers[0]
    layer.trainable = False
    layer.bias.assign(tf.ones_like(layer.bias))
    trained(model, sharded=True, epochs=1)
    return bool((layer.bias.numpy() == 1).all())


SECTIONS = {
    "weights": weights_seen,
    "checkpoints": checkpoints_seen,
    "refusals": refusals_seen,
}
strategy = tfdist.make_strategy()
for section, seen in SECTIONS.items():
    (OUT / f"{section}-{current_job().name}.json").write_text(json.dumps(seen()))
