"""Trains by `model.fit` and by `tfdist.fit`, each with a kill and without: `killed.py OUT`.

Prints a line with the history and a digest of the weights for each training. The first kill hits
the last worker, and the second one the chief.
"""

import json
import os
import pathlib
import signal
import sys

import keras

import tfdist
from tfdist.strategy import current_job

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import zoo

OUT, CONFIG = pathlib.Path(sys.argv[1]), json.loads(os.environ["TF_CONFIG"])
TASK = CONFIG["task"]
(OUT / f"{TASK['type']}-{TASK['index']}.pid").write_text(str(os.getpid()))
strategy = tfdist.make_strategy()
KIND = str(current_job().kind)
LAST = len(CONFIG["cluster"].get("worker", [0])) - 1


class KillOnce(keras.callbacks.Callback):
    """Kills a task within the second epoch, or a ps worker at its end."""

    def __init__(self, name, *, of_chief):
        super().__init__()
        self.mark, self.of_chief = OUT / f"{name}.killed", of_chief

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        of_this_task = tfdist.is_chief() if self.of_chief else TASK["index"] == LAST
        step = (1, 5) if self.of_chief else (1, 4)  # two failures at one step end a job
        if (self.epoch, batch) == step and of_this_task and (KIND != "ps" or self.of_chief):
            self.kill(os.getpid())

    def on_epoch_end(self, epoch, logs=None):
        if KIND == "ps" and epoch == 1 and not self.of_chief:  # no step is under way
            self.kill(int((OUT / "worker-0.pid").read_text()))

    def kill(self, process):
        if not self.mark.exists():
            self.mark.touch()
            os.kill(process, signal.SIGKILL)


def trained(fit, *callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    options = {"batch_size": 8, "epochs": 3, "verbose": 0, "validation_data": (zoo.X, zoo.Y)}
    history = fit(model, zoo.X, zoo.Y, callbacks=[tfdist.Run(seed=3), *callbacks], **options)
    if tfdist.is_chief():
        print("TRAINED", json.dumps([history.history, zoo.sha(model)]), flush=True)


for name, fit in {"model.fit": keras.Model.fit, "tfdist.fit": tfdist.fit}.items():
    steps = "epoch" if KIND == "pipeline" else 3
    kills = KillOnce(name, of_chief=fit is tfdist.fit)
    trained(fit, tfdist.BackupAndRestore(OUT / name, save_freq=steps), kills)
for fit in (keras.Model.fit, tfdist.fit):
    trained(fit)
