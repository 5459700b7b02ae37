"""BackupAndRestore: a run that is cut anywhere ends like one that was left alone."""

import json
import random
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut, bits, classifier
from tests.refusals import refused
from tfdist.checkpoint import CheckpointStore, callback_state
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.errors import EXIT_PEER_MISSING, StartupTimeout, UsageError
from tfdist.strategy import Job
from tfdist.training import resume
from tfdist.training.resume import reason_not_to_save

EARLIER = Path(__file__).parents[1] / "unit" / "data" / "run" / "checkpoints"
RNG = np.random.RandomState(0)
X = RNG.randn(90, 4).astype("float32")
Y = RNG.randint(0, 3, 90)


def make(strategy):
    return classifier(strategy, lambda: keras.optimizers.Adam(0.05))


def callbacks():
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.7),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


def fit(model, directory, more=(), **options):
    backup = tfdist.BackupAndRestore(directory, every_steps=options.pop("every_steps", 4))
    options = {"seed": 5, "epochs": 4, "batch_size": 8, "shuffle": True, **options}
    return tfdist.fit(
        model, X, Y, verbose=0, validation_data=(X, Y), callbacks=[*callbacks(), backup, *more],
        **options,
    )  # fmt: skip


# Twelve steps are an epoch.
def test_a_cut_run_ends_with_the_same_bits(strategies, tmp_path):
    """On several replicas: tests/field, keras#22010."""
    whole = make(strategies[1])
    expected = fit(whole, tmp_path / "whole")
    for step in (3, 12, 30):
        directory = tmp_path / f"cut{step}"
        with pytest.raises(Cut):
            fit(make(strategies[1]), directory, [AtStep(step)])
        resumed = make(strategies[1])
        history = fit(resumed, directory)
        assert bits(resumed) == bits(whole)
        assert json.dumps(history.history) == json.dumps(expected.history)


def test_the_state_of_stateful_layers_is_resumed(strategies, tmp_path):
    def trained(directory, more=()):
        keras.utils.set_random_seed(1)
        with strategies[1].scope():
            recurrent = keras.layers.LSTM(3, stateful=True)
            model = keras.Sequential(
                [keras.Input(batch_shape=(5, 4, 1)), recurrent, keras.layers.Dense(1)]
            )
            model.compile("adam", "mse")
        backup = tfdist.BackupAndRestore(directory, every_steps=4)
        tfdist.fit(
            model, X[..., None], Y, batch_size=5, epochs=2, shuffle=False, seed=5, verbose=0,
            callbacks=[backup, *more],
        )  # fmt: skip
        return bits(model)

    whole = trained(tmp_path / "whole")
    with pytest.raises(Cut):
        trained(tmp_path / "cut", [AtStep(6)])
    assert trained(tmp_path / "cut") == whole


class OwnBest(keras.callbacks.Callback):
    """Keeps what it likes under the name that EarlyStopping has for its weights."""

    def on_epoch_end(self, epoch, logs=None):
        self.best_weights = {"kernel": self.model.layers[-1].kernel.numpy(), "epoch": "first"}


def test_a_callback_may_keep_anything_under_the_name_of_best_weights(strategies, tmp_path):
    assert fit(make(strategies[1]), tmp_path, [OwnBest()], epochs=2).epoch == [0, 1]


class Adversaries(keras.Model):
    """Two models with an optimizer each, as in Keras' guide to such networks."""

    def __init__(self):
        super().__init__()
        self.critic, self.maker = keras.layers.Dense(1), keras.layers.Dense(4)
        self.critic.build((None, 4))
        self.maker.build((None, 4))

    def compile(self, *optimizers):
        super().compile()
        self.critics, self.makers = optimizers[0], [optimizers[1]]
        self.critics.build(self.critic.trainable_variables)
        self.makers[0].build(self.maker.trainable_variables)

    def train_step(self, data):
        x, _ = data
        for part, optimizer, sign in (
            (self.critic, self.critics, 1.0),
            (self.maker, self.makers[0], -1.0),
        ):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(self.critic(self.maker(x)) - self.critic(x) ** 2)
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_the_state_of_several_optimizers_is_resumed(strategies, tmp_path):
    def trained(directory, more=()):
        keras.utils.set_random_seed(1)
        with strategies[2].scope():
            model = Adversaries()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.02))
        backup = tfdist.BackupAndRestore(directory, every_steps=4)
        tfdist.fit(model, X, Y, batch_size=8, seed=5, verbose=0, callbacks=[backup, *more])
        return [*map(np.asarray, model.weights), model.makers[0].iterations.numpy()]

    def cut(batch, logs):
        if batch == 5:
            raise Cut

    whole = trained(tmp_path / "whole")
    with pytest.raises(Cut):
        trained(tmp_path / "cut", [keras.callbacks.LambdaCallback(on_train_batch_end=cut)])
    np.testing.assert_equal(trained(tmp_path / "cut"), whole)


@pytest.mark.parametrize("start", [None, "start.keras"])
def test_what_a_program_draws_after_fit_does_not_depend_on_a_resume(strategies, tmp_path, start):
    """A second model, or a second fit without a seed, is that of the run left alone."""
    options = {"seed": None, "epochs": 1}
    if start is not None:
        make(strategies[1]).save(tmp_path / start)
        options["initial_weights"] = tmp_path / start
    fit(make(strategies[1]), tmp_path / "whole", **options)
    expected = random.random()
    with pytest.raises(Cut):
        fit(make(strategies[1]), tmp_path / "cut", [AtStep(6)], **options)
    for _ in ("resumed", "had come to its end"):
        fit(make(strategies[1]), tmp_path / "cut", **options)
        assert random.random() == expected


def test_a_finished_run_is_not_run_again(strategies, tmp_path, caplog):
    model = make(strategies[1])
    fit(model, tmp_path)
    again = make(strategies[1])
    history = fit(again, tmp_path)
    assert bits(again) == bits(model)
    assert len(history.history["loss"]) == 4
    # A program that sets up no log shows warnings alone.
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "come to its end at step" in said
    assert str(tmp_path) in said


def test_a_run_of_an_earlier_version_goes_on(strategies, tmp_path):
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


@pytest.mark.parametrize(("mine", "epoch", "kept"), [(["0,2.0", "1,1.0"], 1, 1), ([], 0, 0)])
def test_a_csv_log_keeps_the_lines_of_the_run_before(tmp_path, mine, epoch, kept):
    before = ["epoch,loss", "0,5.0", "1,4.0", "2,3.0"]
    (tmp_path / "log.csv").write_text("\r\n".join([*before, *mine, ""]))
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True)
    callback_state.prepare_to_resume([log], epoch=epoch)
    assert (tmp_path / "log.csv").read_text().split() == [*before, *mine[:kept]]


def test_a_resumed_csv_log_keeps_its_columns(tmp_path):
    """Those of an epoch without validation, also where the run goes on with one that has it."""
    before, resumed = (keras.callbacks.CSVLogger(tmp_path / "log.csv") for _ in range(2))
    before.on_train_begin()
    before.on_epoch_end(0, {"loss": 3.0, "wer": 0.5})
    callback_state.prepare_to_resume([resumed], epoch=1)
    resumed.on_train_begin()
    callback_state.set_states([resumed], callback_state.get_states([before]))
    resumed.on_epoch_end(1, {"loss": 2.0, "wer": 0.4, "val_loss": 1.0, "val_wer": 0.3})
    header, _, line = (tmp_path / "log.csv").read_text().split()
    assert dict(zip(header.split(","), line.split(","), strict=True))["val_loss"] == "1.0"


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_a_callback_of_another_metric_begins_anew(kind):
    before, same, other = kind("val_loss"), kind("val_loss"), kind("val_accuracy")
    for callback in (before, same, other):
        callback.set_model(keras.Sequential())
        callback.on_train_begin()
    before.best, before.wait = 2.1, 1
    for callback in (same, other):
        callback_state.set_states([callback], callback_state.get_states([before]))
    assert (same.best, same.wait) == (2.1, 1)
    assert other.best != 2.1
    assert other.wait == 0


def test_a_finished_run_can_be_made_longer(strategies, tmp_path):
    whole = make(strategies[1])
    fit(whole, tmp_path / "whole", epochs=6)
    first = make(strategies[1])
    fit(first, tmp_path / "two", epochs=3)
    longer = make(strategies[1])
    fit(longer, tmp_path / "two", epochs=6)
    assert bits(longer) == bits(whole)


@pytest.fixture(scope="module")
def finished(strategies, tmp_path_factory):
    """The checkpoints of a run that has ended, for those that must leave them as they are."""
    directory = tmp_path_factory.mktemp("finished")
    fit(make(strategies[1]), directory)
    return directory


@pytest.mark.parametrize(
    ("change", "named"),
    [({"batch_size": 16}, "global_batch_size 8 -> 16"), ({"seed": 6}, "seed 5 -> 6"),
     ({"shuffle": False}, "shuffle True -> False")],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(strategies, finished, change, named):
    with pytest.raises(UsageError, match=named):
        fit(make(strategies[1]), finished, **change)


def test_epochs_of_another_length_are_refused(strategies, tmp_path):
    """The examples so far are the same, and yet callbacks have counted other epochs."""
    fit(make(strategies[1]), tmp_path, epochs=2, steps_per_epoch=10)
    with pytest.raises(UsageError, match="another run: epoch 3 -> 5;"):
        fit(make(strategies[1]), tmp_path, epochs=8, steps_per_epoch=5)
    with pytest.raises(UsageError, match="first_example_of_the_epoch 160 -> 120"):
        fit(make(strategies[1]), tmp_path, epochs=2, steps_per_epoch=15)
    fit(make(strategies[1]), tmp_path, epochs=3, steps_per_epoch=10)


def test_a_checkpoint_of_another_model_is_refused(strategies, finished):
    with strategies[1].scope():
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        other.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(UsageError, match="a checkpoint of another model"):
        fit(other, finished)


def test_checkpoints_are_kept_by_number(strategies, tmp_path):
    fit(make(strategies[1]), tmp_path, every_steps=5)
    # 12 steps an epoch: at 5, 10, 12, 15, ... 48; the last three are kept.
    assert CheckpointStore(tmp_path).steps() == [40, 45, 48]


def test_timed_checkpoints_go_by_the_chiefs_clock(strategies, tmp_path):
    times, backups = iter(range(0, 10000, 7)), []

    def clock():
        for backup in backups:
            backup.wait()  # one that is being written puts off those that go by time
        return next(times)

    backups.append(tfdist.BackupAndRestore(tmp_path, every_s=10, keep=100, clock=clock))
    model = make(strategies[1])
    tfdist.fit(model, X, Y, batch_size=8, epochs=1, verbose=0,
               callbacks=[*backups, AtStep(10**9)])  # fmt: skip
    assert len(CheckpointStore(tmp_path).steps()) > 3


@pytest.mark.parametrize(
    ("interval", "where", "code"),
    [
        *(({"every_steps": n}, "every_steps", "not-an-int") for n in (0, 2.5, True)),
        *(({"every_s": s}, "every_s", "not-a-number") for s in (-1, float("nan"), "10")),
        ({"every": "always"}, "every", "unknown-value"),
        ({"every": "auto", "every_s": 5.0}, "every", "exclusive"),
        ({"mtbf_s": 5.0}, "mtbf_s", "exclusive"),
        ({"every": "auto", "mtbf_s": 0}, "mtbf_s", "not-a-number"),
    ],
)
def test_an_interval_that_cannot_be_is_refused(tmp_path, interval, where, code):
    found, is_code = refused(lambda: tfdist.BackupAndRestore(tmp_path, **interval))
    assert (found.removeprefix("BackupAndRestore: "), is_code) == (where, code)


def test_metric_totals_of_another_number_of_replicas_are_taken_over(strategies, tmp_path):
    with pytest.raises(Cut):
        fit(make(strategies[2]), tmp_path, [AtStep(7)])
    model = make(strategies[1])
    history = fit(model, tmp_path, epochs=1)
    whole = make(strategies[2])
    expected = fit(whole, tmp_path / "whole", epochs=1)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=0.2)


@pytest.mark.parametrize("source", ["m.keras", "m.weights.h5", "checkpoint"])
def test_training_starts_from_given_weights(strategies, tmp_path, source):
    model = make(strategies[1])
    path = tmp_path / source
    if source == "checkpoint":
        fit(model, path, epochs=1)
    elif source == "m.keras":
        model.save(path)
    else:
        model.save_weights(path)
    other = make(strategies[2])
    other.layers[0].kernel.assign(other.layers[0].kernel * 2)
    tfdist.fit(other, X, Y, epochs=0, verbose=0, initial_weights=path)
    for mine, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        if mine.dtype != "uint32":
            np.testing.assert_array_equal(mine, theirs)


def test_slots_that_copy_the_weights_copy_those_given(strategies, tmp_path):
    made = []
    for _ in range(2):
        with strategies[2].scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
            model.compile(keras.optimizers.ScheduleFreeAdamW(0.01), "mse")
        made.append(model)
    made[0].save_weights(tmp_path / "m.weights.h5")
    given = {"initial_weights": tmp_path / "m.weights.h5"}
    for model, options in zip(made, ({}, given), strict=True):
        tfdist.fit(model, X, Y, batch_size=8, seed=1, verbose=0, **options)
    np.testing.assert_equal(made[1].get_weights(), made[0].get_weights())


def test_some_layers_are_set_by_name(strategies, tmp_path):
    model = make(strategies[1])
    model.save(tmp_path / "m.keras")
    other = make(strategies[1])
    before = [w + 1 for w in other.get_weights()]
    other.set_weights(before)
    name = other.layers[0].name
    tfdist.load_weights(other, tmp_path / "m.keras", layers=[name])
    np.testing.assert_array_equal(other.layers[0].kernel, model.layers[0].kernel)
    np.testing.assert_array_equal(other.layers[-1].kernel, before[-2])
    with pytest.raises(UsageError, match="did you mean"):
        tfdist.load_weights(other, tmp_path / "m.keras", layers=[name + "x"])


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


def test_weights_of_a_checkpoint_are_found_whatever_the_layers_are_called(strategies, tmp_path):
    model = make(strategies[1])
    fit(model, tmp_path / "run", epochs=1)
    with strategies[1].scope():
        keras.layers.Dense(3)  # shifts the names of the layers that follow
    keras.utils.set_random_seed(9)
    with strategies[1].scope():
        other = keras.models.clone_model(model)
    tfdist.load_weights(other, tmp_path / "run")
    np.testing.assert_array_equal(other.layers[0].kernel, model.layers[0].kernel)
    np.testing.assert_array_equal(other.layers[-1].kernel, model.layers[-1].kernel)


class Twins(keras.Model):
    """Two layers of one name, and a weight of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (keras.layers.Dense(3, name="same") for _ in range(2))
        self.scale = self.add_weight(shape=(3,), initializer="random_normal", name="scale")

    def call(self, x):
        return self.second(self.first(x)) * self.scale


def test_every_weight_of_a_model_is_set_whatever_it_is_called(strategies, tmp_path):
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


def test_a_normalization_goes_by_the_statistics_that_are_loaded(strategies, tmp_path):
    """Keras' layer computes with copies of its weights, which Keras alone renews as it loads."""
    x = np.random.RandomState(0).randn(16, 3).astype("float32") * 5 + 20

    def build():
        with strategies[1].scope():
            scale = keras.layers.Normalization(name="scale")
            layers = [keras.Input((3,)), scale, keras.layers.Dense(1, name="only")]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
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
    for source in ("m.keras", "m.weights.h5", "checkpoint", "a resumed run"):
        other = build()
        if source == "a resumed run":
            fit(other)
        else:
            tfdist.load_weights(other, tmp_path / source)
        np.testing.assert_array_equal(other.predict(x, verbose=0), wanted)
    other = build()
    tfdist.load_weights(other, tmp_path / "m.weights.h5", layers=["only"])
    np.testing.assert_array_equal(other.layers[0].mean, [[0, 0, 0]])


@pytest.mark.parametrize("optimizer", ["adam", "loss_scaled"])
def test_the_optimizer_stays_as_it_is_when_weights_are_loaded(strategies, tmp_path, optimizer):
    """Else the chief alone would go on with the moments of another run."""

    def build():
        with strategies[1].scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="only")])
            adam = keras.optimizers.Adam(0.5)
            scaled = keras.optimizers.LossScaleOptimizer(adam)
            model.compile(adam if optimizer == "adam" else scaled, "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    trained = build()
    x, backup = np.ones((8, 3), "float32"), tfdist.BackupAndRestore(tmp_path / "checkpoint")
    tfdist.fit(trained, x, x, verbose=0, callbacks=[backup])
    trained.save(tmp_path / "m.keras")
    trained.save_weights(tmp_path / "m.weights.h5")
    for source in ("m.keras", "m.weights.h5", "checkpoint"):
        other = build()
        before = [v.numpy() for v in other.optimizer.variables]
        tfdist.load_weights(other, tmp_path / source)
        np.testing.assert_array_equal(other.layers[0].kernel, trained.layers[0].kernel)
        np.testing.assert_equal([v.numpy() for v in other.optimizer.variables], before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.keras", "Could not locate class 'Own'"),
        ("cut.keras", "Keras cannot load"),
        ("cut.weights.h5", "received a damaged file"),
    ],
)
def test_a_file_that_keras_cannot_read_is_refused(strategies, tmp_path, name, said):
    class Own(keras.layers.Dense):
        pass

    with strategies[1].scope():
        model = keras.Sequential([keras.Input((3,)), Own(3)])
    model.save(tmp_path / "own.keras")
    for kind in ("keras", "weights.h5"):
        (tmp_path / f"cut.{kind}").write_text("half of a file")
    with pytest.raises(UsageError, match=said) as caught:
        tfdist.load_weights(model, tmp_path / name)
    assert "\n" not in str(caught.value)


def test_weights_are_not_loaded_into_a_model_without_any(strategies, tmp_path):
    with strategies[1].scope():
        unbuilt = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(UsageError, match="no weights yet"):
        tfdist.load_weights(unbuilt, tmp_path)


def test_a_state_that_became_nan_is_not_saved(strategies, tmp_path, caplog):
    with strategies[1].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    bad = X.copy()
    bad[40:] = np.nan
    backup = tfdist.BackupAndRestore(tmp_path, every_steps=1)
    stop = keras.callbacks.TerminateOnNaN()
    tfdist.fit(
        model, bad, Y, batch_size=8, shuffle=False, epochs=2, verbose=0, callbacks=[stop, backup]
    )
    assert CheckpointStore(tmp_path).latest() == 5
    assert "not saved" in caplog.text


def test_a_validation_that_yields_nan_does_not_keep_a_sound_state_from_being_saved(
    strategies, tmp_path
):
    model = make(strategies[1])
    bad = (X, Y, np.full(len(X), np.nan))  # the weights of its examples
    backup = tfdist.BackupAndRestore(tmp_path)
    history = tfdist.fit(
        model, X, Y, batch_size=8, epochs=2, verbose=0, validation_data=bad, callbacks=[backup]
    )
    assert np.isfinite(history.history["loss"]).all()
    assert np.isnan(history.history["val_loss"]).all()
    assert CheckpointStore(tmp_path).steps() == [12, 24]
    figures = {"loss": 1.0, "val_loss": float("nan")}
    assert reason_not_to_save(model, figures) == ""
    model.layers[0].bias.assign(np.full(8, np.nan))
    assert reason_not_to_save(model, figures) == "a weight is not finite"
    assert reason_not_to_save(model, {"loss": 1.0, "val_loss": 1.0}) == ""


def attempt(number, *, startup_timeout_s=60.0):
    """The chief of a job that was started that often."""
    options = JobOptions(attempt=number, startup_timeout_s=startup_timeout_s)
    cluster = ClusterSpec(worker=("127.0.0.1:1",))
    config = TaskConfig(cluster=cluster, task=Task("worker", 0), options=options)
    return Job(strategy=None, kind="single", config=config)


def test_a_later_attempt_waits_until_the_one_before_has_let_go(tmp_path, monkeypatch):
    before = CheckpointStore(tmp_path)
    before.prepare()
    backup = tfdist.BackupAndRestore(tmp_path)
    with pytest.raises(UsageError, match="a second writer"):
        resume.saved_run([backup], attempt(1))
    with pytest.raises(StartupTimeout, match=r"waited 0\.01 s .* a second writer") as late:
        resume.saved_run([backup], attempt(2, startup_timeout_s=0.01))
    assert late.value.exit_code == EXIT_PEER_MISSING
    monkeypatch.setattr("tfdist.training.resume.time.sleep", lambda _: before.close())
    assert resume.saved_run([backup], attempt(2)) is None
