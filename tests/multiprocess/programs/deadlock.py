"""Stands still at another place in each attempt: the arguments, first to last.

The last worker does in a ``callback``, in the ``data`` and in a ``py_function`` of the step;
``nowhere`` is an attempt that ends.
"""

import json
import os
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import tfdist

CONFIG = json.loads(os.environ["TF_CONFIG"])
PLACE = sys.argv[CONFIG["tfdist"]["attempt"]]
IS_LAST = CONFIG["task"]["index"] == len(CONFIG["cluster"].get("worker", [0])) - 1


def stands_still(*_):
    """Takes a lock twice."""
    lock = threading.Lock()
    lock.acquire()
    print("locked", flush=True)
    lock.acquire()


def batches():
    """Gives twenty batches, or stops after ten."""
    for number in range(20):
        if PLACE == "data" and IS_LAST and number == 10:
            stands_still()
        yield np.ones((8, 2), np.float32), np.zeros(8, np.int32)


def stop():
    """Calls Python from a step."""
    with tf.control_dependencies([tf.py_function(stands_still, [], [])]):
        return tf.constant(0)


def go_on():
    """Does not."""
    return tf.constant(0)


class Model(keras.Sequential):
    """One whose step may call Python."""

    def train_step(self, data):
        if PLACE == "py_function" and IS_LAST:
            with tf.control_dependencies([tf.cond(self.optimizer.iterations > 9, stop, go_on)]):
                return super().train_step(data)
        return super().train_step(data)


class Callback(keras.callbacks.Callback):
    """May hang when the training has begun."""

    def on_epoch_end(self, epoch, logs=None):
        if PLACE == "callback" and IS_LAST:
            stands_still()


strategy = tfdist.make_strategy()
with strategy.scope():
    model = Model([keras.layers.Input((2,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
types = tf.TensorSpec((8, 2), tf.float32), tf.TensorSpec((8,), tf.int32)
data = tf.data.Dataset.from_generator(batches, output_signature=types)
tfdist.fit(model, data, epochs=2, steps_per_epoch=20, verbose=0, callbacks=[Callback()])
tfdist.barrier()
