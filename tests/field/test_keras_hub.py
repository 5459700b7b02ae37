"""Models of KerasHub: `fit`, `evaluate` and `predict` preprocess what they are given."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import models
from tests.models import difference
from tests.refusals import refused
from tfdist.cluster import KINDS
from tfdist.data.resolve import as_source, check_supported
from tfdist.data.source import preprocessed
from tfdist.strategy import Job, job

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
WORDS = ["the", "quick", "brown", "fox", "jumped", "dog", "lazy"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
TEXTS = np.array([" ".join(RNG.choice(WORDS, RNG.integers(2, 9))) for _ in range(20)])
CLASSES = RNG.integers(0, 3, 20)
IMAGES = RNG.integers(0, 256, (20, 8, 8, 3)).astype("uint8")
OPTIONS = {"batch_size": 6, "epochs": 2, "shuffle": False}
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **options)
    return model


def bert():
    tokenizer = keras_hub.tokenizers.BertTokenizer(vocabulary=VOCABULARY)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(VOCABULARY), max_sequence_length=12, dropout=0.0, **SIZES
    )
    return compiled(
        keras_hub.models.BertTextClassifier(
            backbone=backbone, preprocessor=preprocessor, num_classes=3, dropout=0.0
        )
    )


def gpt():
    vocabulary = {letter: index for index, letter in enumerate("Ġabcdefghijklmnopqrstuvwxyz")}
    vocabulary |= {"ab": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer(vocabulary=vocabulary, merges=["a b"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(vocabulary), max_sequence_length=12, dropout=0.0, **SIZES
    )
    backbone.enable_lora(2)
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])
    return model


def vit():
    converter = keras_hub.layers.ViTImageConverter(image_size=(8, 8), scale=1 / 255)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(image_converter=converter)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=8,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    return compiled(
        keras_hub.models.ViTImageClassifier(
            backbone=backbone, preprocessor=preprocessor, num_classes=3
        )
    )


def resized():
    """A task without a preprocessor."""
    model = vit()
    return compiled(keras_hub.models.ViTImageClassifier(backbone=model.backbone, num_classes=3))


def batches(*data):
    return tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(6)


PROGRAMS = {
    "texts": (bert, {"x": TEXTS, "y": CLASSES, "validation_data": (TEXTS[:7], CLASSES[:7])}),
    "weighted batches": (
        bert,
        {"x": batches(TEXTS, CLASSES), "batch_size": None, "class_weight": {0: 2.0, 2: 0.5}},
    ),
    "targets by the preprocessor": (gpt, {"x": TEXTS}),
    "images": (vit, {"x": IMAGES, "y": CLASSES}),
    "a list of labels": (resized, {"x": IMAGES, "y": CLASSES.tolist()}),
    "lists of the documentation": (
        bert,
        {"x": TEXTS.tolist(), "y": CLASSES.tolist(), "validation_data": (list(TEXTS[:7]), [0] * 7)},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hub_models_train_like_under_keras(strategies, name):
    make, data = PROGRAMS[name]
    theirs, history = models.trained(None, make, **OPTIONS | data)
    ours, found = models.trained(strategies[2], make, **OPTIONS | data)
    assert difference(ours, theirs) < 1e-5
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, err_msg=key)


def test_model_fit_in_scope_reads_examples_by_index(strategies, monkeypatch):
    """Shuffled by the seed, where its own batches would come in their order.

    MLflow's autolog patches `keras.Model.fit`, and sees the call.
    """
    by_mlflow, seen = keras.Model.fit, []

    def patched(self, x, *args, **options):
        seen.append((x, *args))
        return by_mlflow(self, x, *args, **options)

    monkeypatch.setattr(keras.Model, "fit", patched)
    monkeypatch.setattr(job, "_made", [])
    job.remember(Job(strategy=strategies[2], kind=KINDS["mirrored"]))
    options = {"batch_size": 6, "epochs": 2, "verbose": 0}
    with strategies[2].scope():
        one, other = bert(), bert()
    other.set_weights(one.get_weights())
    found = one.fit(TEXTS, CLASSES, callbacks=[tfdist.Run(seed=3)], **options)
    wanted = tfdist.fit(other, TEXTS, CLASSES, seed=3, **options)
    assert found.history == wanted.history
    assert seen == [(TEXTS,)] * 2
    assert difference(one, other) == 0
    assert one.evaluate(TEXTS, CLASSES, verbose=0) == tfdist.evaluate(other, TEXTS, CLASSES)


def test_hub_models_evaluate_and_predict_like_under_keras(strategies):
    theirs = bert()
    with strategies[2].scope():
        ours = bert()
    ours.set_weights(theirs.get_weights())
    for one, other in (
        (tfdist.evaluate(ours, TEXTS, CLASSES), theirs.evaluate(TEXTS, CLASSES, verbose=0)),
        (tfdist.predict(ours, TEXTS), theirs.predict(TEXTS, verbose=0)),
        (tfdist.predict(ours, TEXTS.tolist()), theirs.predict(TEXTS, verbose=0)),
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [bert, gpt])
def test_mlflow_predicts_in_one_task_of_several(strategies, monkeypatch, make):
    monkeypatch.setattr(job, "_made", [])
    job.remember(Job(strategy=strategies[1], kind=KINDS["multiworker"]))
    with strategies[1].scope():
        model = make()
    mlflow = {"__name__": "mlflow.tensorflow"}
    exec("signature = lambda model, x: model.predict(x)", mlflow)
    wanted = tfdist.predict(model, TEXTS, verbose=0)
    np.testing.assert_allclose(mlflow["signature"](model, TEXTS), wanted, rtol=1e-5, atol=1e-6)


def test_preprocess_samples_of_a_users_model_is_not_called(strategies):
    class Own(keras.Sequential):
        def preprocess_samples(self, *data):
            raise NotImplementedError

    with strategies[1].scope():
        model = Own([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tfdist.fit(model, np.ones((4, 1)), np.ones((4, 1)), verbose=0)


def test_a_table_of_its_tokenizer_is_refused_under_ps():
    source = preprocessed(as_source(TEXTS), gpt().preprocess_samples)
    assert refused(lambda: check_supported(source, KINDS["ps"])) == (
        "data under the ps strategy",
        "unsupported-data",
    )
