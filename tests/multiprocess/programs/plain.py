"""A script of plain `model.fit`: two fits, of which the second is killed once inside an epoch."""

import os
import signal
import sys

import keras
import numpy as np

import tfdist
from tfdist.strategy import current_job

strategy = tfdist.make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])


class KillOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        is_first = current_job().config.options.attempt == 1
        if is_first and tfdist.is_chief() and model.optimizer.iterations == 18:
            os.kill(os.getpid(), signal.SIGKILL)


x = np.ones((32, 2), "float32")
data = {"x": x, "y": x[:, :1], "validation_data": (x, x[:, :1]), "batch_size": 8, "verbose": 0}
for number in (1, 2):
    backup = tfdist.BackupAndRestore(f"{sys.argv[1]}/backup-{number}", save_freq=2)
    callbacks = [backup, KillOnce()] if number == 2 else [backup]
    model.fit(epochs=3, callbacks=callbacks, **data)
print(model.fit(epochs=1, **data).history)
