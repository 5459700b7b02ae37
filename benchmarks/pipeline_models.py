"""The transformer of the pipeline's benchmark, as `benchmarks.split_sizes` takes it."""

from __future__ import annotations

from typing import Any

BLOCKS, WIDTH, LENGTH, HEADS, WORDS = 8, 256, 128, 4, 1000


def transformer() -> tuple[Any, Any, Any]:
    """Eight blocks; words in, the next word out; compiled with SGD."""
    import keras
    import numpy as np

    layers = keras.layers
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(ids)
    for _ in range(BLOCKS):
        h = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = layers.Add()([x, attention(h, h, use_causal_mask=True)])
        h = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(h)])
    model = keras.Model(ids, layers.Dense(WORDS)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss)
    return model, np.zeros((1, LENGTH), "int32"), np.zeros((1, LENGTH), "int32")
