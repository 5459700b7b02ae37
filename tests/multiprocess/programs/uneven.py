"""Runs of tasks with different lengths, one after the other; each is an error in every task.

uneven.py [OUT] CASE...; with OUT each task writes its errors there, else the first one is raised.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
COUNT = 3 + 2 * INDEX  # of batches
X, Y = np.ones((48, 4), "float32"), np.ones((48, 1), "float32")
BATCH = X[:8], Y[:8]
SIGNATURE = tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1])


def known(count=COUNT):
    return tf.data.Dataset.from_tensors(BATCH).repeat(count)


def unknown(batches=lambda: [BATCH] * COUNT):
    return tf.data.Dataset.from_generator(batches, output_signature=SIGNATURE)


def only_once():
    batches = iter([BATCH] * COUNT)
    return unknown(lambda: batches)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return BATCH


def fit(x, y=None, **options):
    tfdist.fit(model, x, y, verbose=0, **options)


def loop(data=(X, Y), **options):
    optimizer, total = model.optimizer, keras.metrics.Sum()
    optimizer.build(model.trainable_variables)

    def step(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(data[0]) - data[1]) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    return tfdist.StepLoop(step, data, global_batch_size=8, metrics=[total], **options)


def skips(data):
    """Go on at step 6 of a stream, which is read again up to there."""
    loop(data, first_step=6).run(2)


CASES = {
    # before the first step
    "dataset": lambda: fit(known()),
    "generator": lambda: fit(unknown()),
    "PyDataset": lambda: fit(Batches()),
    "function": lambda: fit(lambda context: known()),
    "nothing": lambda: fit(known(3 - 3 * INDEX)),
    "validation": lambda: fit(X, Y, validation_data=known()),
    "evaluate": lambda: tfdist.evaluate(model, known(), verbose=0),
    "predict": lambda: tfdist.predict(model, known().map(lambda x, y: x), verbose=0),
    "batch_size": lambda: fit(X, Y, batch_size=8 * COUNT),
    "epochs": lambda: fit(X, Y, epochs=COUNT),
    "steps_per_epoch": lambda: fit(X, Y, batch_size=8, steps_per_epoch=COUNT),
    "no validation": lambda: fit(X, Y, validation_data=(X, Y) if INDEX else None),
    # at the step where one task has no more batches
    "passes": lambda: fit(unknown(), steps_per_epoch=7),
    "skipped": lambda: skips(unknown()),
    # the last one, as the tasks cannot go on together
    "function, only once": lambda: fit(lambda context: only_once(), steps_per_epoch=7),
    "steps": lambda: loop().run(COUNT),
    "results": lambda: [loop().run(3), INDEX and loop().run(2), loop().results()],
}

strategy = tfdist.make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
cases = [word for word in sys.argv[1:] if word in CASES]
out = [word for word in sys.argv[1:] if word not in CASES]
found = {}
for case in cases:
    try:
        CASES[case]()
        found[case] = "no error"
    except tfdist.UsageError as error:
        found[case] = str(error)
        if not out:
            raise
with open(f"{out[0]}/uneven-{INDEX}.json", "w") as file:
    json.dump(found, file)
os._exit(0)  # TensorFlow may wait a minute for each iterator that lived for milliseconds
