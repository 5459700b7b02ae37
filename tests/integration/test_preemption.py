"""Stopping by a signal and going on: at any moment, and the end is that of an undisturbed run."""

import dataclasses
import json
import os
import re
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import forked_python
from tests.models import classifier
from tfdist import phases
from tfdist.checkpoint import CheckpointStore
from tfdist.errors import Stopped

DEADLINE_S = 150
RNG = np.random.RandomState(0)
X = RNG.randn(90, 4).astype("float32")
Y = RNG.randint(0, 3, 90)
STEPS = 12  # an epoch
EPOCHS = 4


@pytest.fixture(autouse=True)
def handlers_as_at_a_terminal():
    """Signals are what they are in a program of one's own, before and after each test."""
    before = {s: signal.signal(s, signal.SIG_DFL) for s in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    set_here = {signum: signal.getsignal(signum) for signum in before}
    yield
    assert {signum: signal.getsignal(signum) for signum in before} == set_here
    for signum, handler in before.items():
        signal.signal(signum, handler)


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a run is asked to stop: by a hook that is called in an epoch, at or after a batch."""

    hook: str
    epoch: int = 0
    batch: int = 0
    signum: int = signal.SIGTERM


class AskAt(keras.callbacks.Callback):
    """Sends the signal at its moment, once."""

    once_a_range = True

    def __init__(self, moment: Moment | None = None):
        super().__init__()
        self.moment = moment
        self.epoch = -1

    def _at(self, hook: str, batch: int = 0) -> None:
        moment = self.moment
        if moment is None or moment.hook != hook or self.epoch < moment.epoch:
            return
        if self.epoch > moment.epoch or batch >= moment.batch:
            self.moment = None
            signal.raise_signal(moment.signum)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._at("epoch begin")

    def on_train_batch_end(self, batch, logs=None):
        self._at("batch end", batch)

    def on_test_batch_end(self, batch, logs=None):
        self._at("test batch end", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._at("epoch end")

    def on_train_end(self, logs=None):
        self._at("train end")


class Counts(keras.callbacks.Callback):
    """A callback of the user's own with a state; it looks at every batch of a validation."""

    def __init__(self):
        super().__init__()
        self.seen = {"tests": 0, "losses": []}

    def on_test_batch_end(self, batch, logs=None):
        self.seen["tests"] += 1

    def on_epoch_end(self, epoch, logs=None):
        self.seen["losses"].append(logs["loss"])

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = state


class Run:
    """The same run as often as one likes, in one directory."""

    def __init__(self, strategy: tf.distribute.Strategy, directory: Path) -> None:
        self.strategy = strategy
        self.directory = directory

    def model(self) -> keras.Model:
        options = {"gradient_accumulation_steps": 5, "use_ema": True, "ema_overwrite_frequency": 4}
        return classifier(self.strategy, lambda: keras.optimizers.Adam(0.05, **options))

    def attempt(self, *more: keras.callbacks.Callback, **backup: Any) -> dict[str, Any]:
        """Runs to the end and returns all that it ends with."""
        model, counts = self.model(), Counts()
        stopping = keras.callbacks.EarlyStopping(
            "val_loss", patience=2, start_from_epoch=1, restore_best_weights=True
        )
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.7)
        best = tfdist.ModelCheckpoint(self.directory / "best.keras", save_best_only=True)
        log = keras.callbacks.CSVLogger(self.directory / "log.csv")
        try:
            history = tfdist.fit(
                model, X, Y, batch_size=8, epochs=EPOCHS, seed=5, verbose=0,
                validation_data=(X, Y),
                callbacks=[
                    stopping, plateau, best, counts,
                    keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9),
                    log,
                    *more,
                    tfdist.BackupAndRestore(self.directory / "backup", **backup),
                ],
            )  # fmt: skip
        finally:  # as the end of the program does where it is stopped
            log.on_train_end()
        variables = [*model.variables, *model.optimizer.variables]
        return {
            "bits": [np.asarray(v).tobytes() for v in variables],
            "history": json.dumps(history.history),
            "csv": (self.directory / "log.csv").read_bytes(),
            "best": [w.tobytes() for w in _weights(self.directory / "best.keras")],
            "callbacks": [counts.seen, stopping.best, stopping.wait, stopping.best_epoch,
                          plateau.best, plateau.wait, best.best],
        }  # fmt: skip


def _weights(path: Path) -> list[np.ndarray]:
    return keras.models.load_model(path).get_weights()


MOMENTS = {
    Moment("epoch begin"): "at step 0; no state saved yet",
    Moment("batch end", batch=2): "at step .*, state saved",
    Moment("test batch end", batch=3): "at step 12, state saved",
    Moment("test batch end", batch=7, signum=signal.SIGUSR1): "at step 12, state saved",
    Moment("epoch begin", epoch=1): "at step 12, state saved",
    Moment("batch end", epoch=1, batch=0): "at step .*, state saved",
    Moment("epoch end", epoch=1, signum=signal.SIGINT): "at step 24, state saved",
    Moment("test batch end", epoch=EPOCHS - 1): f"at step {EPOCHS * STEPS}, state saved",
    Moment("epoch end", epoch=EPOCHS - 1): f"at step {EPOCHS * STEPS}, state saved",
    Moment("train end", epoch=-1): f"at step {EPOCHS * STEPS}, state saved",
}


def swap():
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


# The averages are in the model during a validation, and from an epoch's end to the next begin.
MOMENTS_OF_SWAPPED = {
    Moment("test batch end", batch=3): "at step .*, state saved",
    Moment("epoch end", epoch=1): "at step .*, state saved",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "policy", "moments", "more"),
    [
        (1, "mixed_float16", MOMENTS, ()),
        (2, "float32", dict(list(MOMENTS.items())[::3]), ()),
        (1, "float32", MOMENTS_OF_SWAPPED, (swap,)),
    ],
    ids=["scaled", "replicas", "swapped"],
)
@pytest.mark.timeout(600)
def test_a_run_stopped_repeatedly_ends_like_an_undisturbed_one(
    strategies, tmp_path, replicas, policy, moments, more
):
    keras.config.set_dtype_policy(policy)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    expected = Run(strategies[replicas], tmp_path / "whole").attempt(*(make() for make in more))
    cut = Run(strategies[replicas], tmp_path / "cut")
    for moment, says in moments.items():
        # What is saved by the clock, here after every range, leaves no trace.
        backup = {} if more else {"every_s": 1e-9}
        with pytest.raises(Stopped) as stopped:
            cut.attempt(AskAt(moment), *(make() for make in more), **backup)
        assert phases.current().phase == "done"
        assert stopped.value.exit_code == (130 if moment.signum == signal.SIGINT else 143)
        name = signal.Signals(moment.signum).name
        assert re.search(f"stopped by {name} {says}", str(stopped.value)), moment
    found = cut.attempt(*(make() for make in more))
    for name, value in expected.items():
        assert found[name] == value, name


def test_a_stop_waits_for_a_validation_that_changes_state(strategies, tmp_path):
    def attempt(directory, *more):
        keras.utils.set_random_seed(1)
        with strategies[1].scope():
            recurrent = keras.layers.LSTM(3, stateful=True)
            model = keras.Sequential(
                [keras.Input(batch_shape=(10, 4, 1)), recurrent, keras.layers.Dense(3)]
            )
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = tfdist.fit(
            model, X[..., None], Y, batch_size=10, epochs=2, seed=5, verbose=0,
            validation_data=(X[..., None], Y),
            callbacks=[Counts(), *more, tfdist.BackupAndRestore(directory)],
        )  # fmt: skip
        return history.history, [weight.tobytes() for weight in model.get_weights()]

    expected = attempt(tmp_path / "whole")
    with pytest.raises(Stopped, match="at step 9, state saved"):
        attempt(tmp_path / "cut", AskAt(Moment("test batch end", batch=3)))
    assert attempt(tmp_path / "cut") == expected


def test_a_signal_in_a_compiled_range_stops_the_run(strategies, tmp_path, caplog):
    class Signalling(keras.Sequential):
        def train_step(self, data):
            tf.py_function(self.tell, [], [])
            return super().train_step(data)

        def tell(self):
            self.steps_seen += 1
            if self.steps_seen == 100:
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.01)  # a hundred steps make a second

    with strategies[1].scope():
        model = Signalling([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.steps_seen = 0
    backup = tfdist.BackupAndRestore(tmp_path)
    with pytest.raises(Stopped) as stopped:
        tfdist.fit(model, X, Y, batch_size=8, epochs=100, steps_per_epoch=10_000, seed=5,
                   verbose=0, callbacks=[backup])  # fmt: skip
    (step,) = CheckpointStore(tmp_path).steps()
    assert 100 <= step == model.steps_seen < 300  # the range in progress, of about a second
    assert stopped.value.code == 143
    line = f"stopped by SIGTERM at step {step}, state saved; run the same command again to resume"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [line]
    assert phases.current().step == step
    assert phases.current().first_step_s is not None


def test_a_run_stopped_within_an_epoch_is_finished(strategies, tmp_path, caplog):
    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.optimizer._iterations.numpy() >= 3

    run = Run(strategies[1], tmp_path)
    expected = run.attempt(StopAt())
    with caplog.at_level("INFO", logger="tfdist"):
        found = run.attempt(StopAt())
    assert "the run already finished" in caplog.text
    assert found == expected


def test_a_stop_without_a_backup_warns_of_lost_state(strategies, caplog):
    model = Run(strategies[1], Path()).model()
    asking = AskAt(Moment("batch end", batch=2))
    with pytest.raises(Stopped, match="no state saved"):
        tfdist.fit(model, X, Y, batch_size=8, verbose=0, callbacks=[asking])
    assert "stopped by SIGTERM at step" in caplog.text
    # A fit in another thread leaves signals alone.
    thread = threading.Thread(target=tfdist.fit, args=(model, X, Y), kwargs={"verbose": 0})
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


PROGRAM = """
import os
import keras, numpy as np, tfdist

class Ready(keras.callbacks.Callback):
    once_a_range = True
    def on_train_batch_end(self, batch, logs=None):
        if batch >= 20:
            os.write(1, b"ready\\n")

with tfdist.make_strategy("single").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
x = np.zeros((64, 4), "float32")
try:
    tfdist.fit(model, x, x[:, :3], batch_size=8, steps_per_epoch=10**7, verbose=0,
               callbacks=[Ready(), tfdist.BackupAndRestore("backup")])
except Exception:
    print("swallowed")
"""


def test_ctrl_c_ends_a_script_with_one_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    read_fd, write_fd = os.pipe()
    with open(tmp_path / "errors", "w") as file, open(read_fd) as said:
        process = forked_python.Program(str(program), cwd=tmp_path, stdout=write_fd, stderr=file)
        os.close(write_fd)
        assert said.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        code = process.wait(DEADLINE_S)
    errors = (tmp_path / "errors").read_text()
    assert code == 130, errors
    assert "stopped by SIGINT at step" in errors
    assert "Traceback" not in errors
    assert len(CheckpointStore(tmp_path / "backup").steps()) == 1
