"""Data that differ between processes, one case after the other: right, warned of or refused.

agreeing.py OUT
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

EXAMPLES, BATCH = 96, 16
IDS = np.arange(EXAMPLES)


class Seen(keras.metrics.Metric):
    """How often each example was seen, by its number."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(EXAMPLES,), initializer="zeros", name="counts")

    def update_state(self, ids):
        ones = tf.ones_like(ids, tf.float32)
        self.counts.assign_add(tf.math.unsorted_segment_sum(ones, ids, EXAMPLES))

    def result(self):
        return tf.reduce_sum(self.counts)


class Counting(keras.Model):
    """Trains on nothing but the numbers of the examples, and counts them."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 1))
        self.seen = Seen()
        self.built = True

    @property
    def metrics(self):
        return [self.seen]

    def call(self, x):
        return self.dense(tf.cast(tf.reshape(x, [tf.shape(x)[0], -1])[:, :1], tf.float32))

    def train_step(self, data):
        x, y = data
        self.seen.update_state(tf.cast(tf.reshape(y, [-1]), tf.int32))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, tf.zeros_like(y, tf.float32), self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"seen": self.seen.result()}


def fresh():
    """Random numbers of this process alone, as of a program that sets no seed."""
    return np.random.default_rng(os.getpid())


def numbered(ids):
    return tf.data.Dataset.from_tensor_slices((ids[:, None].astype("float32"), ids[:, None]))


def shuffled():
    return numbered(IDS).shuffle(EXAMPLES).batch(BATCH)


def drawn_in_parallel():
    def draw(x, y):
        return x + tf.random.normal(tf.shape(x)), y

    stream = numbered(IDS).shuffle(50).map(draw, num_parallel_calls=4, deterministic=False)
    return stream.batch(BATCH).prefetch(2)


def layers_in_the_stream():
    flip = keras.layers.RandomFlip(seed=int(fresh().integers(1000)))
    images = np.random.default_rng(0).random((EXAMPLES, 4, 4, 1)).astype("float32")
    stream = tf.data.Dataset.from_tensor_slices((images, IDS[:, None])).shuffle(EXAMPLES)
    return stream.batch(BATCH).map(lambda x, y: (flip(x, training=True), y), num_parallel_calls=2)


def sampled():
    halves = [numbered(IDS[: EXAMPLES // 2]), numbered(IDS[EXAMPLES // 2 :])]
    return tf.data.Dataset.sample_from_datasets(halves).batch(BATCH)


def generated():
    def examples():
        yield from fresh().permutation(EXAMPLES)

    spec = tf.TensorSpec([], tf.int64)
    stream = tf.data.Dataset.from_generator(examples, output_signature=spec)
    return stream.map(lambda i: ([tf.cast(i, tf.float32)], [i])).batch(BATCH)


class Batches(keras.utils.PyDataset):
    """Batches of a PyDataset in the order of `ids`, its inputs with `noise`."""

    def __init__(self, ids, noise):
        super().__init__()
        self.ids, self.noise = ids, noise

    def __len__(self):
        return EXAMPLES // BATCH

    def __getitem__(self, index):
        ids = self.ids[index * BATCH : (index + 1) * BATCH, None]
        return ids + self.noise * fresh().normal(size=ids.shape).astype("float32"), ids


HOOKS = []


class Reshuffled(Batches):
    """Batches that `on_epoch_end` shuffles, with the numbers that all workers draw alike."""

    def on_epoch_begin(self):
        HOOKS.append("begin")

    def on_epoch_end(self):
        HOOKS.append("end")
        np.random.shuffle(self.ids)


def permuted():
    order = fresh().permutation(EXAMPLES)
    return {"x": IDS[order][:, None].astype("float32"), "y": IDS[order][:, None]}


CASES = {
    "a shuffle without a seed": lambda: {"x": shuffled()},
    "draws in a parallel map": lambda: {"x": drawn_in_parallel()},
    "random layers in a stream": lambda: {"x": layers_in_the_stream()},
    "sampled datasets": lambda: {"x": sampled()},
    "a generator of each process": lambda: {"x": generated()},
    "arrays permuted in each process": permuted,
    "a PyDataset shuffled in each process": lambda: {
        "x": Batches(fresh().permutation(EXAMPLES), 0)
    },
    "a PyDataset shuffled in on_epoch_end": lambda: {"x": Reshuffled(IDS.copy(), 0)},
    "a PyDataset with random inputs": lambda: {"x": Batches(IDS, 1)},
}


def counts_of(case, strategy):
    """How often this worker has seen each example, or why it was refused."""
    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse")
    seen = {}

    class Read(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            counts = strategy.experimental_local_results(model.seen.counts.value)
            seen["counts"] = np.sum([np.asarray(part) for part in counts], 0).tolist()

    try:
        tfdist.fit(model, **CASES[case](), batch_size=None, epochs=1, verbose=0, callbacks=[Read()])
    except tfdist.UsageError as error:
        return {"refused": str(error)}
    return seen


class Doubles(keras.callbacks.Callback):
    """Changes the weights of the chief alone, as where it loads some."""

    def on_epoch_end(self, epoch, logs=None):
        if tfdist.is_chief():
            self.model.set_weights([2 * weight for weight in self.model.get_weights()])


def weights_of_the_chief(strategy):
    """How each call is refused where weights differ."""
    ones, refused = np.ones((8, 1), "float32"), {}
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="only")])
        model.compile("sgd", "mse")
    calls = {
        "a callback": lambda: tfdist.fit(model, ones, ones, epochs=2, callbacks=[Doubles()]),
        "fit": lambda: tfdist.fit(model, ones, ones),
        "evaluate": lambda: tfdist.evaluate(model, ones, ones),
        "predict": lambda: tfdist.predict(model, ones),
    }
    for name, call in calls.items():
        try:
            call()
        except tfdist.UsageError as error:
            refused[name] = str(error)
    return refused


def main():
    strategy = tfdist.make_strategy()
    found = {case: counts_of(case, strategy) for case in CASES}
    with strategy.scope():
        identity = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    stream = numbered(IDS).shuffle(EXAMPLES).batch(BATCH)
    found["hooks"] = HOOKS
    found["weights"] = weights_of_the_chief(strategy)
    found["predicted"] = tfdist.predict(identity, stream, verbose=0)[:, 0].tolist()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with open(f"{sys.argv[1]}/agreeing-{index}.json", "w") as file:
        json.dump(found, file)


main()
