"""A run that another number of workers goes on with: `resized.py OUT KILL_AT [sharded]`.

SGD with sharded slots or whole ones, synchronized BatchNormalization, crops and flips, no Dropout.
At step KILL_AT the chief kills itself; 0 lets the run come to its end, and the chief writes what
came out.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tfdist
from tests.tools.ledger import Ledger
from tfdist.data.arrays import ArraySource
from tfdist.data.augment import Compose, RandomCrop, RandomFlip

STEPS, BATCH, STEPS_PER_EPOCH, SAVE_EVERY = 200, 24, 5, 7

strategy = tfdist.make_strategy()
out, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        at_step = int(self.model.optimizer.iterations.numpy())
        if tfdist.is_chief() and 0 < kill_at <= at_step:
            backup.wait()
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(7)
with strategy.scope():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu", name="convolution"),
            layers.BatchNormalization(synchronized=True, name="normalization"),
            layers.Flatten(),
            layers.Dense(4, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)

draws = np.random.default_rng(7)
brightness, contrast = draws.normal(size=(500, 1, 1, 1)), draws.uniform(0.2, 2, (500, 1, 1, 1))
x = (brightness + contrast * draws.normal(size=(500, 8, 8, 1))).astype("float32")
y = ((brightness > 0) * 2 + (contrast > 1)).reshape(-1)
training = ArraySource(x, y, transform=Compose([RandomCrop(padding=1), RandomFlip("horizontal")]))
backup = tfdist.BackupAndRestore(out / "backup", save_freq=SAVE_EVERY)
history = tfdist.fit(
    model, training, batch_size=BATCH, steps_per_epoch=STEPS_PER_EPOCH,
    epochs=STEPS // STEPS_PER_EPOCH, seed=3, verbose=0, sharded_optimizer="sharded" in sys.argv,
    callbacks=[backup, Ledger(out / "ledger"), Kill()],
)  # fmt: skip
if tfdist.is_chief():
    weights = [float(np.abs(w.numpy()).sum()) for w in model.weights]
    found = {"loss": history.history["loss"], "weights": weights}
    (out / "found.json").write_text(json.dumps(found))
