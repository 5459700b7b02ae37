"""The demo of ``make demo``, which prints a line at its first step."""

import sys

import keras

from tfdist import train
from tfdist.app import run

FIRST = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: print("first step" if not batch else "", flush=True)
)


def fit(*arguments, callbacks, **options):
    """Train with one more callback."""
    return whole_fit(*arguments, callbacks=[*callbacks, FIRST], **options)


whole_fit, run.fit = run.fit, fit
sys.exit(train.main())
