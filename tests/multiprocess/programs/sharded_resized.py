"""A run that other numbers of workers go on with: ``sharded_resized.py OUT SHARDED EPOCHS``."""

import pathlib
import sys

import keras
import numpy as np

import tfdist
from tests.multiprocess.programs import zoo

out, sharded, epochs = pathlib.Path(sys.argv[1]), bool(int(sys.argv[2])), int(sys.argv[3])
strategy = tfdist.make_strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(101, activation="tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
tfdist.fit(
    model, zoo.X, zoo.CALM, batch_size=8, epochs=epochs, seed=3, verbose=0,
    callbacks=[tfdist.BackupAndRestore(out / "backup")], sharded_optimizer=sharded,
)  # fmt: skip
if tfdist.is_chief():
    np.save(out / "weights.npy", np.array(zoo.flat(model)))
tfdist.barrier()
