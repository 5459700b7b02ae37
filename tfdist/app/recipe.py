"""Data, length, learning rate, optimizer and model of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from tfdist.data import tfds
from tfdist.data.augment import Compose, Normalization, RandomCrop, RandomFlip, for_evaluation
from tfdist.data.source import Source
from tfdist.errors import require_one_of
from tfdist.training.epochs import EpochPlan, VirtualEpochs


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """Training and validation data of a run. `image_shape` is (height, width, channels)."""

    training: Source
    validation: Source | None
    image_shape: tuple[int, int, int]
    num_classes: int


def load_datasets(config: Any) -> Datasets:
    """Return the data of a run. Every task that reads data calls it.

    Raises:
      UsageError: The dataset or split does not exist.
    """
    data_dir = config.data_dir or None
    builder = tfds.prepare(config.dataset, data_dir=data_dir)
    transform = transform_of(config)
    training = tfds.from_tfds(
        config.dataset, config.train_split, data_dir=data_dir, transform=transform
    )
    validation = None
    if config.validation_split:
        validation = tfds.from_tfds(
            config.dataset,
            config.validation_split,
            data_dir=data_dir,
            transform=for_evaluation(transform),
        )
    return Datasets(
        training=training,
        validation=validation,
        image_shape=tuple(training.element_spec[0].shape.as_list()),
        num_classes=builder.info.features[builder.info.supervised_keys[1]].num_classes,
    )


def transform_of(config: Any) -> Compose:
    """Return the augmentation steps followed by normalisation."""
    wanted = config.augmentation
    steps: list[Any] = []
    if wanted.random_crop_padding:
        steps.append(RandomCrop(padding=wanted.random_crop_padding))
    if wanted.random_flip:
        steps.append(RandomFlip("horizontal"))
    mean, std = np.broadcast_arrays(wanted.mean, np.asarray(wanted.std, np.float64))
    # The square root of a square is exact, so the pixels are divided by the given numbers.
    return Compose([*steps, Normalization(mean=mean.tolist(), variance=np.square(std).tolist())])


def virtual_epochs(config: Any) -> VirtualEpochs:
    return VirtualEpochs(total_examples=config.total_examples, checkpoints=config.checkpoints)


def plan_of(config: Any) -> EpochPlan:
    """Return the steps and examples of the run's virtual epochs."""
    boundaries = virtual_epochs(config).boundaries()
    return EpochPlan.from_boundaries(boundaries, global_batch_size=config.global_batch_size)


def learning_rate_of(
    config: Any, *, total_steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Return the learning rate. A constant rate is a float, so that callbacks can change it."""
    peak, schedules = float(config.learning_rate), keras.optimizers.schedules
    warmup_steps = -(-config.warmup_examples // config.global_batch_size)
    if config.schedule == "linear":
        return schedules.PolynomialDecay(peak, total_steps, end_learning_rate=0.0)
    if config.schedule == "constant" and not warmup_steps:
        return peak
    return schedules.CosineDecay(
        peak / max(warmup_steps, 1),  # the first update of a warmup is above 0
        max(total_steps - warmup_steps, 1),
        alpha=1.0 if config.schedule == "constant" else 0.0,
        warmup_target=peak if warmup_steps else None,
        warmup_steps=warmup_steps,
    )


def optimizer_of(config: Any, *, total_steps: int) -> keras.optimizers.Optimizer:
    """Return the optimizer. Call this function in the strategy's scope."""
    options: dict[str, Any] = {"learning_rate": learning_rate_of(config, total_steps=total_steps)}
    if config.weight_decay:
        options["weight_decay"] = config.weight_decay
    if config.clip_norm:
        options["global_clipnorm"] = config.clip_norm
    if config.optimizer == "sgd":
        return keras.optimizers.SGD(
            momentum=config.momentum, nesterov=config.momentum > 0, **options
        )
    if config.optimizer == "adamw":
        return keras.optimizers.AdamW(**{"weight_decay": 0.0, **options})
    return keras.optimizers.Adam(**options)


def compiled_model(config: Any, datasets: Datasets, *, total_steps: int) -> keras.Model:
    """Return the model with optimizer, loss and metrics. Call it in the strategy's scope."""
    model = build_model(
        config.model,
        image_shape=datasets.image_shape,
        num_classes=datasets.num_classes,
        dropout=config.dropout,
    )
    model.compile(
        optimizer=optimizer_of(config, total_steps=total_steps),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# Models that a configuration can name. Each returns logits ``[batch, classes]``.


def build_model(
    name: str, *, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.0
) -> keras.Model:
    """Return an uncompiled model. Call this function in the strategy's scope.

    Args:
      name: Key of `MODELS`.
      image_shape: (height, width, channels). The model's input is floats ``[batch, *image_shape]``.
      num_classes: Number of outputs.
      dropout: Fraction of units dropped before each dense layer (default: 0).

    Raises:
      UsageError: No model has this name.
    """
    require_one_of("model", name, MODELS)
    images = keras.Input(image_shape, name="image")
    features = MODELS[name](images, dropout)
    # Always float32: a softmax over float16 logits overflows early.
    logits = layers.Dense(num_classes, dtype="float32", name="logits")(features)
    return keras.Model(images, logits, name=name)


def _dense(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    x = layers.Flatten()(x)
    for units in (256, 128):
        x = layers.Dropout(dropout)(layers.Dense(units, activation="relu")(x))
    return x


def _cnn(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    """Two convolutions, a pooling layer and a dense layer.

    It has no BatchNormalization, because workers of a ps job would overwrite each other's
    statistics.
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
