"""Layers on devices of their own: where they compute, and that the bits are those of one device."""

import json
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import forked_python
from tests.models import bits
from tests.refusals import refusal, refused
from tfdist.strategy.layer_devices import PlacedStrategy

L = keras.layers
PLACEMENT = {"embed": "CPU:2", "lstm|mha": "cpu:1", "norm": "/device:CPU:1"}
WHERE = {"embed": 2, "lstm": 1, "mha": 1, "norm": 1, "head": 0}
random = np.random.default_rng(0)
X = random.integers(0, 10, (20, 6)).astype("int32")
Y = random.integers(0, 3, (20,))


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def words(strategy):
    """A model with a mask, a loop, layers in a layer, statistics and draws; in the scope."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((6,), dtype="int32")
        x = L.Embedding(10, 4, mask_zero=True, name="embed")(ids)
        x = L.LSTM(5, return_sequences=True, name="lstm")(x)
        x = L.MultiHeadAttention(2, 3, name="mha")(x, x)
        x = L.Dropout(0.3, name="drop")(L.BatchNormalization(name="norm")(x))
        x = L.Dense(3, name="head", kernel_regularizer="l2")(L.GlobalAveragePooling1D()(x))
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True)
        return compiled(keras.Model(ids, x), optimizer)


def own_steps(strategy):
    """A small one with a step of its own, scaled losses and accumulated gradients."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((6,), dtype="int32")
        x = L.Embedding(10, 4, name="embed")(ids)
        x = L.Dense(3, name="head")(L.Dropout(0.3)(L.Flatten()(x)))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
            initial_scale=1024.0,
        )
        return compiled(OwnStep(ids, x), optimizer)


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def placed(names=tuple(PLACEMENT)):
    return PlacedStrategy("/CPU:0", {name: PLACEMENT[name] for name in names})


def fitted(model, **options):
    options = {"batch_size": 8, "epochs": 2, "seed": 3, "verbose": 0, **options}
    return tfdist.fit(model, X, Y, validation_data=(X[:7], Y[:7]), **options).history


def device_of(variable):
    return int(variable.value.device.rpartition(":")[2])


def test_bits_and_logs_equal_one_device(strategies):
    alone, model = words(strategies[1]), words(placed())
    assert fitted(alone) == fitted(model)
    assert bits(alone) == bits(model)
    predicted = [tfdist.predict(m, X, batch_size=8, verbose=0) for m in (alone, model)]
    np.testing.assert_array_equal(*predicted)
    assert_on_devices(model)


def assert_on_devices(model):
    """Variables, their slots and their averages."""
    slots = [v for v in model.optimizer.variables if tuple(v.shape)]
    for variable in (*model.weights, *slots):
        names = [name for name in WHERE if name in variable.path]
        if names:
            assert device_of(variable) == WHERE[names[0]], variable.path
    assert len(slots) == 3 * len(model.trainable_variables)


def test_both_passes_run_on_the_device_of_the_layer():
    """All of the operations of a layer and its gradients, in the loop of a layer too; updates."""
    strategy = placed()
    model = words(strategy)
    variables = model.trainable_variables
    with strategy.scope():
        model.optimizer.build(variables)

    @tf.function(autograph=False)
    def step(x):
        def in_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True))
            gradients = tape.gradient(loss, [v.value for v in variables])
            model.optimizer.apply(gradients, variables)

        strategy.run(in_replica)

    graph = step.get_concrete_function(tf.constant(X)).graph
    loops = [g for g in graph._functions.values() if "while" in g.cached_definition.signature.name]
    nodes = list(graph.as_graph_def().node)
    nodes += [node for loop in loops for node in loop.cached_definition.node_def]
    updates = [node.device for node in nodes if node.op == "AssignSubVariableOp"]
    assert {int(device.rpartition(":")[2]) for device in updates} == {0, 1, 2}
    found = {}
    for node in nodes:
        names = {name for name in WHERE if any(p.startswith(name) for p in node.name.split("/"))}
        if node.device and node.op != "Const" and names:
            key = "gradient_tape" in node.name, min(names)
            found.setdefault(key, set()).add(int(node.device.rpartition(":")[2]))
    for name, device in WHERE.items():
        assert found[False, name] == {device}, name
        assert found[True, name] == {device}, name


def test_a_run_resumes_with_and_without_a_placement(strategies, tmp_path):
    """Of one with a step of its own, whose loss is scaled."""
    one, several = strategies[1], placed(["embed"])
    whole = own_steps(one)
    fitted(whole)
    for number, (first, then) in enumerate([(one, several), (several, one)]):
        backup = tfdist.BackupAndRestore(tmp_path / str(number), save_freq=3)
        fitted(own_steps(first), epochs=1, callbacks=[backup])
        resumed = own_steps(then)
        backup = tfdist.BackupAndRestore(tmp_path / str(number), save_freq=3)
        fitted(resumed, callbacks=[backup])
        assert bits(resumed) == bits(whole)
        assert device_of(resumed.layers[1].embeddings) == (2 if then is several else 0)


def test_a_pattern_that_counts_for_no_layer_is_refused():
    def fit():
        strategy = PlacedStrategy("/CPU:0", {"haed": "CPU:1"})
        with strategy.scope():
            layers = [keras.Input((3,)), L.Dense(3, name="head"), L.Dense(2, name="last")]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        tfdist.fit(model, np.ones((4, 3)), np.ones((4, 2)), verbose=0)

    assert refused(fit) == ("placement", "unknown-value")
    with pytest.raises(re.error):
        PlacedStrategy("/CPU:0", {"*dense": "CPU:1"})


@keras.saving.register_keras_serializable("tests")
class Block(L.Layer):
    """Nested arguments and results, a `training` argument, and the mask of an input."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.first, self.last = L.Dense(4, activation="tanh", name="in"), L.Dense(3, name="out")

    def call(self, inputs, scale=None, training=False, inputs_mask=None):
        x = self.first(inputs["x"]) * (2.0 if training else 1.0)
        if inputs_mask["x"] is not None:
            x *= keras.ops.cast(inputs_mask["x"], x.dtype)[..., None]
        return {"y": (self.last(x) * scale,), "x": inputs["x"]}

    def compute_mask(self, inputs, previous):
        return None


def divided(strategy):
    """A model with a block of two inputs, and a second block that is called twice."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((6,), dtype="int32")
        x = keras.Sequential([L.Embedding(10, 4, mask_zero=True)], name="embed")(ids)
        found = Block(name="block")({"x": x}, scale=L.Dense(1, name="scale")(x))
        twice = keras.Sequential([L.Dense(3, activation="gelu")], name="twice")
        x = L.LSTM(4, name="lstm")(twice(twice(found["y"][0])))
        x = L.Concatenate()([x, L.Flatten()(found["x"])])
        return compiled(keras.Model(ids, L.Dense(3, name="head")(x)), keras.optimizers.SGD(0.1))


DIVIDED = {"block|twice|embed": ["CPU:1", "CPU:2", "CPU:0"], "lstm": ["CPU:2", "CPU:1"]}


def test_a_layer_on_several_devices_equals_one_device(strategies):
    """In steps of 8 and of 4 examples, which three devices cannot divide evenly."""
    alone, model = divided(strategies[1]), divided(PlacedStrategy("/CPU:0", DIVIDED))
    options = {"batch_size": 8, "epochs": 3, "seed": 3, "verbose": 0, "shuffle": False}
    logs = [tfdist.fit(m, X, Y, validation_data=(X, Y), **options).history for m in (alone, model)]
    for name, values in logs[0].items():
        np.testing.assert_allclose(logs[1][name], values, atol=1e-6, err_msg=name)
    for one, several in zip(alone.weights, model.weights, strict=True):
        np.testing.assert_allclose(several.numpy(), one.numpy(), atol=1e-6, err_msg=one.path)
        owner = 1 if re.search("block|twice|embed", one.path) else 2 if "lstm" in one.path else 0
        assert device_of(several) == owner
    for size in (1, 2, 7):  # also fewer examples than devices
        with model.distribute_strategy.scope():
            found = [m(X[:size], training=True) for m in (alone, model)]
        np.testing.assert_allclose(found[1], found[0], atol=1e-6)
        found = [tfdist.predict(m, X[:size], verbose=0) for m in (alone, model)]
        np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_each_device_computes_its_part_of_the_batch():
    """Forward and backward, with a batch whose size is known or unknown."""
    strategy = PlacedStrategy("/CPU:0", {"twice": ["CPU:1", "CPU:2"]})
    model = divided(strategy)
    for rows in (7, None):
        specs = [tf.TensorSpec((rows, 6), tf.int32)]

        @tf.function(autograph=False, input_signature=specs)
        def step(x):
            def in_replica():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(x, training=True))
                return tape.gradient(loss, [v.value for v in model.trainable_variables])

            return strategy.run(in_replica)

        found = {}
        for node in step.get_concrete_function().graph.as_graph_def().node:
            if node.device and (place := re.search(r"twice.*part_(\d)", node.name)):
                assert node.name.count("/part_") == 1  # inner layers do not divide again
                key = int(place[1]), node.name.startswith("gradient_tape/"), node.op == "MatMul"
                found.setdefault(key, set()).add(int(node.device.rpartition(":")[2]))
        products = {key[:2]: devices for key, devices in found.items() if key[2]}
        assert products == {(n, back): {n + 1} for n in (0, 1) for back in (False, True)}


class Encoder(L.Layer):
    """A layer without an argument for the mask of its input."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.lstm = L.LSTM(3)

    def call(self, x):
        return self.lstm(x)

    def compute_mask(self, inputs, previous):
        return None


def test_a_divided_layer_keeps_the_mask_of_its_input():
    found = []
    for devices in ("CPU:0", ["CPU:0", "CPU:1"]):
        keras.utils.set_random_seed(1)
        with PlacedStrategy("/CPU:0", {"encoder": devices}).scope():
            ids = keras.Input((6,), dtype="int32")
            x = L.Embedding(10, 4, mask_zero=True)(ids)
            model = keras.Model(ids, Encoder(name="encoder")(x))
            found.append(model(X[:5]))
    np.testing.assert_allclose(*found, atol=1e-6)


def test_each_part_of_a_batch_inherits_training():
    """Also if the layer calls an inner layer with `training=False`, as for a frozen base."""

    class Tuned(L.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.drop, self.base = L.Dropout(0.5, seed=1), L.Dropout(0.5, seed=2)

        def call(self, x):
            return self.base(self.drop(x), training=False)

    with PlacedStrategy("/CPU:0", {"tuned": ["CPU:0", "CPU:1"]}).scope():
        found = Tuned(name="tuned")(tf.ones((4, 100)), training=True)
    assert (np.sum(found == 0, axis=1) > 0).all()


def test_a_layer_that_needs_the_whole_batch_stays_undivided():
    class Adds(L.Dense):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return super().call(x)

    class Mean(L.Layer):
        def call(self, x):
            return keras.ops.mean(x, axis=0)

    class Counts(L.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean")

        def call(self, x):
            self.mean.update_state(x)
            return x

    class Two(L.Layer):
        def call(self, x, table):
            return x + table[:1]

    def called(inner, *more, training=True):
        strategy = PlacedStrategy("/CPU:0", {"block": ["CPU:0", "CPU:1"]})
        with strategy.scope():
            block = keras.Sequential([inner], name="block") if not more else inner
            block.build((None, 3))
        call = tf.function(lambda: block(tf.ones((5, 3)), *more, training=training))
        return lambda: strategy.run(call)

    for inner, reason in (
        (L.BatchNormalization(name="norm"), "updates the variable 'block/norm/moving_mean'"),
        (Adds(2), "it adds a loss in its call"),
        (L.Dense(2, activity_regularizer="l2"), "it adds a loss in its call"),
        (Counts(), "updates the variable 'mean/total'"),
        (Mean(), "its result [3] has no batch axis"),
    ):
        training = not isinstance(inner, Counts)
        error = refusal(called(inner, training=training))
        assert (error.where, error.code) == ("placement", "unsupported")
        assert reason in str(error)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        called(Two(name="block"), tf.ones((2, 3)))()
    strategy = PlacedStrategy("/CPU:0", {"mean": ["CPU:0", "CPU:1"]})
    any_size = tf.function(Mean(name="mean"), input_signature=[tf.TensorSpec((None, 3))])
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no batch axis"):
        strategy.run(any_size, (tf.ones((5, 3)),))
    placed_norm = PlacedStrategy("/CPU:0", {"norm": ["CPU:0", "CPU:1"]})
    assert refused(lambda: fitted(words(placed_norm))) == ("placement", "unsupported")
    called(L.BatchNormalization(), training=False)()
    frozen = L.BatchNormalization()
    frozen.trainable = False
    called(frozen)()
    known = L.Normalization()
    known.adapt(np.eye(5, 3))
    called(known)()


def test_a_layer_with_float8_scales_stays_undivided():
    def fit(devices):
        with PlacedStrategy("/CPU:0", {"block": devices}).scope():
            model = keras.Sequential([keras.Input((3,)), L.Dense(2, name="block")])
            model.quantize("float8")
            model.compile("sgd", "mse")
        tfdist.fit(model, np.ones((4, 3)), np.ones((4, 2)), verbose=0)

    fit("CPU:1")
    error = refusal(lambda: fit(["CPU:0", "CPU:1"]))
    assert (error.code, "float8 scales" in error.problem) == ("unsupported", True)


PROGRAM = """
import json
import keras, numpy as np, tensorflow as tf
import tfdist
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
said = []
def attempt(does):
    try:
        does()
    except tfdist.UsageError as error:
        said.append(error.code)
attempt(lambda: tfdist.make_strategy("mirrored", placement={"a": "CPU:1"}))
attempt(lambda: tfdist.make_strategy(placement={"a": "GPU:1"}))
strategy = tfdist.make_strategy(placement={"first": "CPU:1"}, split_bytes=9)
layers = lambda: [keras.Input((3,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
fit = lambda model: tfdist.fit(model, np.ones((4, 3)), np.ones((4, 1)), verbose=0)
outside = keras.Sequential(layers())
outside.compile("sgd", "mse")
attempt(lambda: fit(outside))
attempt(lambda: tfdist.make_strategy(placement={"first": "CPU"}))
with strategy.scope():
    model = keras.Sequential(layers())
    model.compile("sgd", "mse")
fit(model)
said.append([weight.value.device[-5:] for weight in model.weights])
print(json.dumps(said))
"""


def test_make_strategy_places_layers():
    """What is refused comes first: no device may be asked for once TensorFlow has run."""
    environ = {**os.environ, **forked_python.ENVIRON}
    environ.pop("TF_CONFIG", None)
    ran = forked_python.run("-c", PROGRAM, timeout=120, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert "make_strategy: split_bytes has no effect under strategy single" in ran.stderr
    *codes, devices = json.loads(ran.stdout.splitlines()[-1])
    assert codes == ["unsupported", "devices", "another-scope", "other-strategy"]
    assert devices == ["CPU:1", "CPU:1", "CPU:0", "CPU:0"]
