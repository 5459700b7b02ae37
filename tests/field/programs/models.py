"""Models and data that the replayed jobs and the tests that judge them have in common."""

import keras
import numpy as np
import tensorflow as tf

from tests.multiprocess.programs.zoo import Ramp, descending, flat

__all__ = ["Ramp", "descending", "flat"]

RNG = np.random.RandomState(0)
X = RNG.randn(48, 6).astype("float32")
Y = (X @ RNG.randn(6, 1)).astype("float32")
IMAGES = RNG.rand(96, 8, 8).astype("float32")
LABELS = (IMAGES.mean((1, 2)) * 40).astype("int64") % 10
USERS = np.array([f"user {i}" for i in RNG.permutation(100)])
ITEMS = np.array([f"item {i}" for i in RNG.permutation(100)])
RATINGS = RNG.rand(100, 1).astype("float32") * 5


def digits():
    """The convolutional network of TensorFlow's tutorial on several workers, smaller."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


def digits_dataset():
    """The tutorial's dataset, with a seed, so that every task reads the same batches."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))
    return data.shuffle(96, seed=7).repeat().batch(12)


def quickstart():
    """TensorFlow's first model, with its Dropout."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Named(keras.utils.PyDataset):
    """Batches whose inputs have names."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return {"past": X[rows, :4], "now": X[rows, 4:]}, Y[rows]


def named_inputs():
    keras.utils.set_random_seed(1)
    past, now = keras.Input((4,), name="past"), keras.Input((2,), name="now")
    joined = keras.layers.Concatenate()([keras.layers.Dense(3)(past), now])
    model = keras.Model({"past": past, "now": now}, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    return model


def two_towers():
    """Users and items as vectors, found by name, whose product is a rating."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs, towers = {}, []
    for name, vocabulary in {"user": USERS, "item": ITEMS}.items():
        inputs[name] = keras.Input((), dtype="string", name=name)
        ids = layers.StringLookup(vocabulary=np.sort(vocabulary))(inputs[name])
        towers.append(layers.Embedding(101, 8)(ids))
    model = keras.Model(inputs, layers.Dense(1)(layers.Multiply()(towers)))
    model.compile(keras.optimizers.Adagrad(0.5), "mse")
    return model


def regression(optimizer):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model
