"""Logs that steps compute from metrics, by key, and metrics that steps give numbers to."""

import keras
import numpy as np
import tensorflow as tf

import tfdist

RNG = np.random.default_rng(1)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = np.eye(3, dtype="float32")[RNG.integers(0, 3, 50)]
FITS = {
    # Replicas have 8 and 7 examples, and one of two has none of the last step.
    "batches of several sizes": {"examples": 46, "batch_size": 15},
    # A replica of two has as many examples as an example has features.
    "batches of one size": {"examples": 48, "batch_size": 12},
}


class OfTwo(keras.metrics.Metric):
    """A mean over examples and their count; a dict of two results."""

    adds_up = True

    def __init__(self):
        super().__init__()
        self.inner = keras.metrics.Sum()
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, errors):
        self.inner.update_state(errors)
        self.count.assign_add(tf.cast(tf.shape(errors)[0], tf.float32))

    def result(self):
        return {"mean of two": self.inner.result() / self.count, "count of two": self.count}


def mistakes(y, predicted):
    return tf.cast(tf.argmax(y, 1) != tf.argmax(predicted, 1), tf.float32)


M = keras.metrics
# The metrics of the step, and the numbers that each step gives them.
FED = {
    "loss_mean": (M.Mean, lambda x, y, p, loss: loss),
    "examples_sum": (M.Sum, lambda x, y, p, loss: tf.shape(x)[0]),
    "examples_by_Python_sum": (M.Sum, lambda x, y, p, loss: keras.ops.shape(x)[0]),
    "mistakes_sum": (M.Sum, lambda x, y, p, loss: mistakes(y, p)),
    "steps_sum": (M.Sum, lambda x, y, p, loss: 1),
    "a_variable_sum": (M.Sum, lambda x, y, p, loss: RATE),
}
RATE = tf.constant(0.5)


# Logs by their keys, of a model's metrics.
LOGGED = {
    "another name": lambda m: m.accuracy.result(),
    "not linear": lambda m: m.auc.result(),
    "a vector": lambda m: m.f1.result(),
    "a dict": lambda m: m.of_two.result(),
    "a variable of a metric": lambda m: m.error.count,
    "nobody lists": lambda m: m.unlisted["metric"].result(),
}
# Under these keys a step returns what is computed from metrics.
MIXED = {
    "a product": lambda m, loss: 2 * m.error.result(),
    "a ratio of two": lambda m, loss: m.accuracy.result() / m.error.result(),
    "with a loss": lambda m, loss: m.accuracy.result() + loss,
    "a choice": lambda m, loss: choice(m.accuracy.result()),
    "in a condition": lambda m, loss: tf.cond(loss > 0, m.accuracy.result, lambda: 0.0),
    "in a function": lambda m, loss: tf.function(lambda: m.accuracy.result())(),
}


def choice(value):
    return tf.cond(value > 0.9, lambda: value, lambda: value + 1.0)


class Figures(keras.Model):
    """Steps of its own, which return `LOGGED`, results of `FED`, and one of `MIXED`, if any."""

    def __init__(self, mixed=None):
        super().__init__()
        self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
        self.criterion = keras.losses.CategoricalCrossentropy()
        self.accuracy, self.error, self.auc = M.CategoricalAccuracy(), M.MeanSquaredError(), M.AUC()
        self.f1 = M.F1Score()
        self.f1._build((None, 3), (None, 3))
        self.of_two = OfTwo()
        self.fed = {name: make(name=name) for name, (make, _) in FED.items()}
        self.unlisted = {"metric": M.Mean()}
        self.mixed = mixed

    @property
    def metrics(self):
        judging = [self.accuracy, self.error, self.auc, self.f1]
        return [*judging, self.of_two, *self.fed.values()]

    def call(self, x):
        return self.net(x)

    def logs_of(self, x, y):
        p = self.net(x)
        loss = self.criterion(y, p)
        for metric in (self.accuracy, self.error, self.auc, self.f1):
            metric.update_state(y, p)
        self.unlisted["metric"].update_state(loss)
        self.of_two.update_state(tf.reduce_mean((y - p) ** 2, 1))
        for name, (_, number) in FED.items():
            self.fed[name].update_state(number(x, y, p, loss))
        if self.mixed is not None:
            return {self.mixed: MIXED[self.mixed](self, loss)}
        logs = {key: log(self) for key, log in LOGGED.items()}
        return {**logs, **{name: metric.result() for name, metric in self.fed.items()}}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.criterion(data[1], self.net(data[0]))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.logs_of(*data)

    def test_step(self, data):
        return self.logs_of(*data)


def figures(mixed=None):
    """A model whose weights stay as they are, so that the order of steps does not matter."""
    keras.utils.set_random_seed(3)
    model = Figures(mixed)
    model.build((None, 6))
    model.compile(keras.optimizers.SGD(0.0))
    return model


def logged(model, fit, evaluate, *, examples, batch_size):
    """History of a fit, and the logs of an evaluation after it, by keys."""
    x, y = X[:examples], Y[:examples]
    options = {"batch_size": batch_size, "verbose": 0}
    found = fit(model, x, y, epochs=2, shuffle=False, validation_data=(x[:33], y[:33]), **options)
    evaluated = evaluate(model, x, y, return_dict=True, **options)
    return keras.tree.map_structure(
        lambda value: np.asarray(value).tolist(), {**found.history, "evaluated": evaluated}
    )


def by_tfdist(strategy):
    """What `logged` finds under a strategy, by the fits."""
    found = {}
    for name, options in FITS.items():
        with strategy.scope():
            model = figures()
        found[name] = logged(model, tfdist.fit, tfdist.evaluate, **options)
    return found


def by_keras():
    """What Keras' own fit and evaluate find on one device, by the fits."""
    return {
        name: logged(figures(), keras.Model.fit, keras.Model.evaluate, **options)
        for name, options in FITS.items()
    }


def require_equal(found, expected):
    """Fail where figures are not what one device has."""
    for fit, wanted in expected.items():
        evaluated = wanted["evaluated"].keys()
        assert found[fit].keys() == {*evaluated, *(f"val_{key}" for key in evaluated), "evaluated"}
        assert found[fit]["evaluated"].keys() == evaluated
        for key, value in wanted.items():
            where = {} if key == "evaluated" else {"": value}
            for inner, number in (where or value).items():
                seen = found[fit][key] if where else found[fit][key][inner]
                message = f"{fit}: {key} {inner}"
                np.testing.assert_allclose(seen, number, rtol=1e-4, err_msg=message)
