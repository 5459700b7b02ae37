"""A model in stages computes and trains as it does whole; the stages here are in one process."""

import types
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.refusals import refusal
from tfdist.audit.ledger import merge, read_directory
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, hold_ports
from tfdist.errors import StartupTimeout, UsageError
from tfdist.pipeline import engine
from tfdist.pipeline.cuts import LayerGraph
from tfdist.pipeline.schedule import passes
from tfdist.pipeline.stage import MicroBatch, Stage
from tfdist.pipeline.staged import segments_of
from tfdist.pipeline.timing import chosen_places, possible_places
from tfdist.pipeline.union import fill, is_empty, making_empty_slots, owners_of, release
from tfdist.strategy import job as jobs
from tfdist.strategy import stages
from tfdist.training import inputs
from tfdist.training.feed import Part
from tfdist.training.keras_compat import fuse, random_key
from tfdist.training.keras_compat.trace import ops_behind

L = keras.layers
MICROS, ROWS = 3, 4


def residual():
    image = keras.Input((8, 8, 2), name="image")
    x = L.Conv2D(4, 3, padding="same", activation="relu", name="stem")(image)
    x = L.MaxPooling2D(3, strides=1, padding="same", name="max")(x)  # of equal values, too
    for block in range(2):
        y = L.BatchNormalization(name=f"norm{block}")(x)
        y = L.Conv2D(4, 3, padding="same", activation="relu", name=f"conv{block}")(y)
        x = L.Add(name=f"add{block}")([x, L.Dropout(0.3, name=f"dropout{block}")(y)])
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, L.Dense(3, name="head")(x), name="residual")


def words():
    """Integers in, masks that cross every cut, and layers of no, one and several draws."""
    ids = keras.Input((6,), dtype="int32", name="ids")
    x = L.Embedding(10, 4, mask_zero=True, name="embed")(ids)
    x = L.LSTM(5, return_sequences=True, dropout=0.3, recurrent_dropout=0.3, name="lstm0")(x)
    x = L.Dropout(0.2, name="drop")(L.LSTM(5, name="lstm1")(x))
    return keras.Model(ids, L.Dense(3, name="head")(x), name="words")


def several():
    """Two inputs, of which the second is first used late, and two outputs, one made early."""
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    x = L.Dense(5, activation="tanh", name="first", kernel_regularizer="l2")(a)
    early = L.Dense(3, name="early")(x)
    x = L.Dense(5, name="second", activity_regularizer="l1")(x)
    x = L.Concatenate(name="join")([x, b])
    return keras.Model([a, b], [early, L.Dense(3, name="late")(x)], name="several")


def in_a_row():
    layers = [L.Dense(6, activation="relu", name=f"dense{i}") for i in range(4)]
    return keras.Sequential([keras.Input((5,)), *layers, L.Dense(3, name="head")], name="row")


MODELS = {
    "residual": (residual, ["conv0"], ["norm0", "pool"]),
    "words": (words, ["lstm0"], ["embed", "lstm0"]),
    "several": (several, ["second"], {"first|early": 0, "second": 1, "join|late": 2}),
    "in_a_row": (in_a_row, ["dense1"], ["dense0", "dense2"]),
}
IN_TWO, IN_THREE = ([(name, cuts[n]) for name, (_, *cuts) in MODELS.items()] for n in (0, 1))


def loss_of(batch, outputs, added):
    losses = [
        tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, o, from_logits=True))
        for y, o in zip(tf.nest.flatten(batch.targets), outputs, strict=True)
    ]
    return tf.add_n([tf.constant(0.0), *losses]) + added


def batches(model):
    random = np.random.default_rng(3)
    for micro in range(MICROS):
        inputs = [
            random.integers(0, 10, (ROWS, *t.shape[1:])).astype("int32")
            if "int" in t.dtype
            else random.random((ROWS, *t.shape[1:]), "float32")
            for t in model.inputs
        ]
        targets = [random.integers(0, 3, (ROWS,)) for _ in model.outputs]
        yield MicroBatch(
            inputs=dict(enumerate(map(tf.constant, inputs))),
            targets=[tf.constant(y) for y in targets],
            share=tf.constant(1 / MICROS),
            random_key=random_key(5, step=tf.constant(7, tf.int64), replica=micro),
        )


def stages_of(model, cut):
    graph = LayerGraph(model)
    if isinstance(cut, dict):
        return graph.cut(graph.by_patterns(cut), num_stages=len(cut))
    return graph.cut(graph.behind_layers(cut), num_stages=len(cut) + 1)


def segmented(model, cut, *, kept):
    """Return the segments of each stage, each with as many as there can be."""
    graph = LayerGraph(model)
    by_patterns = isinstance(cut, dict)
    assignment = graph.by_patterns(cut) if by_patterns else graph.behind_layers(cut)
    return segments_of(graph, assignment, kept=[kept] * (max(assignment) + 1))


def trained(
    make, cut, *, schedule="1f1b", keep="tape", others=None, in_segments=False, fused=False
):
    """Run one step's passes; return loss, gradients by path, and the variables' values after it."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = make()
    fuse(model, fused=fused)
    parts = [[part] for part in stages_of(model, cut)]
    if in_segments:
        parts = segmented(model, cut, kept=0)
        assert max(map(len, parts)) > 1
    made = [
        Stage(p, keep=keep, loss_of=loss_of) if p[-1].is_last else Stage(p, keep=others or keep)
        for p in parts
    ]
    data = list(batches(model))
    orders = [
        passes(schedule, stage=i, stages=len(parts), micros=MICROS) for i in range(len(parts))
    ]
    losses = run(made, orders, data)
    gradients = {
        v.path: g.numpy()
        for s in made
        for v, g in zip(s.variables, s.take_sums(), strict=True)
        if g is not None
    }
    return losses, gradients, {v.path: v.numpy() for v in model.non_trainable_variables}


def run(made, orders, data):
    messages, losses = {}, []
    waiting = [list(order) for order in orders]
    while any(waiting):
        for i, stage in enumerate(made):
            if not waiting[i]:
                continue
            forward, micro = waiting[i][0]
            if forward and (i == 0 or (i, "F", micro) in messages):
                given = messages.pop((i, "F", micro), [])
                sent = stage.forward(micro, data[micro], given)
                if stage.is_last:
                    losses.append(float(sent[0]))
                    messages[i, "B", micro] = []
                else:
                    messages[i + 1, "F", micro] = sent
            elif not forward and (i, "B", micro) in messages:
                back = stage.backward(micro, messages.pop((i, "B", micro)))
                messages[i - 1, "B", micro] = back
            else:
                continue
            waiting[i].pop(0)
    return losses


def assert_same(one, other, *, bits=True):
    assert one.keys() == other.keys()
    for path in one:
        if bits:
            assert np.array_equal(one[path], other[path]), path
        else:
            np.testing.assert_allclose(one[path], other[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.fixture(scope="module")
def whole():
    return {name: trained(make, []) for name, (make, *_) in MODELS.items()}


@pytest.fixture(scope="module")
def in_stages():
    """What stages make of a model, which is trained when it is first asked for."""
    found = {}

    def train(name, cut):
        if (name, str(cut)) not in found:
            found[name, str(cut)] = trained(MODELS[name][0], cut)
        return found[name, str(cut)]

    return train


@pytest.mark.parametrize(("name", "cut"), [*IN_TWO, *IN_THREE])
def test_stages_have_the_losses_gradients_and_statistics_of_the_whole_model(
    whole, in_stages, name, cut
):
    losses, gradients, statistics = in_stages(name, cut)
    np.testing.assert_allclose(losses, whole[name][0], rtol=1e-6)
    assert_same(gradients, whole[name][1], bits=False)
    assert_same(statistics, whole[name][2], bits=False)


@pytest.mark.parametrize(("name", "cut"), IN_THREE)
@pytest.mark.parametrize(("schedule", "keep"), [("gpipe", "tape"), ("1f1b", "recompute")])
def test_schedule_and_recomputation_leave_the_bits(in_stages, name, cut, schedule, keep):
    expected = in_stages(name, cut)
    found = trained(MODELS[name][0], cut, schedule=schedule, keep=keep)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1], bits=keep == "tape")
    assert_same(found[2], expected[2])


@pytest.mark.parametrize(("name", "cut"), IN_TWO)
@pytest.mark.parametrize("in_segments", [False, True])
def test_a_last_stage_that_does_both_passes_at_once_has_the_same_sums(
    in_stages, name, cut, in_segments
):
    expected = in_stages(name, cut)
    others = "recompute" if in_segments else "tape"
    made = trained(MODELS[name][0], cut, keep="nothing", others=others, in_segments=in_segments)
    losses, gradients, statistics = made
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    assert_same(gradients, expected[1], bits=False)
    assert_same(statistics, expected[2], bits=False)


@pytest.mark.parametrize("keep", ["tape", "recompute", "nothing"])
def test_stages_take_the_fused_kernel_as_the_whole_model_does(whole, keep):
    by_keras = whole["residual"]
    expected = trained(residual, [], fused=True)
    found = trained(residual, ["conv0"], keep=keep, others="tape", fused=True)
    for one, other in ((found, expected), (expected, by_keras)):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
        assert_same(one[1], other[1], bits=False)
        assert_same(one[2], other[2], bits=False)
    assert any((expected[1][path] != by_keras[1][path]).any() for path in by_keras[1])


def test_a_stage_has_segments_as_far_as_they_save_memory():
    layers = [L.Dense(100, name=f"dense{i}") for i in range(6)]
    model = keras.Sequential([keras.Input((100,)), *layers])
    (many,) = segmented(model, [], kept=0)
    assert [len(part.nodes) for part in many] == [1] * 6
    (one,) = segmented(model, [], kept=9)  # inputs of nine micro-batches are more than outputs
    assert len(one) == 1
    (some,) = segmented(model, [], kept=1)
    assert 1 < len(some) < 6


def test_the_sums_are_those_of_a_step_of_keras_with_the_same_draws(whole):
    """One micro-batch of the whole batch, without draws, against a plain tape."""
    keras.utils.set_random_seed(1)
    model = in_a_row()
    data = list(batches(model))
    with tf.GradientTape() as tape:
        loss = tf.add_n([loss_of(b, [model(b.inputs[0])], 0.0) * b.share for b in data])
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(whole["in_a_row"][1][variable.path], gradient, atol=1e-7)


def test_no_gradient_is_computed_of_what_the_model_is_given():
    computed = []

    def count(gradient):
        computed.append(gradient)
        return gradient

    @tf.custom_gradient
    def noted(x):
        return tf.identity(x), lambda gradient: tf.numpy_function(
            count, [gradient], tf.float32, stateful=False
        )

    model = keras.Sequential([keras.Input((3,)), L.Lambda(noted), L.Dense(2), L.Dense(3)])
    first = Stage(stages_of(model, ["dense"])[:1])
    (data, *_) = batches(model)
    message = first.forward(0, data, [])
    first.backward(0, [tf.ones_like(message[0])])
    assert len([total for total in first.take_sums() if total is not None]) == 2
    assert not computed


def test_the_model_is_as_it_was_after_a_cut(tmp_path):
    model = residual()
    before = model.to_json()
    graph = LayerGraph(model)
    graph.cut(graph.behind_layers(["conv0"]), num_stages=2)
    assert model.to_json() == before
    model.save(tmp_path / "model.keras")
    keras.models.load_model(tmp_path / "model.keras")


def test_places_are_those_where_no_variable_is_on_both_sides():
    x = keras.Input((4,))
    twice = L.Dense(4, name="twice")
    y = L.Dense(4, name="before")(x)
    y = twice(y)
    y = L.Dense(4, name="between")(y)
    y = twice(y)
    model = keras.Model(x, L.Dense(4, name="after")(y))
    graph = LayerGraph(model)
    assert [p.name for p in graph.places()] == ["before", "twice"]
    caught = refusal(lambda: graph.cut(graph.behind_layers(["between"]), num_stages=2))
    assert caught.code == "tied-weights"


def test_a_cut_by_patterns_follows_the_graph():
    graph = LayerGraph(residual())
    by_pattern = graph.by_patterns({"norm1|conv1": 1})
    assert graph.cut(by_pattern, num_stages=2)[1].module.outputs[0].shape == (None, 3)


def own_call():
    class Model(keras.Model):
        def call(self, x):
            return x

    return LayerGraph(Model())


def stateful():
    x = keras.Input((3, 2), batch_size=4)
    return LayerGraph(keras.Model(x, L.LSTM(2, stateful=True)(x)))


def stateful_inside():
    x = keras.Input((3, 2), batch_size=4)
    inner = keras.Sequential([keras.Input((3, 2), batch_size=4), L.LSTM(2, stateful=True)])
    return LayerGraph(keras.Model(x, inner(x)))


def cut_of(**cuts):
    graph = LayerGraph(in_a_row())
    by = graph.behind_layers if "names" in cuts else graph.by_patterns
    return graph.cut(by(*cuts.values()), num_stages=2)


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        (own_call, "no-layer-graph"),
        (lambda: LayerGraph(keras.Sequential([L.Dense(2)])), "no-layer-graph"),
        (stateful, "stateful-layer"),
        (stateful_inside, "stateful-layer"),
        (lambda: cut_of(names=["dense9"]), "unknown-layer"),
        (lambda: cut_of(names=["head"]), "empty-stage"),
        (lambda: cut_of(patterns={"dense9": 1}), "unknown-layer"),
        (lambda: cut_of(patterns={"dense1": 1, "dense2": 0}), "stage-order"),
        (lambda: cut_of(patterns={"dense1": 2}), "empty-stage"),
    ],
)
def test_what_cannot_be_cut_is_refused(mistake, code):
    assert refusal(mistake).code == code


@pytest.mark.parametrize(
    "given",
    [
        *({"split_size": size} for size in (0, -1, 2.5, "fast")),
        {"schedule": "2f2b"},
        {"keep": "nothing"},
    ],
)
def test_options_that_cannot_be_are_refused(given):
    with pytest.raises(UsageError):
        tfdist.PipelineOptions(**given)


# Training by the engine, and how tasks meet.


DEADLINE_S = 60.0
random = np.random.default_rng(0)
X = random.random((26, 5)).astype("float32")
Y = random.integers(0, 3, (26,))


def model_with(optimizer="adam", loss="sparse_categorical_crossentropy", **compiled):
    keras.utils.set_random_seed(1)
    layers = [L.Dense(8, activation="relu", kernel_regularizer="l2") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((5,)), *layers, L.Dense(3, activation="softmax", name="head")]
    )
    optimizer = optimizer() if callable(optimizer) else optimizer
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy", one_number], **compiled)
    return model


def one_number(y, predicted):
    return keras.ops.mean(predicted[:, 0]) + keras.ops.mean(keras.ops.cast(y, predicted.dtype))


def two_outputs(optimizer, loss):
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    y = L.Dense(8, activation="relu", kernel_regularizer="l2")(x)
    model = keras.Model(x, [L.Dense(3, activation="softmax", name=f"head{i}")(y) for i in (0, 1)])
    model.compile(optimizer=optimizer(), loss=loss)
    return model


class AddsForEach(L.Layer):
    """Passes on what it gets; each example's mean of squares is a loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x), axis=-1))
        return x


def adding_for_each(**compiled):
    model = model_with(**compiled)
    first, *others = model.layers
    model_of_all = keras.Sequential([keras.Input((5,)), first, AddsForEach(), *others])
    model_of_all.compile(optimizer=model.optimizer, loss="sparse_categorical_crossentropy")
    return model_of_all


@pytest.fixture
def one_stage(strategies, monkeypatch):
    """The job of a pipeline with one stage."""
    place = stages.Stages(
        index=0, count=1, names=("worker-0",), before=None, after=None,
        options=stages.PipelineOptions(split_size=3),
    )  # fmt: skip
    job = jobs.Job(strategy=strategies[1], kind="pipeline", stages=place)

    def begin():
        monkeypatch.setattr(jobs, "_made", [job])
        return job.strategy

    return begin


def fitted(strategy, make=model_with, **given):
    with strategy.scope():
        model = make(**given)
    several = len(model.outputs) > 1
    y, validation = ([Y, Y], (X[:7], [Y[:7], Y[:7]])) if several else (Y, (X[:7], Y[:7]))
    history = tfdist.fit(
        model, X, y, batch_size=8, epochs=2, seed=3, verbose=0, validation_data=validation
    )
    predicted = tfdist.predict(model, X, batch_size=8, verbose=0)
    evaluated = tfdist.evaluate(model, X, y, batch_size=8, verbose=0)
    return model.get_weights(), history.history, predicted, evaluated


class Centres(keras.optimizers.SGD):
    """Takes the mean out of each gradient, by a method of its own."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g - tf.reduce_mean(g), v) for g, v in grads_and_vars])


OPTIMIZERS = {  # made in the scope
    "by a method of its own": lambda: Centres(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.2), initial_scale=1024.0
    ),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "accumulated": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.2, gradient_accumulation_steps=3),
        initial_scale=1024.0,
    ),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_micro_batches_end_with_the_weights_and_logs_of_whole_batches(strategies, one_stage, name):
    expected = fitted(strategies[1], optimizer=OPTIMIZERS[name])
    assert_same_run(fitted(one_stage(), optimizer=OPTIMIZERS[name]), expected)


def test_stages_compute_in_float64(strategies, one_stage):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        expected = fitted(strategies[1])
        assert_same_run(fitted(one_stage()), expected)
    finally:
        keras.config.set_floatx("float32")


def test_losses_that_are_sums_are_those_of_whole_batches(strategies, one_stage):
    """A sum over the examples, beside a regularizer's loss and a mean; and one by `add_loss`."""
    sums = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    given = {"loss": sums, "optimizer": lambda: keras.optimizers.SGD(0.01)}
    two = {**given, "make": two_outputs, "loss": [sums, "sparse_categorical_crossentropy"]}
    cases = (given, two, {**given, "make": adding_for_each})
    alone = [fitted(strategies[1], **case) for case in cases]
    strategy = one_stage()
    for case, expected in zip(cases, alone, strict=True):
        assert_same_run(fitted(strategy, **case), expected)


@pytest.mark.parametrize(
    ("inputs", "is_last", "gathered"), [([0], False, "x"), ([], True, "y"), ([], False, "")]
)
def test_a_stage_gathers_nothing_that_it_does_not_read(inputs, is_last, gathered):
    whole = types.SimpleNamespace(
        inputs_of=lambda x: [x], stage=types.SimpleNamespace(inputs=inputs, is_last=is_last)
    )
    program = types.SimpleNamespace(recorder=None)

    @tf.function
    def read(rows):
        x, y = (tf.gather(array, rows, name=name) for array, name in ((X, "x"), (Y, "y")))
        part = Part(data=(x, y), share=1.0, count=tf.size(rows))
        batch, recorded = engine._read_part(whole, program, part)
        assert recorded == []
        return batch

    traced = read.get_concrete_function(tf.TensorSpec([None], tf.int64))
    behind = {op.name for op in ops_behind(traced.outputs) if op.type == "GatherV2"}
    assert behind == ({gathered} if gathered else set())
    batch = read(tf.constant([3, 1], tf.int64))
    assert int(batch.rows) == 2
    inputs, targets, _ = batch.data
    for index, tensor in inputs.items():
        assert index == 0
        np.testing.assert_array_equal(tensor, X[[3, 1]])
    assert (targets is not None) == is_last


def assert_same_run(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for key in expected[1]:
        np.testing.assert_allclose(found[1][key], expected[1][key], rtol=1e-4, err_msg=key)
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-4)


@pytest.mark.parametrize("mode", ["full", "hash"])
def test_a_ledger_says_what_it_says_of_one_device(strategies, one_stage, tmp_path, mode):
    records = []
    for name, strategy in (("one", strategies[1]), ("stages", one_stage())):
        with strategy.scope():
            model = model_with()
        ledger = tfdist.Ledger(tmp_path / name, mode=mode)
        tfdist.fit(model, X, Y, batch_size=8, epochs=2, seed=3, verbose=0, ledger=ledger)
        found = merge(read_directory(tmp_path / name)).records()
        rows = [[np.asarray(a) for a in record.arrays] for record in found]
        records.append([np.concatenate(column) for column in zip(*rows, strict=True)])
    np.testing.assert_equal(*records)


def test_a_fit_in_stages_takes_the_kernel_that_it_asks_for(strategies, one_stage):
    x, y = random.random((6, 8, 8, 2), "float32"), Y[:6]

    def weights_of(strategy, asked):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = residual()
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        for fused in asked:
            tfdist.fit(model, x, y, batch_size=3, seed=3, verbose=0, fused_kernels=fused)
        return model.get_weights()

    kernels, stock, both = (
        weights_of(one_stage(), asked) for asked in ([True, True], [False, False], [True, False])
    )
    by_one_device = weights_of(strategies[1], [True, True])
    for one, other in ((kernels, by_one_device), (kernels, stock)):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for one in (kernels, stock):
        assert any((a != b).any() for a, b in zip(one, both, strict=True))


def test_a_layer_that_is_frozen_between_two_fits_stays_as_it_is(one_stage):
    with one_stage().scope():
        model = model_with()
    tfdist.fit(model, X, Y, batch_size=8, epochs=1, seed=3, verbose=0)
    model.layers[0].trainable = False
    before = model.get_weights()
    tfdist.fit(model, X, Y, batch_size=8, epochs=1, seed=3, verbose=0)
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert same == [True, True] + [False] * (len(same) - 2)


def test_frozen_weights_stay_as_they_are_in_several_pipelines(strategies, monkeypatch):
    """Three, the others of which have the same examples: a third of a weight is no float32."""
    peers = types.SimpleNamespace(sum=lambda *arrays, of: [3 * array for array in arrays])
    place = stages.Stages(
        index=0, count=1, names=("worker-0",), options=stages.PipelineOptions(split_size=2),
        pipelines=3, peers=peers,
    )  # fmt: skip
    job = jobs.Job(strategy=strategies[1], kind="pipeline", stages=place)
    monkeypatch.setattr(jobs, "_made", [job])
    monkeypatch.setattr(inputs, "require_same_examples", lambda job, source: None)
    with job.strategy.scope():
        frozen = L.Dense(8)
        model = keras.Sequential([keras.Input((5,)), frozen, L.BatchNormalization(), L.Dense(3)])
        frozen.trainable = False
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = model.get_weights()
    tfdist.fit(model, X[:24], Y[:24], batch_size=6, seed=3, verbose=0)
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert same == [True, True] + [False] * 6


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "reduction", "code"),
    [(OwnStep, "mean", "own-step"), (keras.Sequential, None, "loss-reduction")],
)
def test_what_cannot_be_trained_in_stages_is_refused(one_stage, kind, reduction, code, monkeypatch):
    """And the links to the neighbours are left as they were, for another model."""
    link = types.SimpleNamespace(fail=pytest.fail)
    monkeypatch.setattr(engine, "links_of", lambda place: (link, link))
    with one_stage().scope():
        model = kind([keras.Input((5,)), L.Dense(3)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    assert refusal(lambda: tfdist.fit(model, X, X[:, :3], batch_size=8, verbose=0)).code == code


def test_a_step_function_is_not_cut_in_stages(one_stage):
    one_stage()
    line = refusal(lambda: tfdist.StepLoop(lambda x: {}, X, global_batch_size=8))
    assert line.code == "own-step"


def test_a_model_is_not_saved_while_each_task_has_a_part(one_stage, tmp_path):
    with one_stage().scope():
        model = model_with("sgd")
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=2)
    line = refusal(lambda: tfdist.fit(model, X, Y, batch_size=8, verbose=0, callbacks=[saving]))
    assert line.code == "unsupported-callback"


def test_a_slot_belongs_to_the_stage_of_its_variable():
    model = model_with("adam")
    model.optimizer.build(model.trainable_variables)
    graph = LayerGraph(model)
    parts = graph.cut(graph.behind([1]), num_stages=2)
    owners = owners_of(model, parts)
    stage_of = {v.path.replace("/", "_"): owners[id(v)] for v in model.trainable_variables}
    slots = [v for v in model.optimizer.variables if tuple(v.shape)]
    assert len(slots) == 2 * len(stage_of)
    for slot in slots:
        (owner,) = {stage for path, stage in stage_of.items() if path in slot.path}
        assert owners[id(slot)] == owner


def test_slots_are_made_empty_and_filled_with_what_the_optimizer_starts_from():
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


def test_the_places_that_are_chosen_cut_the_model():
    graph = LayerGraph(model_with())
    possible = possible_places(graph, num_stages=3)
    places = chosen_places(graph, possible, num_stages=3, rows=4, micros=8)
    assert len(graph.cut(graph.behind([p.position for p in places]), num_stages=3)) == 3
    assert refusal(lambda: possible_places(graph, num_stages=9)).code == "too-many-stages"


@pytest.mark.parametrize("fused", [False, True])
def test_parts_are_timed_by_the_kernel_that_steps_take(monkeypatch, fused):
    kernel, traced = tf.raw_ops.FusedBatchNormV3, []
    noted = lambda **given: traced.append(given) or kernel(**given)  # noqa: E731
    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", noted)
    model = residual()
    before = model.get_weights()
    fuse(model, fused=fused)
    graph = LayerGraph(model)
    chosen_places(graph, possible_places(graph, num_stages=2), num_stages=2, rows=4, micros=8)
    assert bool(traced) == fused
    np.testing.assert_equal(model.get_weights(), before)


def test_the_loss_is_timed_with_the_last_part():
    model = model_with()

    def loss_of(outputs):  # 0.1 s, where the whole model takes a hundredth
        (output,) = outputs
        slow = tf.fill([900, 900], tf.reduce_mean(output))
        for _ in range(9):
            slow = slow @ slow
        return tf.reduce_mean(output) + slow[0, 0]

    graph = LayerGraph(model)
    possible = possible_places(graph, num_stages=2)
    places = chosen_places(graph, possible, num_stages=2, rows=4, micros=8, loss_of=loss_of)
    assert places == [possible[-1]]


def test_parts_that_make_integers_alone_are_timed():
    x = keras.Input((6,), dtype="int32")
    ids = L.IntegerLookup(vocabulary=[1, 2, 3])(x)
    hidden = L.LSTM(3)(L.Embedding(9, 4, mask_zero=True)(ids))
    graph = LayerGraph(keras.Model(x, L.Dense(1)(hidden)))
    possible = possible_places(graph, num_stages=2)
    (place,) = chosen_places(graph, possible, num_stages=2, rows=4, micros=8)
    assert len(graph.cut(graph.behind([place.position]), num_stages=2)) == 2


def test_parts_that_compute_the_same_are_timed_once():
    x = keras.Input((6,))
    activations = ["relu", "relu", "tanh"]
    hidden = x
    for activation in activations:
        hidden = L.Dense(6, activation=activation)(hidden)
    graph = LayerGraph(keras.Model(x, L.Dense(6, activation="relu")(L.Flatten()(hidden))))
    parts = graph.divided(graph.behind([0, 1, 2, 3]), num_stages=5)
    first, second, other, _, last = [part.work for part in parts]
    assert second == last
    assert len({first, second, other}) == 3  # the first makes no gradient of what it is given


@pytest.mark.parametrize("behind", ["attention", "sum"])
def test_a_mask_that_keras_loses_masks_nothing(behind):
    x = keras.Input((3,), dtype="int32")
    embedded = L.Embedding(9, 4, mask_zero=True)(x)
    attended = L.MultiHeadAttention(1, 4, name="attention")(embedded, embedded)
    hidden = L.Add(name="sum")([attended, embedded])
    graph = LayerGraph(keras.Model(x, L.Dense(1)(hidden)))
    part, _ = graph.cut(graph.behind_layers([behind]), num_stages=2)
    ids = tf.constant([[1, 2, 0]])
    batch = MicroBatch(inputs={0: ids}, share=tf.constant(1.0), random_key=tf.zeros([2], tf.int32))
    stage = Stage([part])
    message = stage.forward(0, batch, [])
    tensors, masks = message[: len(part.sent)], message[len(part.sent) : -1]
    assert [mask.shape for mask in masks] == [tensor.shape[:2] for tensor in tensors]
    assert masks[-1].numpy().all()


def test_a_cut_is_that_of_one_model():
    def graph_of(units, trainable=True):
        layers = [keras.Input((4,)), L.Dense(units), L.Dense(3, trainable=trainable)]
        return LayerGraph(keras.Sequential(layers)).digest

    assert graph_of(5) == graph_of(5)
    assert len({graph_of(5), graph_of(6), graph_of(5, trainable=False)}) == 3


def configs(count):
    ports = hold_ports(count)
    cluster = ClusterSpec(worker=tuple(port.address for port in ports))
    options = JobOptions(strategy="pipeline", stages=count)
    return [
        TaskConfig(cluster=cluster, task=Task("worker", index), options=options)
        for index in range(count)
    ]


def joined(config, timeout_s=DEADLINE_S):
    options = stages.PipelineOptions()
    return stages.join(config, options, timeout_s=timeout_s, ports=None)


def test_a_stage_that_does_not_come_is_named():
    tasks = configs(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(joined, task, 1.0) for task in tasks[:2]]
        with pytest.raises(StartupTimeout, match="worker-2"):
            waiting[0].result(DEADLINE_S)
        with pytest.raises(StartupTimeout):
            waiting[1].result(DEADLINE_S)
