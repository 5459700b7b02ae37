"""Losses that several replicas refuse or warn of; equal ones are cells of test_conformance."""

import functools

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common.masking import set_keras_mask

from tests.integration.test_conformance import (
    MEAN,
    SUM,
    AddsItsSquares,
    TwoMeans,
    X,
    Y,
    by_tape,
    in_python,
    of,
    unmasked,
)
from tests.models import OwnStep, trained
from tfdist.errors import UsageError

pytestmark = pytest.mark.slow

L = keras.layers


@pytest.mark.parametrize("make", [by_tape(in_python), by_tape(unmasked)], ids=["Python", "a mask"])
def test_a_loss_whose_shape_does_not_tell_is_refused(strategies, make):
    trained(strategies[1], make, X[:8], Y[:8], batch_size=8)
    with pytest.raises(UsageError, match=r"loss: the loss of shape .*loss\.set_shape") as found:
        trained(strategies[2], make, X[:8], Y[:8], batch_size=8)
    assert found.value.code == "unknown-shape"


# What is warned of


def test_several_means_in_one_tensor_warn_once(strategies, warnings):
    make = of(parts=lambda: [L.Dense(1), TwoMeans()], loss="mse", rate=0.001)
    for _ in range(2):
        trained(strategies[2], make, X, Y, batch_size=8)
    (line,) = warnings()
    assert line.startswith("add_loss of shape (2,) on 2 replicas")


class InALoop(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        def add(i, total):
            predicted = tf.identity(y_pred)
            set_keras_mask(predicted, tf.not_equal(predicted, 0))
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
DICE = functools.partial(of, parts=lambda: [L.Dense(1, "sigmoid")])
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
    "nothing": (of(parts=lambda: [*map(L.Dense, (4, 4, 1))], loss="mse"), 8, None),
}


@pytest.mark.parametrize("what", WARNED)
def test_losses_that_depend_on_the_replicas_batch_warn_once(strategies, warnings, what):
    make, batch_size, expected = WARNED[what]
    for replicas in (1, 2):
        trained(strategies[replicas], make, X[:48], Y[:48], batch_size=batch_size, epochs=1)
        assert replicas == 2 or not warnings()
    assert [line.startswith(expected or "-") for line in warnings()] == [True] * bool(expected)


def test_a_step_leaves_no_losses_of_its_graph_behind(strategies):
    make = of(parts=lambda: [L.Dense(1, kernel_regularizer="l2"), AddsItsSquares()], loss="mse")
    model, _ = trained(strategies[2], make, X, Y)
    (of_weights,) = [float(loss) for loss in model.losses]
    model(X)
    assert float(model.losses[-1]) == pytest.approx(of_weights)
    assert len(model.losses) == 2
