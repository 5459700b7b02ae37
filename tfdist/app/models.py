"""The networks that a configuration can name; each gives logits ``[batch, classes]``."""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras import layers

from tfdist.errors import require_one_of


def build_model(
    name: str, *, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.0
) -> keras.Model:
    """Return an unbuilt-optimizer, uncompiled model; call it inside the strategy's scope.

    Args:
      name: a key of `MODELS`.
      image_shape: (height, width, channels); the model takes floats ``[batch, *image_shape]``.
      num_classes: width of the output.
      dropout: share of units left out before each dense layer.

    Raises:
      UsageError: there is no model of this name, or images are too small for it.
    """
    require_one_of("model", name, MODELS)
    images = keras.Input(image_shape, name="image")
    features = MODELS[name](images, dropout)
    # float32 whatever the precision: a softmax over float16 logits overflows early.
    logits = layers.Dense(num_classes, dtype="float32", name="logits")(features)
    return keras.Model(images, logits, name=name)


def _dense(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    x = layers.Flatten()(x)
    for units in (256, 128):
        x = layers.Dropout(dropout)(layers.Dense(units, activation="relu")(x))
    return x


def _cnn(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    """Two convolutions, a pool, a dense layer.

    Without BatchNormalization: under a parameter server the workers would write its statistics
    over one another.
    """
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = layers.Dropout(dropout)(layers.Flatten()(layers.MaxPooling2D()(x)))
    return layers.Dropout(dropout)(layers.Dense(128, activation="relu")(x))


def _resnet20(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    """ResNet-20 for 32 x 32 images (He et al., "Deep residual learning", 2015, section 4.2)."""
    x = _normalized(layers.Conv2D(16, 3, padding="same", use_bias=False)(x))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            x = _residual(x, filters, strides=2 if stage and not block else 1)
    return layers.Dropout(dropout)(layers.GlobalAveragePooling2D()(x))


def _residual(x: keras.KerasTensor, filters: int, *, strides: int) -> keras.KerasTensor:
    y = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(_normalized(y))
    y = layers.BatchNormalization()(y)
    if x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x)
        x = layers.BatchNormalization()(x)
    return layers.ReLU()(layers.Add()([x, y]))


def _normalized(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.ReLU()(layers.BatchNormalization()(x))


MODELS: dict[str, Callable[[keras.KerasTensor, float], keras.KerasTensor]] = {
    "dense": _dense,
    "cnn": _cnn,
    "resnet20": _resnet20,
}
