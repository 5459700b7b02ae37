"""Trains a small CNN in an elastic job. Workers kill themselves where FAULTS says so, each once.

FAULTS maps a worker to the epoch, in its process, at whose begin it dies. With WAIT_EPOCH, worker 0
waits at the begin of this epoch until a restarted worker knocks.
"""

import hashlib
import json
import os
import signal

import keras
import numpy as np
from keras import layers

import tfdist
from tfdist.strategy import current_job

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))
WAIT_EPOCH = int(os.environ.get("WAIT_EPOCH", "-1"))
ME = "worker-{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])


class Faults(keras.callbacks.Callback):
    """Kills this worker, or waits for one."""

    def on_epoch_begin(self, epoch, logs=None):
        mark = tfdist.run_dir() / f"{ME}.died"
        if FAULTS.get(ME) == epoch and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mesh = current_job().ring
        while epoch == WAIT_EPOCH and ME == "worker-0" and not mesh.knocking:
            mesh._hear(wait=True)


strategy = tfdist.make_strategy()
rng = np.random.default_rng(0)
x, y = rng.random((256, 8, 8, 1), np.float32), rng.integers(0, 5, 256)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(5),
        ]
    )
    model.set_weights([rng.random(w.shape, np.float32) for w in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=["accuracy"])
backups = [tfdist.BackupAndRestore()] if "BACKUP" in os.environ else []
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=6,
    verbose=0,
    validation_data=(x[:48], y[:48]),
    callbacks=[tfdist.Run(seed=3), Faults(), *backups],
)
state = b"".join(np.asarray(v).tobytes() for v in (*model.weights, *model.optimizer.variables))
print(
    "DIGEST", hashlib.sha256(state + json.dumps(history.history).encode()).hexdigest(), flush=True
)
