"""Trains a small CNN in an elastic job. Workers kill themselves where FAULTS says so, each once.

FAULTS maps a worker to a hook and to the epoch, in its process, at which it dies there. "save" is a
hook, too. RESIZES maps an epoch to a number of workers, which the chief asks for. JOINED maps an
epoch to a number of workers, for which the chief waits at the epoch's begin. A worker that knocks
ends the wait. At its end, the chief prints a digest of the files that the job has written. EPOCHS
is the number of epochs. CUT is an epoch in which `max_time` ends the run, after four steps. Each
worker writes its process id to a file of the run directory.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
from keras import layers

import tfdist
from tfdist.strategy import current_job
from tfdist.training.loop import TrainLoop

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))
RESIZES = json.loads(os.environ.get("RESIZES", "{}"))
JOINED = json.loads(os.environ.get("JOINED", "{}"))
EPOCHS = int(os.environ.get("EPOCHS", "6"))
ME = "worker-{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])


class Faults(keras.callbacks.Callback):
    """Kills this worker, or waits for one."""

    epoch = -1

    def meet(self, hook):
        mark = tfdist.run_dir() / f"{ME}.died"
        if FAULTS.get(ME) == [hook, self.epoch] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        scaled.scale.assign(scaled.scale * 0.9)
        self.meet("on_epoch_begin")
        if str(epoch) in RESIZES and tfdist.is_chief():
            words = ["-m", "tfdist.workers", str(tfdist.run_dir()), str(RESIZES[str(epoch)])]
            subprocess.run([sys.executable, *words], check=True)
        mesh = current_job().ring
        wanted = JOINED.get(str(epoch), 0)
        while tfdist.is_chief() and not mesh.knocking and len(mesh.members) < wanted:
            mesh._hear(wait=True)

    def on_test_begin(self, logs=None):
        self.meet("on_test_begin")

    def on_epoch_end(self, epoch, logs=None):
        self.meet("on_epoch_end")

    def on_train_end(self, logs=None):
        self.meet("on_train_end")


class Cut(keras.callbacks.Callback):
    """Lets the time of the run be over within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if (faults.epoch, batch) == (int(os.environ["CUT"]), 3):
            TrainLoop._seconds = lambda loop: 2000.0


class Scaled(layers.Layer):
    """Multiplies by a weight that a callback changes at the begin of each epoch."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), trainable=False, name="scale")

    def call(self, inputs):
        return inputs * self.scale


class Backup(tfdist.BackupAndRestore):
    """Dies before a save, or within its write."""

    def save(self, *args, **options):
        faults.meet("save")
        super().save(*args, **options)

    def _write(self, *args, **options):
        faults.meet("write")
        return super()._write(*args, **options)


(tfdist.run_dir() / f"{ME}.pid").write_text(str(os.getpid()))
strategy = tfdist.make_strategy()
rng = np.random.default_rng(0)
x, y = rng.random((256, 8, 8, 1), np.float32), rng.integers(0, 5, 256)
with strategy.scope():
    scaled = Scaled()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2),
            scaled,
            layers.Dense(5),
        ]
    )
    model.set_weights([rng.random(w.shape, np.float32) for w in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=["accuracy"])
faults = Faults()
backups = [Backup()] if "BACKUP" in os.environ else []
best, csv = tfdist.run_dir() / "best.weights.h5", tfdist.run_dir() / "log.csv"
writers = [
    keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger(csv),
]
is_cut = "CUT" in os.environ
run = tfdist.Run(seed=3, max_time=1000 if is_cut else None)
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=EPOCHS,
    verbose=0,
    validation_data=(x[:48], y[:48]),
    callbacks=[run, faults, *writers, *backups, *([Cut()] if is_cut else [])],
)
state = b"".join(np.asarray(v).tobytes() for v in (*model.weights, *model.optimizer.variables))
print(
    "DIGEST", hashlib.sha256(state + json.dumps(history.history).encode()).hexdigest(), flush=True
)
if tfdist.is_chief() and not is_cut:
    steps = [each.store.latest() for each in backups]
    assert steps == [EPOCHS * 8] * len(backups), steps
    model.load_weights(best)
    lines = map(json.loads, (tfdist.run_dir() / "metrics.jsonl").read_text().splitlines())
    written = [{**line, "examples_per_second": 0} for line in lines]
    files = b"".join(w.tobytes() for w in model.get_weights()) + csv.read_bytes()
    print("FILES", hashlib.sha256(files + json.dumps(written).encode()).hexdigest(), flush=True)
