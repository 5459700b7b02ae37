"""Convolutional networks of three sizes, to measure by batch size.

python -m benchmarks.batch_sizes benchmarks/batch_models.py:small \
    benchmarks/batch_models.py:medium benchmarks/batch_models.py:large \
    --sizes 1,4,16,64,256 --plot docs/images/batch.png
"""

from __future__ import annotations

import keras
import numpy as np


def small() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Return the model of 8 and 16 filters, and 28x28 images."""
    return _cnn(8)


def medium() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Return the model of 32 and 64 filters, and 28x28 images."""
    return _cnn(32)


def large() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Return the model of 96 and 192 filters, and 28x28 images."""
    return _cnn(96)


def _cnn(filters: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(filters, 3, activation="relu"),
            layers.Conv2D(2 * filters, 3, activation="relu"),
            layers.MaxPooling2D(4),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model, np.zeros((256, 28, 28, 1), "float32"), np.zeros(256, "int32")
