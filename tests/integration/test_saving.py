"""Saving beside the training: copies, errors, damage, the best, and what is refused."""

import errno
import functools
import json
import os
import re
import threading
from io import FileIO

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut, around, bits, classifier
from tests.refusals import refusal
from tfdist.checkpoint import CheckpointStore, model_state
from tfdist.checkpoint import format as format_module
from tfdist.errors import TfdistError
from tfdist.strategy import job_of
from tfdist.training import resume

pytestmark = pytest.mark.slow

RNG = np.random.RandomState(0)
X = RNG.randn(60, 4).astype("float32")
Y = RNG.randint(0, 3, 60)
STEPS = 10  # an epoch, in batches of 6


def make(strategy, *, optimizer=keras.optimizers.SGD, rate=0.5):
    return classifier(strategy, lambda: optimizer(learning_rate=0.05, momentum=0.9), rate=rate)


def fit(model, directory, *more, epochs=2, **options):
    backup = tfdist.BackupAndRestore(directory, **{"save_freq": 4, "keep": 100, **options})
    return tfdist.fit(
        model, X, Y, batch_size=6, epochs=epochs, seed=5, verbose=0, callbacks=[backup, *more],
        validation_data=(X, Y),
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_copy_is_not_changed_by_later_steps(strategies, tmp_path, replicas):
    model = make(strategies[replicas])
    job = job_of(model.distribute_strategy)
    fit(model, tmp_path / "1", epochs=1)
    arrays = model_state.capture(model, job)
    before = {name: array.tobytes() for name, array in arrays.items()}
    fit(model, tmp_path / "2", epochs=1)
    assert {name: array.tobytes() for name, array in arrays.items()} == before
    now = model_state.capture(model, job)
    assert before["weights/0"] != now["weights/0"].tobytes()
    assert list(before) == list(model_state.variables_of(model))


def slow_writer(monkeypatch, *, step):
    """Have the write of `step` wait; return an event to let it go on, and what came of the wait."""
    go_on, waited, write = threading.Event(), [], CheckpointStore.write

    def slow(self, at, *args, **options):
        if at == step:
            waited.append(go_on.wait(60))
        return write(self, at, *args, **options)

    monkeypatch.setattr(CheckpointStore, "write", slow)
    return go_on, waited


class Listing(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)

    def get_state(self):
        return {"seen": self.seen, "arrays": (np.float32(1), np.arange(2))}

    def set_state(self, saved):
        self.seen = saved["seen"]


def test_training_continues_while_a_checkpoint_is_written(strategies, tmp_path, monkeypatch):
    """And the state of a callback is that of the moment of the save, though it is appended to."""
    go_on, waited = slow_writer(monkeypatch, step=4)
    threads = set(threading.enumerate())
    fit(make(strategies[1]), tmp_path, Listing(), AtStep(6, go_on.set))
    assert waited == [True]
    store = CheckpointStore(tmp_path)
    assert store.steps() == [4, 8, 10, 12, 16, 20]
    assert store.read(4).meta["callbacks"]["Listing-0"] == {
        **{"seen": [0, 1, 2, 3], "arrays": [1.0, [0, 1]]}
    }
    assert set(threading.enumerate()) <= threads


def fail_at(monkeypatch, step):
    """The disk is full in the middle of the checkpoint of `step`, and free again later."""
    write, full = CheckpointStore.write, []

    def watched(self, at, *args, **options):
        full[:] = [at == step]
        return write(self, at, *args, **options)

    class File(FileIO):
        def write(self, data):
            if full == [True]:
                super().write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(CheckpointStore, "write", watched)
    monkeypatch.setattr(format_module, "FileIO", File)


@pytest.mark.parametrize("step", [8, 20], ids=["before the next save", "at the end"])
def test_a_full_disk_ends_the_training_without_losing_checkpoints(
    strategies, tmp_path, monkeypatch, step
):
    whole = make(strategies[1])
    fit(whole, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fail_at(patch, step)
        with pytest.raises(TfdistError, match=rf"step {step} in .*No space left.*intact") as error:
            fit(make(strategies[1]), tmp_path / "full")
    assert error.value.exit_code != 0
    assert "\n" not in str(error.value)
    store = CheckpointStore(tmp_path / "full")
    assert store.steps() == [s for s in (4, 8, 10, 12, 16, 20) if s < step]
    assert {name for name in os.listdir(store.directory) if name[0] == "."} == {".lock"}
    again = make(strategies[1])
    fit(again, tmp_path / "full")
    assert bits(again) == bits(whole)


@pytest.mark.parametrize("error", [Cut, KeyboardInterrupt])
def test_a_copied_state_is_written_if_training_fails(strategies, tmp_path, monkeypatch, error):
    go_on, _ = slow_writer(monkeypatch, step=4)

    def fail():
        go_on.set()
        raise error

    with pytest.raises(error):
        fit(make(strategies[1]), tmp_path, AtStep(6, fail))
    assert CheckpointStore(tmp_path).steps() == [4]


def test_an_unwritable_directory_is_refused_before_any_step(strategies, tmp_path):
    (tmp_path / "file").write_text("")
    model = make(strategies[1])
    before = bits(model)
    with pytest.raises(TfdistError, match=r"/file/checkpoints: (Not a directory|File exists)"):
        fit(model, tmp_path / "file" / "checkpoints")
    assert bits(model) == before


# Damage


def test_a_run_without_a_complete_checkpoint_starts_over(strategies, tmp_path, caplog):
    whole = make(strategies[1])
    fit(whole, tmp_path / "whole")
    with pytest.raises(Cut):
        fit(make(strategies[1]), tmp_path / "run", AtStep(5))
    (damaged,) = (tmp_path / "run").glob("step-*")
    os.truncate(damaged / "arrays.bin", 10)
    again = make(strategies[1])
    fit(again, tmp_path / "run")
    assert caplog.text.count(f"{damaged.name} is damaged") == 1
    assert "no readable checkpoint" in caplog.text
    assert f"moved to {tmp_path}/run/old-1. Without" in caplog.text
    assert "the run starts at step 0" in caplog.text
    assert os.listdir(tmp_path / "run" / "old-1") == [damaged.name]
    assert bits(again) == bits(whole)


# The best


def best_of(directory):
    store = CheckpointStore(directory)
    return store.best(), store.steps()


def test_a_resumed_run_keeps_the_best_checkpoint(strategies, tmp_path):
    def run(directory, *more):
        return fit(make(strategies[1]), directory, *more, epochs=5, keep=1, best="val_accuracy")

    history = run(tmp_path / "whole").history["val_accuracy"]
    best, steps = best_of(tmp_path / "whole")
    assert best == STEPS * (1 + history.index(max(history)))
    assert steps == sorted({best, 50})
    for step in (13, 33):
        with pytest.raises(Cut):
            run(tmp_path / f"cut{step}", AtStep(step))
        run(tmp_path / f"cut{step}")
        assert best_of(tmp_path / f"cut{step}") == (best, steps)


class Scores(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = (1.0, 5.0, 3.0)[epoch]


@pytest.mark.parametrize(("reason", "best"), [("", 2), ("a weight is not finite", 3)])
def test_the_best_saved_checkpoint_can_be_loaded(strategies, tmp_path, monkeypatch, reason, best):
    """The second epoch is better than any, and its weights may not be worth saving."""
    found = iter(["", reason, ""])
    monkeypatch.setattr(resume, "reason_not_to_save", lambda *_: next(found))
    backup = tfdist.BackupAndRestore(tmp_path, keep=1, best="score", mode="max")
    model, callbacks = make(strategies[1]), [Scores(), backup]
    tfdist.fit(model, X, Y, batch_size=6, epochs=3, verbose=0, callbacks=callbacks)
    assert best_of(tmp_path) == (best * STEPS, sorted({best * STEPS, 3 * STEPS}))
    saved = CheckpointStore(tmp_path).read(best * STEPS)
    tfdist.load_weights(model, tmp_path, best=True)
    np.testing.assert_array_equal(model.layers[0].kernel, saved.arrays["weights/0"])


# What is refused


class Other(keras.optimizers.SGD):
    """Another optimizer with the same variables."""


def test_another_configuration_is_refused_with_the_difference(strategies, tmp_path):
    fit(make(strategies[1]), tmp_path, epochs=1)
    for change, named in (
        ({"optimizer": Other}, "optimizer 0 SGD -> Other"),
        ({"rate": 0.25}, "(Dropout) rate 0.5 -> 0.25"),
    ):
        told = refusal(lambda change=change: fit(make(strategies[1], **change), tmp_path))
        assert told.code == "another-run"
        assert named in told.problem
    slower = make(strategies[1], optimizer=functools.partial(keras.optimizers.SGD, name="slower"))
    slower.optimizer.learning_rate = 0.01  # neither is compared: the rate is the checkpoint's
    fit(slower, tmp_path)
    np.testing.assert_allclose(slower.optimizer.learning_rate, 0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"frozen": "b"}, r"_b_kernel_momentum -> \S*_a_kernel_momentum"),
        ({"metrics": ["mse", "mae"]}, r"absolute_error\S*/total -> mean_squared"),
    ],
)
def test_a_state_of_another_model_is_refused(strategies, tmp_path, change, named):
    """Variables of the same shapes, in the same number."""

    def run(*, epochs, frozen="a", metrics=("mae", "mse")):
        with strategies[1].scope():
            parts = [keras.layers.Dense(4, name=name) for name in "ab"]
            parts["ab".index(frozen)].trainable = False
            model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(4)])
            model.compile(keras.optimizers.SGD(momentum=0.9), "mse", metrics=list(metrics))
        backup = tfdist.BackupAndRestore(tmp_path)
        tfdist.fit(model, X, X, epochs=epochs, seed=5, verbose=0, callbacks=[backup])

    run(epochs=1)
    run(epochs=2)  # its third layer has another name in this process
    told = refusal(lambda: run(epochs=3, **change))
    assert told.code == "another-run"
    assert re.search(named, told.problem)


def described(
    *, strides=1, rate=0.1, smoothing=0.5, clipnorm=1.0, mask=float("nan"), weights=(1, 2)
):
    """What a checkpoint says of a model whose variables do not depend on any of these."""
    layers = keras.layers
    inputs = keras.Input((8, 8, 1), name="image")
    regularizer = keras.regularizers.L2(rate)
    x = layers.Conv2D(3, 3, strides=strides, kernel_regularizer=regularizer)(inputs)
    x = layers.Masking(mask_value=mask)(layers.Reshape((-1, 3))(x))
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, [layers.Dense(1)(x), layers.Dense(1)(x)])
    model.compile(
        around(keras.optimizers.SGD(clipnorm=clipnorm)),
        loss=["mse", keras.losses.BinaryCrossentropy(label_smoothing=smoothing)],
        loss_weights=weights and list(weights),
    )
    return json.loads(json.dumps(model_state.configuration_of(model)))


def test_settings_that_no_variable_shows_are_compared():
    compare = functools.partial(model_state.require_same_configuration, where="here")
    mine = described()
    compare(mine, described())
    compare({name: group for name, group in mine.items() if name != "compile"}, mine)
    for change, named in (
        ({"strides": (2, 1)}, r"\(Conv2D\) strides \[1, 1\] -> \[2, 1\]"),
        ({"rate": 0.2}, r"\(Conv2D\) kernel_regularizer \{.*0.1.*\} -> \{.*0.2"),
        ({"smoothing": 0.7}, r"\(BinaryCrossentropy\) label_smoothing 0.5 -> 0.7"),
        ({"clipnorm": 2.0}, r"\(SGD\) clipnorm 1.0 -> 2.0"),
        ({"mask": 0.0}, "mask_value nan -> 0.0"),
        ({"weights": (1, 9)}, r"loss_weights \[1, 2\] -> \[1, 9\]"),
        ({"weights": None}, r"loss_weights \[1, 2\] -> "),
    ):
        told = refusal(lambda change=change: compare(mine, described(**change)))
        assert re.search(named, told.problem)


def test_exact_refuses_another_number_of_replicas_or_threads(
    strategies, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="tfdist")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    fit(make(strategies[3]), tmp_path, epochs=1)
    fit(make(strategies[3]), tmp_path, exact=True)
    assert "resumed with another setup" not in caplog.text
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    told = refusal(lambda: fit(make(strategies[1]), tmp_path, exact=True))
    assert told.code == "not-exact"
    differences = "strategy mirrored -> single, replicas 3 -> 1, threads 3 -> 1"
    assert told.problem.endswith(f": {differences}")
    fit(make(strategies[1]), tmp_path, epochs=3)
    assert f"resumed with another setup ({differences}): " in caplog.text


def test_fit_refuses_inexact_models_before_any_step(strategies, tmp_path):
    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x), name="noise")

    with strategies[1].scope():
        model = keras.Sequential([keras.Input((4,)), Noisy(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = bits(model)
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    for data, named in (((X, Y), "RandomStandardNormal ("), ((stream,), "stream")):
        backup = tfdist.BackupAndRestore(tmp_path / "exact", exact=True)
        told = refusal(
            lambda data=data, backup=backup: tfdist.fit(model, *data, verbose=0, callbacks=[backup])
        )
        assert told.code == "not-exact"
        assert named in told.problem
    assert bits(model) == before
    assert CheckpointStore(tmp_path / "exact").steps() == []


# Between the tasks


def test_a_state_that_is_not_json_names_its_callback(strategies, tmp_path):
    listing = Listing()
    listing.seen = [{1}]
    told = refusal(lambda: fit(make(strategies[1]), tmp_path, listing))
    assert (told.where, told.code) == ("Listing.get_state", "not-saveable")


def test_names_of_a_saved_model_hide_control_characters(strategies):
    model = classifier(strategies[1], keras.optimizers.Adam)
    saved = model_state.names_of(model)
    saved["metrics/99"] = ["kernel\x1b[2J\u202e", [], "float32"]
    with pytest.raises(tfdist.UsageError, match=r"kernel\\x1b\[2J\\u202e") as caught:
        model_state.require_same_variables(model, saved, where="checkpoint")
    assert str(caught.value).isprintable()
    mine = model_state.configuration_of(model)
    others = {"optimizer": [{**mine["optimizer"][0], "class": "Adam\x1b[2J"}]}
    with pytest.raises(tfdist.UsageError, match=r"Adam\\x1b\[2J") as caught:
        model_state.require_same_configuration(others, mine, where="checkpoint")
    assert str(caught.value).isprintable()
