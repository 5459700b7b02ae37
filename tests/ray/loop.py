"""The loop of Ray's TensorflowTrainer example, with `tfdist.fit` in it; the launcher runs it too.

Usage: python -m tfdist.launch --strategy multiworker --workers 2 loop.py FOLDER
"""

import hashlib
import json
import os
import pathlib
import signal
import sys


def train_loop(config):
    """Trains; the chief writes the digest of the weights into the folder.

    Args:
      config: `folder`, of this run and shared by its workers; `in_ray`; `kill`: whether worker 1
        is killed in its third epoch, once.
    """
    # Ray sets it, for Keras 2, beside TF_CONFIG.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras
    import numpy as np

    import tfdist

    folder = pathlib.Path(config["folder"])

    class Report(keras.callbacks.Callback):
        """What `ReportCheckpointCallback` does: all workers report each epoch to Ray."""

        def on_epoch_end(self, epoch, logs=None):
            if config["in_ray"]:
                from ray import train

                train.report({"epoch": epoch, **logs})

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            mark = folder / "killed"
            if config["kill"] and epoch == 2 and not tfdist.is_chief() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def build_model():
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input(()), layers.Reshape((1,)), layers.Dense(10), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(1e-3), "mse", metrics=["mse"])
        return model

    strategy = tfdist.make_strategy()
    x = np.arange(200, dtype="float32") / 200
    data = {"x": x, "y": (2 * x)[:, None]}
    with strategy.scope():
        model = build_model()
    backup = tfdist.BackupAndRestore(folder / "backup", save_freq=5)
    history = model.fit(
        **data, batch_size=32, epochs=5, verbose=0,
        callbacks=[tfdist.Run(seed=3), backup, Report(), Killed()],
    )  # fmt: skip
    if tfdist.is_chief():
        weights = b"".join(w.tobytes() for w in model.get_weights())
        seen = {"history": history.history, "keras": keras.__version__}
        seen["digest"] = hashlib.sha256(weights).hexdigest()
        (folder / "seen.json").write_text(json.dumps(seen))
    tfdist.barrier()


if __name__ == "__main__":
    train_loop({"folder": sys.argv[1], "in_ray": False, "kill": False})
