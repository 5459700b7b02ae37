"""Keras' callbacks and a user's own, beside the same run of `keras.Model.fit` on one device."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import difference, noted_ranges, sequential, written
from tfdist import phases
from tfdist.training import blocks

pytestmark = pytest.mark.slow

RNG = np.random.RandomState(0)
X = RNG.randn(42, 4).astype("float32")
Y = (X @ RNG.randn(4, 1)).astype("float32")
BATCH_SIZE, STEPS, EPOCHS = 10, 5, 3  # the last batch of an epoch has 2 examples


def make_model(strategy=None):
    keras.utils.set_random_seed(1)
    layer = functools.partial(keras.layers.Dense, 1, name="dense")
    optimizer = functools.partial(keras.optimizers.SGD, 0.05)
    strategy = strategy or tf.distribute.get_strategy()
    return sequential(strategy, layer, optimizer=optimizer, metrics=["mae"])


OPTIONS = {
    "batch_size": BATCH_SIZE,
    "epochs": EPOCHS,
    "shuffle": False,
    "verbose": 0,
    "validation_data": (X[:12], Y[:12]),
}


def both(strategy, make_callbacks, **options):
    """Runs tfdist.fit and keras.Model.fit alike; each gets callbacks of its own."""
    options = OPTIONS | options
    ours, theirs = make_model(strategy), make_model()
    tfdist.fit(ours, X, Y, callbacks=make_callbacks("ours"), **options)
    theirs.fit(X, Y, callbacks=make_callbacks("theirs"), **options)
    return ours, theirs


def assert_same_history(one, other):
    assert one.epoch == other.epoch
    assert list(one.history) == list(other.history)
    for name, values in one.history.items():
        np.testing.assert_allclose(values, other.history[name], rtol=1e-4, atol=1e-6)


class Recorder(keras.callbacks.Callback):
    """Keeps every call of every hook, and copies of its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []


def _recording(name, *, is_indexed):
    def hook(self, *arguments, logs=None):
        index, rest = arguments[:is_indexed], arguments[is_indexed:]
        self.calls.append((name, *index, dict((rest[0] if rest else logs) or {})))

    return hook


HOOKS = [n for n in vars(keras.callbacks.Callback) if re.match("on_(epoch|train|test|predict)_", n)]
for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name, is_indexed="batch" in _name or "epoch" in _name))


@pytest.fixture
def ranges(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_S", 600.0)  # however slow the machine is just then
    return noted_ranges(monkeypatch)


FREQUENCIES = (3, 7)  # in steps: at the end of an epoch too, and over it


class Run(NamedTuple):
    """One run of each, with callbacks that leave each other alone; and what they left behind."""

    ours: keras.Model
    theirs: keras.Model
    path: Path
    calls: dict[str, list[Any]]
    ranges: list[tuple[int, int]]


@pytest.fixture(scope="module")
def without_batches(strategies, tmp_path_factory):
    """A run with callbacks that need no look at each batch."""
    path = tmp_path_factory.mktemp("without batches")

    def make(whose):
        (path / whose).mkdir()
        saving = keras.callbacks.ModelCheckpoint
        saves = [
            saving(path / whose / f"every {f}" / "e{epoch}-b{batch}.keras", save_freq=f)
            for f in FREQUENCIES
        ]
        return [
            saving(path / whose / "epochs" / "e{epoch}-{val_loss:.2f}.keras"),
            saving(path / whose / "best" / "e{epoch}.keras", save_best_only=True, mode="max"),
            keras.callbacks.CSVLogger(path / whose / "log.csv"),
            keras.callbacks.TensorBoard(path / whose / "epoch"),
            *saves,
        ]

    with pytest.MonkeyPatch.context() as patch:
        ranges = noted_ranges(patch)
        ours, theirs = both(strategies[2], make)
    return Run(ours, theirs, path, {}, ranges)


@pytest.fixture(scope="module")
def with_batches(strategies, tmp_path_factory):
    """A run with callbacks that look at each batch."""
    path = tmp_path_factory.mktemp("with batches")
    recorders = {"ours": Recorder(), "theirs": Recorder()}

    def make(whose):
        board = keras.callbacks.TensorBoard(path / whose / "batches", update_freq=2)
        return [board, recorders[whose]]

    models = both(strategies[3], make)
    for model, evaluate, predict, recorder in (
        (models[0], tfdist.evaluate, tfdist.predict, recorders["ours"]),
        (models[1], keras.Model.evaluate, keras.Model.predict, recorders["theirs"]),
    ):
        options = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": [recorder]}
        evaluate(model, X, Y, **options)
        predict(model, X, **options)
    calls = {whose: recorder.calls for whose, recorder in recorders.items()}
    return Run(*models, path, calls, [])


def test_history_equals_keras(strategies, without_batches):
    for ours, theirs in (both(strategies[1], lambda _: []), without_batches[:2]):
        assert_same_history(ours.history, theirs.history)
        assert ours.history.params == theirs.history.params


def test_a_second_fit_continues_the_first(strategies):
    ours, theirs = make_model(strategies[2]), make_model()
    for epochs, initial in ((2, 0), (3, 2)):
        options = OPTIONS | {"epochs": epochs, "initial_epoch": initial}
        one = tfdist.fit(ours, X, Y, **options)
        two = theirs.fit(X, Y, **options)
        assert_same_history(one, two)
    assert one.epoch == [2]


def test_validation_freq_equals_keras(strategies):
    for freq in (2, [1, 3]):
        ours, theirs = both(strategies[1], lambda _: [], validation_freq=freq, validation_steps=1)
        assert_same_history(ours.history, theirs.history)


def _shown(text):
    """Epoch lines, and the complete states of the progress bar: steps and metrics."""
    found = []
    for line in re.split(r"[\r\n\x08]+", re.sub(r"\x1b\[[0-9;]*m", "", text)):
        done = re.match(r"(\d+)/(\d+) ", line)
        if line.startswith("Epoch"):
            found.append(line)
        elif done and done[1] == done[2]:
            metrics = re.findall(r"(\w+): ([-\d.e+]+)", line)
            found.append((done[2], {name: float(value) for name, value in metrics}))
    return found


@pytest.mark.parametrize("verbose", [2, "auto"])
def test_the_progress_bar_equals_the_bar_of_keras(strategies, capsys, verbose):
    model = make_model(strategies[2])
    tfdist.fit(model, X, Y, **(OPTIONS | {"verbose": verbose}))
    ours = _shown(capsys.readouterr().out)
    make_model().fit(X, Y, **(OPTIONS | {"verbose": verbose}))
    theirs = _shown(capsys.readouterr().out)
    assert [line for line in ours if isinstance(line, str)] == [
        f"Epoch {i + 1}/{EPOCHS}" for i in range(EPOCHS)
    ]
    finals = [[line for line in text if "val_loss" in line[1]] for text in (ours, theirs)]
    assert len(finals[0]) == EPOCHS
    for one, other in zip(*finals, strict=True):
        assert one[0] == other[0] == str(STEPS)
        assert one[1] == pytest.approx(other[1], abs=2e-4)


def test_evaluate_and_predict_show_their_progress(strategies, capsys):
    model = make_model(strategies[2])
    history = tfdist.fit(model, X, Y, **OPTIONS)
    tfdist.evaluate(model, X, Y, verbose=0)
    tfdist.predict(model, X, verbose=0)
    assert capsys.readouterr().out == ""
    assert model.history is history
    logs = tfdist.evaluate(model, X, Y, batch_size=BATCH_SIZE, return_dict=True)
    (line,) = [line for line in _shown(capsys.readouterr().out) if line[1]][-1:]
    assert line == (str(STEPS), pytest.approx(logs, abs=2e-4))
    tfdist.predict(model, X, batch_size=BATCH_SIZE)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out


def test_stoppers_and_schedulers_act_as_under_keras(strategies):
    stoppers = {}

    def make(whose):
        # A loss that shall rise: the best epoch is the first.
        rising = {"monitor": "val_loss", "mode": "max"}
        stoppers[whose] = keras.callbacks.EarlyStopping(
            patience=2, restore_best_weights=True, **rising
        )
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch),
            stoppers[whose],
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, **rising),
        ]

    ours, theirs = both(strategies[3], make, epochs=9)
    assert stoppers["ours"].stopped_epoch == stoppers["theirs"].stopped_epoch == 2
    rates = ours.history.history["learning_rate"]
    np.testing.assert_allclose(rates, [0.05, 0.05 / 2, 0.05 / 2 / 2 / 4])
    assert_same_history(ours.history, theirs.history)
    assert difference(ours, theirs) < 1e-6
    assert ours.optimizer.iterations.numpy() == 3 * STEPS


def test_a_rate_under_loss_scaling_sets_the_inner_optimizer(strategies):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner = keras.optimizers.SGD(0.05)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.1)
    tfdist.fit(model, X, Y, batch_size=BATCH_SIZE, epochs=2, verbose=0, callbacks=[scheduler])
    assert float(inner.learning_rate.numpy()) == pytest.approx(0.0005)


@pytest.mark.parametrize("run", ["without_batches", "with_batches"])
def test_file_writing_callbacks_produce_the_files_of_keras(request, run):
    run = request.getfixturevalue(run)
    ours, theirs = (written(run.path / whose) for whose in ("ours", "theirs"))
    assert list(ours) == list(theirs)
    for name, values in ours.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, err_msg=name)
        keras.tree.map_structure(close, values, theirs[name])
    if not run.ranges:
        assert "batches/train batch_loss" in ours
        return
    assert {"epoch/train epoch_loss", "epoch/validation epoch_loss", "log.csv"} <= set(ours)
    saved = {kind: [n for n in ours if n.startswith(f"{kind}/")] for kind in ("epochs", "best")}
    assert (len(saved["epochs"]), saved["best"]) == (EPOCHS, ["best/e1.keras"])
    for frequency in FREQUENCIES:
        steps = {v[0] for name, v in ours.items() if name.startswith(f"every {frequency}/")}
        assert steps == set(range(frequency, EPOCHS * STEPS + 1, frequency))
    assert max(last - first for first, last in run.ranges) > 1  # and ask for no single batches


@pytest.mark.parametrize(
    ("frequency", "options", "fits", "steps"),
    [
        # Virtual epochs of 30, 31 and 31 examples: 3, 4 and 4 steps.
        (7, {"virtual_epochs": tfdist.VirtualEpochs(total_examples=92, checkpoints=3)}, 1, [7]),
        (3, {"epochs": 3, "initial_epoch": 1}, 1, [3, 6, 9]),
        (3, {}, 2, [3, 6, 9]),
    ],
    ids=["over unequal epochs", "from the initial epoch", "on in a second fit"],
)
def test_model_checkpoint_counts_batches(strategies, tmp_path, frequency, options, fits, steps):
    path = tmp_path / "{epoch}-{batch}.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_freq=frequency)
    model = make_model(strategies[1])
    for _ in range(fits):
        tfdist.fit(model, X, Y, BATCH_SIZE, verbose=0, callbacks=[checkpoint], **options)
    assert sorted({saved for saved, *_ in written(tmp_path).values()}) == steps


def assert_same_calls(ours, theirs):
    assert [call[:-1] for call in ours] == [call[:-1] for call in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert list(one[-1]) == list(other[-1]), one[0]
        for name, value in one[-1].items():
            np.testing.assert_allclose(value, other[-1][name], rtol=1e-4, atol=1e-5)


def test_every_hook_gets_the_calls_of_keras(with_batches):
    assert_same_calls(*(with_batches.calls[whose] for whose in ("ours", "theirs")))


def test_batch_hooks_run_once_in_steps_per_execution(strategies, tmp_path):
    """A save within the steps of an execution adds no call."""
    ours, theirs, recorders = make_model(strategies[2]), make_model(), (Recorder(), Recorder())
    options = OPTIONS | {"validation_data": None}
    with strategies[2].scope():
        ours.steps_per_execution = 2
    theirs.steps_per_execution = 2
    saves = tfdist.BackupAndRestore(tmp_path, save_freq=3)
    tfdist.fit(ours, X, Y, callbacks=[recorders[0], saves], **options)
    theirs.fit(X, Y, callbacks=[recorders[1]], **options)
    for model, recorder in zip((ours, theirs), recorders, strict=True):
        options = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": [recorder]}
        model.evaluate(X, Y, **options)
        model.predict(X, **options)
    assert_same_calls(*(recorder.calls for recorder in recorders))
    assert saves.store.steps() == [10, 12, 15][-len(saves.store.steps()) :]


def test_a_task_in_any_hook_reports_the_callback_phase(strategies):
    """Where one hangs in its hook, it is told from those that wait for it."""
    doing = {}
    hooks = [name for name in HOOKS if "predict" not in name]

    def noting(hook):
        return lambda *_, **__: doing.setdefault(hook, set()).add(phases.current().phase)

    callback = type("Doing", (keras.callbacks.Callback,), {hook: noting(hook) for hook in hooks})()
    tfdist.fit(make_model(strategies[1]), X, Y, callbacks=[callback], **OPTIONS)
    assert doing == {hook: {"callback"} for hook in hooks}


@pytest.mark.parametrize(
    "base",
    [
        lambda _: keras.callbacks.ProgbarLogger(),
        lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
        lambda path: keras.callbacks.TensorBoard(path),
        lambda _: keras.callbacks.TerminateOnNaN(),
        lambda _: keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
    ],
)
def test_a_batch_hook_in_a_subclass_sees_every_batch(strategies, tmp_path, base):
    seen, callback = [], base(tmp_path)

    class Mine(type(callback)):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            seen.append(batch)

    if isinstance(callback, keras.callbacks.LambdaCallback):  # which has it on the instance
        callback.on_train_batch_end = lambda batch, logs: seen.append(batch)
    else:
        callback.__class__ = Mine
    tfdist.fit(make_model(strategies[1]), X, Y, BATCH_SIZE, verbose=0, callbacks=[callback])
    assert seen == list(range(STEPS))


def test_a_batch_hook_can_stop_the_training(strategies):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == STEPS + 2:
                self.model.stop_training = True

    ours, theirs = both(strategies[2], lambda _: [Stop()])
    assert ours.optimizer.iterations.numpy() == STEPS + 2
    assert_same_history(ours.history, theirs.history)


class StopInTheSecondBatch(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = self.model.stop_predicting = batch == 1

    on_predict_batch_end = on_test_batch_end


class StopAsItBegins(keras.callbacks.Callback):
    """It has one batch all the same."""

    def on_test_begin(self, logs=None):
        self.model.stop_evaluating = self.model.stop_predicting = True

    on_predict_begin = on_test_begin


class StopAndLook(StopAsItBegins):
    def on_predict_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("stop", "batches"), [(StopInTheSecondBatch, 2), (StopAsItBegins, 1), (StopAndLook, 1)]
)
def test_a_hook_can_stop_evaluation_and_prediction(strategies, stop, batches):
    model, examples = make_model(strategies[2]), batches * BATCH_SIZE
    options = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": [stop()]}
    exact = tfdist.evaluate(model, X[:examples], Y[:examples], verbose=0)
    assert tfdist.evaluate(model, X, Y, **options) == pytest.approx(exact, rel=1e-5)
    assert len(tfdist.predict(model, X, **options)) == examples


def test_hooks_may_read_and_write_the_model(strategies):
    """As callbacks do that average weights, log norms, or freeze a layer's bias."""

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel, bias = self.model.get_layer("dense").get_weights()
            self.model.get_layer("dense").set_weights([kernel, np.zeros_like(bias)])

    ours, theirs = both(strategies[3], lambda _: [Reset()])
    assert difference(ours, theirs) < 1e-6
    assert ours.get_weights()[1] == 0


def test_steps_never_make_an_example_count_twice(strategies):
    """`steps` is often the ceiling of examples / batch_size."""
    model = make_model(strategies[2])
    whole = tfdist.evaluate(model, X, Y, batch_size=BATCH_SIZE, verbose=0)
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH_SIZE)
    untold = stream.filter(lambda *_: True)  # which does not tell its length
    for steps in (STEPS, STEPS + 3):
        options = {"batch_size": BATCH_SIZE, "verbose": 0, "steps": steps}
        for data in ((X, Y), (stream,), (untold,)):
            assert tfdist.evaluate(model, *data, **options) == pytest.approx(whole, rel=1e-6)
            assert len(tfdist.predict(model, data[0], **options)) == len(X)
    few = tfdist.evaluate(model, X, Y, batch_size=BATCH_SIZE, verbose=0, steps=2)
    assert few == pytest.approx(tfdist.evaluate(model, X[:20], Y[:20], verbose=0), rel=1e-5)
