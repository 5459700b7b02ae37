"""A job that fails within a step: `failing.py kill` or `failing.py data`.

``kill`` ends the last task while the first one waits for it. ``data`` trains with data that Python
code cannot read.
"""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.strategy.job import current_job
from tfdist.strategy.pipeline_setup import PipelineOptions

X, Y = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")


class Kills(keras.layers.Layer):
    """Ends the last task in its third step."""

    def call(self, x):
        with tf.control_dependencies([tf.numpy_function(self.count, [], tf.bool)]):
            return tf.identity(x)

    @staticmethod
    def count():
        if len(ended) == 2 and current_job().name == "worker-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return np.True_


class Unreadable(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("a file that is not there")
        return X[:8], Y[:8]


ended = []
noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))
strategy = tfdist.make_strategy(pipeline=PipelineOptions(cut=["first"], keep="compiled"))
with strategy.scope():
    layers = [keras.layers.Dense(4, name="first"), Kills(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
if sys.argv[1] == "kill":
    model.fit(X, Y, batch_size=8, callbacks=[noted], verbose=0)
else:
    model.fit(Unreadable(), verbose=0, shuffle=False)
