"""The job of `fork_soak.py`: a short training run whose last line is a hash of its weights."""

from __future__ import annotations

import hashlib

import keras
import numpy as np

import tfdist

SEED = 7


def main() -> None:
    strategy = tfdist.make_strategy()
    random = np.random.default_rng(SEED)
    x = random.normal(size=(256, 16)).astype("float32")
    y = random.integers(0, 4, size=256)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    tfdist.fit(model, x, y, batch_size=64, epochs=3, verbose=0, seed=SEED)
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(np.ascontiguousarray(weight.numpy()).tobytes())
    print(f"weights_sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
