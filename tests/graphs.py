"""Functional graphs of every shape that a pipeline cuts."""

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
OPEN = 8
"""Size of an axis that a model leaves open."""


def residual():
    image = keras.Input((8, 8, 2), name="image")
    x = L.Conv2D(4, 3, padding="same", activation="relu", name="stem")(image)
    x = L.MaxPooling2D(3, strides=1, padding="same", name="max")(x)  # of equal values, too
    for block in range(2):
        y = L.BatchNormalization(name=f"norm{block}")(x)
        y = L.Conv2D(4, 3, padding="same", activation="relu", name=f"conv{block}")(y)
        x = L.Add(name=f"add{block}")([x, L.Dropout(0.3, name=f"dropout{block}")(y)])
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, L.Dense(3, name="head")(x), name="residual")


def words():
    """Integers in, masks that cross every cut, and layers of no, one and several draws."""
    ids = keras.Input((6,), dtype="int32", name="ids")
    x = L.Embedding(10, 4, mask_zero=True, name="embed")(ids)
    x = L.LSTM(5, return_sequences=True, dropout=0.3, recurrent_dropout=0.3, name="lstm0")(x)
    x = L.Dropout(0.2, name="drop")(L.LSTM(5, name="lstm1")(x))
    return keras.Model(ids, L.Dense(3, name="head")(x), name="words")


def several():
    """Two inputs, of which the second is first used late, and two outputs, one made early."""
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    x = L.Dense(5, activation="tanh", name="first", kernel_regularizer="l2")(a)
    early = L.Dense(3, name="early")(x)
    x = L.Dense(5, name="second", activity_regularizer="l1")(x)
    x = L.Concatenate(name="join")([x, b])
    return keras.Model([a, b], [early, L.Dense(3, name="late")(x)], name="several")


def nested():
    """Models inside the model: one that has one inside, called for two inputs, and a Sequential."""
    ids = keras.Input((6,), dtype="int32", name="ids")
    embed = keras.Sequential([keras.Input((6,), dtype="int32"), L.Embedding(10, 4, mask_zero=True)])
    embedded = keras.Model(ids, L.Dense(4, name="first")(embed(ids)), name="embedded")
    x = keras.Input((6, 4), name="x")
    encoder = keras.Model(
        {"x": x}, L.Dense(5, name="last")(L.LSTM(5, name="lstm")(x)), name="encoder"
    )
    first, second = (keras.Input((6,), dtype="int32", name=name) for name in "ab")
    y = L.Concatenate(name="join")([encoder({"x": embedded(each)}) for each in (first, second)])
    head = keras.Sequential([keras.Input((10,)), L.Dense(4, name="hidden"), L.Dropout(0.2)])
    y = L.Dense(3, name="out")(head(y, training=False))
    return keras.Model([first, second], y, name="nested")


def forked():
    """Two layers and an operation read one input, a layer is called twice, and ops are sliced."""
    x = keras.Input((4,), name="x")
    twice = L.Dense(4, activation="tanh", name="twice")
    y = L.Add(name="sum")([twice(L.Dense(4, name="left")(x)), twice(L.Dense(4, name="right")(x))])
    y = L.Concatenate(name="join")([L.Dense(4, name="middle")(y)[:, 1:], x * 2.0])
    return keras.Model(x, {"label": L.Dense(3, name="label")(y)}, name="forked")


def tagger():
    """A label for each word of a text of any length."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = L.LSTM(6, return_sequences=True, name="lstm")(L.Embedding(10, 4, name="embed")(ids))
    return keras.Model(ids, L.Dense(3, name="head")(L.Dense(5, activation="tanh")(x)))


def images():
    """A label for each pixel of an image of any size, which pooling makes smaller in between."""
    image = keras.Input((None, None, 2), name="image")
    x = L.MaxPooling2D()(L.Conv2D(4, 3, padding="same", name="stem")(image))
    x = L.UpSampling2D()(L.Conv2D(4, 3, name="valid")(L.ZeroPadding2D()(x)))
    return keras.Model(image, L.Conv2D(3, 1, name="head")(x))


@keras.saving.register_keras_serializable("tests")
class MeanOfWords(L.Layer):
    """A text's vector, of as many words as it has."""

    def call(self, x):
        return tf.reduce_mean(x, axis=1)

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], x.shape[-1]), x.dtype)


def ragged():
    ids = keras.Input((None,), dtype="int32", ragged=True, name="ids")
    x = MeanOfWords(name="mean")(L.Embedding(10, 4, name="embed")(ids))
    return keras.Model(ids, L.Dense(3)(L.Dense(5, activation="tanh")(x)))


def sparse():
    """Two layers far from each other read what is sparse."""
    x = keras.Input((6,), sparse=True, name="x")
    y = L.Dense(5, activation="tanh")(L.Dense(4)(x))
    return keras.Model(x, L.Dense(3)(L.Concatenate()([y, L.Dense(2, name="late")(x)])))


SHAPES = {
    make.__name__: make
    for make in (forked, residual, nested, words, several, tagger, images, ragged, sparse)
}


def data_of(model, rows):
    """Inputs and labels of as many rows as there are asked for."""
    random = np.random.default_rng(3)

    def drawn(tensor):
        shape = (rows, *(size or OPEN for size in tensor.shape[1:]))
        if "float" in tensor.dtype:
            dense = random.random(shape, "float32")
            return tf.sparse.from_dense(dense * (dense > 0.5)) if tensor.sparse else dense
        ids = random.integers(0, 10, shape).astype("int32")
        lengths = random.integers(1, OPEN, rows)
        return tf.RaggedTensor.from_tensor(ids, lengths) if tensor.ragged else ids

    def label(tensor):
        return random.integers(0, 3, (rows, *(size or OPEN for size in tensor.shape[1:-1])))

    given, made = map(keras.tree.lists_to_tuples, (model._inputs_struct, model._outputs_struct))
    return keras.tree.map_structure(drawn, given), keras.tree.map_structure(label, made)


def batches_of(model, rows, *, batch):
    """The same as a dataset, which alone may have ragged and sparse batches."""
    return tf.data.Dataset.from_tensor_slices(data_of(model, rows)).batch(batch)
