"""From a configuration to model, optimizer, learning rate and data."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.clock import Clock
from tests.refusals import refusal
from tfdist.app import recipe
from tfdist.app.recipe import MODELS, build_model
from tfdist.app.run import RunReporter
from tfdist.configs import FIELDS, base
from tfdist.errors import TfdistError
from tfdist.outputs.run_directory import RunDirectory
from tfdist.training.epochs import EpochPlan


def config_with(**changes: Any) -> Any:
    config = base()
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("dense", (8, 8, 1), 50_826), ("cnn", (8, 8, 1), 151_306), ("resnet20", (32, 32, 3), 272_474)],
)
def test_models_give_logits_of_float32(name, shape, parameters):
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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.4, 0.4, 0.4, 0.4]),
        ("linear", [1 / 3, 1 / 6, 0.0, 0.0]),
        ("cosine", [0.4, 0.2, 0.0, 0.0]),
    ],
)
def test_the_learning_rate_follows_its_schedule(kind, expected):
    changes = {"schedule": kind, "learning_rate": 0.4, "global_batch_size": 10}
    warmup = {} if kind == "linear" else {"warmup_examples": 40}
    schedule = recipe.learning_rate_of(config_with(**changes, **warmup), total_steps=24)
    assert [float(schedule(step)) for step in (4, 14, 24, 30)] == pytest.approx(expected, abs=1e-7)
    if warmup:
        assert [float(schedule(step)) for step in (0, 2)] == pytest.approx([0.1, 0.25])


def test_the_schedule_is_saved_with_its_optimizer():
    config = config_with(schedule="cosine", warmup_examples=100, learning_rate=0.5)
    optimizer = recipe.optimizer_of(config, total_steps=50)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    schedule = again._learning_rate
    assert isinstance(schedule, keras.optimizers.schedules.CosineDecay)
    assert schedule.warmup_steps == 2
    assert schedule.get_config() == optimizer._learning_rate.get_config()


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({"optimizer": "sgd"}, {"momentum": 0.9, "nesterov": True, "weight_decay": None}),
        ({"optimizer": "sgd", "momentum": 0.0}, {"momentum": 0.0, "nesterov": False}),
        ({"optimizer": "adamw", "weight_decay": 0.01}, {"weight_decay": 0.01}),
        ({"optimizer": "adam", "clip_norm": 2.0}, {"global_clipnorm": 2.0, "clipnorm": None}),
        ({}, {"gradient_accumulation_steps": None, "global_clipnorm": None}),
    ],
)
def test_the_optimizer_is_as_configured(changes, attributes):
    optimizer = recipe.optimizer_of(config_with(**changes), total_steps=10)
    assert type(optimizer).__name__.lower() == changes.get("optimizer", "adam")
    assert {name: getattr(optimizer, name) for name in attributes} == attributes


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_image_sets_are_loaded_augmented_and_normalised(name, tmp_path):
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


def test_the_configuration_knows_the_models_and_another_is_refused():
    field = FIELDS["model"]
    assert field.choices == tuple(MODELS)
    make = lambda: build_model("resnet2", image_shape=(8, 8, 1), num_classes=10)  # noqa: E731
    assert refusal(make).code == "unknown-value"


# What the program writes and shows while it trains.


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.claim({})
    return directory


PLAN = EpochPlan.uniform(epochs=3, examples=100, global_batch_size=10)


def reporter_of(directory: RunDirectory, clock: Clock, objective_file: str = "") -> RunReporter:
    return RunReporter(directory, PLAN, clock=clock, objective_file=objective_file)


def run_block(
    reporter: RunReporter, clock: Clock, batches: tuple[int, int], *, seconds: float
) -> None:
    reporter.on_train_batch_begin(batches[0])
    clock.now_s += seconds
    reporter.on_train_batch_end(batches[1] - 1, {"loss": 0.5})


def test_a_run_with_only_validation_left_writes_one_line(directory):
    for step in (10, 20):
        directory.append_metrics({"step": step, "loss": 1.0})  # of an attempt that was killed next
    reporter = reporter_of(directory, Clock())
    reporter.on_epoch_begin(1)
    reporter.resumed_at(20)
    reporter.on_epoch_end(1, {"loss": 0.5})
    lines = directory.read_metrics()
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 1.0), (20, 0.5)]
    assert reporter.examples_per_second is None
    reporter.close()


def test_a_resumed_run_reports_each_value_once_without_exponents(directory, tmp_path):
    for step in (10, 20):  # and step 20 was not saved
        directory.append_metrics({"step": step, "virtual_epoch": step // 10, "loss": 1e-7 * step})
    file = tmp_path / "metrics.log"
    file.write_text("2026-01-01T00:00:00Z loss=0.000001\n2026-01-01T00:00:01Z loss=0.000002\n")
    reporter = reporter_of(directory, Clock(), str(file))
    reporter.on_epoch_begin(1)
    reporter.resumed_at(10)
    run_block(reporter, Clock(), (0, 10), seconds=1)
    reporter.on_epoch_end(1, {"loss": 1.5e-6, "val_loss": math.nan})
    reporter.close()
    words = [line.split()[1] for line in file.read_text().splitlines()]
    assert words == ["loss=0.000001", "loss=0.0000015"]
    broken = reporter_of(directory, Clock(), str(file / "x"))
    with pytest.raises(TfdistError, match=r"metrics\.log"):
        broken.resumed_at(10)
    broken.close()


def test_the_rate_excludes_the_first_block_and_validation(directory):
    clock = Clock()
    reporter = reporter_of(directory, clock)
    reporter.on_epoch_begin(0)
    run_block(reporter, clock, (0, 1), seconds=20)
    assert reporter.examples_per_second == 0.5
    run_block(reporter, clock, (1, 6), seconds=1)
    clock.now_s += 7
    assert reporter.examples_per_second == 50
    reporter.on_epoch_end(0, {"loss": 0.5})  # which was cut short, and has no line
    reporter.on_train_end()
    assert directory.read_metrics() == []
    assert reporter.step == 6
