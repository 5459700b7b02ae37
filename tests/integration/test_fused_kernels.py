"""Fused kernels: what they compute is Keras', and where they are taken."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.strategy.layer_devices import PlacedStrategy
from tfdist.training import keras_compat

L = keras.layers
BATCH_NORM = {"FusedBatchNormV3", "FusedBatchNormGradV3"}
XLA = {"PartitionedCall"}
PRODUCTS = {"MatMul", "BatchMatMulV2", "Einsum"}
KERNELS = BATCH_NORM | XLA | PRODUCTS
RNG = np.random.default_rng(0)
X = RNG.normal(1.0, 2.0, (22, 6, 6, 2)).astype("float32")
Y = RNG.integers(0, 3, (22,))
IMAGES = np.random.default_rng(2).normal(3.0, 2.0, (4, 5, 6, 3)).astype("float32")
WORDS = np.random.default_rng(3).normal(0.5, 2.0, (4, 5, 7)).astype("float32")
PADDED = WORDS.copy()
PADDED[1, 3:] = 0.0


class DerivedBatch(L.BatchNormalization):
    """May compute something else."""


class DerivedLayer(L.LayerNormalization):
    """May compute something else."""


class DerivedDense(L.Dense):
    """May compute something else."""


def trace_of(*, fused=True):
    return keras_compat.bare_trace(4, fused=fused)


def computed(layer, x, *, fused, training=True, **given):
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
    loss, gradients = step(tf.constant(x))
    kernels = {o.type for o in graph.get_operations()} & KERNELS
    return [loss, *gradients, *layer.weights], kernels


def assert_close(found, expected, rtol=1e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())


def attending(layer, *, dtype="float32", mask=False, **call):
    """What makes a model of one layer that attends to its inputs, some of which may be padding."""

    def make():
        x = keras.Input((5, 7))
        h = L.Masking(0.0)(x) if mask else x
        return keras.Model(x, layer(dtype=dtype)(h, h, **call))

    return make


partial = functools.partial
Batch, Layer, Product = L.BatchNormalization, L.LayerNormalization, L.EinsumDense
GELU = partial(L.Activation, "gelu")
HEADS = partial(L.MultiHeadAttention, 2, 3)
ATTENTION = {"MatMul", "BatchMatMulV2"}
FUSED = {
    **{f"batch {shape}": (Batch, shape, BATCH_NORM) for shape in ((1, 5, 6, 3), (1, 1, 4, 3))},
    "batch": (Batch, None, BATCH_NORM),
    "batch without center": (partial(Batch, center=False), None, BATCH_NORM),
    "batch without scale": (partial(Batch, scale=False), None, BATCH_NORM),
    "batch without both": (partial(Batch, center=False, scale=False), None, BATCH_NORM),
    "batch options": (partial(Batch, momentum=0.5, epsilon=1e-6, axis=3), None, BATCH_NORM),
    **{f"layer {shape}": (Layer, shape, XLA) for shape in ((4, 5, 7), (1, 1, 7), (6, 7))},
    "layer epsilon": (partial(Layer, epsilon=1e-6), (4, 5, 7), XLA),
    "layer [-1]": (partial(Layer, axis=[-1]), (4, 5, 7), XLA),
    "layer 2": (partial(Layer, axis=2), (4, 5, 7), XLA),
    **{f"gelu {shape}": (GELU, shape, XLA) for shape in ((4, 5, 7), (6, 7))},
    "gelu by tanh": (
        lambda: L.Activation(lambda x: keras.ops.gelu(x, approximate=True)),
        (4, 5, 7),
        XLA,
    ),
    "gelu of a layer": (partial(L.Dense, 7, activation="gelu"), (1, 1, 7), {*XLA, "MatMul"}),
    "heads": (partial(Product, "abc,cde->abde", (5, 2, 3)), (4, 5, 7), {"MatMul"}),
    "of heads": (partial(Product, "abcd,cde->abe", (5, 3)), (4, 5, 2, 7), {"MatMul"}),
    "matrix": (partial(Product, "abc,cd->abd", (5, 3)), (4, 5, 7), {"MatMul"}),
    "two axes": (partial(Product, "abcde,def->abcf", (5, 2, 6)), (4, 5, 2, 3, 7), {"MatMul"}),
    "attention": (attending(HEADS), (4, 5, 7), ATTENTION),
    "causal": (attending(HEADS, use_causal_mask=True), (4, 5, 7), ATTENTION),
    "masked": (attending(HEADS, mask=True), (4, 5, 7), ATTENTION),
    "groups": (attending(partial(L.GroupQueryAttention, 3, 4, 2)), (4, 5, 7), ATTENTION),
    "one group": (
        attending(partial(L.GroupQueryAttention, 3, 4, 1), use_causal_mask=True),
        (4, 5, 7),
        ATTENTION,
    ),
    "narrow": (attending(partial(HEADS, dropout=0.0, output_shape=4)), (4, 5, 7), ATTENTION),
}


@pytest.mark.parametrize("what", FUSED)
def test_outputs_gradients_and_statistics_equal_keras(what):
    make, shape, kernels = FUSED[what]
    data = IMAGES if kernels == BATCH_NORM else PADDED if kernels == ATTENTION else WORDS
    x = np.resize(data, shape or IMAGES.shape)
    expected, stock = computed(make(), x, fused=False)
    found, used = computed(make(), x, fused=True)
    assert used == kernels != stock
    assert_close(found, expected)


def half(array):
    return array.astype("float16")


KERAS_WAY = {
    "a class derived from it": (DerivedBatch, IMAGES),
    "a vector": (Batch, IMAGES[0, 0]),
    "a volume": (Batch, np.resize(IMAGES, (2, 2, 2, 2, 3))),
    "channels first": (partial(Batch, axis=1), IMAGES),
    "bfloat16": (partial(Batch, dtype="mixed_bfloat16"), IMAGES),
    "float16": (partial(Batch, dtype="mixed_float16"), IMAGES),
    "bfloat16 of float32": (partial(Batch, dtype="mixed_bfloat16", autocast=False), IMAGES),
    "float32 of float16": (partial(Batch, autocast=False), half(IMAGES)),
    "float64": (partial(Batch, dtype="float64"), IMAGES),
    "synchronized": (partial(Batch, synchronized=True), IMAGES),
    "renorm": (partial(Batch, renorm=True), IMAGES),
    "a mask": (Batch, IMAGES, {"mask": tf.constant(np.ones(IMAGES.shape[:3], bool))}),
    "frozen": (partial(Batch, trainable=False), IMAGES),
    "inference": (Batch, IMAGES, {"training": False}),
    "a derived layer": (DerivedLayer, WORDS),
    "another axis": (partial(Layer, axis=1), WORDS),
    "two axes": (partial(Layer, axis=[1, 2]), WORDS),
    "no scale": (partial(Layer, scale=False), WORDS),
    "no center": (partial(Layer, center=False), WORDS),
    "a layer in bfloat16": (partial(Layer, dtype="mixed_bfloat16"), WORDS),
    "a layer in float64": (partial(Layer, dtype="float64"), WORDS),
    "gelu in float16": (partial(GELU, dtype="mixed_float16"), half(WORDS)),
    "gelu in float64": (partial(GELU, dtype="float64"), WORDS.astype("float64")),
    "a product with weights of another order": (
        partial(Product, "abcde,edf->abcf", (5, 2, 6)),
        np.resize(WORDS, (4, 5, 2, 3, 7)),
    ),
    "a transposed product": (partial(Product, "abc,cd->adb", (3, 5)), WORDS),
    "a product by position": (partial(Product, "abc,bcd->abd", (5, 3)), WORDS),
    "a product with an ellipsis": (partial(Product, "...x,xy->...y", 3), WORDS),
    "a bias of another axis": (partial(Product, "abc,cd->abd", (5, 3), bias_axes="b"), WORDS),
    "a derived product": (partial(DerivedDense, 3), WORDS),
    "attention in bfloat16": (attending(HEADS, dtype="mixed_bfloat16"), WORDS),
}


@pytest.mark.parametrize("what", KERAS_WAY)
def test_other_layers_use_the_code_of_keras(what):
    make, x, *given = KERAS_WAY[what]
    options = given[0] if given else {}
    expected, stock = computed(make(), x, fused=False, **options)
    found, kernels = computed(make(), x, fused=True, **options)
    assert not (kernels & (BATCH_NORM | XLA))
    assert ("Einsum" in kernels) == ("Einsum" in stock)
    if "attention" in what:  # whose projections are products with weights
        return
    assert kernels == stock
    np.testing.assert_equal([*map(np.asarray, found)], [*map(np.asarray, expected)])


def test_a_batch_of_one_value_has_no_variance():
    x = np.full((1, 1, 1, 2), 3.0, "float32")
    found, kernels = computed(Batch(momentum=0.0), x, fused=True)
    assert kernels
    *_, mean, variance = found
    np.testing.assert_array_equal([mean, variance], [[3.0, 3.0], [0.0, 0.0]])


def graph_of(layer, spec):
    def step(x):
        with keras_compat.tracing(trace_of()):
            return layer(x)

    return tf.function(step, autograph=False).get_concrete_function(spec).graph.get_operations()


def test_unknown_lengths_use_the_code_of_keras():
    for shape, fused in (([None, 7], True), ([None, None], False), ([None, 3, None], False)):
        kinds = {o.type for o in graph_of(GELU(), tf.TensorSpec(shape, tf.float32))}
        assert (kinds >= XLA) == fused


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_product_and_its_bias_are_one_kernel(dtype):
    make = partial(L.Dense, 3, activation="relu", bias_initializer="ones", dtype=dtype)
    if dtype == "float32":
        assert_close(*(computed(make(), WORDS, fused=fused)[0] for fused in (True, False)))
    layer = make()
    layer.build(WORDS.shape)
    (added,) = (one for one in graph_of(layer, tf.constant(WORDS)) if one.type == "BiasAdd")
    assert added.inputs[0].op.type == "MatMul"  # which one kernel computes


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_of_large_and_special_values(approximate):
    x = np.float32([[-1e30, -50, -10, -6, -1e-30, 0, 1e-30, 6, 10, 50, 1e30, np.inf, np.nan]])
    layer = L.Activation(lambda x: keras.ops.gelu(x, approximate=approximate))
    expected, found = (computed(layer, x, fused=fused)[0][1] for fused in (False, True))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_adds_a_bias_and_scales():
    random = np.random.default_rng(5)
    query, key, value = random.normal(size=(3, 2, 5, 2, 3)).astype("float32")
    given = dict(bias=random.normal(size=(2, 2, 5, 5)).astype("float32"), scale=0.5)
    expected = keras.ops.dot_product_attention(query, key, value, **given)
    with keras_compat.tracing(trace_of()):
        found = keras.ops.dot_product_attention(query, key, value, **given)
    assert_close([found], [expected])


def composed(x):
    """What LayerNormalization is; Keras' stops a gradient in its moments, as tf.nn.moments does."""
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
    return centered * tf.math.rsqrt(variance + 1e-3)


@pytest.mark.parametrize(("make", "function"), [(GELU, tf.nn.gelu), (Layer, composed)])
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
    assert_close([found], [expected], rtol=1e-4)
    if function is composed:
        assert np.abs(penalty(weights, layer) - expected).max() > 1e-3 * most


# In a fit


def compiled(strategy, make, optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9)):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def convolutions():
    layers = [L.Conv2D(4, 3, use_bias=False), Batch(), L.ReLU()]
    block = keras.Sequential(layers, name="block")
    return keras.Sequential([keras.Input(X.shape[1:]), Batch(), block, L.Flatten(), L.Dense(3)])


def transformer():
    x = keras.Input(X.shape[1:])
    h = L.Reshape((12, 6))(x)
    normal = Layer()(h)
    h = L.Add()([h, HEADS()(normal, normal)])
    h = L.Add()([h, L.Dense(6, activation="gelu")(Layer()(h))])
    return keras.Model(x, L.Dense(3)(L.Flatten()(h)))


def fitted(strategy, *asked, make=convolutions, **options):
    """The weights after a fit for each of `asked`, of epochs with a smaller last batch."""
    model = compiled(strategy, make, **options)
    data = {"validation_data": (X[:5], Y[:5]), "batch_size": 8, "epochs": 2}
    for fused in asked:
        tfdist.fit(model, X, Y, **data, seed=3, verbose=0, fused_kernels=fused)
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


CLIPPED = {"optimizer": accumulating}


@pytest.mark.parametrize(
    ("make", "replicas", "options"),
    [
        *((convolutions, replicas, {}) for replicas in (1, 3)),
        *((make, 2, CLIPPED) for make in (convolutions, transformer)),
        (transformer, 1, {}),
    ],
)
def test_steps_end_with_the_weights_and_statistics_of_keras(strategies, make, replicas, options):
    strategy, options = strategies[replicas], {"make": make, **options}
    expected, found = (fitted(strategy, fused, **options) for fused in (False, True))
    assert any((one != other).any() for one, other in zip(found, expected, strict=True))
    rtol = 1e-4 if make is convolutions else 1e-3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol / 10)
    if make is transformer:
        np.testing.assert_equal(fitted(strategy, True, **options), found)  # the bits


def test_a_layer_on_its_own_device_gives_identical_bits(strategies, kernels):
    placed = PlacedStrategy("/CPU:0", {"batch_normalization": "CPU:1"})
    np.testing.assert_equal(fitted(placed, True), fitted(strategies[1], True))
    assert kernels


def test_other_calls_use_no_fused_kernels(strategies, kernels):
    model = compiled(strategies[1], convolutions)
    tfdist.fit(model, X, Y, batch_size=8, verbose=0, fused_kernels=True)
    count = len(kernels)
    assert count
    model(X, training=True)
    tfdist.evaluate(model, X, Y, batch_size=8, verbose=0)
    assert len(kernels) == count
