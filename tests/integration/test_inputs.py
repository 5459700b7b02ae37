"""Every kind of data, on one device and several: the same examples, the same weights."""

import contextlib
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import difference
from tests.refusals import refusal
from tfdist import phases
from tfdist.data import InputFunctionSource, PyDatasetSource, StreamSource
from tfdist.strategy import job_of
from tfdist.training import inputs

RNG = np.random.RandomState(0)
# Of batches of 8 the last has one example, and nothing for one of two replicas.
X = RNG.randn(49, 4).astype("float32")
Y = RNG.randn(49, 1).astype("float32")


class Batches(keras.utils.PyDataset):
    def __init__(self, size=8):
        super().__init__(workers=2)
        self.size = size
        self.passes = []

    def __len__(self):
        return -(-len(X) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.passes.append("begin")

    def on_epoch_end(self):
        self.passes.append("end")


class Growing(Batches):
    def __getitem__(self, index):
        rows = slice(0, self.size if index else self.size // 2)
        return X[rows], Y[rows]


class Examples:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def dataset(size=8):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def unknown_length():
    return dataset().filter(lambda *_: True)


def input_function(context):
    size = context.get_per_replica_batch_size(6)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).take(48)
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)


def build():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05, global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


def built(strategy):
    with strategy.scope() if strategy else contextlib.nullcontext():
        return build()


def train(strategy, *data, **fit):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    history = tfdist.fit(model, *data, seed=3, verbose=0, **fit)
    return model, history


KINDS = {
    "arrays": (lambda: (X, Y), {"batch_size": 8}),
    "examples": (lambda: (Examples(),), {"batch_size": 8}),
    "pydataset": (lambda: (Batches(),), {}),
    "dataset": (lambda: (dataset(),), {}),
    "unknown_length": (lambda: (unknown_length(),), {}),
    "endless": (lambda: (dataset().repeat(),), {"steps_per_epoch": 7}),
}


@pytest.fixture(scope="module")
def by_keras():
    """What `keras.Model.fit` makes of the arrays, in their order."""
    keras.utils.set_random_seed(1)
    model = build()
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model, history


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_equals_keras_on_one_device(kind, strategies, by_keras):
    make, arguments = KINDS[kind]
    for replicas in (1, 2) if kind in ("arrays", "dataset", "examples") else (2,):
        model, history = train(strategies[replicas], *make(), epochs=2, shuffle=False, **arguments)
        if kind == "endless":  # its second epoch goes on where the first ended
            assert model.optimizer.iterations.numpy() == 14
            continue
        assert difference(model, by_keras[0]) < 1e-6
        expected = by_keras[1].history["loss"]
        np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-5)


def test_a_pass_to_count_batches_warns(strategies, caplog):
    """It comes before the first step, where Keras makes none."""

    def said():
        texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        caplog.clear()
        return sum("read once to count its batches" in text for text in texts)

    train(strategies[2], unknown_length())
    assert said() == 1
    train(strategies[2], unknown_length(), steps_per_epoch=3)
    known = unknown_length().apply(tf.data.experimental.assert_cardinality(7))
    train(strategies[2], known, validation_data=dataset())
    assert said() == 0


def test_a_function_of_input_context_trains_alike(strategies):
    one, _ = train(strategies[1], X[:48], Y[:48], batch_size=6, epochs=2, shuffle=False)
    function, _ = train(strategies[1], input_function, epochs=2)
    assert difference(one, function) < 1e-6
    many, _ = train(strategies[2], input_function, epochs=2)
    assert many.optimizer.iterations.numpy() == 16


def test_an_epoch_of_an_input_function_with_a_fixed_batch_is_one_pass(strategies):
    def fixed(context):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).take(48)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)

    for replicas, steps in (1, 12), (2, 6), (3, 4):
        model, _ = train(strategies[replicas], fixed)
        assert model.optimizer.iterations.numpy() == steps
        job, length = job_of(strategies[replicas]), inputs.Length()
        plan = inputs.prepare(fixed, None, None, job=job, length=length, shuffle=True, seed=3).plan
        assert (plan.global_batch_size, plan.example_starts[-1]) == (4 * replicas, 48)


def read_by(strategy, x, *, class_weight=None, **length):
    """What each step of a run has of the first part of its data, or the weights of its examples."""
    feed = inputs.prepare(
        x, None, None, job=job_of(strategy), length=inputs.Length(**length), shuffle=True, seed=3,
        class_weight=class_weight,
    )  # fmt: skip
    part = 0 if class_weight is None else 2
    steps = feed.dataset(0, feed.plan.total_steps).as_numpy_iterator()
    return [np.concatenate([replica.data[part] for replica in step]) for step in steps]


def test_devices_of_a_task_share_one_input_context_order(strategies):
    def shuffled(context):
        rows = tf.data.Dataset.from_tensor_slices((np.arange(48), Y[:48])).shuffle(48)
        return rows.batch(context.get_per_replica_batch_size(8))

    first, second = np.reshape(read_by(strategies[2], shuffled, epochs=2), (2, 48))
    assert sorted(first) == sorted(second) == list(range(48))
    assert first.tolist() != second.tolist()


def test_each_example_of_a_stream_has_its_own_id(strategies):
    """Else what stands at one place of a batch is augmented alike in every step."""
    seen = []

    def note(ids, epoch):
        seen.extend(zip(ids.numpy().tolist(), np.broadcast_to(epoch, ids.shape), strict=True))
        return ids

    def noted(batch, *, example_ids, epoch, seed):
        with tf.control_dependencies([tf.py_function(note, [example_ids, epoch], tf.int64)]):
            return tf.identity(batch[0]), batch[1]

    for source in (
        StreamSource(dataset(6).take(8), transform=noted),
        StreamSource(dataset(2).take(1).concatenate(dataset(7).take(7)), transform=noted),
        InputFunctionSource(input_function, transform=noted),
        PyDatasetSource(Growing(), transform=noted),
    ):
        seen.clear()
        train(strategies[2], source, epochs=2, steps_per_epoch=4)
        assert len(seen) == len(set(seen)) >= 48


def test_an_empty_batch_is_a_step_as_under_keras(strategies):
    def batches():
        for first, last in ((0, 5), (5, 5), (5, 20)):
            yield X[first:last], Y[first:last]

    kinds = (tf.TensorSpec((None, *X.shape[1:])), tf.TensorSpec((None, *Y.shape[1:]), Y.dtype))
    data = tf.data.Dataset.from_generator(batches, output_signature=kinds)
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    ours = [train(strategies[n], data, epochs=2)[0] for n in (1, 2)]
    assert difference(*ours) < 1e-6


@pytest.mark.parametrize("kind", ["arrays", "examples", "pydataset", "dataset", "unknown_length"])
def test_evaluate_and_predict_see_every_example_once(kind, strategies):
    make, arguments = KINDS[kind]
    model, _ = train(strategies[2], X, Y, batch_size=8)
    predicted = model(X).numpy()
    expected = [float(((predicted - Y) ** 2).mean()), float(np.abs(predicted - Y).mean())]
    np.testing.assert_allclose(
        tfdist.evaluate(model, *make(), verbose=0, **arguments), expected, rtol=1e-5
    )
    data = make()[0] if kind != "arrays" else X
    predicted = tfdist.predict(model, data, verbose=0, **arguments)
    np.testing.assert_allclose(predicted, model(X).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "packed", [lambda x: (x, x[:, :1]), lambda x: x, lambda x: {"x": x}], ids=["pair", "x", "dict"]
)
def test_rereading_a_stream_reports_progress(strategies, packed):
    said = []

    def batches():
        for number in range(50):
            said.append(phases.current().since_s)
            yield np.full((2, 4), number, np.float32)

    data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec((2, 4)))
    length = inputs.Length(steps_per_epoch=50)
    job = job_of(strategies[1])
    feed = inputs.prepare(
        data.map(packed), None, None, job=job, length=length, shuffle=True, seed=3
    )
    phases.enter("trace")
    said.clear()
    (part,) = next(iter(feed.dataset(40, 41)))
    assert float(tf.reduce_max(tf.nest.flatten(part)[0])) == 40
    # After the batches 0, 16 and 32; what makes examples of them may read some ahead.
    assert 3 <= len(set(said[:41])) <= 4


class Endless(Batches):
    num_batches = None

    def __getitem__(self, index):
        return super().__getitem__(index % 7)


class StopAfterTheEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize(
    ("kind", "validates", "options"),
    [
        (Batches, True, {"epochs": 2}),
        (Batches, False, {"steps_per_epoch": 3}),
        (Endless, False, {"steps_per_epoch": 3, "epochs": 3}),
    ],
    ids=["validation", "steps", "endless"],
)
def test_pydataset_hooks_run_as_in_keras_in_fit(kind, validates, options, strategies):
    found = []
    for strategy in (None, strategies[2]):
        data, validation = kind(), Batches()
        given = {"validation_data": validation} if validates else {}
        fit = partial(tfdist.fit, built(strategy)) if strategy else built(None).fit
        for _ in range(2):
            fit(data, verbose=0, **given, **options)
        found.append((data.passes, validation.passes))
    assert found[0] == found[1]


def test_pydataset_hooks_run_as_in_keras_in_evaluate_and_predict(strategies):
    found = []
    for strategy, module in (None, keras.Model), (strategies[2], tfdist):
        model, data = built(strategy), Batches()
        module.evaluate(model, data, verbose=0)
        module.evaluate(model, data, steps=2, verbose=0)
        module.predict(model, data, verbose=0)
        found.append(data.passes)
    assert found[0] == found[1]


def test_on_epoch_end_is_called_once_if_training_stops_after_an_epoch(strategies):
    data = Batches()
    train(strategies[1], data, epochs=9, callbacks=[StopAfterTheEpoch()])
    assert data.passes[:3] == ["end", "begin", "end"]
    assert data.passes.count("end") == 2  # the thread that reads ahead may have begun a pass


def test_pydataset_hooks_run_between_passes_and_on_resume(strategies, tmp_path):
    def passes(**options):
        data = Batches()
        train(strategies[1], data, **options)
        return data.passes

    assert passes(epochs=3) == ["end", *["begin", "end"] * 3]
    run = ["end", "begin", "end"]
    # The second run has the steps 3 to 5 of a pass of 7, and the third run has no step left.
    for epochs, expected in (1, run), (2, run), (2, ["end"]):
        backups = [tfdist.BackupAndRestore(tmp_path)]
        assert passes(epochs=epochs, steps_per_epoch=3, callbacks=backups) == expected


def test_a_pydataset_that_changes_its_length_is_refused(strategies):
    class Longer(Batches):
        def on_epoch_end(self):
            self.size = max(4, self.size - 2)

    train(strategies[1], Longer(), epochs=1)
    told = refusal(lambda: train(strategies[1], Longer(), epochs=2))
    assert told.code == "shapes-differ"
    assert told.problem == "the number of batches changes from 9 to 13 within a run"
    told = refusal(lambda: train(strategies[1], X, Y, validation_data=Longer()))
    assert told.code == "shapes-differ"


def test_steps_of_an_epoch_continue_across_passes(strategies):
    # The seventh step has the last example and the first seven of the next pass.
    steps, _ = train(strategies[1], X, Y, batch_size=8, steps_per_epoch=7, shuffle=False)
    again = [np.concatenate([part, part])[:56] for part in (X, Y)]
    passes, _ = train(strategies[1], *again, batch_size=8, shuffle=False)
    assert difference(steps, passes) < 1e-6


def test_shuffling_batches_shuffles_arrays_and_python_examples_alike(strategies):
    examples, _ = train(strategies[1], X, Y, batch_size=8, epochs=2)
    batches, _ = train(strategies[1], X, Y, batch_size=8, epochs=2, shuffle="batch")
    assert difference(batches, examples) == 0
    python, _ = train(strategies[2], Examples(), batch_size=8, epochs=2)
    assert difference(python, examples) < 1e-6


@pytest.mark.parametrize("kind", ["arrays", "pydataset", "dataset", "endless"])
def test_overfitting_sees_the_first_batches_only(kind, strategies):
    make, arguments = KINDS[kind]
    few, _ = train(strategies[1], X[:16], Y[:16], batch_size=8, epochs=4, shuffle=False)
    options = {**arguments, "steps_per_epoch": 2} if kind == "endless" else arguments
    other, _ = train(strategies[1], *make(), epochs=4, shuffle=False, overfit_batches=2, **options)
    assert difference(few, other) < 1e-6


def test_overfitting_an_input_function_sees_a_batch_for_each_device(strategies):
    few, _ = train(strategies[1], X[:12], Y[:12], batch_size=6, epochs=4, shuffle=False)
    other, _ = train(strategies[2], input_function, epochs=4, overfit_batches=2)
    assert difference(few, other) < 1e-6


def test_virtual_epochs_do_not_cut_ready_batches(strategies):
    thirty = tfdist.VirtualEpochs(30, 2)
    told = refusal(lambda: train(strategies[1], dataset(), virtual_epochs=thirty))
    assert told.code == "unsupported-data"
    model, _ = train(strategies[1], dataset(), virtual_epochs=tfdist.VirtualEpochs(48, 2))
    assert model.optimizer.iterations.numpy() == 6
