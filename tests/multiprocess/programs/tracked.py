"""Trains with a tracker that is not there; `tests/multiprocess/test_trackers.py` runs it.

Arguments: where the tracker writes, the checkpoints' directory, and the epoch at whose end the
chief kills itself, once: after the epoch is logged, and before it is saved.
"""

import json
import os
import signal
import sys
import types
import uuid
from pathlib import Path

import keras
import numpy as np

import tfdist

OUT, BACKUP, KILLED_AT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
EPOCHS = 4
sys.modules["aim"] = types.ModuleType("aim")


class AimCallback(keras.callbacks.Callback):
    """As Aim's: a run that is made when the training begins, of a hash that it may be given."""

    _run_hash = None
    experiment = None

    def on_train_begin(self, logs=None):
        self.experiment = types.SimpleNamespace(hash=self._run_hash or uuid.uuid4().hex)

    def on_train_batch_end(self, batch, logs=None):
        self.write(block=batch)

    def on_epoch_end(self, epoch, logs=None):
        self.write(epoch=epoch)

    def write(self, **what):
        me = json.loads(os.environ["TF_CONFIG"])["task"]
        line = {"run": self.experiment.hash, "task": f"{me['type']}-{me['index']}", **what}
        with open(OUT, "a") as file:
            file.write(json.dumps(line) + "\n")


AimCallback.__module__ = "aim.sdk.adapters.keras"


class Kill(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        mark = OUT.with_suffix(".killed")
        if tfdist.is_chief() and epoch == KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


with tfdist.make_strategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
tfdist.fit(
    model,
    x,
    x[:, :1],
    batch_size=8,
    epochs=EPOCHS,
    verbose=0,
    seed=1,
    callbacks=[AimCallback(), tfdist.BackupAndRestore(BACKUP), Kill()],
)
