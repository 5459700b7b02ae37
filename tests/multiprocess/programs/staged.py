"""A pipeline job that does what its tests look at; each task writes what it saw."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tfdist
from tfdist.strategy.job import current_job
from tfdist.strategy.stages import PipelineOptions

OUT, DOES = pathlib.Path(sys.argv[1]), sys.argv[2]
random = np.random.default_rng(0)
X = random.random((26, 5)).astype("float32")
Y = random.integers(0, 3, (26,))
L = keras.layers


def staged_model():
    """Weights that each task draws by itself: the chief's are to count."""
    layers = [L.Dense(6, activation="relu", kernel_regularizer="l2", name=f"d{i}") for i in (0, 1)]
    head = [L.BatchNormalization(name="norm"), L.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((5,)), *layers, *head])
    model.compile(
        optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and DOES == "dies" and current_job().name == "worker-1":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    stages = int(os.environ.get("STAGES", "2"))
    cut = {1: None, 2: ["d1"], 3: ["d0", "d1"]}[stages] if DOES != "auto" else None
    options = PipelineOptions(
        split_size=4, cut=cut, keep="recompute" if DOES == "again" else "tape"
    )
    strategy = tfdist.make_strategy(pipeline=options)
    keras.utils.set_random_seed(1 if tfdist.is_chief() else 99)
    with strategy.scope():
        model = staged_model()
    callbacks = [Dies()]
    if DOES == "saves":
        callbacks.append(tfdist.BackupAndRestore(OUT / "checkpoints"))
    history = tfdist.fit(
        model, X, Y, batch_size=8, epochs=2, seed=3, verbose=0, callbacks=callbacks,
        validation_data=(X[:7], Y[:7]),
    )  # fmt: skip
    seen = {
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
        "slots": [np.asarray(v.value).tolist() for v in model.optimizer.variables],
        "evaluated": tfdist.evaluate(model, X, Y, batch_size=8, verbose=0),
        "predicted": tfdist.predict(model, X, batch_size=8, verbose=0).tolist(),
    }
    (OUT / f"{DOES}-{stages}-{current_job().name}.json").write_text(json.dumps(seen))
