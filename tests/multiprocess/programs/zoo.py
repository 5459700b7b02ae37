"""Models and data that the jobs and the tests that judge them have in common."""

import contextlib
import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut
from tfdist.ps.worker_pool import worker_pool_of

RNG = np.random.RandomState(0)
X = RNG.randn(60, 6).astype("float32")
Y = (RNG.randn(60, 1) * 3).astype("float32")
Y[7] *= 20  # an example whose gradient dominates its replica's, so that clipping tells
IMAGES = RNG.rand(90, 8, 8, 1).astype("float32")
LABELS = (IMAGES.mean((1, 2, 3)) > 0.5).astype("int64")
TOKENS = RNG.randint(0, 200, (60, 5))
CALM = np.tanh(Y / 3)  # without the example that makes a last bit a large difference in ten steps

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw_clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, clipvalue=0.1),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, clipnorm=0.5, gradient_accumulation_steps=2
    ),
    "accumulation_clipped": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=3
    ),
    "averaging": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "loss_scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, clipnorm=1.0, momentum=0.9, nesterov=True)
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    ),
}


class CustomStep(keras.Sequential):
    """A training step of the user's own, whose loss nobody scaled."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"mine": loss}


class TwoUpdates(keras.Sequential):
    """A step that updates the same weights twice, by a loss with a gradient in it."""

    def train_step(self, data):
        x, y = data
        for optimizer in (self.optimizer, self.second_optimizer):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    found = self(x, training=True)
                penalty = tf.reduce_mean(inner.gradient(found, x) ** 2)
                loss = tf.reduce_mean((found - y) ** 2) + 0.1 * penalty
            gradients = tape.gradient(loss, self.trainable_weights)
            optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"mine": loss}


def two_updates(second_optimizer=None):
    """A model of two optimizers, of which Keras knows one."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = TwoUpdates([keras.Input((6,)), layers.Dense(80, activation="tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.second_optimizer = second_optimizer or keras.optimizers.RMSprop(0.01)
    model.second_optimizer.build(model.trainable_variables)
    return model


JUDGED = np.eye(3, dtype="float32")[RNG.randint(0, 3, 90)]


class Mistakes(keras.metrics.Metric):
    """Adds up by reading and assigning, in whole numbers."""

    adds_up = True

    def __init__(self):
        super().__init__(name="mistakes")
        self.count = self.add_weight(name="count", shape=(3,), initializer="zeros", dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        wrong = keras.ops.not_equal(keras.ops.argmax(y_true, -1), keras.ops.argmax(y_pred, -1))
        self.count.assign(
            self.count + keras.ops.sum(keras.ops.cast(wrong[:, None] & (y_true > 0), "int64"), 0)
        )

    def result(self):
        return keras.ops.sum(self.count * keras.ops.convert_to_tensor([1, 100, 10_000], "int64"))


def judged():
    """A model of three classes, whose metrics put together what they have seen in many ways."""
    keras.utils.set_random_seed(1)
    layers, metrics = keras.layers, keras.metrics
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3, activation="softmax")]
    )
    listed = [
        metrics.AUC(name="auc"), metrics.AUC(multi_label=True, num_labels=3, name="auc_of_each"),
        metrics.OneHotMeanIoU(3, name="iou"), metrics.F1Score(), metrics.R2Score(),
        metrics.Precision(name="precision"), metrics.CosineSimilarity(),
        metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
        metrics.RootMeanSquaredError(), metrics.CategoricalAccuracy(), Mistakes(),
    ]  # fmt: skip
    model.compile(loss="categorical_crossentropy", metrics=listed)
    return model


class Ramp(keras.optimizers.schedules.LearningRateSchedule):
    """1 in the first step, and 1 more in each other."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32") + 1.0

    def get_config(self):
        return {}


def descending(optimizer, examples=60):
    """A model of one weight, which begins at 0 and whose gradient is 1; and its data."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, lambda y, predicted: tf.reduce_mean(predicted))
    return model, np.ones((examples, 1), "float32")


def meeting(*, workers):
    """A step, of a model of one variable, that goes on once each worker has begun one."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    begun = tf.Variable(0, dtype=tf.int64, trainable=False)

    def step(data):
        x, y = data
        weights = [tf.identity(v) for v in model.trainable_variables]  # on a server of their own
        with tf.control_dependencies(weights):
            mine = tf.identity(begun.assign_add(1))
        all_begun = -(-mine // workers) * workers
        waited = tf.while_loop(lambda now: now < all_begun, lambda _: begun.read_value(), [mine])
        with tf.control_dependencies(waited):
            x = tf.identity(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    return step


def stalenesses_of_a_meeting(strategy, *, times):
    """How many steps had so many updates of others in between."""
    pool = worker_pool_of(strategy, patience_s=0)
    pool.account.staleness.clear()
    workers = len(pool.shares)
    with strategy.scope():
        step = meeting(workers=workers)
    loop = tfdist.StepLoop(step, (X, Y), global_batch_size=8, seed=3)
    for _ in range(times):
        loop.run(workers)
    return pool.account.summary()["staleness"]


def dense(optimizer="sgd", kind=keras.Sequential):
    """A small regression model, the same in every process."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = kind([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def penalized(optimizer):
    """A small regression model with a penalty and a constraint."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(1.5)),
        ]
    )
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def by_every_optimizer(strategy, make=penalized, data=(X, Y), *, steps, batch_size=8):
    """What each optimizer makes of a model of its own in one program: its updates, and weights."""
    with strategy.scope():
        models = {name: make(name) for name in OPTIMIZERS}
        for model in models.values():
            model.optimizer.build(model.trainable_variables)

    def step(data):
        x, y = data
        for model in models.values():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) + sum(model.losses)
                scaled = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    tfdist.StepLoop(step, data, global_batch_size=batch_size, seed=3).run(steps)
    assert np.isfinite(np.concatenate([flat(model) for model in models.values()])).all()
    return {
        name: (int(model.optimizer.iterations.numpy()), flat(model))
        for name, model in models.items()
    }


def cnn(optimizer="adam"):
    """A convolutional network with BatchNormalization and Dropout."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    return model


@keras.saving.register_keras_serializable("zoo")
class Twice(keras.layers.Layer):
    """A dense layer done twice, which reads its weights inside the loop only."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        def body(i, x):
            return i + 1, tf.tanh(tf.matmul(x, self.kernel))

        return tf.while_loop(lambda i, x: i < 2, body, [0, x], maximum_iterations=2)[1]


def tokens(optimizer="adam", recurrent=False):
    """A model that reads its weights in a lookup, in loops and twice in a step."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    reads = [layers.LSTM(24)] if recurrent else [layers.Flatten(), layers.Dense(24)]
    twice = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(1.0)}
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(200, 16),
            *reads,
            Twice(),
            layers.Dense(32, activation="relu", **twice),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def looked_up(optimizer):
    """A table and a kernel large enough to be in parts, with a penalty and a constraint."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    tied = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(1.0)}
    rows = [keras.Input((5,), dtype="int32"), layers.Embedding(200, 4), layers.Flatten()]
    model = keras.Sequential([*rows, layers.Dense(24, activation="tanh", **tied), layers.Dense(1)])
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def with_activities(*, shared=False):
    """A model in a model, with losses of layers before and after the replicas meet."""
    layers, l2 = keras.layers, keras.regularizers.L2
    inner = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(6, activity_regularizer=l2(0.1), kernel_regularizer=l2(0.01)),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(6, activity_regularizer=l2(0.05)),
        ]
    )
    x = keras.Input((6,))
    h = inner(x)
    if shared:
        h = inner(layers.BatchNormalization(synchronized=True)(h))
    model = keras.Model(x, layers.Dense(1, activity_regularizer="l1")(h))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def learned(strategy, out, **fit):
    """What a CNN has learned of the images, and evaluates and predicts; the chief saves it."""
    with strategy.scope():
        model = cnn()
    tfdist.fit(model, IMAGES, LABELS, batch_size=16, epochs=3, **fit)
    evaluated = tfdist.evaluate(model, IMAGES[:37], LABELS[:37], batch_size=8, verbose=0)
    predicted = tfdist.predict(model, IMAGES[:37], batch_size=8, verbose=0)
    if tfdist.is_chief():
        model.save(out / "cnn.keras")
    return {
        "cnn evaluated": evaluated, "cnn predicted": predicted.tolist(), "cnn sha": sha(model),
    }  # fmt: skip


def sources(batch_size, **batch):
    """A dataset, and a function of tf.distribute that makes one of so many examples a step."""

    def function(context):
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(batch_size), **batch)

    return {
        "dataset": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), "function": function,
    }  # fmt: skip


def evaluated(strategy, sources, **fit):
    """The models that were trained on such sources, by their names, and what they evaluate."""
    models, seen = {}, {}
    for name, data in sources.items():
        with strategy.scope():
            model = models[name] = dense()
        tfdist.fit(model, data, epochs=2, steps_per_epoch=5, verbose=0, **fit)
        seen[f"evaluated {name}"] = tfdist.evaluate(model, sources["dataset"], verbose=0)
        seen[f"expected {name}"] = float(((model(X).numpy() - Y) ** 2).mean())
    return models, seen


def range_tested(strategy):
    """What a range test of learning rates finds, and whether the model is then what it was."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    tfdist.fit(model, X, CALM, batch_size=16, verbose=0, seed=3)
    state = [*model.weights, *model.optimizer.variables]
    before = digest(state)
    found = tfdist.find_learning_rate(model, X, CALM, 16, lowest=1e-4, highest=1.0, steps=20)
    seen = {"rates": found.rates, "losses": found.losses, "suggestion": found.suggestion}
    seen["same"] = digest(state) == before
    diverged = tfdist.find_learning_rate(model, np.nan * X, CALM, 16, steps=10)
    seen["diverged"] = str(diverged)
    return seen | {"same after NaN": digest(state) == before}


def exported(strategy, out):
    """Where a model was exported that has been trained a little, and what it answers to `X`."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,), name="features"), layers.Dense(80, activation="relu"),
             layers.BatchNormalization(), layers.Dense(3, name="logits")],
            name="mlp",
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    tfdist.fit(model, X, X.argmax(1) // 2, batch_size=16, epochs=2, verbose=0, seed=3)
    place = tfdist.export_model(model, out)
    return str(place), tfdist.predict(model, X, batch_size=12, verbose=0).tolist()


def own_loop(strategy):
    """A loop of a step of one's own, which has done 5 steps; and its model."""
    with strategy.scope():
        model = dense()
        model.optimizer.build(model.trainable_variables)
        total = keras.metrics.Sum(name="examples")

    def step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        total.update_state(tf.ones(tf.shape(x)[0]))
        return {"loss": loss, "each": tf.stack([loss, 2.0 * loss, 3.0])}

    loop = tfdist.StepLoop(step, (X, Y), global_batch_size=8, seed=3, metrics=[total])
    loop.run(5)
    return loop, model


BESIDE_A_FIT = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
OF_KERAS = ("fit", "train_on_batch", *BESIDE_A_FIT)


def outcomes(model, names=OF_KERAS):
    """What comes of calls of Keras' own methods."""
    found = {}
    for name in names:
        arguments = (X[:8],) if "predict" in name else (X[:8], Y[:8])
        try:
            result = getattr(model, name)(*arguments, **({} if "batch" in name else {"verbose": 0}))
            found[name] = "works" if name in ("fit", "train_on_batch") else np.sum(result).item()
        except tfdist.UsageError as error:
            found[name] = f"{error.where}: {error.code}. Fix: {error.fix}"
    return found


def by_methods_of_keras(strategy, folder):
    """What comes of Keras' methods of a model of the scope, and of one outside."""

    class Judges(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen["in a callback"] = outcomes(self.model, BESIDE_A_FIT)

    with strategy.scope():
        model, explicit, cut, resumed = dense(), dense(), dense(), dense()
    seen, options = {}, {"batch_size": 8, "epochs": 2, "verbose": 0}
    theirs = model.fit(X, Y, callbacks=[Judges(), tfdist.Run(seed=3)], **options)
    ours = tfdist.fit(explicit, X, Y, seed=3, **options)
    backup = tfdist.BackupAndRestore(folder, save_freq=3)
    callbacks = [tfdist.Run(seed=3), backup]
    with contextlib.suppress(Cut):
        cut.fit(X, Y, callbacks=[*callbacks, AtStep(11)], **options)
    last = resumed.fit(X, Y, callbacks=callbacks, **options)
    seen["by model.fit"], seen["by tfdist.fit"], seen["cut and resumed"] = (
        [fit.model.optimizer.iterations.numpy().item(), fit.history, sha(fit.model)]
        for fit in (theirs, ours, last)
    )
    seen["by tfdist"] = {
        "evaluate": np.sum(tfdist.evaluate(model, X[:8], Y[:8], verbose=0)).item(),
        "predict": np.sum(tfdist.predict(model, X[:8], verbose=0)).item(),
    }
    seen["in the program"] = outcomes(model, BESIDE_A_FIT) | outcomes(model, OF_KERAS[:2])
    seen["outside"] = outcomes(dense())
    return seen


def sha(model):
    """SHA-256 of the weights' bytes."""
    return digest(model.weights)


def digest(variables):
    """SHA-256 of the bytes of variables."""
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()


def flat(model):
    """The weights as one list of numbers."""
    return np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
