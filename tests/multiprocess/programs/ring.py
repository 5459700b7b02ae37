"""A multiworker job: gradients by the ring or by TensorFlow; worker 1 may leave the others.

Arguments: where to write, and ``ring``, ``collectives``, or that worker 1 ``dies`` or ``differs``.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import threading

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import collective_ops

import tfdist
from tfdist.strategy import current_job
from tfdist.training.keras_compat import reduction

reduction._BUCKET_BYTES = 2**20  # so that a step has several sums

OUT, HOW = pathlib.Path(sys.argv[1]), sys.argv[2]
options = None
if HOW == "collectives":
    communication = tf.distribute.experimental
    options = communication.CommunicationOptions(
        implementation=communication.CommunicationImplementation.RING
    )
strategy = tfdist.make_strategy(communication_options=options)
job = current_job()


class Dies(keras.callbacks.Callback):
    """Ends worker 1 within a range of steps."""

    def on_epoch_begin(self, epoch, logs=None):
        if HOW == "dies" and job.name == "worker-1" and epoch == 1:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()


class Model(keras.Sequential):
    """Sums what is of one shape in two places of the step, of which worker 1 may take the other."""

    def train_step(self, data):
        if HOW != "differs":
            return super().train_step(data)
        here, there = (lambda: reduction.sum_over_replicas([tf.zeros(3)])[0] for _ in range(2))
        own = tf.constant(job.name == "worker-1") & (self.optimizer.iterations > 5)
        with tf.control_dependencies([tf.cond(own, there, here)]):
            return super().train_step(data)


def counting(real):
    """Notes each call of a function."""

    def counted(*args):
        broadcasts.append(real.__name__)
        return real(*args)

    return counted


broadcasts: list[str] = []
collective_ops.broadcast_send = counting(collective_ops.broadcast_send)
collective_ops.broadcast_recv = counting(collective_ops.broadcast_recv)

draw = np.random.default_rng(5)
count = 96 if HOW != "dies" else 16_000  # enough to die in
x, y = draw.normal(size=(count, 8, 8, 1)).astype(np.float32), draw.integers(4, size=count)
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = Model(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(1000, activation="relu"),  # 1.2 MB: it fills a bucket
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
tfdist.fit(model, x, y, batch_size=16, epochs=4, seed=3, verbose=0, callbacks=[Dies()])
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
seen = {"by ring": job.ring is not None, "sha": digest, "broadcasts": len(broadcasts)}
(OUT / f"{HOW}-{job.name}.json").write_text(json.dumps(seen))
