"""Losses on several replicas: masks, weights, sums by the tape, what layers add."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import difference
from tests.multiprocess.programs import zoo
from tfdist.training.keras_compat.trace import warn_once

pytestmark = pytest.mark.slow

RNG = np.random.RandomState(0)
X = RNG.randn(60, 6).astype("float32")
X[1::3] *= 3
Y = RNG.randn(60, 1).astype("float32")
TOKENS = RNG.randint(1, 20, (60, 5))
TOKENS[:, 3:] *= RNG.randint(0, 2, (60, 2))
TOKENS[::4, 1:] = 0
TOKENS[40:48] = 0  # batches in which a replica, or all of them, have nothing unmasked
NEXT = RNG.randint(0, 4, (60, 5))
WEIGHTS = RNG.rand(60, 5).astype("float32")
BATCH_SIZE = 9  # 5 and 4 for two replicas; of 55 examples the last is a batch, and one has nothing


def trained(strategy, make, x, y=None, *, batch_size=BATCH_SIZE, epochs=2, **fit):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
    options = {"batch_size": batch_size, "epochs": epochs, "seed": 3, "verbose": 0, **fit}
    return model, tfdist.fit(model, x, y, **options).history


def require_equal(strategies, make, x, y=None, **fit):
    """Trains on one device and on two replicas; returns what one device made of it."""
    one, one_logs = trained(strategies[1], make, x, y, **fit)
    many, many_logs = trained(strategies[2], make, x, y, **fit)
    assert difference(one, many) < 1e-6
    for name, values in one_logs.items():
        np.testing.assert_allclose(many_logs[name], values, rtol=1e-5, atol=1e-7, err_msg=name)
    return one, one_logs


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", None])
def test_distillation(strategies, loss):
    def make():
        layers = keras.layers
        teacher, student = (
            keras.Sequential([keras.Input((6,)), layers.Dense(4, "softmax")]) for _ in "ts"
        )
        model = keras.distillation.Distiller(
            teacher, student, keras.distillation.LogitsDistillation(), student_loss_weight=0.7
        )
        given = loss or keras.losses.SparseCategoricalCrossentropy()
        model.compile(keras.optimizers.SGD(0.5), given, metrics=["accuracy"])
        return model

    require_equal(strategies, make, X, NEXT[:, 0])


# Terms of several kinds


class AddsByHand(keras.Sequential):
    """A mean by hand beside the loss of `compile`, as in guides on autoencoders."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * tf.reduce_mean(tf.abs(y_pred))


class MixesInItsStep(keras.Sequential):
    """Two updates: one by a sum of both kinds, one by a mean by hand alone."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
            by_hand = tf.reduce_mean(tf.abs(predicted))
            total = keras.ops.sum([loss, 0.5 * by_hand])
        for target in (total, by_hand):
            gradients = tape.gradient(target, self.trainable_variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 1e9)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(total)
        return {"total": self.tracker.result()}


class LearnsItsWeights(keras.Sequential):
    """A loss that is weighted by a variable, as for several tasks."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        log_variance = self.layers[0].bias[0]
        return keras.ops.exp(-log_variance) * loss + log_variance


@pytest.mark.parametrize("kind", [AddsByHand, MixesInItsStep, LearnsItsWeights])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_terms_by_hand_beside_losses_of_keras(strategies, kind, reduction):
    def make():
        dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
        model = kind([keras.Input((6,)), dense, keras.layers.BatchNormalization(synchronized=True)])
        model.tracker = keras.metrics.Mean(name="total")
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    validation = {} if kind is MixesInItsStep else {"validation_data": (X[:19], Y[:19])}
    require_equal(strategies, make, X[:55], Y[:55], **validation)


class KeepsGradients(keras.Sequential):
    """Keeps gradients in variables, as programs from before Keras did it do."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for kept, gradient in zip(self.kept(), gradients, strict=True):
            kept.assign_add(gradient)
        self.optimizer.apply([0.5 * kept for kept in self.kept()], self.trainable_variables)
        for kept in self.kept():
            kept.assign(0.3 * kept)
        return {"mine": loss}


class DescendsByHand(keras.Sequential):
    """Updates its weights without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return {"mine": loss}


@pytest.mark.parametrize("kind", [KeepsGradients, DescendsByHand])
def test_variables_that_a_step_assigns(strategies, kind):
    def make():
        model = kind([keras.Input((6,)), keras.layers.Dense(1)])
        kept = [
            keras.Variable(np.zeros(v.shape, "float32"), trainable=False)
            for v in model.trainable_variables
        ]
        model.kept = lambda: kept
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    require_equal(strategies, make, X[:55], Y[:55])


class ByTensorFlow(keras.Sequential):
    """Losses as in TensorFlow's guide to custom training."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=self.batch_size)
            loss += tf.nn.scale_regularization_loss(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"mine": self.tracker.result()}


@pytest.mark.parametrize("batch_size", [None, BATCH_SIZE])
def test_losses_by_tensorflows_guide(strategies, batch_size):
    def make():
        dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
        model = ByTensorFlow([keras.Input((6,)), dense])
        model.batch_size = batch_size
        model.tracker = keras.metrics.Mean(name="mine")
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(strategies, make, X[:55], Y[:55])


# Masks and weights


def tagger():
    """A class for each token, none for those that are 0."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.Dense(4),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), entropy(), metrics=["accuracy"])
    return model


# In batches of 5, the last step has one example for two replicas; in batches of 8, each of them has
# as many as the other at every step.
@pytest.mark.parametrize(("examples", "batch_size"), [(41, 5), (48, 8)])
def test_masked_losses_equal_one_device(strategies, examples, batch_size):
    data = {"validation_data": (TOKENS[:17], NEXT[:17]), "batch_size": batch_size}
    x, y = TOKENS[:examples], NEXT[:examples]
    require_equal(strategies, tagger, x, y, **data)


def of_several_outputs(losses):
    """A class for each token by each of several losses, whose heads have weights of their own."""

    def make():
        x = keras.Input((5,), dtype="int32")
        h = keras.layers.Embedding(20, 8, mask_zero=True)(x)
        model = keras.Model(x, {name: keras.layers.Dense(4, name=name)(h) for name in losses})
        weights = {name: 1.0 / number for number, name in enumerate(losses, 1)}
        model.compile(keras.optimizers.SGD(0.5), losses, loss_weights=weights)
        return model

    return make


def one_number(y_true, y_pred):
    """A mean that masks do not weight."""
    entropy = keras.losses.sparse_categorical_crossentropy
    return keras.ops.mean(entropy(y_true, y_pred, from_logits=True))


def entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def test_masked_losses_of_several_outputs_equal_one_device(strategies):
    losses = {"masked": entropy(), "ignoring": entropy(ignore_class=1), "number": one_number}
    x, y = TOKENS[:55], {name: np.roll(NEXT[:55], n, 0) for n, name in enumerate(losses)}
    # A last batch of one example.
    make, data = of_several_outputs(losses), {"validation_data": (x, y)}
    _, logs = require_equal(strategies, make, x, y, **data)
    assert {"masked_loss", "number_loss", "val_ignoring_loss"} < logs.keys()


def test_masked_losses_with_sample_weights_equal_one_device(strategies):
    losses = {"mean": entropy(), "weighted": entropy(reduction="mean_with_sample_weight")}
    losses["number"] = one_number
    y, weights = dict.fromkeys(losses, NEXT), dict.fromkeys(losses, WEIGHTS)
    require_equal(strategies, of_several_outputs(losses), TOKENS, y, sample_weight=weights)


def test_weighted_means_equal_one_device(strategies):
    def make():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    require_equal(strategies, make, X, Y, sample_weight=WEIGHTS[:, 0] ** 4)


def test_a_masked_loss_in_a_loop_says_that_replicas_count_for_themselves(strategies, caplog):
    class Micro(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            def add(i, total):
                predicted = tf.identity(y_pred)
                keras.src.backend.set_keras_mask(predicted, tf.not_equal(x, 0))
                return i + 1, total + self.loss(y, predicted)

            return tf.while_loop(lambda i, _: i < 2, add, [0, 0.0])[1]

    def make():
        model = Micro([keras.Input((5,)), keras.layers.Reshape((5, 1)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss)
        return model

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        trained(strategies[2], make, TOKENS.astype("float32"), NEXT)
    assert caplog.text.count("a masked loss in a loop or condition of the step") == 1


# Losses in one tensor


class SummedByTheTape(keras.Sequential):
    """A loss per example, as of published siamese networks; with a mean; a mean in another call."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            mean = tf.reduce_mean(self(x, training=True) ** 2)
        for target in (errors, [errors, mean], mean):
            gradients = tape.gradient(target, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(errors)
        return {"mine": self.tracker.result()}


# A last batch of 1, and one of 8 like all.
UNEVEN, EVEN = (55, BATCH_SIZE), (48, 8)


@pytest.mark.parametrize(("examples", "batch_size"), [UNEVEN, EVEN])
def test_a_loss_per_example_is_a_sum(strategies, examples, batch_size):
    def make():
        model = SummedByTheTape([keras.Input((6,)), keras.layers.Dense(1)])
        model.tracker = keras.metrics.Mean(name="mine")
        model.compile(keras.optimizers.SGD(0.001))
        return model

    require_equal(strategies, make, X[:examples], Y[:examples], batch_size=batch_size)


class PerExample(keras.layers.Layer):
    """Adds a loss of each example, as published models of OCR do."""

    def call(self, x):
        self.add_loss(tf.reduce_sum((x - 1.0) ** 2, -1, keepdims=True))
        return x


@pytest.mark.parametrize(
    ("examples", "batch_size", "loss"), [(*UNEVEN, "mse"), (*UNEVEN, None), (*EVEN, "mse")]
)
def test_a_vector_of_add_loss_is_a_sum(strategies, examples, batch_size, loss):
    def make():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), PerExample()])
        model.compile(keras.optimizers.SGD(0.001), loss)
        return model

    x, y = X[:examples], Y[:examples]
    data = {"validation_data": (x[:19], y[:19])}
    require_equal(strategies, make, x, y, batch_size=batch_size, **data)


class TwoMeans(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.stack([tf.reduce_mean(x**2), tf.reduce_mean(tf.abs(x))]))
        return x


def test_several_means_in_one_tensor_are_means_and_warned_of_once(strategies, caplog):
    def make():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), TwoMeans()])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        require_equal(strategies, make, X, Y, batch_size=8)
        trained(strategies[2], make, X, Y)
    told = [record.message for record in caplog.records if record.name.startswith("tfdist")]
    assert len(told) == 1
    assert told[0].startswith("add_loss of shape (2,) on 2 replicas")
    assert "1/2 of what they count on one device" in told[0]


class Clips(keras.optimizers.SGD):
    """Clips by a method of its own, to which a replica's own gradients come."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.clip_by_norm(g, 0.1) for g in grads], trainable_variables)


@pytest.mark.parametrize("kind", [Clips, keras.optimizers.SGD])
def test_an_optimizer_that_takes_gradients_by_itself_is_warned_of(strategies, caplog, kind):
    def make():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(kind(0.001), "mse")
        return model

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        trained(strategies[2], make, X, Y)
    said = "Clips.apply gets the gradients of each replica's own part of the batch"
    assert caplog.text.count(said) == (1 if kind is Clips else 0)


class Contrastive(keras.Model):
    """Which of the others in the batch is an example's own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(4), keras.layers.Dense(4)

    def call(self, x):
        return tf.matmul(self.left(x), self.right(x**2), transpose_b=True)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            likeness = self(data)
            own = tf.range(tf.shape(likeness)[0])
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(own, likeness)
            loss = tf.reduce_mean(entropy)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"mine": loss}


class SumOfAll(Contrastive):
    """A likeness that is summed over the examples, as `tensordot(left, right, 2)` is."""

    def call(self, x):
        return tf.tensordot(self.left(x), self.right(x**2), 2) + tf.tile(self.left(x), [1, 4])


@pytest.mark.parametrize("kind", [Contrastive, SumOfAll])
@pytest.mark.parametrize("examples", [60, 48])
def test_losses_over_pairs_say_that_replicas_see_their_own_part(strategies, caplog, kind, examples):
    def make():
        model = kind()
        model.compile(keras.optimizers.SGD(0.001))
        return model

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        trained(strategies[1], make, X[:examples])
        assert not caplog.records
        trained(strategies[2], make, X[:examples])
    assert caplog.text.count("a matrix product of the batch with itself on 2 replicas") == 1


def test_layers_as_wide_as_a_part_of_the_batch_compare_nothing(strategies, caplog):
    def make():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(4) for _ in range(3))])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        trained(strategies[2], make, X[:48], X[:48, :4])
    assert not caplog.records


# What layers add


@pytest.mark.parametrize("shared", [False, True])
def test_activity_regularizers_and_synchronized_statistics_equal_one_device(strategies, shared):
    def make():
        return zoo.with_activities(shared=shared)

    x, y = X[:55], Y[:55]
    require_equal(strategies, make, x, y, validation_data=(x[:19], y[:19]))


class AddsItsSquares(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class ReadsAfterTheUpdate(keras.Sequential):
    """As the published VQ-VAE, whose metric is what its layers have added."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(sum(self.losses))
        return {"added": self.tracker.result()}


class ReturnsItsLosses(ReadsAfterTheUpdate):
    """Takes the losses of a call that leaves nothing behind."""

    def train_step(self, data):
        x, y = data
        trainable, others = self.trainable_variables, self.non_trainable_variables
        with tf.GradientTape() as tape:
            values = [tf.convert_to_tensor(v) for v in trainable]
            tape.watch(values)
            call = self.stateless_call(values, others, x, training=True, return_losses=True)
            found, _, added = call
            loss = tf.reduce_mean((found - y) ** 2) + sum(added)
        gradients = tape.gradient(loss, values)
        self.optimizer.apply_gradients(zip(gradients, trainable, strict=True))
        self.tracker.update_state(sum(added))
        return {"added": self.tracker.result()}


@pytest.mark.parametrize("kind", [ReadsAfterTheUpdate, ReturnsItsLosses])
def test_losses_read_in_a_step_are_those_of_the_replica(strategies, kind):
    def make():
        layers = [keras.layers.Dense(4), AddsItsSquares()]
        layers += [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        model = kind([keras.Input((6,)), *layers])
        model.tracker = keras.metrics.Mean(name="added")
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(strategies, make, X[:55], Y[:55])


def test_a_step_leaves_no_losses_of_its_graph_behind(strategies):
    with strategies[2].scope():
        layers = [keras.layers.Dense(1, kernel_regularizer="l2"), AddsItsSquares()]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
    tfdist.fit(model, X, Y, batch_size=8, verbose=0)
    (of_weights,) = [float(loss) for loss in model.losses]
    model(X)
    assert float(model.losses[-1]) == pytest.approx(of_weights)
    assert len(model.losses) == 2
