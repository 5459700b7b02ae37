"""The models and data of the benchmarks, written once for keras and tf_keras."""

from __future__ import annotations

from typing import Any

import numpy as np

LEARNING_RATE = 0.01
MOMENTUM = 0.9
CNN_PARAMETERS = 1_199_882


def cnn(keras: Any) -> Any:
    """28x28x1, two convolutions, a pool, dense 128, dense 10; 1.2 M parameters; not compiled."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def dense(keras: Any) -> Any:
    """64-256-10 with BatchNormalization and Dropout; not compiled."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def wide(keras: Any) -> Any:
    """784-512-512-10 with BatchNormalization and Dropout; 672 k parameters; not compiled."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(512, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(512, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def sgd(keras: Any) -> Any:
    """The optimizer of every CNN row."""
    return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)


def loss(keras: Any) -> Any:
    """Cross-entropy of logits and integer labels."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def images(num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images float32 [n, 28, 28, 1] and labels int64 [n]."""
    random = np.random.default_rng(0)
    x = random.standard_normal((num_examples, 28, 28, 1), dtype=np.float32)
    return x, random.integers(0, 10, num_examples)


def vectors(num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random vectors float32 [n, 64] and labels int64 [n]."""
    random = np.random.default_rng(0)
    x = random.standard_normal((num_examples, 64), dtype=np.float32)
    return x, random.integers(0, 10, num_examples)
