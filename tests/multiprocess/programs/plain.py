"""A script of plain `model.fit`: the second is killed once, and time ends the third."""

import os
import signal
import sys
import types

import keras
import numpy as np

import tfdist
from tfdist.strategy import current_job
from tfdist.training import loop

strategy = tfdist.make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])


class KillOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        is_first = current_job().config.options.attempt == 1
        if is_first and tfdist.is_chief() and model.optimizer.iterations == 18:
            os.kill(os.getpid(), signal.SIGKILL)


class ChiefsClock(keras.callbacks.Callback):
    """A second for each step, in the chief alone."""

    now_s = 0

    def on_train_batch_end(self, batch, logs=None):
        ChiefsClock.now_s += tfdist.is_chief()


x = np.ones((32, 2), "float32")
data = {"x": x, "y": x[:, :1], "validation_data": (x, x[:, :1]), "batch_size": 8, "verbose": 0}
for number in (1, 2):
    backup = tfdist.BackupAndRestore(f"{sys.argv[1]}/backup-{number}", save_freq=2)
    callbacks = [backup, KillOnce()] if number == 2 else [backup]
    model.fit(epochs=3, callbacks=callbacks, **data)
loop.time = types.SimpleNamespace(monotonic=lambda: ChiefsClock.now_s)
model.fit(epochs=9, callbacks=[tfdist.Run(max_time="00:00:00:03"), ChiefsClock()], **data)
print("steps", int(model.optimizer.iterations))
