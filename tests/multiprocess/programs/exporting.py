"""Train a little and export, under the strategy of the job: exporting.py OUT."""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfdist

strategy = tfdist.make_strategy()
rng = np.random.RandomState(0)
x, y = rng.rand(64, 6).astype("float32"), rng.randint(0, 3, 64)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((6,), name="features"), keras.layers.Dense(40, activation="relu"),
         keras.layers.BatchNormalization(), keras.layers.Dense(3, name="logits")],
        name="mlp",
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
tfdist.fit(model, x, y, batch_size=16, epochs=2, verbose=0, seed=3)
place = tfdist.export_model(model, sys.argv[1])
answers = tfdist.predict(model, x, verbose=0)
if tfdist.is_chief():
    np.save(f"{sys.argv[1]}/answers.npy", answers)
print("exported", place)
