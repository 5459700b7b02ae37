"""Data, length, learning rate, optimizer and model made from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from tfdist.app.models import build_model
from tfdist.data import tfds
from tfdist.data.augment import Compose, Normalize, RandomCrop, RandomFlip, for_evaluation
from tfdist.data.source import Source
from tfdist.errors import UsageError
from tfdist.training.epochs import EpochPlan, VirtualEpochs
from tfdist.training.schedule import WarmupThenDecay


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """What a run trains and validates on; `image_shape` is (height, width, channels)."""

    training: Source
    validation: Source | None
    image_shape: tuple[int, int, int]
    num_classes: int


def load_datasets(config: Any) -> Datasets:
    """Return the sources of a run; every task that reads data calls it.

    Raises:
      UsageError: there is no such dataset or split, or its examples are not (image, label).
    """
    data_dir = config.data_dir or None
    builder = tfds.prepare(config.dataset, data_dir=data_dir)
    transform = transform_of(config)
    training = tfds.load(config.dataset, config.train_split, data_dir=data_dir, transform=transform)
    image_shape = _image_shape(training, dataset=config.dataset)
    _require_channels(config, image_shape[2])
    validation = None
    if config.validation_split:
        validation = tfds.load(
            config.dataset,
            config.validation_split,
            data_dir=data_dir,
            transform=for_evaluation(transform),
        )
    return Datasets(
        training=training,
        validation=validation,
        image_shape=image_shape,
        num_classes=_num_classes(builder, dataset=config.dataset),
    )


def transform_of(config: Any) -> Compose:
    """Return augmentation and normalisation, in this order."""
    wanted = config.augmentation
    steps: list[Any] = []
    if wanted.random_crop_padding:
        steps.append(RandomCrop(padding=wanted.random_crop_padding))
    if wanted.random_flip:
        steps.append(RandomFlip())
    return Compose([*steps, Normalize(mean=list(wanted.mean), std=list(wanted.std))])


def virtual_epochs(config: Any) -> VirtualEpochs:
    """Return the length of the run."""
    return VirtualEpochs(total_examples=config.total_examples, checkpoints=config.checkpoints)


def plan_of(config: Any) -> EpochPlan:
    """Return the steps and examples of the run's virtual epochs."""
    boundaries = virtual_epochs(config).boundaries()
    return EpochPlan.from_boundaries(boundaries, global_batch_size=config.global_batch_size)


def learning_rate_of(config: Any, *, total_steps: int) -> float | WarmupThenDecay:
    """Return a number where it never changes, so that callbacks can set it."""
    if config.schedule == "constant" and not config.warmup_examples:
        return float(config.learning_rate)
    return WarmupThenDecay(
        config.learning_rate,
        kind=config.schedule,
        warmup_steps=-(-config.warmup_examples // config.global_batch_size),
        total_steps=total_steps,
    )


def optimizer_of(config: Any, *, total_steps: int) -> keras.optimizers.Optimizer:
    """Return the optimizer; call it inside the strategy's scope."""
    options: dict[str, Any] = {"learning_rate": learning_rate_of(config, total_steps=total_steps)}
    if config.weight_decay:
        options["weight_decay"] = config.weight_decay
    if config.clip_norm:
        options["global_clipnorm"] = config.clip_norm
    if config.gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if config.optimizer == "sgd":
        return keras.optimizers.SGD(
            momentum=config.momentum, nesterov=config.momentum > 0, **options
        )
    if config.optimizer == "adamw":
        return keras.optimizers.AdamW(**{"weight_decay": 0.0, **options})
    return keras.optimizers.Adam(**options)


def compiled_model(config: Any, datasets: Datasets, *, total_steps: int) -> keras.Model:
    """Return the model with optimizer, loss and metrics; call it inside the strategy's scope."""
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


def _image_shape(source: Source, *, dataset: str) -> tuple[int, int, int]:
    spec = source.element_spec
    image = spec[0] if isinstance(spec, tuple) and len(spec) == 2 else None
    shape = getattr(image, "shape", None)
    if shape is None or shape.rank != 3 or None in shape.as_list():
        raise _not_images(dataset, f"examples of {spec}")
    height, width, channels = shape.as_list()
    return height, width, channels


def _num_classes(builder: Any, *, dataset: str) -> int:
    keys = builder.info.supervised_keys
    classes = getattr(builder.info.features[keys[1]], "num_classes", None)
    if classes is None:
        raise _not_images(dataset, f"a label {keys[1]!r} that is not a class")
    return int(classes)


def _not_images(dataset: str, received: str) -> UsageError:
    return UsageError(
        f"config.dataset {dataset!r}",
        received=received,
        expected="an image of one size [height, width, channels] and a class",
        fix="train other data with tfdist.fit in a program of your own",
        code="not-images",
    )


def _require_channels(config: Any, channels: int) -> None:
    for name in ("mean", "std"):
        values = config.augmentation[name]
        if len(values) not in (1, channels):
            raise UsageError(
                f"config.augmentation.{name}",
                received=f"{len(values)} numbers",
                expected=f"1, or {channels}: one for each channel of {config.dataset}",
                fix="give one number for all channels, or one for each",
                code="channels-differ",
            )
