"""How a model is cut into stages, and one stage in this process; jobs: test_pipeline_jobs."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.graphs import ragged, residual, several
from tests.refusals import refusal
from tfdist.cluster import KINDS
from tfdist.pipeline import engine
from tfdist.pipeline.cuts import LayerGraph, chosen_places, possible_places
from tfdist.pipeline.stage import MicroBatch, Stage
from tfdist.pipeline.union import fill, is_empty, making_empty_slots, release
from tfdist.strategy import job as jobs
from tfdist.strategy import pipeline_setup
from tfdist.training import inputs
from tfdist.training.keras_compat.trace import warn_once
from tfdist.training.resume import require_exact

L = keras.layers


def stages_of(model, cut):
    graph = LayerGraph(model)
    return graph.cut(graph.behind_layers(cut))


def test_inner_models_stay_whole_if_layer_names_repeat():
    x = keras.Input((4,))
    towers = [
        keras.Sequential([keras.Input((4,)), L.Dense(3, name="same")], name=name) for name in "ab"
    ]
    model = keras.Model(x, L.Concatenate(name="join")([tower(x) for tower in towers]))
    assert [node.operation.name for node in LayerGraph(model).nodes] == ["a", "b", "join"]


def test_no_variable_is_on_both_sides_of_a_place():
    x = keras.Input((4,))
    twice = L.Dense(4, name="twice")
    y = twice(L.Dense(4, name="before")(x))
    y = twice(L.Dense(4, name="between")(y))
    model = keras.Model(x, L.Dense(4, name="after")(y))
    assert [p.name for p in LayerGraph(model).places()] == ["before", "twice"]
    assert refusal(lambda: stages_of(model, ["between"])).code == "no-cut"


def own_call():
    class Model(keras.Model):
        def call(self, x):
            return x

    return LayerGraph(Model())


def stateful(*, inside):
    lstm = keras.Sequential([keras.Input((3, 2), batch_size=4), L.LSTM(2, stateful=True)])
    x = keras.Input((3, 2), batch_size=4)
    return LayerGraph(keras.Model(x, lstm(x)) if inside else lstm)


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        (own_call, "no-cut"),
        (lambda: LayerGraph(keras.Sequential([L.Dense(2)])), "no-cut"),
        (lambda: stateful(inside=False), "unsupported-layer"),
        (lambda: stateful(inside=True), "unsupported-layer"),
        (lambda: stages_of(several(), ["third"]), "unknown-value"),
        (lambda: stages_of(residual(), ["head"]), "no-cut"),
        (lambda: stages_of(ragged(), ["embed"]), "no-cut"),
        (lambda: stages_of(several(), ["second", "second"]), "no-cut"),
    ],
)
def test_impossible_cuts_are_refused(mistake, code):
    assert refusal(mistake).code == code


@pytest.mark.parametrize(
    "given",
    [
        *({"split_size": size} for size in (0, -1, 2.5, "fast")),
        {"schedule": "2f2b"},
        {"keep": "nothing"},
    ],
)
def test_invalid_options_are_refused(given):
    assert refusal(lambda: tfdist.PipelineOptions(**given)).where in given


# Training by the engine, and how tasks meet.


random = np.random.default_rng(0)
X = random.random((26, 5)).astype("float32")
Y = random.integers(0, 3, (26,))


def model_with(optimizer="adam"):
    keras.utils.set_random_seed(1)
    layers = [L.Dense(8, activation="relu", kernel_regularizer="l2") for _ in range(3)]
    model = keras.Sequential([keras.Input((5,)), *layers, L.Dense(3, activation="softmax")])
    optimizer = optimizer() if callable(optimizer) else optimizer
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy", one_number])
    return model


def one_number(y, predicted):
    return keras.ops.mean(predicted[:, 0]) + keras.ops.mean(keras.ops.cast(y, predicted.dtype))


class AddsForEach(L.Layer):
    """Passes on what it gets; each example's mean of squares is a loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x), axis=-1))
        return x


def summed():
    """A sum and a mean over the examples, beside losses of a regularizer and by `add_loss`."""
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    y = AddsForEach()(L.Dense(8, activation="relu", kernel_regularizer="l2")(x))
    model = keras.Model(x, [L.Dense(3, activation="softmax", name=f"head{i}")(y) for i in (0, 1)])
    losses = [SPARSE(reduction=how) for how in ("sum", "sum_over_batch_size")]
    model.compile(keras.optimizers.SGD(0.01), losses)
    return model


class AddsForEachUnit(L.Layer):
    """Passes on what it gets; each unit's mean of squares over the batch is a loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x), axis=0))
        return x


def with_means():
    """As many means as a micro-batch has examples."""
    keras.utils.set_random_seed(1)
    layers = [L.Dense(3), AddsForEachUnit(), L.Dense(3, activation="softmax")]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), SPARSE())
    return model


class Counts(L.Layer):
    """Passes on what it gets, of which it gives numbers to metrics."""

    def build(self, shape):
        self.mean = keras.metrics.Mean(name="mean")
        self.steps, self.examples = (keras.metrics.Sum(name=name) for name in ("steps", "examples"))

    def call(self, x):
        self.mean.update_state(keras.ops.mean(x))
        self.steps.update_state(1)
        self.examples.update_state(keras.ops.shape(x)[0])
        return x


def counted():
    """Metrics of a layer, which see a number of each micro-batch."""
    keras.utils.set_random_seed(1)
    layers = [L.Dense(8, activation="relu"), Counts(), L.Dense(3, activation="softmax")]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), SPARSE())
    return model


SPARSE = keras.losses.SparseCategoricalCrossentropy


@pytest.fixture
def one_stage(strategies, monkeypatch):
    """Begins the job of a pipeline with one stage."""

    def begin(split_size=3, **given):
        options = pipeline_setup.PipelineOptions(split_size=split_size)
        place = pipeline_setup.Stages(
            index=0, count=1, names=("worker-0",), options=options, **given
        )
        job = jobs.Job(strategy=strategies[1], kind=KINDS["pipeline"], stages=place)
        monkeypatch.setattr(jobs, "_made", [job])
        return job.strategy

    return begin


def fitted(strategy, make, **given):
    with strategy.scope():
        model = make(**given)
    y, few = (Y, Y[:7]) if len(model.outputs) == 1 else ([Y, Y], [Y[:7], Y[:7]])
    fit = {"batch_size": 8, "verbose": 0}
    history = tfdist.fit(model, X, y, epochs=2, seed=3, validation_data=(X[:7], few), **fit)
    predicted = tfdist.predict(model, X, **fit)
    return model.get_weights(), history.history, predicted, tfdist.evaluate(model, X, y, **fit)


def assert_same_run(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for key in expected[1]:
        np.testing.assert_allclose(found[1][key], expected[1][key], rtol=1e-4, err_msg=key)
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-4)


class Centres(keras.optimizers.SGD):
    """Takes the mean out of each gradient, by a method of its own."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g - tf.reduce_mean(g), v) for g, v in grads_and_vars])


def scaled():
    inner = keras.optimizers.SGD(0.1, global_clipnorm=0.2, gradient_accumulation_steps=3)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: model_with(lambda: Centres(0.1)),
        lambda: model_with(scaled),
        summed,
        with_means,
        counted,
    ],
    ids=["a method of its own", "scaled, clipped and accumulated", "summed", "means", "counted"],
)
def test_micro_batches_give_the_weights_of_whole_batches(strategies, one_stage, make):
    expected = fitted(strategies[1], make)
    assert_same_run(fitted(one_stage(), make), expected)


def contrastive(labels, z):
    same = keras.ops.equal(labels[:, None], labels[None])
    products = keras.ops.matmul(z, keras.ops.transpose(z))
    return keras.ops.mean(keras.ops.square(products - keras.ops.cast(same, z.dtype)))


def divided_sum(labels, z):
    return SPARSE(reduction="sum")(labels, z) / keras.ops.cast(keras.ops.shape(z)[0], z.dtype)


COMPARING = {
    "pairs": (contrastive, "a matrix product of the batch with itself in micro-batches"),
    "circle": (keras.losses.Circle(), "a matrix product of the batch with itself in micro-batches"),
    "overlap": (keras.losses.Dice(), "Dice of a whole batch in micro-batches"),
    "a sum divided": (divided_sum, "a loss that is a sum over the batch is divided by a number"),
    "none": (SPARSE(), None),
}


def test_an_empty_batch_of_a_stream_is_refused(one_stage):
    with one_stage().scope():
        model = model_with()
    types = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (X, Y)]
    batches = tf.data.Dataset.from_generator(
        lambda: ((X[:size], Y[:size]) for size in (8, 0, 8)), output_signature=tuple(types)
    )
    found = refusal(lambda: tfdist.fit(model, batches, verbose=0))
    assert (found.where, found.problem) == ("pipeline", "the batch of step 2 has no examples")


class Draws(L.Layer):
    def call(self, x):
        return x * tf.random.uniform([])


def test_an_exact_run_depends_on_work_and_seed_only(one_stage, tmp_path):
    strategy = one_stage()
    place = jobs._made[0].stages
    backup = functools.partial(tfdist.BackupAndRestore, exact=True)
    with strategy.scope():
        model = model_with()
    tfdist.fit(model, X, Y, batch_size=8, verbose=0, callbacks=[backup(tmp_path / "a")])
    assert place.chosen.exact
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), L.Dense(3), Draws()])
        model.compile("sgd", SPARSE(from_logits=True))
    fit = functools.partial(tfdist.fit, model, X, Y, batch_size=8, verbose=0)
    assert refusal(lambda: fit(callbacks=[backup(tmp_path / "b")])).code == "not-exact"
    fit()
    assert not place.chosen.exact
    strategy = one_stage("auto")
    with strategy.scope():
        model = model_with()
    refused = lambda: tfdist.fit(model, X, Y, callbacks=[backup(tmp_path / "c")])  # noqa: E731
    assert refusal(refused).code == "not-exact"


@pytest.mark.parametrize(("cut", "is_refused"), [("auto", True), (None, True), (["a"], False)])
def test_an_exact_run_needs_named_cuts(cut, is_refused):
    options = pipeline_setup.PipelineOptions(cut=cut)
    place = pipeline_setup.Stages(index=0, count=2, names=(), options=options)
    job = types.SimpleNamespace(kind=KINDS["pipeline"], stages=place, is_chief=True)
    feed = types.SimpleNamespace(source=None)
    require = functools.partial(require_exact, [types.SimpleNamespace(exact=True)], feed, job=job)
    if is_refused:
        assert refusal(require).code == "not-exact"
    else:
        require()


def test_a_cut_of_version_0_2_is_read():
    chosen = pipeline_setup.Choices(cuts={"a/2": [3]})
    chosen.take({"cut_of": ["b", 2], "cut": [1], "split_size": 6})
    assert chosen.state() == {"cuts": {"a/2": [3], "b/2": [1]}, "split_size": 6}


@pytest.mark.parametrize("what", COMPARING)
def test_a_pairwise_loss_gets_the_whole_batch_or_warns(strategies, one_stage, caplog, what):
    loss, warning = COMPARING[what]
    warn_once.cache_clear()

    def weights_of(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), L.Dense(4), L.Dense(3, "softmax")])
            model.compile("sgd", loss)
        y = np.eye(3, dtype="float32")[Y] if what == "overlap" else Y
        tfdist.fit(model, X, y, batch_size=8, seed=3, verbose=0)
        return model.get_weights()

    expected = weights_of(strategies[1])
    if what != "a sum divided":
        for one, other in zip(weights_of(one_stage(None)), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        assert not [line for line in caplog.messages if "in micro-batches" in line]
        assert ("the loss compares" in caplog.text) == (warning is not None)
    weights_of(one_stage(3))
    found = [
        line for line in caplog.messages if "micro-batch" in line and "examples of a" not in line
    ]
    assert [line.startswith(warning or "-") for line in found] == [True] * bool(warning)


def test_frozen_weights_stay_as_they_are_in_several_pipelines(one_stage, monkeypatch):
    """Three, the others of which have the same examples: a third of a weight is no float32."""
    peers = types.SimpleNamespace(sum=lambda *arrays, of: [3 * array for array in arrays])
    monkeypatch.setattr(inputs, "require_same_examples", lambda job, source: None)
    with one_stage(2, pipelines=3, peers=peers).scope():
        frozen = L.Dense(8)
        model = keras.Sequential([keras.Input((5,)), frozen, L.BatchNormalization(), L.Dense(3)])
        frozen.trainable = False
        model.compile("sgd", SPARSE(from_logits=True))
    before = model.get_weights()
    tfdist.fit(model, X[:24], Y[:24], batch_size=6, seed=3, verbose=0)
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert same == [True, True] + [False] * 6


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "reduction", "code"),
    [(OwnStep, "mean", "unsupported"), (keras.Sequential, None, "loss-reduction")],
)
def test_models_that_cannot_train_in_stages_are_refused(
    one_stage, kind, reduction, code, monkeypatch
):
    """And the links to the neighbours are left as they were, for another model."""
    link = types.SimpleNamespace(fail=pytest.fail)
    monkeypatch.setattr(engine, "links_of", lambda place: (link, link))
    with one_stage().scope():
        model = kind([keras.Input((5,)), L.Dense(3)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    assert refusal(lambda: tfdist.fit(model, X, X[:, :3], batch_size=8, verbose=0)).code == code


def test_features_that_need_the_whole_model_are_refused(one_stage, tmp_path):
    with one_stage().scope():
        model = model_with("sgd")
    line = refusal(lambda: tfdist.StepLoop(lambda x: {}, X, global_batch_size=8))
    assert line.code == "unsupported"
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=2)
    line = refusal(lambda: tfdist.fit(model, X, Y, batch_size=8, verbose=0, callbacks=[saving]))
    assert line.code == "unsupported"


def test_slots_start_empty_and_get_their_initial_values():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    adagrad = keras.optimizers.Adagrad(initial_accumulator_value=0.25, use_ema=True)
    with making_empty_slots(keras.optimizers.LossScaleOptimizer(adagrad)):
        adagrad.build(model.trainable_variables)
    slots = adagrad._accumulators
    assert all(map(is_empty, slots))
    assert not any(map(is_empty, adagrad._model_variables_moving_average))
    fill(slots)
    for slot, variable in zip(slots, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(slot.numpy(), np.full(variable.shape, 0.25))
    release(slots)
    assert all(map(is_empty, slots))


def of_integers():
    """Parts that make integers alone."""
    x = keras.Input((6,), dtype="int32")
    ids = L.IntegerLookup(vocabulary=[1, 2, 3])(x)
    hidden = L.LSTM(3)(L.Embedding(9, 4, mask_zero=True)(ids))
    return keras.Model(x, L.Dense(1)(hidden))


def chosen(graph, *, stages, **given):
    possible = possible_places(graph, num_stages=stages)
    return chosen_places(graph, possible, num_stages=stages, rows=4, micros=8, **given)


@pytest.mark.parametrize(("make", "stages"), [(model_with, 3), (of_integers, 2)])
def test_the_places_that_are_chosen_cut_the_model(make, stages):
    graph = LayerGraph(make())
    positions = [place.position for place in chosen(graph, stages=stages)]
    assert len(graph.cut(positions)) == stages
    assert refusal(lambda: chosen(graph, stages=9)).code == "no-cut"


def called_twice():
    x, dense = keras.Input((4,)), L.Dense(4, name="twice")
    return keras.Model(x, dense(L.Dense(4)(dense(x))))


def skipping():
    """Each level goes to the end by itself, too, as in a U-Net."""
    x = keras.Input((4,))
    levels = [L.Dense(4, name="level")(x)]
    for _ in range(3):
        levels.append(L.Dense(4)(levels[-1]))
    return keras.Model(x, L.Dense(1)(L.Concatenate()(levels)))


@pytest.mark.parametrize(
    ("make", "stages", "says"),
    [
        (called_twice, 2, "layer 'twice' is called 2 times with 'twice/"),
        (skipping, 6, "more than 2 tensors cross behind 'dense"),
        (model_with, 9, "can be cut at 3 places. Fix: use fewer"),
    ],
)
def test_a_refusal_gives_the_reason_for_few_places(make, stages, says):
    line = refusal(lambda: possible_places(LayerGraph(make()), num_stages=stages))
    assert line.code == "no-cut"
    assert says in str(line)


@pytest.mark.parametrize("behind", ["attention", "sum"])
def test_a_mask_lost_by_keras_has_no_effect(behind):
    x = keras.Input((3,), dtype="int32")
    embedded = L.Embedding(9, 4, mask_zero=True)(x)
    attended = L.MultiHeadAttention(1, 4, name="attention")(embedded, embedded)
    hidden = L.Add(name="sum")([attended, embedded])
    graph = LayerGraph(keras.Model(x, L.Dense(1)(hidden)))
    part, _ = graph.cut(graph.behind_layers([behind]))
    ids = tf.constant([[1, 2, 0]])
    batch = MicroBatch(inputs={0: ids}, share=tf.constant(1.0), random_key=tf.zeros([2], tf.int32))
    stage = Stage([part])
    message = stage.forward(0, batch, [])
    tensors, masks = message[: len(part.sent)], message[len(part.sent) : -1]
    assert [mask.shape for mask in masks] == [tensor.shape[:2] for tensor in tensors]
    assert masks[-1].numpy().all()
