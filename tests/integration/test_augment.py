"""Augmentation: the same for an example whatever batch it is in, and evenly spread."""

import hashlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.refusals import refused
from tfdist.data import (
    ArraySource,
    Compose,
    Normalization,
    RandomCrop,
    RandomFlip,
    Rescaling,
    draws_for,
    for_evaluation,
)

RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 255, (32, 6, 5, 3), np.uint8)
LABELS = np.arange(32)
IDS = RNG.permutation(1000)[:32].astype(np.int64)
EPOCHS = RNG.integers(0, 3, 32).astype(np.int64)
SEED = 2**62 + 17

TRANSFORMS = {
    "crop": RandomCrop(padding=2),
    "small crop": RandomCrop(4, 3),
    "flip": RandomFlip(),
    "rescale": Rescaling(1 / 255),
    "all": Compose(
        [
            RandomCrop(padding=2),
            RandomFlip("horizontal"),
            RandomFlip(),
            Rescaling(1 / 255),
            Normalization(mean=[0.4, 0.5, 0.6], variance=[0.04, 0.09, 0.16]),
        ]
    ),
}


def apply(transform, images=IMAGES, *, ids=IDS, epoch=EPOCHS, seed=SEED):
    labels = LABELS[: len(images)]
    x, y = transform((images, labels), example_ids=ids, epoch=epoch, seed=seed)
    assert y is labels
    return np.asarray(x)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_single_images_and_slices_equal_the_batch_exactly(transform):
    signature = [tf.TensorSpec([None, 6, 5, 3], tf.uint8)] + [tf.TensorSpec([None], tf.int64)] * 2

    @tf.function(input_signature=signature)
    def in_graph(images, ids, epoch):
        return transform((images, ids), example_ids=ids, epoch=epoch, seed=SEED)[0]

    whole = apply(transform)
    for i in range(len(IMAGES)):
        alone = apply(transform, IMAGES[i : i + 1], ids=IDS[i : i + 1], epoch=int(EPOCHS[i]))
        assert np.array_equal(alone[0], whole[i])
    for cut in (slice(0, 13), slice(13, 32), slice(4, 4)):
        assert np.array_equal(in_graph(IMAGES[cut], IDS[cut], EPOCHS[cut]), whole[cut])


def test_draws_and_pixels_do_not_change_between_versions():
    """A checkpoint resumes with the augmentation it was written with."""
    draws = draws_for("RandomCrop", example_ids=np.arange(6), epoch=2, seed=5, position=1)
    assert draws.below(1000, index=0).numpy().tolist() == [120, 997, 354, 661, 166, 781]
    assert draws.below(1000, index=1).numpy().tolist() == [948, 735, 832, 40, 952, 595]
    images = (np.arange(32 * 6 * 5 * 3) * 7919 % 251).astype(np.uint8).reshape(32, 6, 5, 3)
    moves = [RandomCrop(padding=2), RandomFlip("horizontal"), RandomFlip()]
    chain = Compose([*moves, RandomCrop(4, 3)])
    found = apply(chain, images, ids=np.arange(32) * 31 % 1000, epoch=np.arange(32) % 3)
    digest = "5a68f7bfa26d41e620a90a36fedb099f591dcb17a3d5167f239dd3c8e147de96"
    assert hashlib.sha256(found.tobytes()).hexdigest() == digest


def test_scaling_equals_the_layers_of_keras():
    adapted = keras.layers.Normalization()
    adapted.adapt(IMAGES.astype(np.float32))
    given = {"mean": [1.0, 2.0, 3.0], "variance": [4.0, 5.0, 6.0]}
    for ours, layer in (
        (Rescaling(1 / 127.5, -1), keras.layers.Rescaling(1 / 127.5, -1)),
        (Normalization(mean=adapted.mean, variance=adapted.variance), adapted),
        (Normalization(**given), keras.layers.Normalization(**given)),
        (
            Normalization(-1, *given.values(), True),
            keras.layers.Normalization(**given, invert=True),
        ),
        (Normalization(None, 3.0, 2.0), keras.layers.Normalization(None, 3.0, 2.0)),
    ):
        np.testing.assert_allclose(apply(ours), layer(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [RandomCrop, RandomFlip])
def test_a_seed_of_a_transform_replaces_the_run_seed(kind):
    options = {"padding": 2} if kind is RandomCrop else {}
    found = apply(kind(seed=7, **options), seed=SEED)
    assert np.array_equal(found, apply(kind(**options), seed=7))
    assert not np.array_equal(found, apply(kind(**options), seed=SEED))


def test_other_inputs_stay_unchanged_and_custom_transforms_compose():
    x = {"image": IMAGES, "meta": LABELS}
    batch = (x, LABELS, np.ones(32))
    chain = Compose([RandomFlip("horizontal")], key="image")
    found, y, weight = chain(batch, example_ids=IDS, epoch=0, seed=1)
    assert found["meta"] is LABELS
    assert y is LABELS
    assert weight is batch[2]
    assert not np.array_equal(found["image"], IMAGES)
    second = Compose([RandomFlip("horizontal")], key=1)(
        ((LABELS, IMAGES), y), example_ids=IDS, epoch=0, seed=1
    )
    assert np.array_equal(second[0][1], found["image"])
    alone = RandomFlip("horizontal")(tf.constant(IMAGES), example_ids=IDS, epoch=0, seed=1)
    assert np.array_equal(alone, found["image"])

    def invert(batch, *, example_ids, epoch, seed):
        return 255 - batch[0], batch[1]

    assert np.array_equal(
        apply(Compose([RandomFlip("horizontal"), invert])), 255 - apply(RandomFlip("horizontal"))
    )


def test_evaluation_skips_random_transforms():
    plain = for_evaluation(TRANSFORMS["all"])
    expected = Compose(
        [Rescaling(1 / 255), Normalization(mean=[0.4, 0.5, 0.6], variance=[0.04, 0.09, 0.16])]
    )
    assert np.array_equal(apply(plain), apply(expected))
    assert for_evaluation(RandomCrop(padding=1)) is None
    assert for_evaluation(None) is None
    assert for_evaluation(TRANSFORMS["rescale"]) is TRANSFORMS["rescale"]
    of_inputs = Compose(
        [Compose([RandomFlip("horizontal"), Rescaling(2)], key="left"), RandomCrop()]
    )
    (left,) = for_evaluation(of_inputs).transforms
    assert (left.key, left.transforms) == ("left", (Rescaling(2),))


@pytest.mark.parametrize(
    ("act", "where", "code"),
    [
        (lambda: RandomCrop(padding=-1), "RandomCrop: padding", "not-an-int"),
        (lambda: RandomCrop((32, 32)), "RandomCrop: height", "not-an-int"),
        (lambda: RandomCrop(4, 4, seed="x"), "RandomCrop: seed", "not-an-int"),
        (lambda: RandomFlip("sideways"), "RandomFlip: mode", "unknown-value"),
        (
            lambda: RandomFlip(data_format="channels_first"),
            "RandomFlip: data_format",
            "unknown-value",
        ),
        (lambda: Normalization(mean=0, variance=0), "Normalization", "out-of-range"),
        (lambda: Normalization(variance=1), "Normalization", "out-of-range"),
        (lambda: Normalization(1, [0.0], [1.0]), "Normalization", "out-of-range"),
        (lambda: Normalization(mean=[0, 1], variance=1), "Normalization", "out-of-range"),
        (lambda: Normalization(None, [0, 1], [1, 1]), "Normalization", "out-of-range"),
        (Normalization, "Normalization", "out-of-range"),
        (
            lambda: apply(RandomFlip("horizontal"), IMAGES[..., 0]),
            "augmentation",
            "unsupported-data",
        ),
        (
            lambda: RandomFlip("horizontal")(
                ({"a": IMAGES}, LABELS), example_ids=IDS, epoch=0, seed=1
            ),
            "augmentation",
            "unsupported-data",
        ),
    ],
)
def test_invalid_transforms_are_refused(act, where, code):
    assert refused(act) == (where, code)


def test_images_of_unknown_size_below_the_window_are_rejected():
    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8)])
    def cropped(images):
        crop = RandomCrop(6, 5)
        return crop((images, IDS), example_ids=IDS, epoch=0, seed=SEED)[0]

    assert np.array_equal(cropped(IMAGES), IMAGES)
    with pytest.raises(tf.errors.InvalidArgumentError, match="smaller than a window of 5"):
        cropped(IMAGES[:, :, 1:])
    with pytest.raises(tf.errors.InvalidArgumentError, match="smaller than a window of 9"):
        apply(RandomCrop(9, 9))


def test_the_model_is_built_for_the_transformed_size():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    crop = RandomCrop(4, 3)

    def of_a_known_size(batch, **draws):
        images, labels = crop(batch, **draws)
        return tf.reshape(images, (int(images.shape[0]), 4, 3, 3)), labels

    source = ArraySource(IMAGES, LABELS % 2, transform=of_a_known_size)
    tfdist.fit(model, source, batch_size=8, verbose=0)
    assert model.layers[-1].kernel.shape == (4 * 3 * 3, 2)
