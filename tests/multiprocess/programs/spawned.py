"""Functions of ``__main__`` as jobs; `tests/multiprocess/test_spawn.py` runs it."""

import json
import os
import signal
import sys

import tfdist

OFFSET = 3


class Answer:
    def __init__(self, value, task):
        self.value = value
        self.task = task


def task():
    me = json.loads(os.environ["TF_CONFIG"])["task"]
    return f"{me['type']}-{me['index']}"


def answer(value):
    print("value", value + OFFSET)
    return Answer(value + OFFSET, task())


def fail_in_one(index):
    if task() == f"worker-{index}":
        raise LookupError(f"none of {index}")
    signal.pause()


def fail_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        raise RuntimeError("the first time")
    return task()


def lock():
    import threading

    return threading.Lock()


def wait():
    def stop(signum, frame):
        print("saved", flush=True)
        sys.exit(130)

    signal.signal(signal.SIGINT, stop)
    print("ready", flush=True)
    signal.pause()


def within():
    try:
        tfdist.spawn(answer, 1)
    except tfdist.UsageError as error:
        return error.code, sys.argv


def train(x):
    import keras

    with tfdist.make_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = tfdist.fit(model, x, x[:, :1], batch_size=8, epochs=2, verbose=0, seed=1)
    return task(), history.history["loss"], model.get_weights()


def training():
    """A job that trains, from a process that has used TensorFlow itself."""
    import numpy as np
    import tensorflow as tf

    x = tf.ones((32, 4)).numpy()
    found, losses, weights = tfdist.spawn(train, x, strategy="ps", workers=1)
    assert (found, len(losses)) == ("chief-0", 2)
    assert all(isinstance(w, np.ndarray) for w in weights)


def failure(fn, *args, **options):
    try:
        tfdist.spawn(fn, *args, **options)
    except tfdist.JobFailed as error:
        return error
    raise AssertionError("it did not fail")


def checks(start):
    """All that needs no one from outside."""
    found = tfdist.spawn(answer, 4, workers=2, start=start)
    assert isinstance(found, Answer)
    assert (found.value, found.task) == (7, "worker-0")
    assert tfdist.spawn(bytearray, 3_000_000, strategy="single", start=start) == bytes(3_000_000)

    error = failure(fail_in_one, 1, workers=2, start=start)
    assert (error.task, error.exit_code) == ("worker-1", 1), error
    assert isinstance(error.__cause__, LookupError)
    assert 'raise LookupError(f"none of {index}")' in error.traceback
    assert "in serve" not in error.traceback

    again = {"max_restarts": 1, "run_dir": "again", "workers": 2, "start": start}
    assert tfdist.spawn(fail_once, os.path.abspath("once"), **again) == "worker-0"

    error = failure(lock, strategy="single", start=start)
    assert error.exit_code == 1
    assert "cannot pickle" in str(error.__cause__)
    assert tfdist.spawn(sys.exit, 0, strategy="single", start=start) is None
    assert tfdist.spawn(within, strategy="single", start=start) == ("nested-launcher", sys.argv)

    os.mkdir("closed")
    open("closed/logs", "w").close()
    error = failure(answer, 1, run_dir="closed", start=start)
    assert (error.task, error.exit_code) == ("", 2)
    assert "--run_dir: cannot write to" in str(error)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        try:
            tfdist.spawn(wait, strategy="single", start="exec")
        except KeyboardInterrupt as error:
            print("interrupted:", error)
    elif sys.argv[1] == "train":
        training()
    else:
        checks(sys.argv[1])
        print("all", os.listdir("/proc/self/fd").__len__() < 20)
