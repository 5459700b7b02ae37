"""BatchNormalization by the fused kernel: what it computes is Keras', and where it is taken."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.refusals import refusal
from tfdist.strategy.layer_devices import PlacedStrategy
from tfdist.training import keras_compat

L = keras.layers
SHAPE = (4, 5, 6, 3)
RNG = np.random.default_rng(0)
X = RNG.normal(1.0, 2.0, (22, 6, 6, 2)).astype("float32")
Y = RNG.integers(0, 3, (22,))


class Derived(L.BatchNormalization):
    """May compute something else."""


def computed(layer, x, *, fused, training=True, **given):
    """What a step computes of a layer, with the gradients by its input and weights; its kernels."""
    layer.build(x.shape)
    keras_compat.fuse_batch_norm(keras.Sequential([layer]), fused=fused)
    random = np.random.default_rng(1)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    slope = tf.constant(random.normal(size=x.shape), x.dtype)

    @tf.function(autograph=False)
    def step(x):
        trace = keras_compat.StepTrace(
            num_replicas=1, share=1.0, examples=1, random_key=tf.zeros([2], tf.int32)
        )
        with tf.GradientTape() as tape, keras_compat.tracing(trace):
            tape.watch(x)
            loss = tf.reduce_sum(tf.cast(layer(x, training=training, **given), x.dtype) * slope)
        return loss, tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    graph = step.get_concrete_function(tf.constant(x)).graph
    kernels = {o.type for o in graph.get_operations() if o.type.startswith("FusedBatchNorm")}
    loss, gradients = step(tf.constant(x))
    return [loss, *gradients, *layer.weights], kernels


@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 6, 3), (1, 1, 4, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"center": False},
        {"scale": False},
        {"center": False, "scale": False},
        {"momentum": 0.5, "epsilon": 1e-6, "axis": 3},
    ],
)
def test_outputs_gradients_and_statistics_are_those_of_keras(shape, options):
    x = np.random.default_rng(2).normal(3.0, 2.0, shape).astype("float32")
    expected, none = computed(L.BatchNormalization(**options), x, fused=False)
    found, kernels = computed(L.BatchNormalization(**options), x, fused=True)
    assert not none
    assert kernels == {"FusedBatchNormV3", "FusedBatchNormGradV3"}
    for one, other in zip(found, expected, strict=True):
        largest = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


def test_a_batch_of_one_number_has_no_variance():
    x = np.full((1, 1, 1, 2), 3.0, "float32")
    found, kernels = computed(L.BatchNormalization(momentum=0.0), x, fused=True)
    assert kernels
    *_, mean, variance = found
    np.testing.assert_array_equal(mean, [3.0, 3.0])
    np.testing.assert_array_equal(variance, [0.0, 0.0])


ELSE = {
    "a class derived from it": (Derived, SHAPE, {}),
    "a vector": (L.BatchNormalization, (4, 3), {}),
    "a volume": (L.BatchNormalization, (2, 2, 2, 2, 3), {}),
    "channels first": (lambda: L.BatchNormalization(axis=1), SHAPE, {}),
    "bfloat16": (lambda: L.BatchNormalization(dtype="mixed_bfloat16"), SHAPE, {}),
    "float16": (lambda: L.BatchNormalization(dtype="mixed_float16"), SHAPE, {}),
    "bfloat16 of float32": (
        lambda: L.BatchNormalization(dtype="mixed_bfloat16", autocast=False),
        SHAPE,
        {},
    ),
    "float32 of float16": (lambda: L.BatchNormalization(autocast=False), SHAPE, {}),
    "float64": (lambda: L.BatchNormalization(dtype="float64"), SHAPE, {}),
    "synchronized": (lambda: L.BatchNormalization(synchronized=True), SHAPE, {}),
    "renorm": (lambda: L.BatchNormalization(renorm=True), SHAPE, {}),
    "a mask": (L.BatchNormalization, SHAPE, {"mask": tf.constant(np.ones(SHAPE[:3], bool))}),
    "frozen": (lambda: L.BatchNormalization(trainable=False), SHAPE, {}),
    "inference": (L.BatchNormalization, SHAPE, {"training": False}),
}


@pytest.mark.parametrize("what", list(ELSE))
def test_all_else_goes_keras_way(what):
    make, shape, given = ELSE[what]
    dtype = "float16" if what == "float32 of float16" else "float32"
    x = np.random.default_rng(2).normal(3.0, 2.0, shape).astype(dtype)
    expected, _ = computed(make(), x, fused=False, **given)
    found, kernels = computed(make(), x, fused=True, **given)
    assert not kernels
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def convolutions(strategy, optimizer):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        block = keras.Sequential(
            [L.Conv2D(4, 3, use_bias=False), L.BatchNormalization(), L.ReLU()], name="block"
        )
        model = keras.Sequential(
            [keras.Input(X.shape[1:]), L.BatchNormalization(), block, L.Flatten(), L.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def fitted(strategy, *asked, optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9)):
    """The weights after a fit for each of `asked`, of epochs with a smaller last batch."""
    model = convolutions(strategy, optimizer)
    for fused in asked:
        tfdist.fit(
            model, X, Y, batch_size=8, epochs=2, seed=3, verbose=0,
            validation_data=(X[:5], Y[:5]), fused_batch_norm=fused,
        )  # fmt: skip
    return model.get_weights()


def accumulating():
    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, global_clipnorm=0.5)


@pytest.fixture
def kernels(monkeypatch):
    """The layers' inputs for which a kernel was traced."""
    kernel, traced = tf.raw_ops.FusedBatchNormV3, []

    def noted(**given):
        traced.append(given["x"])
        return kernel(**given)

    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", noted)
    return traced


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"optimizer": accumulating}])
def test_steps_end_with_the_weights_and_statistics_of_keras(strategies, kernels, replicas, options):
    expected = fitted(strategies[replicas], False, **options)
    assert not kernels
    found = fitted(strategies[replicas], True, **options)
    assert len(kernels) >= 2 * replicas
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_on_a_device_of_its_own_a_layer_gives_the_bits_of_one_device(strategies, kernels):
    placed = PlacedStrategy("/CPU:0", {"batch_normalization": "CPU:1"})
    np.testing.assert_equal(fitted(placed, True), fitted(strategies[1], True))
    assert kernels


def test_a_fit_is_by_what_it_asks_for_alone(strategies):
    by_keras, by_kernels, mixed = (
        fitted(strategies[1], *asked) for asked in ((False, False), (True, True), (True, False))
    )
    for one, other in itertools.combinations((by_keras, by_kernels, mixed), 2):
        assert any((a != b).any() for a, b in zip(one, other, strict=True))
    np.testing.assert_equal(fitted(strategies[1], True, True), by_kernels)  # the bits


def test_keras_own_training_is_as_it_was(strategies, kernels):
    model = convolutions(strategies[1], keras.optimizers.SGD)
    tfdist.fit(model, X, Y, batch_size=8, verbose=0, fused_batch_norm=True)
    count = len(kernels)
    assert count
    model(X, training=True)
    tfdist.evaluate(model, X, Y, batch_size=8, verbose=0)
    assert len(kernels) == count


@pytest.mark.parametrize("given", [1, None, "yes"])
def test_what_is_neither_true_nor_false_is_refused(strategies, given):
    model = convolutions(strategies[1], keras.optimizers.SGD)
    error = refusal(lambda: tfdist.fit(model, X, Y, fused_batch_norm=given))
    assert str(error).startswith(f"fused_batch_norm: received {given!r}; expected True or False.")
