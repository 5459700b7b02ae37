"""Trains with every callback of Keras that writes or decides, and with validation data.

written.py OUT [kills]; with ``kills`` the last task kills itself in the first attempt, after
the callbacks have written an epoch and before the checkpoint at the end of that epoch.
"""

import http.server
import json
import os
import pathlib
import signal
import sys
import threading

import keras
import numpy as np

import tfdist

OUT, KILLS = pathlib.Path(sys.argv[1]), "kills" in sys.argv
CONFIG = json.loads(os.environ["TF_CONFIG"])
EPOCHS, KILLED_IN = 4, 2
random = np.random.default_rng(0)
X = random.random((42, 4)).astype("float32")
Y = (X @ random.random((4, 1))).astype("float32")

strategy = tfdist.make_strategy()


class Received(http.server.BaseHTTPRequestHandler):
    """Server of a RemoteMonitor."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with (OUT / "posted.jsonl").open("ab") as file:
            file.write(body + b"\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Log nothing."""


class LogsRate(keras.callbacks.Callback):
    """Logger of the learning rate, which converts variables to numbers."""

    chief_only = True

    def on_epoch_end(self, epoch, logs=None):
        rate, count = self.model.optimizer.learning_rate, self.model.optimizer.iterations
        with (OUT / "rates.txt").open("a") as file:
            print(epoch, int(count), f"{float(rate):.5f}", f"{rate:.5f}", file=file)


class Kills(keras.callbacks.Callback):
    """Callback that kills its task."""

    def on_epoch_end(self, epoch, logs=None):
        last = CONFIG["task"]["index"] == len(CONFIG["cluster"].get("worker", [0])) - 1
        if KILLS and last and epoch == KILLED_IN and CONFIG["tfdist"]["attempt"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Received)
threading.Thread(target=server.serve_forever, daemon=True).start()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
C = keras.callbacks
callbacks = [
    tfdist.Run(seed=3),
    tfdist.BackupAndRestore(OUT.with_suffix(".backup"), save_freq=3),
    C.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    C.ReduceLROnPlateau("val_loss", min_delta=1e9, patience=1, factor=0.5),
    C.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
    C.TerminateOnNaN(),
    C.SwapEMAWeights(swap_on_epoch=True),
    C.ModelCheckpoint(OUT / "e{epoch}-{val_loss:.2f}.keras"),
    C.ModelCheckpoint(OUT / "best.keras", save_best_only=True),
    tfdist.ModelCheckpoint(OUT / "whole.keras"),
    C.ModelCheckpoint(OUT / "s{epoch}-{batch}.keras", save_freq=3),
    C.CSVLogger(OUT / "log.csv"),
    C.TensorBoard(OUT / "board", histogram_freq=1, write_images=True, update_freq=2),
    C.RemoteMonitor(f"http://127.0.0.1:{server.server_port}"),
    LogsRate(),
    Kills(),
]
history = model.fit(
    X,
    Y,
    batch_size=10,
    epochs=EPOCHS,
    verbose=2,
    validation_data=(X[:12], Y[:12]),
    callbacks=callbacks,
)
if tfdist.is_chief():
    (OUT / "history.json").write_text(json.dumps(history.history))
tfdist.barrier()
