"""A mistake is one line that names it and the fix; nothing is trained, and the next call works."""

import functools
import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import forked_python, refusals
from tfdist.errors import UsageError

RNG = np.random.RandomState(0)
X = RNG.randn(12, 4).astype("float32")
Y = RNG.randn(12, 1).astype("float32")
LABELS = np.arange(12) % 3


def regression(strategy, **compiled):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compiled)
    return model


def classifier(strategy, *, logits=False):
    with strategy.scope():
        activation = None if logits else "softmax"
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return model


def two_outputs(strategy):
    with strategy.scope():
        x = keras.Input((4,))
        model = keras.Model(x, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])
        model.compile("sgd", ["mse", "mse"])
    return model


def fit(model, *arguments, **options):
    return tfdist.fit(model, *arguments, **({"verbose": 0} | options))


def refusal(call):
    """The one line that a call is refused with."""
    line = str(refusals.refusal(call))
    assert all(part in line for part in (": received ", "; expected ", ". Fix: "))
    return line


class NoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        return X, Y


PAIRS = tf.data.Dataset.from_tensor_slices((X, Y))
NUMBERS = {
    "batch_size=0": {"batch_size": 0},
    "batch_size=-1": {"batch_size": -1},
    "batch_size=2.5": {"batch_size": 2.5},
    "batch_size='4'": {"batch_size": "4"},
    "epochs=-1": {"epochs": -1},
    "epochs=1.5": {"epochs": 1.5},
    "epochs=True": {"epochs": True},
    "epochs=None": {"epochs": None},
    "seed=1.5": {"seed": 1.5},
    "seed='a'": {"seed": "a"},
    "steps_per_epoch=0": {"steps_per_epoch": 0},
    "initial_epoch=-1": {"initial_epoch": -1},
    "validation_split=1.0": {"validation_split": 1.0},
    "validation_split=-0.5": {"validation_split": -0.5},
    "validation_freq=0": {"validation_freq": 0},
    "validation_freq=(1, 2)": {"validation_freq": (1, 2), "validation_data": (X, Y)},
    "overfit_batches=0.5": {"overfit_batches": 0.5},
    "virtual_epochs=100": {"virtual_epochs": 100},
}


@pytest.mark.parametrize("named", NUMBERS)
def test_a_number_that_is_none_is_named(strategies, named):
    name, value = named.split("=")
    line = refusal(lambda: fit(regression(strategies[1]), X, Y, **NUMBERS[named]))
    assert line.startswith(f"{name}: received {value};")


def test_numpy_integers_are_numbers(strategies, tmp_path):
    five, two = np.int64(5), np.int32(2)
    virtual = tfdist.VirtualEpochs(total_examples=five, checkpoints=two)
    lengths = {"epochs": two, "steps_per_epoch": two}, {"virtual_epochs": virtual}
    for number, length in enumerate(lengths):
        saved = [tfdist.BackupAndRestore(tmp_path / str(number))]
        options = {"batch_size": five, "shuffle": np.bool_(True), "callbacks": saved, **length}
        history = fit(regression(strategies[1]), X, Y, **options)
        assert history.epoch == [0, 1]


def test_no_epochs_is_a_run_of_nothing(strategies):
    model = regression(strategies[2])
    before = model.get_weights()
    assert fit(model, X, Y, epochs=0).history == {}
    assert fit(model, X, Y, epochs=2, initial_epoch=2).history == {}
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict"])
def test_what_is_no_model_is_refused(act):
    line = refusal(lambda: getattr(tfdist, act)("model", X))
    assert line.startswith(f"tfdist.{act}: received a str as the model")


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict"])
def test_a_model_of_keras_2_is_refused_as_one(act):
    kind = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    mine = type("Mine", (kind,), {})
    line = refusal(lambda: getattr(tfdist, act)(mine(), X))
    assert line.startswith(f"tfdist.{act}: received a Mine of Keras 2 (tf_keras) as the model;")
    assert "TF_USE_LEGACY_KERAS" in line


@pytest.mark.parametrize("act", ["fit", "evaluate"])
def test_an_uncompiled_model_is_refused(act):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    line = refusal(lambda: getattr(tfdist, act)(model, X, Y))
    assert "a model that was not compiled" in line
    assert "model.compile" in line


def test_an_uncompiled_model_predicts(strategies):
    for strategy in (strategies[1], strategies[2]):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])  # not built either
        assert tfdist.predict(model, X, verbose=0).shape == (12, 1)


@pytest.mark.parametrize("act", ["fit", "evaluate"])
def test_run_eagerly_is_refused(strategies, act):
    model = regression(strategies[1], run_eagerly=True)
    line = refusal(lambda: getattr(tfdist, act)(model, X, Y))
    assert "run_eagerly=True" in line


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict", "validation"])
def test_a_global_batch_smaller_than_the_replicas_is_refused(strategies, act):
    model = regression(strategies[3])
    calls = {
        "fit": lambda: fit(model, X, Y, 2),
        "evaluate": lambda: tfdist.evaluate(model, X, Y, 2),
        "predict": lambda: tfdist.predict(model, X, 2),
        "validation": lambda: fit(model, X, Y, 6, validation_data=(X, Y), validation_batch_size=2),
    }
    line = refusal(calls[act])
    assert line.startswith("batch_size: received a global batch of 2 for 3 replicas")
    assert "batch_size=3" in line
    assert "validation_batch_size" in line


def test_a_call_in_the_scope_of_another_strategy_is_refused(strategies):
    model = regression(strategies[2])
    with strategies[1].scope():
        line = refusal(lambda: fit(model, X, Y))
    assert "inside the scope of another strategy" in line


def test_a_call_in_the_models_own_scope_works(strategies):
    with strategies[2].scope():
        model = regression(strategies[2])
        fit(model, X, Y, validation_data=(X, Y))
        assert tfdist.evaluate(model, X, Y, verbose=0) > 0
        assert tfdist.predict(model, X, verbose=0).shape == (12, 1)


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict", "load_weights", "loop"])
@pytest.mark.parametrize("kind", ["mirrored", "multiworker", "ps"])
def test_a_task_that_made_no_strategy_does_not_train_by_itself(monkeypatch, act, kind):
    hosts = {"worker": ["a:2222", "b:2222"]}
    if kind == "ps":
        hosts |= {"chief": ["c:2222"], "ps": ["d:2222"]}
    config = {
        "cluster": {} if kind == "mirrored" else hosts,
        "task": {"type": "worker", "index": 0},
        "tfdist": {"strategy": kind},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    calls = {
        "fit": lambda: fit(model, X, Y),
        "evaluate": lambda: tfdist.evaluate(model, X, Y),
        "predict": lambda: tfdist.predict(model, X),
        "load_weights": lambda: tfdist.load_weights(model, "weights.keras"),
        "loop": lambda: tfdist.StepLoop(lambda x: {}, X, global_batch_size=4),
    }
    line = refusal(calls[act])
    assert f"a model of strategy single in worker-0 of a {kind} job" in line
    assert "tfdist.make_strategy()" in line


def test_an_optimizer_made_outside_the_scope_is_refused(strategies):
    optimizer = keras.optimizers.Adam()
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    assert "Adam made outside the strategy's scope" in refusal(lambda: fit(model, X, Y))


def test_a_model_compiled_outside_the_scope_is_refused(strategies):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    assert "model.compile, inside `with strategy.scope():`" in refusal(lambda: fit(model, X, Y))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_layer_that_becomes_trainable_needs_another_optimizer(strategies, replicas):
    with strategies[replicas].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.layers[0].trainable = False
        model.compile("adam", "mse")
    fit(model, X, Y)
    model.layers[0].trainable = True
    line = refusal(lambda: fit(model, X, Y))
    assert "kernel, which became trainable after the model was compiled" in line
    with strategies[replicas].scope():
        model.compile("adam", "mse")
    fit(model, X, Y)


def test_a_layer_or_metric_made_outside_the_scope_is_refused(strategies):
    layer = keras.layers.Dense(1, name="outsider")
    layer.build((None, 4))
    metric = keras.metrics.MeanAbsoluteError(name="stranger")
    for layers, metrics in (([layer], []), ([keras.layers.Dense(1)], [metric])):
        with strategies[2].scope():
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("sgd", "mse", metrics=metrics)
        line = refusal(lambda model=model: fit(model, X, Y))
        assert "outsider/" in line or "stranger/" in line
        assert "outside the strategy's scope" in line


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict"])
def test_a_stateful_layer_on_several_replicas_is_refused(strategies, act):
    """Its state would be the mean of those of other sequences."""
    rows = np.zeros((4, 3, 2), "float32")

    def line(strategy, per_replica):
        with strategy.scope():
            layers = [keras.layers.SimpleRNN(1, stateful=True, name="remembers")]
            model = keras.Sequential([keras.Input(batch_shape=(per_replica, 3, 2)), *layers])
            model.compile("sgd", "mse")
        data = (rows,) if act == "predict" else (rows, rows[:, 0, :1])
        return getattr(tfdist, act)(model, *data, batch_size=4, verbose=0)

    found = refusal(lambda: line(strategies[2], 2))
    assert "remembers, which is stateful, under strategy mirrored" in found
    line(strategies[1], 4)


def test_layers_in_float8_are_refused_on_several_replicas(strategies):
    for replicas in (1, 2):
        model = regression(strategies[replicas])
        with strategies[replicas].scope():
            model.layers[0].quantize("float8")
            model.compile("sgd", "mse")
        if replicas == 1:
            assert fit(model, X, Y).epoch == [0]
        else:
            assert "of a layer in float8" in refusal(lambda model=model: fit(model, X, Y))


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_of_a_step_of_ones_own_is_built_before(strategies, replicas):
    """A second one, as of a GAN; on one device the first step may build it, as under Keras."""

    class TwoOptimizers(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.second.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    with strategies[replicas].scope():
        model = TwoOptimizers([keras.Input((4,)), keras.layers.Dense(1)])
        model.second = keras.optimizers.Adam(name="second")
        model.compile("sgd", "mse")
    if replicas == 1:
        fit(model, X, Y)
    else:
        line = refusal(lambda: fit(model, X, Y))
        assert "Adam 'second' in a step, and not built" in line
        with strategies[replicas].scope():
            model.second.build(model.trainable_variables)
        fit(model, X, Y)
    assert model.second.iterations.numpy() == 1


class AccumulatesByHand(keras.Sequential):
    """Applies its optimizer every second step, by a condition."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)

        tf.cond(self.optimizer.iterations % 2 == 0, apply, lambda: None)
        return {"loss": loss}


def test_an_optimizer_in_a_condition_is_refused_on_several_replicas(strategies):
    """The replicas of one process cannot sum there; TensorFlow's own message is half a page."""
    for replicas in (1, 2):
        with strategies[replicas].scope():
            model = AccumulatesByHand([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        if replicas == 1:
            assert fit(model, X, Y).epoch == [0]
        else:
            line = refusal(lambda model=model: fit(model, X, Y))
            assert "SGD applied in a tf.cond or loop of the step" in line


def test_optimizers_inside_another_are_of_the_scope_too(strategies):
    outside = keras.optimizers.OptimizerMap(keras.optimizers.SGD())
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.MultiOptimizer(outside), "mse")
    assert "SGD made outside the strategy's scope" in refusal(lambda: fit(model, X, Y))


def test_a_validation_split_that_cannot_be_is_refused(strategies):
    model = regression(strategies[1])
    for x, y, share in ((X[:1], Y[:1], 0.1), (PAIRS.batch(4), None, 0.5)):
        line = refusal(lambda x=x, y=y, share=share: fit(model, x, y, validation_split=share))
        assert line.startswith(f"validation_split: received {share}, and this: ")


class Decorated(keras.Sequential):
    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"mine": loss}


def test_a_step_that_is_a_tf_function_is_refused_on_several_replicas(strategies):
    """What is returned from inside cannot be told to be scaled or not."""
    for replicas in (1, 2):
        with strategies[replicas].scope():
            model = Decorated([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        if replicas == 1:
            assert list(fit(model, X, Y).history) == ["mine"]
        else:
            assert "leave @tf.function out" in refusal(lambda model=model: fit(model, X, Y))
    with strategies[2].scope():
        line = refusal(lambda: tfdist.StepLoop(tf.function(lambda x: {}), X, global_batch_size=4))
    assert "StepLoop: received a tf.function" in line


def test_a_generator_function_leads_to_a_dataset(strategies):
    def batches():
        yield X, Y

    line = refusal(lambda: fit(regression(strategies[1]), batches))
    assert "use tf.data.Dataset.from_generator" in line


def test_the_name_of_a_dataset_leads_to_the_source_for_it(strategies):
    line = refusal(lambda: fit(regression(strategies[1]), "mnist"))
    assert line.startswith("x: received str 'mnist';")
    assert "Fix: pass tfdist.data.load('mnist', 'train') for a dataset of TFDS" in line


def test_data_without_targets_are_refused_where_the_loss_needs_them(strategies):
    model = regression(strategies[2])
    assert "no targets" in refusal(lambda: fit(model, X))
    assert "no targets" in refusal(lambda: fit(model, X, Y, validation_data=X))
    assert "no targets" in refusal(lambda: tfdist.evaluate(model, X))
    with strategies[2].scope():
        inside = keras.Input((4,))
        model = keras.Model(inside, keras.layers.ActivityRegularization(1.0)(inside))
        model.compile("sgd")
    assert fit(model, X).history["loss"][0] > 0


@pytest.mark.parametrize("returned", [[1.0], {}, None])
def test_a_step_that_returns_no_dict_of_scalars_is_refused(strategies, returned):
    for replicas in (1, 2):
        with strategies[replicas].scope():
            loop = tfdist.StepLoop(lambda x: returned, X, global_batch_size=4)
        line = refusal(lambda loop=loop: loop.run(1))
        assert line.startswith(f"step: received a {type(returned).__name__} ")


EMPTY = {
    "arrays": (X[:0], Y[:0]),
    "dataset": (PAIRS.take(0).batch(4),),
    "unknown": (PAIRS.filter(lambda x, y: x[0] > 1e9).batch(4),),
    "pydataset": (NoBatches(),),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("act", ["fit", "evaluate", "validation"])
def test_empty_data_are_refused(strategies, kind, act):
    model = regression(strategies[2])
    calls = {
        "fit": lambda: fit(model, *EMPTY[kind]),
        "evaluate": lambda: tfdist.evaluate(model, *EMPTY[kind], verbose=0),
        "validation": lambda: fit(
            model, X, Y,
            validation_data=EMPTY[kind] if len(EMPTY[kind]) > 1 else EMPTY[kind][0],
        ),
    }  # fmt: skip
    line = refusal(calls[act])
    assert "at least one" in line


def test_data_that_do_not_fit_together_are_refused(strategies):
    model = regression(strategies[1])
    assert "x: 12, y: 5" in refusal(lambda: fit(model, X, Y[:5]))
    assert "sample_weight: 7" in refusal(lambda: fit(model, X, Y, sample_weight=np.ones(7)))
    assert "y beside a tf.data.Dataset" in refusal(lambda: fit(model, PAIRS.batch(4), Y))
    assert "None" in refusal(lambda: fit(model))
    assert "str 'abc'" in refusal(lambda: fit(model, X, Y, validation_data="abc"))
    assert "float '2.0'" in refusal(lambda: fit(model, X, Y, sample_weight=2.0))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_dataset_that_can_be_read_once_is_refused(strategies, replicas):
    batches = iter([(X, Y)] * 3)  # all are gone when they have been counted
    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    data = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
    line = refusal(lambda: tfdist.fit(regression(strategies[replicas]), data, verbose=0))
    assert line.startswith("data: received a dataset that ended before the step")


def test_batches_that_replicas_cannot_divide_are_refused(strategies):
    """A part that belongs to all examples would be cut as if it had a row for each of them."""
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    data = pairs.map(lambda x, y: ({"x": x, "all": tf.ones((3, 4))}, y))

    def model(strategy):
        with strategy.scope():
            x, whole = keras.Input((4,), name="x"), keras.Input((4,), name="all")
            means = keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, 0, keepdims=True))(whole)
            made = keras.Model([x, whole], keras.layers.Dense(1)(keras.layers.Add()([x, means])))
            made.compile("sgd", "mse")
        return made

    class Batches(keras.utils.PyDataset):
        """Cut to the rows of its first part, it would give another mean."""

        even = False

        def __len__(self):
            return 2

        def __getitem__(self, index):
            whole = X[: 4 if self.even and index == 0 else 9]
            return {"x": X[4 * index :][:4], "all": whole}, Y[4 * index :][:4]

    line = refusal(lambda: tfdist.fit(model(strategies[2]), data, verbose=0))
    assert line.startswith("data: received a batch whose parts have 3, 4 rows;")
    tfdist.fit(model(strategies[1]), data, verbose=0)
    for Batches.even in (False, True):
        line = refusal(lambda: tfdist.fit(model(strategies[2]), Batches(), verbose=0))
        assert line.startswith("data: received a batch whose parts have 4, 9 rows;")
    one, other = model(strategies[1]), model(tf.distribute.get_strategy())
    other.set_weights(one.get_weights())
    tfdist.fit(one, Batches(), shuffle=False, verbose=0)
    other.fit(Batches(), shuffle=False, verbose=0)
    np.testing.assert_allclose(one.get_weights()[0], other.get_weights()[0], atol=1e-6)


def test_endless_data_need_a_length(strategies):
    model = regression(strategies[1])
    line = refusal(lambda: fit(model, PAIRS.batch(4).repeat()))
    assert "pass steps_per_epoch" in line
    assert fit(model, PAIRS.batch(4).repeat(), steps_per_epoch=3).epoch == [0]


def test_steps_without_a_batch_size_divide_the_data_as_under_keras(strategies):
    def make():
        keras.utils.set_random_seed(1)
        return regression(strategies[1])

    ours, theirs = make(), make()
    fit(ours, X, Y, steps_per_epoch=4, shuffle=False)
    theirs.fit(X, Y, steps_per_epoch=4, shuffle=False, verbose=0)
    assert ours.optimizer.iterations.numpy() == theirs.optimizer.iterations.numpy() == 4
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], atol=1e-6)


def test_class_weights_that_cannot_be_are_refused(strategies):
    labels, model = LABELS, classifier(strategies[1])
    both = {"class_weight": {0: 1.0}, "sample_weight": np.ones(12)}
    assert "class_weight with sample weights" in refusal(lambda: fit(model, X, labels, **both))
    assert "no targets" in refusal(lambda: fit(model, X, class_weight={0: 1.0}))
    line = refusal(lambda: fit(two_outputs(strategies[1]), X, [Y, Y], class_weight={0: 1.0}))
    assert "several outputs" in line
    with strategies[1].scope():
        each = keras.Sequential([keras.Input((4, 1)), keras.layers.Dense(3, "softmax")])
        each.compile("sgd", "sparse_categorical_crossentropy")
    pixels = RNG.randint(0, 3, (12, 4, 1))
    line = refusal(lambda: fit(each, X[..., None], pixels, class_weight={0: 2.0}))
    assert "targets of shape (None, 4, 1)" in line
    for wrong in ([1, 1, 1], {}, {"cat": 1.0}, {-1: 2.0}, {0: "heavy"}):
        line = refusal(lambda wrong=wrong: fit(model, X, labels, class_weight=wrong))
        assert line.startswith("class_weight: received")


@pytest.mark.parametrize("targets", ["labels", "column", "bool", "one_hot"])
def test_class_weights_weigh_as_under_keras(strategies, targets):
    y = {
        "labels": LABELS,
        "column": LABELS[:, None],
        "bool": LABELS == 0,
        "one_hot": np.eye(3, dtype="float32")[LABELS],
    }[targets]

    def make(strategy):
        keras.utils.set_random_seed(1)
        model = classifier(strategy)
        if targets == "one_hot":
            with strategy.scope():
                model.compile("sgd", "categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    # Class 0 is listed, class 1 is below the highest of the list, class 2 above: both weigh 1.
    for weights in ({0: 3.0}, {0: 3.0, 2: 0.5})[: 2 if targets == "labels" else 1]:
        ours, theirs = make(strategies[2]), make(tf.distribute.get_strategy())
        options = {"batch_size": 5, "epochs": 2, "shuffle": False, "class_weight": weights}
        one = fit(ours, X, y, **options)
        other = theirs.fit(X, y, verbose=0, **options)
        for name, values in one.history.items():
            np.testing.assert_allclose(values, other.history[name], rtol=1e-4)
        np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], atol=1e-6)


def test_a_broadcast_of_keys_that_json_would_change_is_refused():
    for value in ({0: 1.0}, [{"a": ({"b": {1: 2}},)}]):
        assert "text as keys" in refusal(lambda value=value: tfdist.broadcast(value))
    assert tfdist.broadcast({"a": [{"b": 1}]}) == {"a": [{"b": 1}]}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"ab\0", "bytes"),
        ([{1, 2}], "set"),
        ({"a": np.zeros(2, [("x", int)])}, "ndarray with fields"),
    ],
)
def test_a_broadcast_of_what_would_come_as_something_else_is_refused(value, named):
    assert f"received a {named};" in refusal(lambda: tfdist.broadcast(value))
    assert tfdist.broadcast((np.float32(2), tf.zeros(1), None)) is not None


@pytest.mark.parametrize("kind", ["multiworker", "pipeline"])
def test_a_task_that_made_no_strategy_does_not_speak_to_itself(monkeypatch, kind):
    workers = {"worker": ["a:2222", "b:2222"]}
    task = {"type": "worker", "index": 1}
    config = {"cluster": workers, "task": task, "tfdist": {"strategy": kind}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for call in (tfdist.barrier, lambda: tfdist.broadcast(1)):
        assert "in worker-1 before it has a strategy" in refusal(call)
    config["task"] = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    tfdist.barrier()


def test_two_lengths_of_a_run_are_refused(strategies):
    length = tfdist.VirtualEpochs(total_examples=24)
    for other in ({"epochs": 2}, {"steps_per_epoch": 2}):
        line = refusal(
            lambda other=other: fit(regression(strategies[1]), X, Y, virtual_epochs=length, **other)
        )
        assert "virtual_epochs together with" in line


class Pairs(keras.utils.PyDataset):
    """Anchors and positives, one upon the other."""

    def __init__(self, shape=(2, 10, 4)):
        super().__init__()
        self.shape = shape

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.ones(self.shape, "float32")


class OfPairs(keras.Model):
    """Takes a batch apart along its first axis, in training and in evaluation."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.test_step(data)["loss"]
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        (data,) = data if isinstance(data, tuple) else (data,)
        return {"loss": tf.reduce_mean((self(data[0]) - self(data[1])) ** 2)}


def of_pairs(strategy):
    with strategy.scope():
        x = keras.Input((4,))
        model = OfPairs(x, keras.layers.Dense(3)(x))
        model.compile("sgd")
    return model


@pytest.mark.parametrize(("rows", "replicas"), [(3, 2), (5, 3)])
def test_a_stack_of_what_is_no_example_is_refused_before_training(strategies, rows, replicas):
    seen = []
    callback = keras.callbacks.LambdaCallback(on_train_begin=seen.append)
    model = of_pairs(strategies[replicas])
    fits = functools.partial(fit, model, Pairs((rows, 10, 4)), callbacks=[callback])
    line = refusal(fits)
    assert line.startswith(f"data: received a batch whose first axis has {rows} rows: train_step ")
    assert f"fails with the 1 that one of {replicas} replicas gets" in line
    assert seen == []
    line = refusal(lambda: tfdist.evaluate(model, Pairs((rows, 10, 4)), verbose=0))
    assert f"first axis has {rows} rows: test_step works" in line
    assert np.isfinite(fit(of_pairs(strategies[1]), Pairs((rows, 10, 4))).history["loss"]).all()


def test_small_batches_that_can_be_divided_are_not_refused(strategies):
    model = of_pairs(strategies[2])
    assert np.isfinite(fit(model, Pairs((4, 10, 4))).history["loss"]).all()


def test_a_step_that_fails_with_any_batch_says_so_itself(strategies):
    class Failing(OfPairs):
        def test_step(self, data):
            raise LookupError("mine")

    with strategies[2].scope():
        x = keras.Input((4,))
        model = Failing(x, keras.layers.Dense(1)(x))
        model.compile("sgd")
    with pytest.raises(LookupError, match="mine"):
        fit(model, Pairs())


def test_callbacks_that_cannot_be_are_refused(strategies, tmp_path):
    model = regression(strategies[1])
    assert "a str" in refusal(lambda: fit(model, X, Y, callbacks=["EarlyStopping"]))
    assert "write History(...)" in refusal(
        lambda: fit(model, X, Y, callbacks=[keras.callbacks.History])
    )
    container = keras.callbacks.CallbackList([keras.callbacks.History()], model=model)
    assert "a CallbackList" in refusal(lambda: fit(model, X, Y, callbacks=container))
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    line = refusal(lambda: fit(model, X, Y, callbacks=[backup]))
    assert "tfdist.BackupAndRestore" in line
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize("by", ["compile", "optimizer"])
def test_a_model_that_a_callback_compiles_is_refused(strategies, hook, by):
    """The step goes on with the optimizer of before, and checkpoints would have the other one's."""

    def change(*_, **__):
        with strategies[2].scope():
            other = keras.optimizers.SGD(0.5)
            if by == "compile":
                model.compile(other, "mse")
            else:
                model.optimizer = other

    model = regression(strategies[2])
    callback = keras.callbacks.Callback()
    setattr(callback, hook, change)
    line = refusal(lambda: fit(model, X, Y, epochs=2, callbacks=[callback]))
    assert line.startswith("callbacks: received a model that was compiled, or given another")


class Broken(keras.utils.PyDataset):
    """Its fourth batch is not as the first one is, or cannot be read."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(3 * index, 3 * index + 3)
        if index < 3:
            return (X[rows] * 10).astype(int), Y[rows]
        if self.kind == "error":
            raise KeyError("a file that is not there")
        return (X[rows], Y[rows]) if self.kind == "type" else (X[:0].astype(int), Y[:0])


BROKEN = {
    "type": "Broken[3]: received numbers of float32; expected int64",
    "empty": "Broken[3]: received a batch without an example;",
    "error": "a file that is not there",
}


@pytest.mark.parametrize("act", ["fit", "predict"])
@pytest.mark.parametrize("kind", BROKEN)
def test_what_reading_a_batch_raises_is_raised(strategies, kind, act):
    """TensorFlow gives its text, in an error of many lines, and would cut fractions."""
    model = regression(strategies[2])
    with pytest.raises(KeyError if kind == "error" else UsageError) as caught:
        getattr(tfdist, act)(model, Broken(kind), verbose=0)
    assert BROKEN[kind] in str(caught.value)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_warned_of_once_and_the_run_goes_on(strategies, caplog, kind):
    y = Y.copy()
    y[3] = float(kind)
    history = fit(regression(strategies[2]), X, y, 6, 3, shuffle=False)
    assert history.epoch == [0, 1, 2]
    assert not np.isfinite(history.history["loss"]).any()
    warned = [r.getMessage() for r in caplog.records if r.getMessage().startswith("loss: ")]
    assert len(warned) == 1
    assert "in epoch 1" in warned[0]
    assert "TerminateOnNaN" in warned[0]


@pytest.mark.parametrize(("replicas", "logits"), [(1, True), (2, False)])
def test_labels_out_of_range_are_named(strategies, replicas, logits):
    model = classifier(strategies[replicas], logits=logits)
    for shift, named in ((1, "a label of 3"), (-1, "a label of -1")):
        line = refusal(lambda shift=shift: fit(model, X, LABELS + shift))
        assert line.startswith("labels: received ")
        assert named in line
        assert "in the range [0, 3)" in line
    assert "a label of 3" in refusal(lambda: tfdist.evaluate(model, X, LABELS + 1, verbose=0))
    fit(model, X, LABELS)  # the strategy is as good as before


def test_another_invalid_argument_keeps_its_own_message(strategies):
    with strategies[1].scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "mine")),
            ]
        )
        model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="mine"):
        tfdist.evaluate(model, X * np.nan, Y, verbose=0)


def test_what_keras_finds_wrong_keeps_the_message_of_keras(strategies):
    model = regression(strategies[2])
    with pytest.raises(ValueError, match=r"expected axis -1 .* value 4|incompatible"):
        fit(model, X[:, :3], Y)
    with strategies[1].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        fit(model, X, Y)
    with pytest.raises(TypeError, match="batchsize"):
        fit(model, X, Y, batchsize=4)


# make_strategy must be called before TensorFlow has run anything: each in a process of its own.

ASK = """
import json, sys
import tfdist
def ask(**options):
    try:
        tfdist.make_strategy(**options)
        said.append("made")
    except tfdist.UsageError as error:
        said.append(str(error))
said = []
"""

REFUSED = (
    ASK
    + """
ask(kind="mirorred")
ask(kind="ps")
ask(kind="multiworker")
ask(kind="single", devices_per_worker=2)
ask(kind="mirrored", devices_per_worker=1000)
ask(environ={"TF_CONFIG": "{'cluster': {}}"})
workers = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
config = {"cluster": workers, "task": {"type": "worker", "index": 0}}
ask(kind="ps", environ={"TF_CONFIG": json.dumps(config)})
cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
for count in (0, 2):
    ask(environ={"TF_CONFIG": json.dumps(config)}, min_workers=count)
ask(startup_timeout_s=-1.0)
ask(threads=True)
ask(kind="mirrored", devices_per_worker=2)
ask(kind="mirrored")
ask(kind="single")

import keras, numpy as np, tensorflow as tf
def made(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model
for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("/CPU:0")):
    for act in (tfdist.fit, tfdist.evaluate, tfdist.predict):
        try:
            act(made(strategy), np.zeros((8, 4)), *[np.zeros((8, 1))] * (act is not tfdist.predict))
            said.append("done")
        except tfdist.UsageError as error:
            said.append(str(error))
print(json.dumps(said))
"""
)

TOO_LATE = (
    ASK
    + """
import tensorflow as tf
tf.zeros([])
ask()
ask(kind="mirrored")
print(json.dumps(said))
"""
)


def said_by(program):
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    ran = forked_python.run("-c", program, timeout=120, env=environ)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_make_strategy_and_models_of_other_scopes():
    said = said_by(REFUSED)
    expected = [
        "make_strategy(kind): received 'mirorred' (did you mean 'mirrored'?)",
        "kind='ps' and no cluster in TF_CONFIG",
        "kind='multiworker' and no cluster in TF_CONFIG",
        "devices_per_worker=2 with strategy single",
        "devices_per_worker: received 1000",
        "TF_CONFIG",
        "kind='ps' where TF_CONFIG describes a multiworker job",
        "make_strategy(min_workers): received 0",
        "min_workers: received 2 of 1 workers",
        "make_strategy(startup_timeout_s): received -1.0",
        "make_strategy(threads): received True",
        "made",
        "made",
        "kind='single' after a mirrored strategy was made",
        *["a model made outside strategy.scope()"] * 3,
        *["a model made in the scope of another strategy"] * 3,
    ]
    assert len(said) == len(expected)
    for line, part in zip(said, expected, strict=True):
        assert part in line
        assert line == "made" or ". Fix: " in line


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"TF_USE_LEGACY_KERAS": "1"}, 1),
        ({"TF_USE_LEGACY_KERAS": "1", "TFDIST_JOB": "of a launcher, which says it"}, 0),
        ({"TF_USE_LEGACY_KERAS": "0"}, 0),
    ],
)
def test_make_strategy_says_that_tf_keras_is_keras_2(variables, lines):
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | variables
    program = ASK + "ask(kind='single')\nask(kind='single')\nassert said == ['made', 'made']"
    ran = forked_python.run("-c", program, timeout=120, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("TF_USE_LEGACY_KERAS=1: tf.keras is Keras 2") == lines


EVALUATOR = (
    ASK
    + """
workers = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
options = {"strategy": "multiworker", "devices_per_worker": 2}
config = {"cluster": workers, "task": {"type": "evaluator", "index": 0}, "tfdist": options}
ask(environ={"TF_CONFIG": json.dumps(config)})
print(json.dumps(said))
"""
)


def test_an_evaluator_is_made_where_workers_have_several_devices():
    assert said_by(EVALUATOR) == ["made"]


def test_make_strategy_after_an_operation_is_refused():
    for line in said_by(TOO_LATE):
        assert "a process in which TensorFlow has already run an operation" in line
        assert "top of the program" in line
