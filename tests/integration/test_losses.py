"""Losses on several replicas: masks, weights, sums by the tape, what layers add."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models import OwnStep, Tracked, difference, trained
from tests.multiprocess.programs import zoo
from tfdist.errors import UsageError
from tfdist.training.keras_compat.trace import warn_once

pytestmark = pytest.mark.slow

L = keras.layers
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


def require_equal(strategies, make, x, y=None, **fit):
    """Trains on one device and on two replicas."""
    options = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, **fit}
    one, one_logs = trained(strategies[1], make, x, y, **options)
    many, many_logs = trained(strategies[2], make, x, y, **options)
    assert difference(one, many) < 1e-6
    assert list(one_logs) == list(many_logs)
    for name, values in one_logs.items():
        np.testing.assert_allclose(many_logs[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def of(kind=keras.Sequential, layers=lambda: [L.Dense(1)], loss=None, *, rate=0.01):
    """What makes a model of a kind in a strategy's scope."""

    def make():
        model = kind([keras.Input((6,)), *layers()])
        model.compile(keras.optimizers.SGD(rate), loss)
        return model

    return make


# Terms of several kinds


class AddsByHand(keras.Sequential):
    """A mean by hand beside the loss of `compile`, as in guides on autoencoders."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * tf.reduce_mean(tf.abs(y_pred))


class LearnsItsWeights(keras.Sequential):
    """A loss that is weighted by a variable, as for several tasks."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        log_variance = self.layers[0].bias[0]
        return keras.ops.exp(-log_variance) * loss + log_variance


class MixesInItsStep(Tracked, keras.Sequential):
    """Two updates: one by a sum of both kinds, one by a mean by hand alone."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            by_hand = tf.reduce_mean(tf.abs(predicted))
            total = keras.ops.sum([self.compute_loss(x, y, predicted), 0.5 * by_hand])
        for target in (total, by_hand):
            gradients = tape.gradient(target, self.trainable_variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 1e9)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs_of(total, data)


def synchronized():
    dense = L.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    return dense, L.BatchNormalization(synchronized=True)


MEAN, SUM = keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(reduction="sum")


class KeepsGradients(OwnStep, keras.Sequential):
    """Keeps gradients in variables, as programs from before Keras did it do."""

    def compile(self, *arguments):
        super().compile(*arguments)
        weights = self.trainable_variables
        kept = [keras.Variable(np.zeros(v.shape, "float32"), trainable=False) for v in weights]
        self.kept = lambda: kept

    def update(self, gradients):
        for kept, gradient in zip(self.kept(), gradients, strict=True):
            kept.assign_add(gradient)
        super().update([0.5 * kept for kept in self.kept()])
        for kept in self.kept():
            kept.assign(0.3 * kept)


class DescendsByHand(OwnStep, keras.Sequential):
    """Updates its weights without an optimizer."""

    def update(self, gradients):
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)


class ByTensorFlow(Tracked, keras.Sequential):
    """Losses as in TensorFlow's guide to custom training."""

    global_batch_size = None

    def loss_of(self, data):
        x, y = data
        errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
        size = self.global_batch_size
        loss = tf.nn.compute_average_loss(errors, global_batch_size=size)
        return loss + tf.nn.scale_regularization_loss(self.losses)


class BySize(ByTensorFlow):
    global_batch_size = BATCH_SIZE


def penalized():
    return [L.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))]


def distiller(loss):
    teacher, student = (keras.Sequential([keras.Input((6,)), L.Dense(4, "softmax")]) for _ in "ts")
    model = keras.distillation.Distiller(
        teacher, student, keras.distillation.LogitsDistillation(), student_loss_weight=0.7
    )
    model.compile(keras.optimizers.SGD(0.5), loss(), metrics=["accuracy"])
    return model


VALIDATED = {"validation_data": (X[:19], Y[:19])}
SPARSE = keras.losses.SparseCategoricalCrossentropy
TERMS = {
    "by hand": (of(AddsByHand, synchronized, MEAN), VALIDATED),
    "by hand beside a sum": (of(AddsByHand, synchronized, SUM), VALIDATED),
    "two in a step": (of(MixesInItsStep, synchronized, MEAN), {}),
    "two in a step beside a sum": (of(MixesInItsStep, synchronized, SUM), {}),
    "weighted by a variable": (of(LearnsItsWeights, synchronized, SUM), VALIDATED),
    "gradients that are kept": (of(KeepsGradients, loss="mse"), {}),
    "no optimizer": (of(DescendsByHand, loss="mse"), {}),
    "by TensorFlow's guide": (of(ByTensorFlow, penalized), {}),
    "by TensorFlow's guide and a size": (of(BySize, penalized), {}),
    "activities": (zoo.with_activities, VALIDATED),
    "activities of a layer used twice": (lambda: zoo.with_activities(shared=True), VALIDATED),
}


@pytest.mark.parametrize("what", TERMS)
def test_losses_of_several_terms_equal_one_device(strategies, what):
    make, options = TERMS[what]
    require_equal(strategies, make, X[:55], Y[:55], **options)


@pytest.mark.parametrize("loss", [lambda: "sparse_categorical_crossentropy", SPARSE])
def test_distillation(strategies, loss):
    require_equal(strategies, functools.partial(distiller, loss), X, NEXT[:, 0])


# Masks and weights


def entropy(**options):
    return SPARSE(from_logits=True, **options)


def one_number(y_true, y_pred):
    """A mean that masks do not weight."""
    entropies = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return keras.ops.mean(entropies)


def tagger(losses):
    """A class for each token that is not 0, by each of several losses, by heads of their own."""

    def make():
        x = keras.Input((5,), dtype="int32")
        h = L.Embedding(20, 8, mask_zero=True)(x)
        model = keras.Model(x, {name: L.Dense(4, name=name)(h) for name in losses})
        weights = {name: 1.0 / number for number, name in enumerate(losses, 1)}
        metrics = dict.fromkeys(losses, "accuracy")
        optimizer = keras.optimizers.SGD(0.5)
        model.compile(optimizer, losses, loss_weights=weights, metrics=metrics)
        return model

    return make


# Of 55 and 41 the last step has one example for two replicas; of 48 in batches of 8, each has as
# many as the other at every step.
@pytest.mark.parametrize(("examples", "batch_size"), [(55, BATCH_SIZE), (41, 5), (48, 8)])
def test_masked_losses_equal_one_device(strategies, examples, batch_size):
    losses = {"masked": entropy(), "ignoring": entropy(ignore_class=1), "number": one_number}
    x, y = TOKENS[:examples], NEXT[:examples]
    y = {name: np.roll(y, n, 0) for n, name in enumerate(losses)}
    data = {"validation_data": (x, y), "batch_size": batch_size}
    require_equal(strategies, tagger(losses), x, y, **data)


def test_masked_and_weighted_losses_equal_one_device(strategies):
    losses = {"mean": entropy(), "weighted": entropy(reduction="mean_with_sample_weight")}
    losses["number"] = one_number
    y, weights = dict.fromkeys(losses, NEXT), dict.fromkeys(losses, WEIGHTS)
    require_equal(strategies, tagger(losses), TOKENS, y, sample_weight=weights)
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    require_equal(strategies, of(loss=mean), X, Y, sample_weight=WEIGHTS[:, 0] ** 4)


# Losses in one tensor


class SummedByTheTape(Tracked, keras.Sequential):
    """A loss per example, as of published siamese networks; with a mean; a mean in another call."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            mean = tf.reduce_mean(self(x, training=True) ** 2)
        for target in (errors, [errors, mean], mean):
            self.update(tape.gradient(target, self.trainable_weights))
        return self.logs_of(errors, data)


class PerExample(L.Layer):
    """Adds a loss of each example, as published models of OCR do."""

    def call(self, x):
        self.add_loss(tf.reduce_sum((x - 1.0) ** 2, -1, keepdims=True))
        return x


def per_example():
    return L.Dense(1), PerExample()


SUMS = {
    "by the tape": of(SummedByTheTape, rate=0.001),
    "by add_loss": of(layers=per_example, loss="mse", rate=0.001),
    "by add_loss alone": of(layers=per_example, rate=0.001),
}


# A last batch of 1, and one of 8 like all.
@pytest.mark.parametrize(("examples", "batch_size"), [(55, BATCH_SIZE), (48, 8)])
@pytest.mark.parametrize("what", SUMS)
def test_a_loss_per_example_is_a_sum(strategies, what, examples, batch_size):
    x, y = X[:examples], Y[:examples]
    data = {} if what == "by the tape" else {"validation_data": (x[:19], y[:19])}
    require_equal(strategies, SUMS[what], x, y, batch_size=batch_size, **data)


# Means in one tensor, of which there are as many as examples of a replica, and unknown shapes


class ByTheTape(Tracked, keras.Sequential):
    """The gradient of what a function makes of targets and predictions."""

    def __init__(self, layers, loss):
        super().__init__(layers)
        self.loss_by_hand = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_by_hand(y, self(x, training=True))
        self.update(tape.gradient(loss, self.trainable_weights))
        mean = tf.add_n([tf.reduce_mean(part) for part in tf.nest.flatten(loss)])
        return self.logs_of(mean, data)


class ByKerasStep(keras.Sequential):
    """A loss of its own, of which Keras' step takes the gradient."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return means(y, y_pred)


def means(y, p):
    return tf.reduce_mean((p - y) ** 2, 0)


def in_python(y, p, shape=None):
    loss = tf.py_function(means if shape is None else of_each, [y, p], tf.float32)
    return loss if shape is None else tf.ensure_shape(loss, shape)


def of_each(y, p):
    return tf.reduce_mean((p - y) ** 2, -1)


def by_tape(loss, units=4):
    return of(functools.partial(ByTheTape, loss=loss), lambda: [L.Dense(units)])


class AddsForEachUnit(L.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2, 0))
        return x


def unmasked(y, p):
    return tf.boolean_mask(of_each(y, p), p[:, 0] > 0)


def sequences():
    rows = [X[i : i + 8, : 2 * 2].reshape(8, 2, 2) for i in range(0, 48, 8)]
    spec = tf.TensorSpec((None, None, 2)), tf.TensorSpec((None, 1, 1))
    batches = lambda: ((np.repeat(x, 2, 1), x[:, :1, :1]) for x in rows)  # noqa: E731
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def over_sequences():
    model = ByTheTape([keras.Input((None, 2)), L.Dense(1)], means)
    model.compile(keras.optimizers.SGD(0.01))
    return model


ADDED = of(layers=lambda: [L.Dense(4), AddsForEachUnit(), L.Dense(1)], loss="mse")
NUMBERS = {
    "a mean for each output": (by_tape(means), 8),
    "as many as the larger part of a batch has": (by_tape(means, 5), 9),
    "a matrix of means": (by_tape(lambda y, p: means(y[..., None], tf.stack([p, -p], -1))), 8),
    "beside a loss per example": (by_tape(lambda y, p: [means(y, p), of_each(y, p)]), 8),
    "by Keras' step": (of(ByKerasStep, lambda: [L.Dense(4)]), 8),
    "of layers": (ADDED, 8, {"validation_data": (X[:24], Y[:24])}),
    "of layers, of the larger part": (
        of(layers=lambda: [L.Dense(5), AddsForEachUnit(), L.Dense(1)], loss="mse"),
        9,
    ),
    "a loss per example of known shape": (
        by_tape(lambda y, p: in_python(y, p, y.shape[:1])),
        8,
    ),
    "one number of known shape": (
        by_tape(lambda y, p: tf.ensure_shape(tf.reduce_mean(in_python(y, p)), [])),
        8,
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_means_are_no_losses_of_examples(strategies, what):
    make, batch_size, *options = NUMBERS[what]
    require_equal(strategies, make, X[:48], Y[:48], batch_size=batch_size, **dict(*options))


class OfBags(Tracked, keras.Model):
    """A loss per example, of data that come ragged or sparse."""

    def __init__(self):
        super().__init__()
        self.embed = L.Embedding(20, 4)
        self.embed.build((None, None))

    def call(self, x):
        return tf.reduce_mean(self.embed(x.to_tensor() if hasattr(x, "to_tensor") else x), 1)

    def train_step(self, x):
        x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(self(x) ** 2, -1)
        self.update(tape.gradient(losses, self.trainable_variables))
        return self.logs_of(losses, x)


@pytest.mark.parametrize("of_tokens", [tf.RaggedTensor.from_tensor, tf.sparse.from_dense])
def test_a_loss_per_example_of_ragged_and_sparse_data_is_a_sum(strategies, of_tokens):
    def make():
        model = OfBags()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    data = tf.data.Dataset.from_tensor_slices(of_tokens(TOKENS[:36])).batch(BATCH_SIZE)
    require_equal(strategies, make, data, batch_size=None, shuffle=False)


def test_means_over_sequences_of_unknown_length_are_no_losses_of_examples(strategies):
    options = {"batch_size": None, "shuffle": False}
    require_equal(strategies, over_sequences, sequences(), **options)


@pytest.mark.parametrize("make", [by_tape(in_python), by_tape(unmasked)], ids=["Python", "a mask"])
def test_a_loss_whose_shape_does_not_tell_is_refused(strategies, make):
    trained(strategies[1], make, X[:8], Y[:8], batch_size=8)
    with pytest.raises(
        UsageError, match=r"loss: received a loss of shape .*loss\.set_shape"
    ) as found:
        trained(strategies[2], make, X[:8], Y[:8], batch_size=8)
    assert found.value.code == "unknown-shape"


# What is warned of


@pytest.fixture
def warnings(caplog):
    """What tfdist has warned of, each once in the process."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="tfdist")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("tfdist")]


class TwoMeans(L.Layer):
    def call(self, x):
        self.add_loss(tf.stack([tf.reduce_mean(x**2), tf.reduce_mean(tf.abs(x))]))
        return x


def test_several_means_in_one_tensor_are_means_and_warned_of(strategies, warnings):
    make = of(layers=lambda: [L.Dense(1), TwoMeans()], loss="mse", rate=0.001)
    require_equal(strategies, make, X, Y, batch_size=8)
    trained(strategies[2], make, X, Y)
    (line,) = warnings()
    assert line.startswith("add_loss of shape (2,) on 2 replicas")


class InALoop(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        def add(i, total):
            predicted = tf.identity(y_pred)
            keras.src.backend.set_keras_mask(predicted, tf.not_equal(predicted, 0))
            return i + 1, total + self.loss(y, predicted)

        return tf.while_loop(lambda i, _: i < 2, add, [0, 0.0])[1]


class Clips(keras.optimizers.SGD):
    """Clips by a method of its own, to which a replica's own gradients come."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.clip_by_norm(g, 0.1) for g in grads], trainable_variables)


def clipping():
    model = keras.Sequential([keras.Input((6,)), L.Dense(1)])
    model.compile(Clips(0.001), "mse")
    return model


class Contrastive(OwnStep, keras.Model):
    """Which of the others in the batch is an example's own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = L.Dense(4), L.Dense(4)

    def call(self, x):
        return tf.matmul(self.left(x), self.right(x**2), transpose_b=True)

    def loss_of(self, data):
        likeness = self(data[0])
        own = tf.range(tf.shape(likeness)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, likeness))


class SumOfAll(Contrastive):
    """A likeness that is summed over the examples, as `tensordot(left, right, 2)` is."""

    def call(self, x):
        return tf.tensordot(self.left(x), self.right(x**2), 2) + tf.tile(self.left(x), [1, 4])


def comparing(kind):
    def make():
        model = kind()
        model.compile(keras.optimizers.SGD(0.001))
        return model

    return make


class DividesASum(OwnStep, keras.Sequential):
    """A mean by hand, of a loss that sums."""

    def loss_of(self, data):
        x, y = data
        return SUM(y, self(x)) / tf.cast(tf.shape(x)[0], tf.float32)


class DividesByAll(DividesASum):
    """By the examples of the whole batch, which is right."""

    def loss_of(self, data):
        return SUM(data[1], self(data[0])) / 8


PAIRS = "a matrix product of the batch with itself on 2 replicas"
QUOTIENT = "a loss that is a sum over the batch is divided by a number of each of 2 replicas"
DICE = functools.partial(of, layers=lambda: [L.Dense(1, "sigmoid")])
WARNED = {
    "a masked loss in a loop": (of(InALoop, loss=MEAN), 9, "a masked loss in a loop or condition"),
    "an optimizer's own method": (clipping, 9, "Clips.apply gets the gradients of each replica's"),
    "pairs": (comparing(Contrastive), 9, PAIRS),
    "pairs of even parts": (comparing(Contrastive), 8, PAIRS),
    "a sum of pairs": (comparing(SumOfAll), 9, PAIRS),
    "a sum of pairs of even parts": (comparing(SumOfAll), 8, PAIRS),
    "a sum that is divided": (of(DividesASum), 9, QUOTIENT),
    "a sum of even parts that is divided": (of(DividesASum), 8, QUOTIENT),
    "a sum that is divided by all": (of(DividesByAll), 8, None),
    "overlap of a batch": (DICE(loss=keras.losses.Dice()), 8, "Dice of a whole batch on 2 repl"),
    "overlap of an example": (DICE(loss=keras.losses.Tversky(axis=1)), 8, None),
    # Layers as wide as a part of the batch compare nothing.
    "nothing": (of(layers=lambda: [*map(L.Dense, (4, 4, 1))], loss="mse"), 8, None),
}


@pytest.mark.parametrize("what", WARNED)
def test_what_replicas_see_for_themselves_is_warned_of_once(strategies, warnings, what):
    make, batch_size, expected = WARNED[what]
    for replicas in (1, 2):
        trained(strategies[replicas], make, X[:48], Y[:48], batch_size=batch_size, epochs=1)
        assert replicas == 2 or not warnings()
    assert [line.startswith(expected or "-") for line in warnings()] == [True] * bool(expected)


# What layers add


class AddsItsSquares(L.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class ReadsAfterTheUpdate(Tracked, keras.Sequential):
    """As the published VQ-VAE, whose metric is what its layers have added."""

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self(x, training=True) - y) ** 2) + sum(self.losses)

    def logs_of(self, loss, data):
        return super().logs_of(sum(self.losses), data)


class ReturnsItsLosses(Tracked, keras.Sequential):
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
        self.update(tape.gradient(loss, values))
        return self.logs_of(sum(added), data)


@pytest.mark.parametrize("kind", [ReadsAfterTheUpdate, ReturnsItsLosses])
def test_losses_read_in_a_step_are_those_of_the_replica(strategies, kind):
    def layers():
        yield from (L.Dense(4), AddsItsSquares())
        yield from (L.BatchNormalization(synchronized=True), L.Dense(1))

    require_equal(strategies, of(kind, layers), X[:55], Y[:55])


def test_a_step_leaves_no_losses_of_its_graph_behind(strategies):
    make = of(layers=lambda: [L.Dense(1, kernel_regularizer="l2"), AddsItsSquares()], loss="mse")
    model, _ = trained(strategies[2], make, X, Y)
    (of_weights,) = [float(loss) for loss in model.losses]
    model(X)
    assert float(model.losses[-1]) == pytest.approx(of_weights)
    assert len(model.losses) == 2
