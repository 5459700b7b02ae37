"""From a configuration to model, optimizer, learning rate and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tfdist.app import recipe
from tfdist.app.recipe import MODELS, build_model
from tfdist.configs import FIELDS, base
from tfdist.errors import UsageError
from tfdist.training.schedule import InExamples, WarmupThenDecay


def config_with(**changes: Any) -> Any:
    config = base()
    config.update_from_flattened_dict(changes)
    return config


def test_the_configuration_knows_the_models() -> None:
    field = next(field for field in FIELDS if field.name == "model")
    assert field.choices == tuple(MODELS)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("dense", (8, 8, 1), 50_826), ("cnn", (8, 8, 1), 151_306), ("resnet20", (32, 32, 3), 272_474)],
)
def test_models_give_logits_of_float32(
    name: str, shape: tuple[int, int, int], parameters: int
) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build_model(name, image_shape=shape, num_classes=10, dropout=0.5)
    finally:
        keras.config.set_dtype_policy("float32")
    logits = model(np.zeros((2, *shape), np.float32))
    assert logits.shape == (2, 10)
    assert logits.dtype == "float32"
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    # Section 4.2 of the paper counts 0.27 M; the two projections are ours.
    assert trainable == parameters


def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"'resnet2' .did you mean 'resnet20'.."):
        build_model("resnet2", image_shape=(8, 8, 1), num_classes=10)


def test_a_constant_learning_rate_is_a_number_that_callbacks_can_set() -> None:
    optimizer = recipe.optimizer_of(config_with(learning_rate=0.5), total_steps=10)
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.1, 0.2, 0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.1, 0.2, 0.4, 0.2, 0.0, 0.0]),
        ("cosine", [0.1, 0.2, 0.4, 0.2, 0.0, 0.0]),
    ],
)
def test_the_learning_rate_over_a_run(kind: str, expected: list[float]) -> None:
    schedule = WarmupThenDecay(0.4, kind="constant", warmup_steps=4, total_steps=24)
    assert [float(schedule(step)) for step in (0, 1, 3)] == pytest.approx([0.1, 0.2, 0.4])
    schedule = WarmupThenDecay(0.4, kind=kind, warmup_steps=4, total_steps=24)
    rates = [float(schedule(step)) for step in (4, 14, 24, 30)]
    assert rates == pytest.approx(expected[2:], abs=1e-7)


def test_the_schedule_is_saved_with_its_optimizer() -> None:
    config = config_with(schedule="cosine", warmup_examples=100, learning_rate=0.5)
    optimizer = recipe.optimizer_of(config, total_steps=50)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    schedule = again._learning_rate
    assert isinstance(schedule, WarmupThenDecay)
    assert schedule.warmup_steps == 2
    assert schedule.get_config() == optimizer._learning_rate.get_config()


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({"optimizer": "sgd"}, {"momentum": 0.9, "nesterov": True, "weight_decay": None}),
        ({"optimizer": "sgd", "momentum": 0.0}, {"momentum": 0.0, "nesterov": False}),
        ({"optimizer": "adamw", "weight_decay": 0.01}, {"weight_decay": 0.01}),
        ({"optimizer": "adam", "clip_norm": 2.0}, {"global_clipnorm": 2.0, "clipnorm": None}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        ({}, {"gradient_accumulation_steps": None, "global_clipnorm": None}),
    ],
)
def test_the_optimizer_is_as_configured(
    changes: dict[str, Any], attributes: dict[str, Any]
) -> None:
    optimizer = recipe.optimizer_of(config_with(**changes), total_steps=10)
    assert type(optimizer).__name__.lower() == changes.get("optimizer", "adam")
    assert {name: getattr(optimizer, name) for name in attributes} == attributes


def test_length_and_steps_come_from_examples() -> None:
    config = config_with(total_examples=1000, checkpoints=3, global_batch_size=64)
    plan = recipe.plan_of(config)
    assert plan.example_starts == (0, 333, 666, 1000)
    assert plan.total_steps == 18


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_image_sets_are_loaded_augmented_and_normalised(name: str, tmp_path: Any) -> None:
    changes = {
        "dataset": name,
        "data_dir": str(tmp_path),
        "augmentation.random_crop_padding": 4,
        "augmentation.mean": (100.0,),
        "augmentation.std": (50.0,),
    }
    with tfds.testing.mock_data(num_examples=20):
        datasets = recipe.load_datasets(config_with(**changes))
    assert datasets.num_classes == 10
    assert datasets.image_shape == ((28, 28, 1) if name == "mnist" else (32, 32, 3))
    validation = datasets.validation
    assert validation is not None
    raw, _ = validation.gather(np.arange(3))
    ids = np.arange(3)
    images, _ = validation.transformed((raw, ids), example_ids=ids, epoch=0, seed=1)
    np.testing.assert_allclose(images, (np.float32(raw) - 100) / 50, atol=1e-6)
    raw, _ = datasets.training.gather(ids)
    first, _ = datasets.training.transformed((raw, ids), example_ids=ids, epoch=0, seed=1)
    second, _ = datasets.training.transformed((raw, ids), example_ids=ids, epoch=1, seed=1)
    assert not np.array_equal(first, second)


def test_numbers_that_do_not_fit_the_channels_are_one_line(tmp_path: Any) -> None:
    changes = {"dataset": "mnist", "data_dir": str(tmp_path), "augmentation.std": (1.0, 2.0)}
    with (
        tfds.testing.mock_data(num_examples=4),
        pytest.raises(UsageError, match=r"augmentation\.std: received 2 numbers; expected 1"),
    ):
        recipe.load_datasets(config_with(**changes))


def test_data_that_are_not_images_are_one_line(tmp_path: Any) -> None:
    changes = {"dataset": "iris", "data_dir": str(tmp_path), "validation_split": ""}
    with (
        tfds.testing.mock_data(num_examples=4),
        pytest.raises(UsageError, match="'iris': received examples of"),
    ):
        recipe.load_datasets(config_with(**changes))


def test_a_schedule_in_examples_does_not_change_with_the_batch_size(tmp_path: Path) -> None:
    decay = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=1000)
    for size in (1, 10, 250):
        schedule = InExamples(decay, global_batch_size=size)
        for examples in (0, 250, 500, 1000):
            np.testing.assert_allclose(schedule(examples // size), decay(examples), rtol=1e-6)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(InExamples(decay, global_batch_size=250)), "mse")
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras").optimizer
    loaded.iterations.assign(2)
    np.testing.assert_allclose(loaded.learning_rate, decay(500), rtol=1e-6)
