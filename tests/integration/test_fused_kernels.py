"""Fused kernels: what they compute is Keras', and where they are taken."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.strategy.layer_devices import PlacedStrategy
from tfdist.training import keras_compat

L = keras.layers
SHAPE = (4, 5, 6, 3)
KERNELS = ("FusedBatchNormV3", "FusedBatchNormGradV3", "PartitionedCall")
RNG = np.random.default_rng(0)
X = RNG.normal(1.0, 2.0, (22, 6, 6, 2)).astype("float32")
Y = RNG.integers(0, 3, (22,))


class Derived(L.BatchNormalization):
    """May compute something else."""


class DerivedDense(L.Dense):
    """May compute something else."""


def trace_of(*, fused=True):
    return keras_compat.StepTrace(
        num_replicas=1, share=1.0, examples=4, random_key=tf.zeros([2], tf.int32), fused=fused
    )


def computed(layer, x, *, fused, training=True, of=KERNELS, **given):
    """What a step computes of a layer, with the gradients by its input and weights; its kernels."""
    layer.build(x.shape)
    random = np.random.default_rng(1)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    slope = tf.constant(random.normal(size=layer.compute_output_shape(x.shape)), x.dtype)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape, keras_compat.tracing(trace_of(fused=fused)):
            tape.watch(x)
            loss = tf.reduce_sum(tf.cast(layer(x, training=training, **given), x.dtype) * slope)
        return loss, tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    graph = step.get_concrete_function(tf.constant(x)).graph
    kernels = {o.type for o in graph.get_operations() if o.type in of}
    loss, gradients = step(tf.constant(x))
    return [loss, *gradients, *layer.weights], kernels


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        largest = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, {}) for shape in (SHAPE, (1, 5, 6, 3), (1, 1, 4, 3))),
        (SHAPE, {"center": False}),
        (SHAPE, {"scale": False}),
        (SHAPE, {"center": False, "scale": False}),
        (SHAPE, {"momentum": 0.5, "epsilon": 1e-6, "axis": 3}),
    ],
)
def test_outputs_gradients_and_statistics_are_those_of_keras(shape, options):
    x = np.random.default_rng(2).normal(3.0, 2.0, shape).astype("float32")
    expected, none = computed(L.BatchNormalization(**options), x, fused=False)
    found, kernels = computed(L.BatchNormalization(**options), x, fused=True)
    assert not none
    assert kernels == {"FusedBatchNormV3", "FusedBatchNormGradV3"}
    assert_close(found, expected)


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
    np.testing.assert_equal([*map(np.asarray, found)], [*map(np.asarray, expected)])


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


def fitted(
    strategy,
    *asked,
    make=convolutions,
    optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
):
    """The weights after a fit for each of `asked`, of epochs with a smaller last batch."""
    model = make(strategy, optimizer)
    for fused in asked:
        tfdist.fit(
            model, X, Y, batch_size=8, epochs=2, seed=3, verbose=0,
            validation_data=(X[:5], Y[:5]), fused_kernels=fused,
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


@pytest.mark.parametrize(
    ("replicas", "options"), [(1, {}), (2, {"optimizer": accumulating}), (3, {})]
)
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
    tfdist.fit(model, X, Y, batch_size=8, verbose=0, fused_kernels=True)
    count = len(kernels)
    assert count
    model(X, training=True)
    tfdist.evaluate(model, X, Y, batch_size=8, verbose=0)
    assert len(kernels) == count


# LayerNormalization and GELU, which XLA compiles.

WORDS = np.random.default_rng(3).normal(0.5, 2.0, (4, 5, 7)).astype("float32")


class DerivedNormalization(L.LayerNormalization):
    """May compute something else."""


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *((L.LayerNormalization, shape) for shape in ((4, 5, 7), (1, 1, 7), (6, 7))),
        (lambda: L.LayerNormalization(epsilon=1e-6), (4, 5, 7)),
        (lambda: L.LayerNormalization(axis=[-1]), (4, 5, 7)),
        (lambda: L.LayerNormalization(axis=2), (4, 5, 7)),
        *((lambda: L.Activation("gelu"), shape) for shape in ((4, 5, 7), (6, 7))),
        (lambda: L.Activation(lambda x: keras.ops.gelu(x, approximate=True)), (4, 5, 7)),
        (lambda: L.Dense(7, activation="gelu"), (1, 1, 7)),
    ],
)
def test_what_xla_compiles_is_that_of_keras(make, shape):
    x = np.resize(WORDS, shape)
    expected, none = computed(make(), x, fused=False)
    found, kernels = computed(make(), x, fused=True)
    assert "PartitionedCall" not in none
    assert "PartitionedCall" in kernels
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (DerivedNormalization, WORDS),
        (lambda: L.LayerNormalization(axis=1), WORDS),
        (lambda: L.LayerNormalization(axis=[1, 2]), WORDS),
        (lambda: L.LayerNormalization(scale=False), WORDS),
        (lambda: L.LayerNormalization(center=False), WORDS),
        (lambda: L.LayerNormalization(dtype="mixed_bfloat16"), WORDS),
        (lambda: L.LayerNormalization(dtype="float64"), WORDS),
        (lambda: L.Activation("gelu", dtype="mixed_float16"), WORDS.astype("float16")),
        (lambda: L.Activation("gelu", dtype="float64"), WORDS.astype("float64")),
    ],
)
def test_what_xla_does_not_compile_goes_keras_way(make, x):
    expected, _ = computed(make(), x, fused=False)
    found, kernels = computed(make(), x, fused=True)
    assert "PartitionedCall" not in kernels
    np.testing.assert_equal([*map(np.asarray, found)], [*map(np.asarray, expected)])


def test_lengths_that_are_not_known_go_keras_way():
    activation = L.Activation("gelu")

    def step(x):
        with keras_compat.tracing(trace_of()):
            return activation(x)

    for shape, compiled in (([None, 7], True), ([None, None], False), ([None, 3, None], False)):
        spec = tf.TensorSpec(shape, tf.float32)
        graph = tf.function(step, autograph=False).get_concrete_function(spec).graph
        calls = [o for o in graph.get_operations() if o.type == "PartitionedCall"]
        assert bool(calls) == compiled


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_of_large_and_special_values(approximate):
    x = np.float32([[-1e30, -50, -10, -6, -1e-30, 0, 1e-30, 6, 10, 50, 1e30, np.inf, np.nan]])
    make = lambda: L.Activation(lambda x: keras.ops.gelu(x, approximate=approximate))  # noqa: E731
    (_, expected), _ = computed(make(), x, fused=False)
    (_, found), _ = computed(make(), x, fused=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# Products with a matrix of weights, and attention.

PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum")


@pytest.mark.parametrize(
    ("equation", "shape", "output"),
    [
        ("abc,cde->abde", (4, 5, 7), (5, 2, 3)),
        ("abcd,cde->abe", (4, 5, 2, 7), (5, 3)),
        ("abc,cd->abd", (4, 5, 7), (5, 3)),
        ("abcde,edf->abcf", (4, 5, 2, 3, 7), None),
        ("abcde,def->abcf", (4, 5, 2, 3, 7), (5, 2, 6)),
    ],
)
def test_a_product_with_weights_is_one_for_all_examples(equation, shape, output):
    if output is None:  # the axes of the weights in another order: as Keras has it
        output, kinds = (5, 2, 6), {"Einsum"}
    else:
        kinds = {"MatMul"}
    x = np.resize(WORDS, shape)
    expected, stock = computed(L.EinsumDense(equation, output), x, fused=False, of=PRODUCTS)
    found, kernels = computed(L.EinsumDense(equation, output), x, fused=True, of=PRODUCTS)
    assert stock != {"MatMul"}
    assert kernels == kinds
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_product_and_its_bias_are_one_kernel(dtype):
    make = lambda: L.Dense(3, activation="relu", bias_initializer="ones", dtype=dtype)  # noqa: E731
    if dtype == "float32":
        expected, _ = computed(make(), WORDS, fused=False)
        found, _ = computed(make(), WORDS, fused=True)
        assert_close(found, expected)

    layer = make()
    layer.build(WORDS.shape)

    def step(x):
        with keras_compat.tracing(trace_of()):
            return layer(x)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.constant(WORDS)).graph
    (added,) = (one for one in graph.get_operations() if one.type == "BiasAdd")
    assert added.inputs[0].op.type == "MatMul"  # which one kernel computes


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.EinsumDense("abc,cd->adb", (3, 5)),
        lambda: L.EinsumDense("abc,bcd->abd", (5, 3)),
        lambda: L.EinsumDense("...x,xy->...y", 3),
        lambda: L.EinsumDense("abc,cd->abd", (5, 3), bias_axes="b"),
        lambda: DerivedDense(3),
    ],
    ids=["transposed", "by position", "ellipsis", "bias of another axis", "derived"],
)
def test_other_products_are_keras_own(make):
    expected, stock = computed(make(), WORDS, fused=False, of=PRODUCTS)
    found, kernels = computed(make(), WORDS, fused=True, of=PRODUCTS)
    assert kernels == stock
    assert_close(found, expected)


def attending(layer, *, dtype="float32", mask=False, **call):
    """A model of one layer that attends to its inputs, some of which may be padding."""

    def make():
        x = keras.Input((5, 7))
        h = L.Masking(0.0)(x) if mask else x
        return keras.Model(x, layer(dtype=dtype)(h, h, **call))

    return make


HEADS = functools.partial(L.MultiHeadAttention, 2, 3)


@pytest.mark.parametrize(
    "make",
    [
        attending(HEADS),
        attending(HEADS, use_causal_mask=True),
        attending(HEADS, mask=True),
        attending(functools.partial(L.GroupQueryAttention, 3, 4, 2)),
        attending(functools.partial(L.GroupQueryAttention, 3, 4, 1), use_causal_mask=True),
        attending(functools.partial(L.MultiHeadAttention, 2, 3, dropout=0.0, output_shape=4)),
    ],
)
def test_attention_is_that_of_keras(make):
    x = WORDS.copy()
    x[1, 3:] = 0.0
    expected, stock = computed(make(), x, fused=False, of=PRODUCTS)
    found, kernels = computed(make(), x, fused=True, of=PRODUCTS)
    assert "Einsum" in stock
    assert kernels == {"MatMul", "BatchMatMulV2"}
    assert_close(found, expected)


def test_attention_in_half_precision_goes_keras_way():
    make = attending(HEADS, dtype="mixed_bfloat16")
    _, kernels = computed(make(), WORDS, fused=True, of=PRODUCTS)
    assert "Einsum" in kernels


def test_attention_adds_a_bias_and_scales():
    random = np.random.default_rng(5)
    query, key, value = random.normal(size=(3, 2, 5, 2, 3)).astype("float32")
    given = dict(bias=random.normal(size=(2, 2, 5, 5)).astype("float32"), scale=0.5)
    expected = keras.ops.dot_product_attention(query, key, value, **given)
    with keras_compat.tracing(trace_of()):
        found = keras.ops.dot_product_attention(query, key, value, **given)
    assert_close([found], [expected])


def transformer(strategy, optimizer=lambda: keras.optimizers.Adam(0.01)):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input(X.shape[1:])
        h = L.Reshape((12, 6))(x)
        normal = L.LayerNormalization()(h)
        h = L.Add()([h, L.MultiHeadAttention(2, 3)(normal, normal)])
        h = L.Add()([h, L.Dense(6, activation="gelu")(L.LayerNormalization()(h))])
        model = keras.Model(x, L.Dense(3)(L.Flatten()(h)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(("replicas", "options"), [(1, {}), (2, {"optimizer": accumulating})])
def test_steps_of_a_transformer_end_with_the_weights_of_keras(strategies, replicas, options):
    fit = dict(make=transformer, **options)
    expected = fitted(strategies[replicas], False, **fit)
    found = fitted(strategies[replicas], True, **fit)
    assert any((one != other).any() for one, other in zip(found, expected, strict=True))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    np.testing.assert_equal(fitted(strategies[replicas], True, **fit), found)  # the bits


def composed(x):
    """What LayerNormalization is; Keras' stops a gradient in its moments, as tf.nn.moments does."""
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
    return centered * tf.math.rsqrt(variance + 1e-3)


@pytest.mark.parametrize(
    ("make", "function"),
    [(lambda: L.Activation("gelu"), tf.nn.gelu), (L.LayerNormalization, composed)],
)
def test_a_gradient_of_a_gradient_is_right(make, function):
    weights = tf.constant(np.random.default_rng(4).normal(size=(7, 5)), tf.float32)
    layer = make()
    layer.build((4, 5, 5))

    @tf.function(autograph=False)
    def penalty(weights, layer, *, fused=False):
        x = tf.constant(WORDS)
        with tf.GradientTape() as outer, keras_compat.tracing(trace_of(fused=fused)):
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = tf.tanh(layer(x @ weights))
            loss = tf.reduce_mean(tf.square(inner.gradient(outputs, x)))
        return outer.gradient(loss, weights)

    found, expected = penalty(weights, layer, fused=True), penalty(weights, function)
    most = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * most)
    if function is composed:
        assert np.abs(penalty(weights, layer) - expected).max() > 1e-3 * most
