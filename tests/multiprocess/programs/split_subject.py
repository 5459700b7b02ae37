"""A small model for `tfdist.bench pipeline`."""

import keras
import numpy as np


def make():
    layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model, np.zeros((1, 8), "float32"), np.zeros(1, "int32")
