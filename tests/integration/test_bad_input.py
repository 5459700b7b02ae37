"""A mistake is refused by where it is and a code; nothing is trained, and the next call works."""

import dataclasses
import functools
import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import forked_python
from tests.models import OwnStep, around, linear, sequential
from tests.multiprocess.programs.without_call import AutoEncoder
from tests.refusals import refusal, refused
from tfdist.errors import UsageError
from tfdist.kinds import KINDS
from tfdist.strategy.job import Job
from tfdist.training import building

RNG = np.random.RandomState(0)
X = RNG.randn(12, 4).astype("float32")
Y = RNG.randn(12, 1).astype("float32")
LABELS = np.arange(12) % 3
PAIRS = tf.data.Dataset.from_tensor_slices((X, Y))


def fit(model, *arguments, **options):
    return tfdist.fit(model, *arguments, **({"verbose": 0} | options))


def loop_of(strategy, step=lambda x: {"sum": tf.reduce_sum(x)}, **options):
    with strategy.scope():
        return tfdist.StepLoop(step, X, global_batch_size=4, **options)


def classifier(strategy, *, logits=False):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    layer = functools.partial(keras.layers.Dense, 3, None if logits else "softmax")
    return sequential(strategy, layer, loss=loss, weighted_metrics=["accuracy"])


def two_outputs(strategy):
    with strategy.scope():
        x = keras.Input((4,))
        model = keras.Model(x, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])
        model.compile("sgd", ["mse", "mse"])
    return model


def of_pixels(strategy):
    layer = functools.partial(keras.layers.Dense, 3, "softmax")
    return sequential(strategy, layer, inputs=(4, 1), loss="sparse_categorical_crossentropy")


def test_a_setting_of_another_strategy_warns(strategies, caplog):
    """A script keeps its settings under every strategy."""
    settings = tfdist.Run(max_staleness=3, sharded_optimizer=True)
    fit(linear(strategies[1]), X, Y, callbacks=[settings])
    told = [record.message for record in caplog.records if "no effect" in record.message]
    assert told == [
        "fit: sharded_optimizer has no effect with one worker",
        "fit: max_staleness has no effect under strategy single, only under ps",
    ]


OPTIONS = {
    "not-an-int": [
        *(("batch_size", value) for value in (0, -1, 2.5, "4")),
        *(("epochs", value) for value in (-1, 1.5, True, None)),
        *(("seed", value) for value in (-1, 1.5, "a")),
        *(("validation_freq", value) for value in (0, (1, 2))),
        *(("steps_per_epoch", 0), ("initial_epoch", -1), ("overfit_batches", 0.5)),
    ],
    "too-large": [("seed", 1 << 63)],  # a checkpoint would not hold it
    "bad-value": [("class_weight", value) for value in ([1, 1], {}, {"cat": 1.0}, {-1: 2.0})],
}


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [(code, *option) for code, options in OPTIONS.items() for option in options],
)
def test_an_invalid_option_is_named(strategies, code, name, value):
    assert refused(lambda: fit(linear(strategies[1]), X, Y, **{name: value})) == (name, code)


def test_numpy_integers_are_numbers(strategies, tmp_path):
    five, two = np.int64(5), np.int32(2)
    virtual = tfdist.VirtualEpochs(total_examples=five, checkpoints=two)
    lengths = {"epochs": two, "steps_per_epoch": two}, {"virtual_epochs": virtual}
    for number, length in enumerate(lengths):
        saved = [tfdist.BackupAndRestore(tmp_path / str(number))]
        options = {"batch_size": five, "shuffle": np.bool_(True), "callbacks": saved, **length}
        assert fit(linear(strategies[1]), X, Y, **options).epoch == [0, 1]


def test_zero_epochs_leave_the_model_unchanged(strategies):
    model = linear(strategies[2])
    before = model.get_weights()
    assert fit(model, X, Y, epochs=0).history == {}
    assert fit(model, X, Y, epochs=2, initial_epoch=2).history == {}
    np.testing.assert_equal(model.get_weights(), before)


# Models


ACTS = {
    "fit": lambda model: fit(model, X, Y),
    "evaluate": lambda model: tfdist.evaluate(model, X, Y),
    "predict": lambda model: tfdist.predict(model, X),
    "load_weights": lambda model: tfdist.load_weights(model, "weights.keras"),
    "StepLoop": lambda model: tfdist.StepLoop(lambda x: {}, X, global_batch_size=4),
    "find_learning_rate": lambda model: tfdist.find_learning_rate(model, X, Y),
    "find_batch_size": lambda model: tfdist.find_batch_size(model, X, Y),
}
BY_STEPS = ("fit", "evaluate", "predict")
MODELS = {
    "not-a-model": (lambda strategy: "model", BY_STEPS),
    "unsupported": (lambda strategy: linear(strategy, run_eagerly=True), ("fit", "evaluate")),
}


@pytest.mark.parametrize(
    ("code", "act"), [(code, act) for code, (_, acts) in MODELS.items() for act in acts]
)
def test_untrainable_models_are_refused(strategies, code, act):
    model = MODELS[code][0](strategies[1])
    assert refusal(lambda: ACTS[act](model)).code == code


@pytest.mark.parametrize("act", [*BY_STEPS, "StepLoop"])
def test_functions_that_run_eagerly_are_refused(strategies, act):
    model = linear(strategies[2])
    tf.config.run_functions_eagerly(True)
    try:
        assert refused(lambda: ACTS[act](model)) == (f"tfdist.{act}", "unsupported")
    finally:
        tf.config.run_functions_eagerly(False)


def test_an_uncompiled_model_predicts(strategies):
    for replicas in (1, 2):
        with strategies[replicas].scope():
            model = keras.Sequential([keras.layers.Dense(1)])  # not built either
        assert tfdist.predict(model, X, verbose=0).shape == (12, 1)


def test_a_call_in_the_models_own_scope_works(strategies):
    with strategies[2].scope():
        model = linear(strategies[2])
        fit(model, X, Y, validation_data=(X, Y))
        assert tfdist.evaluate(model, X, Y, verbose=0) > 0
        assert tfdist.predict(model, X, verbose=0).shape == (12, 1)


@pytest.mark.parametrize("act", [*BY_STEPS, "load_weights", "StepLoop"])
@pytest.mark.parametrize("kind", ["mirrored", "multiworker", "ps"])
def test_a_task_without_make_strategy_does_not_train_alone(monkeypatch, act, kind):
    hosts = {"worker": ["a:2222", "b:2222"]}
    if kind == "ps":
        hosts |= {"chief": ["c:2222"], "ps": ["d:2222"]}
    config = {
        "cluster": {} if kind == "mirrored" else hosts,
        "task": {"type": "worker", "index": 0},
        "tfdist": {"strategy": kind},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    model = linear(tf.distribute.get_strategy())
    assert refused(lambda: ACTS[act](model)) == ("tfdist", "other-strategy")


@pytest.mark.parametrize("kind", ["multiworker", "pipeline"])
def test_barrier_and_broadcast_without_make_strategy_are_refused(monkeypatch, kind):
    workers = {"worker": ["a:2222", "b:2222"]}
    task = {"type": "worker", "index": 1}
    config = {"cluster": workers, "task": task, "tfdist": {"strategy": kind}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for call in (tfdist.barrier, lambda: tfdist.broadcast(1)):
        assert refusal(call).code == "no-strategy"
    config["task"] = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    tfdist.barrier()


def test_a_layer_that_becomes_trainable_needs_another_optimizer(strategies):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.layers[0].trainable = False
        model.compile("adam", "mse")
    fit(model, X, Y)
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match="Unknown variable"):
        fit(model, X, Y)
    with strategies[2].scope():
        model.compile("adam", "mse")
    fit(model, X, Y)


# What one replica alone can do


def stateful(strategy):
    per_replica = 4 // strategy.num_replicas_in_sync
    with strategy.scope():
        layer = keras.layers.SimpleRNN(1, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(per_replica, 3, 2)), layer])
        model.compile("sgd", "mse")
    return model


def in_float8(strategy):
    model = linear(strategy)
    with strategy.scope():
        model.layers[0].quantize("float8")
        model.compile("sgd", "mse")
    return model


class Decorated(OwnStep, keras.Sequential):
    """In a function, from inside of which it cannot be told whether a loss is scaled."""

    train_step = tf.function(OwnStep.train_step)


def with_a_mean(strategy):
    """A model whose second input belongs to all examples."""
    with strategy.scope():
        x, whole = keras.Input((4,), name="x"), keras.Input((4,), name="all")
        means = keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, 0, keepdims=True))(whole)
        model = keras.Model([x, whole], keras.layers.Dense(1)(keras.layers.Add()([x, means])))
        model.compile("sgd", "mse")
    return model


class InReplicas(AutoEncoder):
    """Has outputs for its metrics in replicas only."""

    def loss_and_outputs(self, x):
        if tf.distribute.in_cross_replica_context():
            raise LookupError("no replica")
        return super().loss_and_outputs(x)


def without_a_call(strategy):
    with strategy.scope():
        model = InReplicas(4)
        model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


ROWS = np.zeros((4, 3, 2), "float32")
OF_ALL = PAIRS.batch(4).map(lambda x, y: ({"x": x, "all": tf.ones((3, 4))}, y))
ON_ONE = {
    "a state": (stateful, (ROWS, ROWS[:, 0, :1], 4), "model", "unsupported"),
    "float8": (in_float8, (X, Y), "model", "unsupported"),
    "metrics of compile": (without_a_call, (X,), "metrics", "not-built"),
    "metrics of compile, few rows": (
        without_a_call,
        (PAIRS.map(lambda x, y: x).batch(4),),
        "metrics",
        "not-built",
    ),
    "a tf.function": (
        functools.partial(linear, kind=Decorated),
        (X, Y),
        "train_step",
        "unsupported",
    ),
    "parts of all examples": (with_a_mean, (OF_ALL,), "data", "shapes-differ"),
}


@pytest.mark.parametrize("what", ON_ONE)
def test_single_replica_features_are_refused_on_several_replicas(strategies, what):
    make, data, where, code = ON_ONE[what]
    logs = fit(make(strategies[1]), *data).history
    assert np.isfinite([*logs.values()]).all()
    assert refused(lambda: fit(make(strategies[2]), *data)) == (where, code)


def test_float8_scales_are_refused_in_micro_batches(strategies):
    model, single = in_float8(strategies[1]), Job(strategy=strategies[1], kind=KINDS["single"])
    building._require_one_scale(model, single)
    staged = dataclasses.replace(single, kind=KINDS["pipeline"])
    error = refused(lambda: building._require_one_scale(model, staged))
    assert error == ("model", "unsupported")


# Whatever else


def in_another_scope(strategies):
    model = linear(strategies[2])
    with strategies[1].scope():
        fit(model, X, Y)


def compiled_outside(strategy):
    model = linear(strategy)
    model.compile("adam", "mse")
    return model


def with_a_layer_made_outside(strategy):
    layer = keras.layers.Dense(1)
    layer.build((None, 4))
    return sequential(strategy, lambda: layer)


def read_once():
    batches = iter([(X, Y)] * 3)  # all are gone when they have been counted
    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    return tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)


def with_callbacks(given):
    return lambda s: fit(linear(s[1]), X, Y, callbacks=given)


def weighing(make, *data, **options):
    options = {"class_weight": {0: 1.0}, **options}
    return lambda s: fit(make(s[1]), *data, **options)


SGD, LENGTH = keras.optimizers.SGD, tfdist.VirtualEpochs(total_examples=24)
REFUSED = {
    ("tfdist.fit", "another-scope"): [in_another_scope],
    ("optimizer", "another-scope"): [
        lambda s: fit(linear(s[2], optimizer=SGD()), X, Y),
        lambda s: fit(linear(s[2], optimizer=functools.partial(around, SGD())), X, Y),
        lambda s: fit(compiled_outside(s[2]), X, Y),
    ],
    ("model", "another-scope"): [
        lambda s: fit(with_a_layer_made_outside(s[2]), X, Y),
        lambda s: fit(linear(s[2], metrics=[keras.metrics.MeanAbsoluteError()]), X, Y),
    ],
    ("model", "unsupported"): [
        lambda s: tfdist.evaluate(stateful(s[2]), ROWS, ROWS[:, 0, :1], 4),
        lambda s: tfdist.predict(stateful(s[2]), ROWS, 4),
    ],
    ("data", "shapes-differ"): [
        lambda s: fit(linear(s[1]), X, Y, validation_split=-0.5),
        lambda s: fit(linear(s[1]), X, Y[:5]),
    ],
    ("StepLoop", "unsupported"): [lambda s: loop_of(s[2], tf.function(lambda x: {}))],
    ("step", "bad-value"): [
        lambda s, logs=logs: loop_of(s[2], lambda x: logs).run(1) for logs in ([1.0], {}, None)
    ],
    ("steps", "not-an-int"): [
        lambda s, steps=steps: loop_of(s[1]).run(steps) for steps in (0, 2.5, "a", True)
    ],
    ("first_step", "not-an-int"): [lambda s: loop_of(s[1], first_step=-1)],
    ("max_staleness", "not-an-int"): [  # no work unit of a ps job ever meets such a bound
        lambda s, most=most: loop_of(s[1], max_staleness=most) for most in (-1, 0.5)
    ],
    ("y", "no-data"): [
        lambda s: fit(linear(s[2]), X),
        lambda s: fit(linear(s[2]), X, Y, validation_data=X),
        lambda s: tfdist.evaluate(linear(s[2]), X),
    ],
    ("x", "unsupported-data"): [lambda s: fit(linear(s[1]), X, Y, validation_data="abc")],
    ("data", "data-ended"): [lambda s, n=n: fit(linear(s[n]), read_once()) for n in (1, 2)],
    ("tfdist.fit", "unknown-length"): [lambda s: fit(linear(s[1]), PAIRS.batch(4).repeat())],
    ("tfdist.fit", "exclusive"): [
        lambda s, name=name: fit(linear(s[1]), X, Y, virtual_epochs=LENGTH, **{name: 2})
        for name in ("epochs", "steps_per_epoch")
    ],
    ("class_weight", "unsupported-data"): [
        weighing(classifier, X, LABELS, sample_weight=np.ones(12)),
        weighing(classifier, X),
        weighing(two_outputs, X, [Y, Y]),
        weighing(of_pixels, X[..., None], RNG.randint(0, 3, (12, 4, 1))),
    ],
    ("callbacks", "bad-value"): [
        with_callbacks(["EarlyStopping"]),
        with_callbacks([keras.callbacks.History]),
        with_callbacks(keras.callbacks.CallbackList([])),
    ],
    ("callbacks", "unsupported"): [
        with_callbacks([keras.callbacks.BackupAndRestore(f"{os.devnull}/backup")]),
    ],
    ("PublishModel", "missing-backup"): [with_callbacks([tfdist.PublishModel("served")])],
    ("broadcast", "collective-type"): [
        lambda s: tfdist.broadcast({0: 1.0}),
        lambda s: tfdist.broadcast([{"a": ({"b": {1: 2}},)}]),
        lambda s: tfdist.broadcast(b"ab\0"),
        lambda s: tfdist.broadcast([{1, 2}]),
        lambda s: tfdist.broadcast({"a": np.zeros(2, [("x", int)])}),
    ],
}


@pytest.mark.parametrize(
    ("where", "code", "act"), [(*named, act) for named, acts in REFUSED.items() for act in acts]
)
def test_it_is_refused(strategies, where, code, act):
    assert refused(lambda: act(strategies)) == (where, code)


def test_data_without_targets_suffice_if_layers_have_losses(strategies):
    layer = functools.partial(keras.layers.ActivityRegularization, 1.0)
    assert fit(sequential(strategies[2], layer, loss=None), X).history["loss"][0] > 0


class Broken(keras.utils.PyDataset):
    """Its fourth batch is not as the first one is, or cannot be read."""

    def __init__(self, kind, batches=4):
        super().__init__()
        self.kind, self.batches = kind, batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        rows = slice(3 * index, 3 * index + 3)
        if index < 3:
            return (X[rows] * 10).astype(int), Y[rows]
        if self.kind == "error":
            raise KeyError("a file that is not there")
        return (X[rows], Y[rows]) if self.kind == "type" else (X[:0].astype(int), Y[:0])


EMPTY = {
    "arrays": (X[:0], Y[:0]),
    "dataset": (PAIRS.take(0).batch(4),),
    "unknown": (PAIRS.filter(lambda x, y: x[0] > 1e9).batch(4),),
    "pydataset": (Broken("none", batches=0),),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_data_are_refused(strategies, kind):
    model, data = linear(strategies[2]), EMPTY[kind]
    validation = data if len(data) > 1 else data[0]
    for call in (
        lambda: fit(model, *data),
        lambda: tfdist.evaluate(model, *data),
        lambda: fit(model, X, Y, validation_data=validation),
    ):
        assert refusal(call).code in ("no-data", "shapes-differ")


def test_steps_without_a_batch_size_divide_data_like_keras(strategies):
    keras.utils.set_random_seed(1)
    ours, theirs = (linear(strategies[1]) for _ in range(2))
    theirs.set_weights(ours.get_weights())
    fit(ours, X, Y, steps_per_epoch=4, shuffle=False)
    theirs.fit(X, Y, steps_per_epoch=4, shuffle=False, verbose=0)
    assert ours.optimizer.iterations.numpy() == theirs.optimizer.iterations.numpy() == 4
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], atol=1e-6)


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


@pytest.mark.parametrize(
    ("hook", "by"),
    [
        ("on_train_begin", "compile"),
        ("on_epoch_end", "optimizer"),
        ("on_train_batch_end", "compile"),
    ],
)
def test_a_model_that_a_callback_compiles_is_refused(strategies, hook, by):
    """The step goes on with the optimizer of before, and checkpoints would have the other one's."""

    def change(*_, **__):
        with strategies[2].scope():
            other = keras.optimizers.SGD(0.5)
            if by == "compile":
                model.compile(other, "mse")
            else:
                model.optimizer = other

    model = linear(strategies[2])
    callback = keras.callbacks.Callback()
    setattr(callback, hook, change)
    refusing = refused(lambda: fit(model, X, Y, epochs=2, callbacks=[callback]))
    assert refusing == ("callbacks", "unsupported")


BROKEN = {"type": "Broken[3]", "empty": "Broken[3]", "error": "a file that is not there"}


@pytest.mark.parametrize("act", ["fit", "predict"])
@pytest.mark.parametrize("kind", BROKEN)
def test_an_error_while_reading_a_batch_is_raised(strategies, kind, act):
    """TensorFlow gives its text, in an error of many lines, and would cut fractions."""
    model = linear(strategies[2])
    with pytest.raises(KeyError if kind == "error" else UsageError) as caught:
        getattr(tfdist, act)(model, Broken(kind), verbose=0)
    assert BROKEN[kind] in str(caught.value)


def test_a_non_finite_loss_warns_once_and_training_continues(strategies, caplog):
    for kind in ("nan", "inf"):
        y = Y.copy()
        y[3] = float(kind)
        caplog.clear()
        history = fit(linear(strategies[2]), X, y, 6, 3, shuffle=False)
        assert history.epoch == [0, 1, 2]
        assert not np.isfinite(history.history["loss"]).any()
        (warned,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("loss: ")]
        assert "in epoch 1" in warned


@pytest.mark.parametrize(("replicas", "logits"), [(1, True), (2, False)])
def test_labels_out_of_range_are_named(strategies, replicas, logits):
    model = classifier(strategies[replicas], logits=logits)
    for act, shift in ((fit, 1), (fit, -1), (tfdist.evaluate, 1)):
        error = refusal(lambda act=act, shift=shift: act(model, X, LABELS + shift, verbose=0))
        assert (error.where, error.code) == ("labels", "label-range")
        assert f"the label {3 if shift == 1 else -1} is not in the range" in error.problem
    fit(model, X, LABELS)  # the strategy is as good as before


# make_strategy must be called before TensorFlow has run anything: each in a process of its own.

ASK = """
import json
import tfdist
said = []
def ask(act=tfdist.make_strategy, *arguments, **options):
    try:
        act(*arguments, **options)
        said.append("made")
    except tfdist.UsageError as error:
        said.append(error.code)
workers = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
"""
ALL = """
ask(strategy="mirorred")
ask(strategy="ps")
ask(strategy="multiworker")
ask(strategy="single", devices_per_worker=2)
ask(strategy="mirrored", devices_per_worker=1000)
ask(environ={"TF_CONFIG": "{'cluster': {}}"})
config = {"cluster": workers, "task": {"type": "worker", "index": 0}}
ask(strategy="ps", environ={"TF_CONFIG": json.dumps(config)})
cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
for count in (0, 2):
    ask(environ={"TF_CONFIG": json.dumps(config)}, min_workers=count)
ask(environ={"TF_CONFIG": json.dumps(config)}, devices_per_worker=2)  # keras-team/keras#18624
ask(startup_timeout_s=-1.0)
ask(threads=True)
ask(strategy="single", elastic=True)
ask(shards=4)
config = {"cluster": workers, "task": {"type": "worker", "index": 0}}
ask(elastic=True, environ={"TF_CONFIG": json.dumps(config)})
config["tfdist"] = {"strategy": "elastic"}
ask(elastic=True, environ={"TF_CONFIG": json.dumps(config)})
ask(strategy="mirrored", devices_per_worker=2)
ask(strategy="mirrored")
ask(strategy="single")

import numpy as np, tensorflow as tf
from tests.models import linear
x, y = np.zeros((8, 4)), np.zeros((8, 1))
for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("/CPU:0")):
    ask(tfdist.fit, linear(strategy), x, y)
    ask(tfdist.evaluate, linear(strategy), x, y)
    ask(tfdist.predict, linear(strategy), x)
"""
AFTER_AN_OPERATION = "import tensorflow as tf; tf.zeros([]); ask(); ask(strategy='mirrored')"
ELASTIC = """
ask(elastic=True, shards=3)
said.append(tfdist.make_strategy(elastic=True).num_replicas_in_sync)
"""
EVALUATOR_OF_WORKERS_WITH_SEVERAL_DEVICES = """
options = {"strategy": "multiworker", "devices_per_worker": 2}
config = {"cluster": workers, "task": {"type": "evaluator", "index": 0}, "tfdist": options}
ask(environ={"TF_CONFIG": json.dumps(config)})
"""


def said_by(program, **variables):
    """What became of each thing that a program has asked for, and its errors."""
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | variables
    program = f"{ASK}{program}\nprint(json.dumps(said))"
    ran = forked_python.run("-c", program, timeout=120, env=environ)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            ALL,
            [
                *("unknown-value", "no-cluster", "no-cluster", "devices", "devices"),
                *("bad-tf-config", "other-strategy", "bad-value", "too-few-tasks", "devices"),
                *("bad-value", "bad-value"),
                *("unsupported", "unsupported", "other-strategy", "no-launcher"),
                *("made", "made", "other-strategy", *["another-scope"] * 6),
            ],
        ),
        (AFTER_AN_OPERATION, ["tensorflow-has-run"] * 2),
        (EVALUATOR_OF_WORKERS_WITH_SEVERAL_DEVICES, ["made"]),
        (ELASTIC, ["made", 3]),
    ],
    ids=["all", "after an operation", "an evaluator", "elastic"],
)
def test_make_strategy_creates_or_refuses_a_strategy(program, expected):
    assert said_by(program)[0] == expected


def test_options_without_effect_in_an_elastic_job_are_named():
    program = """
import tensorflow as tf
options = tf.distribute.experimental.CommunicationOptions()
ask(elastic=True, min_workers=1, communication_options=options)
"""
    _, errors = said_by(program)
    for name in ("min_workers", "communication_options"):
        assert f"make_strategy: {name} has no effect under strategy elastic" in errors


@pytest.mark.parametrize(("value", "lines"), [("1", 1), ("0", 0)])
def test_make_strategy_warns_of_keras_2_as_tf_keras(value, lines):
    program = "ask(strategy='single')\nask(strategy='single')"
    said, errors = said_by(program, TF_USE_LEGACY_KERAS=value)
    assert said == ["made", "made"]
    assert errors.count("TF_USE_LEGACY_KERAS: tf.keras is Keras 2") == lines
