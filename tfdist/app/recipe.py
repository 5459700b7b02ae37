"""Model, optimizer and schedule made from a configuration."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.app.datasets import Datasets
from tfdist.app.models import build_model
from tfdist.training.epochs import EpochPlan, VirtualEpochs
from tfdist.training.schedule import WarmupThenDecay


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
