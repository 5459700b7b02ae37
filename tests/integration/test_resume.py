"""BackupAndRestore: a run that is cut anywhere ends like one that was left alone."""

import contextlib
import functools
import json
import random
import shutil
import tempfile
import types
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tests.integration import test_conformance as conformance
from tests.models import AtStep, Cut, bits, classifier
from tests.mutations import JSON, forged, replacing_at
from tests.refusals import refusal, refused
from tfdist.checkpoint import CheckpointStore, callback_state
from tfdist.cluster import KINDS, ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.errors import EXIT_PEER_MISSING, StartupTimeout, TfdistError
from tfdist.strategy import Job, job_of
from tfdist.training import loop, resume

EARLIER = Path(__file__).parents[1] / "unit" / "data" / "run" / "checkpoints"
RNG = np.random.RandomState(0)
X = RNG.randn(90, 4).astype("float32")
Y = RNG.randint(0, 3, 90)


VAST = {"units": 1 << 43, "build_config": {"input_shape": [None, 1 << 10]}}


def make(strategy):
    return classifier(strategy, lambda: keras.optimizers.Adam(0.05))


class OwnBest(keras.callbacks.Callback):
    """Keeps what it likes under the name that EarlyStopping has for its weights."""

    def on_epoch_end(self, epoch, logs=None):
        self.best_weights = {"kernel": self.model.layers[-1].kernel.numpy(), "epoch": "first"}


def callbacks():
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.7),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        OwnBest(),
    ]


def fit(model, directory, more=(), **options):
    backup = tfdist.BackupAndRestore(directory, save_freq=4)
    options = {"seed": 5, "epochs": 4, "batch_size": 8, "shuffle": True, **options}
    return tfdist.fit(
        model, X, Y, verbose=0, validation_data=(X, Y), callbacks=[*callbacks(), backup, *more],
        **options,
    )  # fmt: skip


class Ticking(keras.callbacks.Callback):
    """Lets the run's clock advance by a second in each step."""

    now_s = 0.0

    def on_train_batch_end(self, batch, logs=None):
        Ticking.now_s += 1


def test_max_time_limits_the_whole_run_and_can_grow(strategies, tmp_path, monkeypatch, warnings):
    whole = make(strategies[1])
    expected = fit(whole, tmp_path / "whole", [Ticking()])
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: Ticking.now_s))
    # Twelve steps are an epoch: the time is over within an epoch and at its end.
    for max_time, steps in (6.5, 7), (6, 7), ({"seconds": 24}, 24), ("00:00:00:29", 29), (None, 48):
        model = make(strategies[1])
        history = fit(model, tmp_path / "run", [Ticking()], max_time=max_time)
        assert CheckpointStore(tmp_path / "run").steps()[-1] == steps
    assert bits(model) == bits(whole)
    assert json.dumps(history.history) == json.dumps(expected.history)
    said = [line for line in warnings() if line.startswith("max_time")]
    assert [line.partition(";")[0] for line in said] == [
        f"max_time: the run stops after {step} s at step {step}" for step in (7, 7, 24, 29)
    ]
    assert [line for line in warnings() if line.startswith("resumes")] == [
        f"resumes at step {step} (epoch {epoch}) from {tmp_path / 'run'}"
        for step, epoch in ((7, 1), (7, 1), (24, 3), (29, 3))
    ]
    for wrong in ("1:00", -1, "soon"):
        _, code = refused(lambda wrong=wrong: fit(model, tmp_path / "run", max_time=wrong))
        assert code == "not-a-number"


def test_a_cut_or_extended_run_has_the_same_bits(strategies, tmp_path):
    """On several replicas: tests/field/test_one_process.py. Twelve steps are an epoch."""
    whole = make(strategies[1])
    expected = fit(whole, tmp_path / "whole")
    assert CheckpointStore(tmp_path / "whole").steps() == [40, 44, 48]
    for step in (3, 12, 30, None):
        directory = tmp_path / f"cut{step}"
        if step is None:
            fit(make(strategies[1]), directory, epochs=3)
        else:
            with pytest.raises(Cut):
                fit(make(strategies[1]), directory, [AtStep(step)])
        resumed = make(strategies[1])
        history = fit(resumed, directory)
        assert bits(resumed) == bits(whole)
        assert json.dumps(history.history) == json.dumps(expected.history)


def test_a_run_resumes_from_the_backup_with_the_largest_step(strategies, tmp_path, caplog):
    """The local directory is lost with its machine. Twelve steps are an epoch."""
    local, durable = tmp_path / "local", tmp_path / "durable"
    whole, resumed = make(strategies[1]), make(strategies[1])
    fit(whole, tmp_path / "whole")
    with pytest.raises(Cut):
        fit(make(strategies[1]), local, [AtStep(31), tfdist.BackupAndRestore(durable)])
    shutil.rmtree(local)
    fit(resumed, local, [tfdist.BackupAndRestore(durable)])
    assert f"resumes at step 24 (epoch 3) from {durable}" in caplog.text
    assert bits(resumed) == bits(whole)
    assert CheckpointStore(durable).steps() == [24, 36, 48]
    assert CheckpointStore(local).steps() == [40, 44, 48]


class Calls(keras.callbacks.Callback):
    """The calls of its batch hooks."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("end", batch))


def test_a_run_that_resumes_between_batch_hooks_begins_with_the_first(strategies, tmp_path):
    """A save every 4 steps, and hooks every 3."""
    for callback in AtStep(6), Calls():
        model = make(strategies[1])
        model.steps_per_execution = 3
        with contextlib.suppress(Cut):
            fit(model, tmp_path, [callback], epochs=1)
    assert callback.seen[:3] == [("begin", 4), ("end", 5), ("begin", 6)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_state_of_several_optimizers_is_resumed(strategies, tmp_path, replicas):
    """The step builds them, as in Keras' guides."""

    def trained(directory, more=()):
        keras.utils.set_random_seed(1)
        with strategies[replicas].scope():
            model = conformance.compiled(conformance.Alternating)
        callbacks = [tfdist.BackupAndRestore(directory, save_freq=4), *more]
        x, y = conformance.GUIDE_X, conformance.GUIDE_Y
        tfdist.fit(model, x, y, batch_size=8, seed=5, verbose=0, callbacks=callbacks)
        return [*map(np.asarray, model.weights), model.of_first.iterations.numpy()]

    def cut(batch, logs):
        if batch == 5:
            raise Cut

    whole = trained(tmp_path / "whole")
    with pytest.raises(Cut):
        trained(tmp_path / "cut", [keras.callbacks.LambdaCallback(on_train_batch_end=cut)])
    np.testing.assert_equal(trained(tmp_path / "cut"), whole)


@pytest.mark.parametrize("start", [None, "start.keras"])
def test_draws_after_fit_do_not_depend_on_a_resume(strategies, tmp_path, start):
    """A second model, or a second fit without a seed, is that of the run left alone."""
    options = {"seed": None, "epochs": 1}
    if start is not None:
        make(strategies[1]).save(tmp_path / start)
        options["initial_weights"] = tmp_path / start
    fit(make(strategies[1]), tmp_path / "whole", **options)
    expected = random.random()
    with pytest.raises(Cut):
        fit(make(strategies[1]), tmp_path / "cut", [AtStep(6)], **options)
    for _ in ("resumed", "already finished"):
        fit(make(strategies[1]), tmp_path / "cut", **options)
        assert random.random() == expected


def test_a_run_of_an_earlier_version_resumes(strategies, tmp_path):
    """With the state of its callbacks; the files are from before their modules were joined."""
    shutil.copytree(EARLIER, tmp_path / "run")
    x = np.arange(48, dtype="float32").reshape(12, 4) / 48
    y = np.arange(12, dtype="float32")[:, None] / 12
    with strategies[1].scope():
        dense = [keras.layers.Dense(2, activation="relu", name="a"), keras.layers.Dropout(0.5)]
        last = keras.layers.Dense(1, name="b")
        model = keras.Sequential([keras.Input((4,)), *dense, last])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    stopping = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    backup = tfdist.BackupAndRestore(tmp_path / "run", best="loss")
    history = tfdist.fit(
        model, x, y, batch_size=4, epochs=3, seed=7, verbose=0, callbacks=[backup, stopping]
    )
    before = CheckpointStore(EARLIER).read().meta["callbacks"]["History-0"]["history"]["loss"]
    assert history.history["loss"][:2] == before
    assert len(history.history["loss"]) == 3
    assert CheckpointStore(tmp_path / "run").steps() == [6, 9]


@pytest.mark.parametrize(
    ("mine", "epoch", "kept"),
    [(["0,2.0", "1,1.0"], 1, 1), ([], 0, 0), (["0,2.0", "\0\0\0"], 1, 1)],
    ids=["its own are cut", "it has none", "one that a loss of power has left"],
)
def test_a_csv_log_keeps_lines_of_the_earlier_run(tmp_path, mine, epoch, kept):
    before = ["epoch,loss", "0,5.0", "1,4.0", "2,3.0"]
    (tmp_path / "log.csv").write_text("\r\n".join([*before, *mine, ""]))
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True)
    callback_state.prepare_to_resume([log], epoch=epoch)
    assert (tmp_path / "log.csv").read_text().split() == [*before, *mine[:kept]]


def hand_over(before, *resumed):
    for callback in resumed:
        callback_state.set_states([callback], callback_state.get_states([before]))


def test_a_csv_log_at_a_url_is_continued():
    log = keras.callbacks.CSVLogger("gs://bucket/log.csv")
    callback_state.prepare_to_resume([log], epoch=1)
    assert log.append


def test_a_resumed_csv_log_keeps_its_columns(tmp_path):
    """Those of an epoch without validation, also where the run goes on with one that has it."""
    before, resumed = (keras.callbacks.CSVLogger(tmp_path / "log.csv") for _ in range(2))
    before.on_train_begin()
    before.on_epoch_end(0, {"loss": 3.0, "wer": 0.5})
    callback_state.prepare_to_resume([resumed], epoch=1)
    resumed.on_train_begin()
    hand_over(before, resumed)
    resumed.on_epoch_end(1, {"loss": 2.0, "wer": 0.4, "val_loss": 1.0, "val_wer": 0.3})
    header, _, line = (tmp_path / "log.csv").read_text().split()
    assert dict(zip(header.split(","), line.split(","), strict=True))["val_loss"] == "1.0"


def test_a_resumed_history_keeps_metrics_by_class_as_arrays():
    before, resumed = keras.callbacks.History(), keras.callbacks.History()
    before.epoch, before.history = [0], {"loss": [0.5], "f1": [np.float32([0.1, 0.2])]}
    hand_over(before, resumed)
    np.testing.assert_array_equal(resumed.history["f1"][0], before.history["f1"][0], strict=True)
    assert resumed.history["loss"] == [0.5]


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_a_callback_of_another_metric_starts_again(kind):
    before, same, other = kind("val_loss"), kind("val_loss"), kind("val_accuracy")
    for callback in (before, same, other):
        callback.set_model(keras.Sequential())
        callback.on_train_begin()
    before.best, before.wait = 2.1, 1
    hand_over(before, same, other)
    assert (same.best, same.wait) == (2.1, 1)
    assert other.best != 2.1
    assert other.wait == 0


def test_a_model_checkpoint_within_epochs_keeps_its_best_value(tmp_path):
    options = {"monitor": "loss", "save_freq": 1, "save_best_only": True}
    before, resumed = (
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", **options) for _ in range(2)
    )
    before.best = 2.1
    resumed.set_model(keras.Sequential())
    hand_over(before, resumed)
    resumed.on_epoch_begin(3)
    resumed.on_train_batch_end(0, {"loss": 3.0})
    assert resumed.best == 2.1
    assert not any(tmp_path.iterdir())


def listed(tmp_path):
    return [
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss"),
        keras.callbacks.History(),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.RemoteMonitor("https://mine"),
        keras.callbacks.SwapEMAWeights(),
        Cut0(),
    ]


class Cut0(keras.callbacks.Callback):
    """One of the user's own, without a state."""


def test_a_foreign_state_sets_only_saved_attributes(tmp_path):
    """Not where a callback writes, sends or reads, nor a method of it."""
    names = ["filepath", "filename", "root", "path", "log_dir", "model", "params", "on_epoch_end"]
    names += ["headers", "monitor_op", "_summary_module", "save_freq", "__class__", "patience"]
    mine = listed(tmp_path)
    before = [dict(vars(callback)) for callback in mine]
    states = {
        f"{type(callback).__name__}-0": {name: "/home/me/.ssh/authorized_keys" for name in names}
        for callback in mine
    }
    callback_state.prepare_to_resume(mine[:4], epoch=1)
    callback_state.set_states(mine, states)
    assert [dict(vars(callback)) for callback in mine] == before


@pytest.fixture(scope="module")
def small(strategies):
    """The model of the checkpoint in `data`, and its directory."""
    with strategies[1].scope():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(2, activation="relu", name="a"), layers.Dropout(0.5),
             layers.Dense(1, name="b")]
        )  # fmt: skip
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    tfdist.evaluate(model, X, Y, verbose=0)
    return model


def restored(directory, model, mine):
    """Resume from a directory as `fit` does."""
    backup = tfdist.BackupAndRestore(directory)
    backup.set_model(model)
    saved = backup.saved()
    if saved is not None:
        resume.logs_before_validation(saved)
        container = keras.callbacks.CallbackList([*mine, backup], model=model)
        backup.restore(model, job_of(model.distribute_strategy), callbacks=container)
    return saved


def test_a_checkpoint_of_this_model_is_restored(small, tmp_path):
    assert restored(EARLIER, small, listed(tmp_path)).step == 6


@settings(max_examples=150)
@given(path=st.lists(st.integers(0, 40), min_size=2, max_size=6), value=JSON)
def test_any_checkpoint_metadata_is_resumed_or_refused(small, path, value):
    (earlier,) = EARLIER.glob("step-*")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(shutil.copytree(earlier, Path(place) / "c" / earlier.name))
        forged(directory, lambda body: replacing_at(path, value)(body["meta"]))
        mine, said = listed(Path(place)), ""
        try:
            restored(directory.parent, small, mine)
        except TfdistError as error:
            said = str(error)
        assert "\n" not in said
        assert [mine[2].filepath, mine[5].filename, mine[6].root] == [
            *(f"{place}/best.keras", f"{place}/log.csv", "https://mine"),
        ]


@pytest.mark.parametrize("name", ["weights/0", "optimizer/2", "callbacks/EarlyStopping-0/0"])
def test_arrays_of_another_shape_are_refused_before_any_change(small, tmp_path, name):
    store = CheckpointStore(EARLIER)
    checkpoint = store.read()
    arrays = {**checkpoint.arrays, name: np.zeros((5, 4, 2), "float32")}
    CheckpointStore(tmp_path).write(6, arrays, meta=checkpoint.meta)
    before = bits(small)
    with pytest.raises(TfdistError) as caught:
        restored(tmp_path, small, listed(tmp_path))
    assert "\n" not in str(caught.value)
    if name.startswith("callbacks"):
        assert tfdist.load_weights(small, tmp_path)
    else:
        assert bits(small) == before


@pytest.fixture(scope="module")
def finished(strategies, tmp_path_factory):
    """A run that has ended: its model, and its checkpoints, which refusals leave as they are."""
    directory = tmp_path_factory.mktemp("finished")
    model = make(strategies[1])
    fit(model, directory)
    return bits(model), directory


def test_a_finished_run_is_not_run_again(strategies, finished, caplog):
    again = make(strategies[1])
    assert len(fit(again, finished[1]).history["loss"]) == 4
    assert bits(again) == finished[0]
    # A program that sets up no log shows warnings alone.
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "already finished at step" in said
    assert str(finished[1]) in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 16}, "global_batch_size 8 -> 16"),
        ({"seed": 6}, "seed 5 -> 6"),
        ({"shuffle": False}, "shuffle True -> False"),
        ({"class_weight": {1: 2}}, "class_weight None -> [1.0, 2.0]"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(strategies, finished, change, named):
    told = refusal(lambda: fit(make(strategies[1]), finished[1], **change))
    assert told.code == "another-run"
    assert named in told.problem


def test_a_run_with_the_same_class_weights_is_resumed(strategies, tmp_path):
    for epochs, weights in (1, {0: 1, 1: 2}), (2, {1: 2.0}):
        history = fit(make(strategies[1]), tmp_path, epochs=epochs, class_weight=weights)
    assert len(history.history["loss"]) == 2


def test_a_refusal_hides_control_characters_of_a_checkpoint(strategies, finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    for directory in (tmp_path / "run").glob("step-*"):
        forged(directory, lambda body: body["meta"]["fingerprint"].update(data="\x1b[2J" * 99))
    told = refusal(lambda: fit(make(strategies[1]), tmp_path / "run"))
    assert told.problem.isprintable()
    assert len(told.problem) < 500


def test_epochs_of_another_length_are_refused(strategies, tmp_path):
    """The examples so far are the same, and yet callbacks have counted other epochs."""

    def run(epochs, steps):
        fit(make(strategies[1]), tmp_path, epochs=epochs, steps_per_epoch=steps)

    run(2, 10)
    assert "another run: epoch 3 -> 5" in refusal(lambda: run(8, 5)).problem
    assert "first_example_of_the_epoch 160 -> 120" in refusal(lambda: run(2, 15)).problem
    run(3, 10)


def test_a_checkpoint_of_another_model_is_refused(strategies, finished):
    with strategies[1].scope():
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        other.compile("sgd", "sparse_categorical_crossentropy")
    assert refusal(lambda: fit(other, finished[1])).code == "another-run"


@pytest.mark.parametrize(
    ("interval", "where", "code"),
    [
        *(({"save_freq": n}, "save_freq", "not-an-int") for n in (0, 2.5, True)),
        *(({"every_s": s}, "every_s", "not-a-number") for s in (-1, float("nan"), "10")),
        ({"save_freq": "always"}, "save_freq", "unknown-value"),
        ({"save_freq": "auto", "every_s": 5.0}, "every_s", "exclusive"),
        ({"mtbf_s": 5.0}, "mtbf_s", "exclusive"),
        ({"save_freq": "auto", "mtbf_s": 0}, "mtbf_s", "not-a-number"),
        ({"keep": 0}, "keep", "not-an-int"),
        ({"delete_checkpoint": True}, "delete_checkpoint", "unsupported"),
    ],
)
def test_an_invalid_interval_is_refused(tmp_path, interval, where, code):
    found, is_code = refused(lambda: tfdist.BackupAndRestore(tmp_path, **interval))
    assert (found.removeprefix("BackupAndRestore: "), is_code) == (where, code)


def test_model_checkpoint_leaves_a_whole_file(strategies, tmp_path, monkeypatch):
    model = make(strategies[2])
    (tmp_path / ".partial-best.keras").write_text("half")  # by a process that was killed at it
    saver = tfdist.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    tfdist.fit(model, X, Y, batch_size=8, verbose=0, validation_data=(X, Y), callbacks=[saver])
    whole = (tmp_path / "best.keras").read_bytes()
    loaded = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)

    def half(self, path, **options):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save", half)
    saver.best = None
    with pytest.raises(tfdist.TfdistError, match="No space left"):
        tfdist.fit(model, X, Y, batch_size=8, verbose=0, validation_data=(X, Y),
                   callbacks=[tfdist.ModelCheckpoint(tmp_path / "best.keras")])  # fmt: skip
    assert (tmp_path / "best.keras").read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["best.keras"]


class Twins(keras.Model):
    """Two layers of one name, and a weight of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (keras.layers.Dense(3, name="same") for _ in range(2))
        self.scale = self.add_weight(shape=(3,), initializer="random_normal", name="scale")

    def call(self, x):
        return self.second(self.first(x)) * self.scale


def test_every_weight_is_set_regardless_of_its_name(strategies, tmp_path):
    with strategies[1].scope():
        trained, *others = (Twins() for _ in range(3))
        trained.compile("adam", "mse")
    x = np.ones((8, 3), "float32")
    backup = tfdist.BackupAndRestore(tmp_path / "checkpoint")
    tfdist.fit(trained, x, x, verbose=0, callbacks=[backup])
    trained.save_weights(tmp_path / "twins.weights.h5")
    for source, other in zip(("checkpoint", "twins.weights.h5"), others, strict=True):
        other(x)
        assert len(tfdist.load_weights(other, tmp_path / source)) == 5
        np.testing.assert_equal(other.get_weights(), trained.get_weights())


@pytest.mark.parametrize("scaled", [False, True])
def test_weights_load_from_every_file_and_keep_the_optimizer(strategies, tmp_path, scaled):
    """Else the chief alone would go on with the moments of another run.

    Keras' Normalization computes with copies of its weights, which Keras alone renews as it loads.
    """
    x = np.random.RandomState(0).randn(16, 3).astype("float32") * 5 + 20

    def build():
        with strategies[1].scope():
            scale = keras.layers.Normalization(name="scale")
            layers = [keras.Input((3,)), scale, keras.layers.Dense(1, name="only")]
            model = keras.Sequential(layers)
            adam = keras.optimizers.Adam(0.5)
            model.compile(keras.optimizers.LossScaleOptimizer(adam) if scaled else adam, "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def fit(model):
        backup = tfdist.BackupAndRestore(tmp_path / "checkpoint")
        tfdist.fit(model, x, x[:, :1], verbose=0, callbacks=[backup])

    trained = build()
    trained.layers[0].adapt(x)
    fit(trained)
    wanted = trained.predict(x, verbose=0)
    trained.save(tmp_path / "m.keras")
    trained.save_weights(tmp_path / "m.weights.h5")
    for source in ("m.keras", "m.weights.h5", "checkpoint"):
        other = build()
        before = [v.numpy() for v in other.optimizer.variables]
        tfdist.load_weights(other, tmp_path / source)
        np.testing.assert_array_equal(other.predict(x, verbose=0), wanted)
        np.testing.assert_equal([v.numpy() for v in other.optimizer.variables], before)
    resumed, some = build(), build()
    fit(resumed)
    np.testing.assert_array_equal(resumed.predict(x, verbose=0), wanted)
    tfdist.load_weights(some, tmp_path / "m.keras", layers=["only"])
    np.testing.assert_array_equal(some.layers[1].kernel, trained.layers[1].kernel)
    np.testing.assert_array_equal(some.layers[0].mean, [[0, 0, 0]])


def test_named_layers_in_another_order_get_their_own_weights(strategies, tmp_path):
    def build(*names):
        with strategies[1].scope():
            layers = [keras.layers.Dense(4, name=name) for name in names]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("sgd", "mse")
        return model

    model, other = build("left", "right"), build("right", "left")
    x = np.ones((8, 4), "float32")
    tfdist.fit(model, x, x, verbose=0, callbacks=[tfdist.BackupAndRestore(tmp_path)])
    right = other.get_layer("right").get_weights()
    tfdist.load_weights(other, tmp_path, layers=["left"])
    np.testing.assert_equal(
        [other.get_layer(name).get_weights() for name in ("left", "right")],
        [model.get_layer("left").get_weights(), right],
    )


def test_skip_mismatch_skips_weights_of_another_shape(strategies, tmp_path, caplog):
    def build(units):
        with strategies[1].scope():
            layers = [keras.layers.Dense(3, name="same"), keras.layers.Dense(units, name="head")]
            return keras.Sequential([keras.Input((3,)), *layers])

    small, other = build(2), build(4)
    small.save(tmp_path / "m.keras")
    head = other.get_layer("head").get_weights()
    load = functools.partial(tfdist.load_weights, other, tmp_path / "m.keras")
    assert refusal(load).code == "another-run"
    with caplog.at_level("WARNING"):
        assert load(skip_mismatch=True) == ["same/0/kernel", "same/1/bias"]
    assert "head/0/kernel, head/1/bias" in caplog.text
    np.testing.assert_equal(other.get_weights(), [*small.get_layer("same").get_weights(), *head])


def test_weights_that_cannot_be_loaded_are_refused(strategies, tmp_path):
    class Own(keras.layers.Dense):
        pass

    with strategies[1].scope():
        model = keras.Sequential([keras.Input((3,)), Own(3, name="own")])
        unbuilt = keras.Sequential([keras.layers.Dense(3)])
    model.save(tmp_path / "own.keras")
    for name in ("cut.keras", "cut.weights.h5", "m.other"):
        (tmp_path / name).write_text("half of a file")
    for name, config in (
        ("of_64_pib.keras", {"module": "keras.layers", "class_name": "Dense", "config": VAST}),
        ("without_class.keras", {"module": "keras", "config": {}}),
        ("of_a_list.keras", [1]),
        ("without_config.keras", None),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            if config is not None:
                file.writestr("config.json", json.dumps(config))
            file.writestr("metadata.json", "{}")
            file.writestr("model.weights.h5", b"")
    CheckpointStore(tmp_path / "run").write(1, {}, meta={})
    for name, code in (
        *((name.name, "unreadable") for name in tmp_path.glob("*_*.keras")),
        ("own.keras", "unreadable"),
        ("cut.keras", "unreadable"),
        *((name, "unreadable") for name in ("cut.weights.h5", "m.other", "none.keras")),
    ):
        told = refusal(lambda name=name: tfdist.load_weights(model, tmp_path / name))
        assert told.code == code
    for name in ("run", "own.keras"):
        told = refusal(lambda name=name: tfdist.load_weights(model, tmp_path / name, best=True))
        assert told.code == "unreadable"
    told = refusal(lambda: tfdist.load_weights(model, tmp_path / "own.keras", layers=["own2"]))
    assert told.code == "unknown-value"
    assert refusal(lambda: tfdist.load_weights(unbuilt, tmp_path)).code == "not-built"


def test_a_state_that_became_nan_is_not_saved(strategies, tmp_path, caplog):
    with strategies[1].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    bad = X.copy()
    bad[40:] = np.nan
    backup = tfdist.BackupAndRestore(tmp_path, save_freq=1)
    stop = keras.callbacks.TerminateOnNaN()
    tfdist.fit(
        model, bad, Y, batch_size=8, shuffle=False, epochs=2, verbose=0, callbacks=[stop, backup]
    )
    assert CheckpointStore(tmp_path).latest() == 5
    assert "checkpoint skipped" in caplog.text


@pytest.mark.parametrize("every", [None, 4])
def test_weights_that_became_nan_before_the_loss_are_not_saved(strategies, tmp_path, caplog, every):
    """The gradient of a root is NaN at 0, in the sixth step, and so is a sum of gradients."""
    with strategies[1].scope():
        root = keras.layers.Lambda(lambda x: keras.ops.sqrt(abs(x)))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False), root])
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=every), "mse")
    x, y = np.ones((2, 10, 1), "float32")
    x[5] = 0
    backup = tfdist.BackupAndRestore(tmp_path, save_freq=2)
    stop = keras.callbacks.TerminateOnNaN()
    tfdist.fit(model, x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[stop, backup])
    assert CheckpointStore(tmp_path).latest() == 4
    assert "slot of the optimizer is not finite at step 6: checkpoint skipped" in caplog.text


def test_a_nan_validation_does_not_prevent_a_save(strategies, tmp_path):
    model = make(strategies[1])
    bad = (X, Y, np.full(len(X), np.nan))  # the weights of its examples
    backup = tfdist.BackupAndRestore(tmp_path)
    history = tfdist.fit(
        model, X, Y, batch_size=8, epochs=2, verbose=0, validation_data=bad, callbacks=[backup]
    )
    assert np.isfinite(history.history["loss"]).all()
    assert np.isnan(history.history["val_loss"]).all()
    assert CheckpointStore(tmp_path).steps() == [12, 24]
    model.layers[0].bias.assign(np.full(8, np.nan))
    figures = {"loss": 1.0, "val_loss": float("nan")}
    assert resume.reason_not_to_save(model, figures) == "a weight is not finite"
    assert resume.reason_not_to_save(model, {"loss": np.ones(3)}) == ""


def test_a_later_attempt_waits_for_the_earlier_one(tmp_path, monkeypatch):
    def saved_run(attempt, *, timeout_s=60.0):
        options = JobOptions(attempt=attempt, startup_timeout_s=timeout_s)
        cluster = ClusterSpec(worker=("127.0.0.1:1",))
        config = TaskConfig(cluster=cluster, task=Task("worker", 0), options=options)
        return resume.saved_run([backup], Job(strategy=None, kind=KINDS["single"], config=config))

    before, backup = CheckpointStore(tmp_path), tfdist.BackupAndRestore(tmp_path)
    before.prepare()
    assert refusal(lambda: saved_run(1)).code == "second-writer"
    with pytest.raises(StartupTimeout, match=r"waited 0\.01 s .* already writes") as late:
        saved_run(2, timeout_s=0.01)
    assert late.value.exit_code == EXIT_PEER_MISSING
    monkeypatch.setattr("tfdist.training.resume.time.sleep", lambda _: before.close())
    assert saved_run(2) == (None, 0)
