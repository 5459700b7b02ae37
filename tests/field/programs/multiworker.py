"""One job of three workers, in which the scripts of several issues run one after the other."""

import json
import os
import pathlib
import sys

import keras

import tfdist

strategy = tfdist.make_strategy()

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import models  # noqa: E402
from recorded import record  # noqa: E402

OUT = pathlib.Path(sys.argv[1])
INDEX = strategy.cluster_resolver.task_id


def keras_20585():
    with strategy.scope():
        model = models.digits()
    history = model.fit(
        models.digits_dataset(), epochs=3, steps_per_epoch=7, verbose=0,
        callbacks=[tfdist.Run(seed=3)],
    )  # fmt: skip
    return {"history": history.history, "weights": models.flat(model)}


def tensorflow_72388():
    with strategy.scope():
        model = models.quickstart()
    history = tfdist.fit(
        model, models.IMAGES, models.LABELS, batch_size=16, epochs=2, seed=3, verbose=0,
        validation_data=(models.IMAGES, models.LABELS),
    )  # fmt: skip
    return {"history": history.history, "weights": models.flat(model)}


def keras_20329():
    with strategy.scope():
        model = models.named_inputs()
    tfdist.fit(model, models.Named(), epochs=2, seed=3, verbose=0)
    evaluated = tfdist.evaluate(model, models.Named(), verbose=0)
    return {"evaluated": evaluated, "weights": models.flat(model)}


def recommenders_274():
    with strategy.scope():
        model = models.two_towers()
    events = {"user": models.USERS, "item": models.ITEMS}
    tfdist.fit(model, events, models.RATINGS, batch_size=32, epochs=2, seed=3, verbose=0)
    return {"weights": models.flat(model)}


class Tracker(keras.callbacks.Callback):
    """What a tracker's automatic logging does: a run as training begins, a line an epoch."""

    def __init__(self, folder):
        super().__init__()
        self.run = OUT / folder / f"run-{os.getpid()}.jsonl"

    def on_train_begin(self, logs=None):
        self.run.parent.mkdir(exist_ok=True)
        self.run.touch()

    def on_epoch_end(self, epoch, logs=None):
        with self.run.open("a") as file:
            file.write(json.dumps({"epoch": epoch, **logs}) + "\n")


def mlflow_5817():
    with strategy.scope():
        model = models.regression("sgd")
    trackers = [Tracker("everywhere"), tfdist.on_chief(Tracker("chief"))]
    history = tfdist.fit(
        model, models.X, models.Y, batch_size=12, epochs=2, seed=3, verbose=0, callbacks=trackers
    )
    tfdist.barrier()
    return {"history": history.history}


def tensorflow_58434():
    with strategy.scope():
        model = models.regression("sgd")
    tfdist.fit(model, models.X, models.Y, batch_size=12, verbose=0)
    if tfdist.is_chief():  # the others come to the end of their program meanwhile
        left = [path.read_text() for path in sorted(OUT.glob("leaving-*"))]
        model.save(OUT / "model.keras")
        return {"left": left}
    return {}


record(
    [
        keras_20585,
        tensorflow_72388,
        keras_20329,
        recommenders_274,
        mlflow_5817,
        tensorflow_58434,
    ],
    OUT / f"seen-{INDEX}.jsonl",
)
if not tfdist.is_chief():
    (OUT / f"leaving-{INDEX}").write_text("done")  # a pipe, at whose other end the chief waits
