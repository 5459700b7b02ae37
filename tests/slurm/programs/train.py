"""`tfdist.train` that says how far it is, and can be held where a test wants it.

While HOLD names a file that exists, the chief waits at the end of each virtual epoch for a signal
that asks it to stop, or for the file to go. What is computed is the same.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras

from tfdist import train
from tfdist.app import run
from tfdist.strategy import is_chief

HOLD = Path(os.environ.get("HOLD", "/none"))
LONGEST_S = 600
PAUSE_S = 0.02


class Held(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if is_chief():
            print(f"epoch {epoch} begins", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        deadline_s = time.monotonic() + LONGEST_S
        if is_chief() and HOLD.is_file():
            print(f"held after epoch {epoch}", flush=True)
            while HOLD.is_file() and time.monotonic() < deadline_s:
                if signal.getsignal(signal.SIGTERM).__self__.signum:  # of tfdist's StopRequests
                    break
                time.sleep(PAUSE_S)


def fit(*arguments, callbacks, **options):
    return whole_fit(*arguments, callbacks=[*callbacks, Held()], **options)


whole_fit, run.fit = run.fit, fit
sys.exit(train.main())
