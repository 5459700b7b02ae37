"""A ps job that does everything the tests look at, or the parts that are named; see PARTS."""

import json
import pathlib
import sys
from unittest import mock

import keras
import keras_tuner
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.data import ArraySource, InputFunctionSource, StreamSource
from tfdist.ps.engine import ParameterServerEngine
from tfdist.ps.worker_pool import worker_pool_of

strategy = tfdist.make_strategy()

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import figures  # noqa: E402
import zoo  # noqa: E402
from without_call import AutoEncoder  # noqa: E402

OUT = pathlib.Path(sys.argv[1])
SEEN = {}


class OneNumber(keras.metrics.Metric):
    """A metric of one number, which begins at 0."""

    def __init__(self):
        super().__init__(name=type(self).__name__.lower())
        self.value = self.add_weight(name="value", initializer="zeros")

    def result(self):
        return self.value


class Targets(OneNumber):
    """Adds the targets up."""

    adds_up = True

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(tf.reduce_sum(y_true))


class Examples(OneNumber):
    """Counts examples, so that a lost update shows."""

    adds_up = True

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))


class Least(OneNumber):
    """Keeps the least target, which begins at infinity."""

    adds_up = True

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.minimum(self.value, tf.reduce_min(y_true)))

    def reset_state(self):
        self.value.assign(float("inf"))


class Most(OneNumber):
    """Keeps the greatest target above 0."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_true)))


def counts():
    SEEN["every optimizer"] = zoo.by_every_optimizer(strategy, steps=18, batch_size=4)
    with strategy.scope():
        model = zoo.dense("loss_scaling")
        model.compile(model.optimizer, "mse", metrics=[Examples()])
    history = tfdist.fit(
        model, zoo.X, zoo.Y, batch_size=4, epochs=7, seed=3, verbose=0,
        validation_data=(zoo.X[:41], zoo.Y[:41]),
    )  # fmt: skip
    SEEN["iterations"] = int(model.optimizer.iterations.numpy())
    SEEN["examples"] = history.history["examples"]
    SEEN["val_examples"] = history.history["val_examples"]
    SEEN["weights"] = zoo.flat(model)
    with strategy.scope():
        model = zoo.dense(kind=zoo.CustomStep)
    history = tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, verbose=0)
    SEEN["custom step"] = list(history.history)


def grid():
    SEEN.update(zoo.learned(strategy, OUT, verbose=2))


def sources():
    found = zoo.sources(6, drop_remainder=True)
    models, seen = zoo.evaluated(strategy, found)
    SEEN.update(seen)
    for name, model in models.items():
        SEEN[f"iterations {name}"] = int(model.optimizer.iterations.numpy())
        predicted = tfdist.predict(model, found["dataset"], verbose=0)
        SEEN[f"predicted {name}"] = predicted.shape[0]

    def numbered(batch, *, example_ids, epoch, seed):
        return batch[0], tf.cast(example_ids, tf.float32)[:, None]

    for name, data in {
        "dataset": StreamSource(found["dataset"].take(2), transform=numbered),  # for 3 workers
        "function": InputFunctionSource(found["function"], transform=numbered),
    }.items():
        with strategy.scope():
            model = zoo.dense()
            model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[Targets()])
        history = tfdist.fit(model, data, epochs=2, steps_per_epoch=5, verbose=0).history
        SEEN[f"numbers {name}"] = sum(history["targets"])

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return zoo.X, zoo.Y

    import tensorflow_text  # the workers do not import it

    def normalized(batch, **draws):
        texts = tensorflow_text.normalize_utf8(tf.as_string(batch[0]))
        return tf.strings.to_number(texts), batch[1]

    unknown = ArraySource(zoo.X, zoo.Y, transform=normalized)
    for name, data in (("python source", Batches()), ("unknown operation", unknown)):
        with strategy.scope():
            model = zoo.dense()
        try:
            tfdist.fit(model, data, verbose=0)
        except tfdist.UsageError as error:
            SEEN[name] = str(error)


def callbacks():
    with strategy.scope():
        model = zoo.dense()
    seen = []
    listed = [
        keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9),
        keras.callbacks.CSVLogger(OUT / "log.csv"),
        tfdist.ModelCheckpoint(OUT / "saved.keras"),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch)),
    ]
    history = tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, epochs=9, verbose=0, callbacks=listed)
    SEEN["epochs"] = len(history.history["loss"])
    SEEN["batches"] = seen


def own_step():
    loop, _ = zoo.own_loop(strategy)
    logs = loop.run(3)
    assert logs["each"].tolist() == [logs["loss"], 2 * logs["loss"], 3.0]
    SEEN["own step"] = [sorted(logs), loop.step, loop.results()]


def one_weight_loop():
    with strategy.scope():
        model, x = zoo.descending("sgd")
        model.optimizer.build(model.trainable_variables)
    return loop_of(model, x)


def loop_of(model, x):
    def step(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data[0]))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    return tfdist.StepLoop(step, (x, x), global_batch_size=8, seed=3)


def metrics():
    """Metrics of many kinds, over a model that stays as it is."""
    with strategy.scope():
        model = zoo.judged()
    found = tfdist.evaluate(
        model, zoo.IMAGES, zoo.JUDGED, batch_size=7, verbose=0, return_dict=True
    )
    SEEN["judged"] = {name: np.asarray(value).tolist() for name, value in found.items()}
    SEEN["figures"] = figures.by_tfdist(strategy)
    for metric in (Least, Most):
        with strategy.scope():
            model = zoo.dense()
            model.compile("sgd", "mse", metrics=[metric()])
        try:
            tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, verbose=0)
        except tfdist.UsageError as error:
            SEEN[metric.__name__] = error.code
    with strategy.scope():
        model = AutoEncoder(zoo.X.shape[1])
        model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
    logs = tfdist.fit(model, zoo.X, batch_size=8, validation_data=zoo.X, verbose=0).history
    outputs = model.decoder(model.encoder(zoo.X))
    SEEN["without call"] = [logs["val_mae"][0], float(np.abs(outputs - zoo.X).mean())]


def made_outside():
    """How a model is refused that is made in the scope and built outside, or has such a metric."""
    SEEN["made outside"] = []
    for optimizer, by_call in (("adam", False), ("adam", True), ("sgd", False)):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
        model(zoo.X[:2]) if by_call else model.build(zoo.X.shape)
        SEEN["made outside"].append(refusal_of(model))
    outside = keras.metrics.MeanAbsoluteError()
    with strategy.scope():
        model = zoo.dense()
        model.compile("sgd", "mse", metrics=[outside])
    SEEN["made outside"].append(refusal_of(model))


def refusal_of(model):
    try:
        tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, verbose=0)
    except tfdist.UsageError as error:
        return [error.where, error.code]
    return None


def steps_of_optimizers():
    optimizers = {
        "ramp": lambda: keras.optimizers.SGD(zoo.Ramp()),
        "accumulation": lambda: keras.optimizers.Lion(1.0, gradient_accumulation_steps=3),
        "momentum": lambda: keras.optimizers.SGD(1.0, momentum=1.0),
        "decay": lambda: keras.optimizers.Muon(
            1.0, adam_beta_1=0.0, adam_beta_2=0.0, adam_weight_decay=1e-9, exclude_layers=["."]
        ),
        "sums": lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=4),
    }
    for name, optimizer in optimizers.items():
        with strategy.scope():
            model, x = zoo.descending(optimizer())
        for _ in range(2 if name == "ramp" else 1):
            tfdist.fit(model, x, x, batch_size=4, epochs=7, verbose=0)
        SEEN[f"went down by {name}"] = -zoo.flat(model)[0]
    SEEN["still to go down"] = float(model.optimizer._accumulated_gradients[0].numpy()[0, 0])
    with strategy.scope():
        model, x = zoo.descending(optimizers["ramp"]())
        model.optimizer.build(model.trainable_variables)
    loops = [loop_of(model, x) for _ in range(2)]
    for steps in (3, 20, 1):
        for loop in loops:
            loop.run(steps)
    SEEN["went down by two loops"] = -zoo.flat(model)[0]


def staleness():
    account = worker_pool_of(strategy, patience_s=0).account
    for bound in (None, 0, 1):
        with strategy.scope():
            model = zoo.dense("adam")
        account.staleness.clear()
        run = tfdist.Run(max_staleness=bound)
        model.fit(zoo.X, zoo.Y, batch_size=4, epochs=7, verbose=0, callbacks=[run])
        SEEN[f"staleness {bound}"] = account.summary()["staleness"]
    SEEN["staleness of a meeting"] = zoo.stalenesses_of_a_meeting(strategy, times=3)
    loops = [one_weight_loop() for _ in range(2)]
    for _ in range(2):
        for loop in loops:
            loop.run(3)
    SEEN["applied twice"] = account.summary()["steps_applied_twice"]
    SEEN["repeated"] = account.summary()["repeated_ranges"]


class Slow(keras.layers.Layer):
    """Takes half a second or more, whatever the machine."""

    def call(self, x):
        until = tf.timestamp() + 0.6
        (now,) = tf.while_loop(lambda now: now < until, lambda _: tf.timestamp(), [tf.timestamp()])
        return x + tf.cast(0 * now, x.dtype)


def ranges_that_go_on():
    """Many ranges between two moments at which somebody looks; and a step too long for two."""
    pool = worker_pool_of(strategy, patience_s=0)
    with strategy.scope():
        model = zoo.dense()
        model.compile("sgd", "mse", metrics=[Examples()])
    left, run = [], ParameterServerEngine.run

    def run_and_look(engine, *args, **kwargs):
        logs = run(engine, *args, **kwargs)
        left.append(engine.steps_under_way)
        return logs

    class Raising(keras.callbacks.Callback):
        once_a_range = True

        def on_train_batch_end(self, batch, logs=None):
            if left[-1]:
                raise LookupError("mine")

    (x, y), (xv, yv) = ((np.tile(zoo.X, (n, 1)), np.tile(zoo.Y, (n, 1))) for n in (10, 5))
    with (
        mock.patch.object(ParameterServerEngine, "run", run_and_look),
        mock.patch("tfdist.training.blocks._BLOCK_S", 0.05),
    ):
        history = tfdist.fit(
            model, x, y, batch_size=2, epochs=2, verbose=0, validation_data=(xv, yv)
        ).history
        SEEN["ranges that go on"] = {
            "examples": history["examples"] + history["val_examples"],
            "iterations": int(model.optimizer.iterations.numpy()),
            "left": left[:],
        }
        try:
            tfdist.fit(model, x, y, batch_size=2, epochs=9, verbose=0, callbacks=[Raising()])
        except LookupError:
            SEEN["under way after an error"] = len(pool._held)
    with strategy.scope():
        model = keras.Sequential([keras.Input((zoo.X.shape[1],)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    pool.account.staleness.clear()
    tfdist.fit(model, zoo.X[:12], zoo.Y[:12], batch_size=1, verbose=0)
    SEEN["staleness of slow steps"] = pool.account.summary()["staleness"]


def methods_of_keras():
    SEEN["methods of Keras"] = zoo.by_methods_of_keras(strategy, OUT / "cut")


def search():
    def build(hp):
        model = zoo.dense()
        model.optimizer.learning_rate = hp.Choice("rate", [0.1, 0.0])
        return model

    tuner = keras_tuner.GridSearch(
        build, "val_loss", directory=OUT / "search", distribution_strategy=strategy
    )
    data = {"validation_data": (zoo.X, zoo.Y), "epochs": 3, "verbose": 0}
    tuner.search(zoo.X, zoo.Y, **data)
    trials = {trial.hyperparameters["rate"]: trial for trial in tuner.oracle.trials.values()}
    best, _ = tuner.get_best_models(2)
    SEEN["search"] = {
        "best": tuner.get_best_hyperparameters()[0]["rate"],
        "trials": [[trials[rate].status, trials[rate].score] for rate in (0.1, 0.0)],
        "evaluated": best.evaluate(zoo.X, zoo.Y, verbose=0),
    }


PARTS = (
    counts, grid, sources, callbacks, own_step, metrics, steps_of_optimizers, staleness,
    ranges_that_go_on, methods_of_keras, search, made_outside,
)  # fmt: skip
for part in PARTS:
    if not sys.argv[2:] or part.__name__ in sys.argv[2:]:
        print(f"doing {part.__name__}", flush=True)
        part()
(OUT / "seen.json").write_text(json.dumps(SEEN))
