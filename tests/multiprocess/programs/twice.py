"""A ps job in which one work unit is begun again, as after the death of its worker."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.tools.ledger import Ledger
from tfdist.ps.engine import Work

strategy = tfdist.make_strategy()
run = Work.__call__
lost = []


def run_and_lose_the_first(self, first, last, place):
    result = run(self, first, last, place)
    if first == 0 and not lost:
        lost.append(place)
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    return result


Work.__call__ = run_and_lose_the_first
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.zeros((64, 1), "float32")
tfdist.fit(model, x, x, batch_size=4, seed=1, verbose=0, callbacks=[Ledger(sys.argv[1])])
