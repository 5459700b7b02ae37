"""Trains with a tracker that is not there; `tests/multiprocess/test_trackers.py` runs it.

Arguments: where the tracker writes, the checkpoints' directory, and the epoch at whose end the
chief kills itself, once: after the epoch is logged, and before it is saved.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist
from tests import fake_trackers

OUT, BACKUP, KILLED_AT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
EPOCHS = 4


def note(run, **what):
    me = json.loads(os.environ["TF_CONFIG"])["task"]
    line = {"run": run, "task": f"{me['type']}-{me['index']}", **what}
    with open(OUT, "a") as file:
        file.write(json.dumps(line) + "\n")


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
    callbacks=[
        fake_trackers.board(note)(),
        keras.callbacks.TensorBoard(OUT.parent / "board"),
        tfdist.BackupAndRestore(BACKUP),
        Kill(),
    ],
)
