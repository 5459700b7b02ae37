"""A ps job in which one piece of work is handed out twice, as after a worker's death."""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfdist
from tfdist.training.engines.parameter_server import ParameterServerEngine
from tfdist.training.ledger import Ledger

strategy = tfdist.make_strategy()
hand_out = ParameterServerEngine._hand_out


def hand_out_twice(self, work, first, last, *, number=0):
    if first == 0:
        hand_out(self, work, first, last, number=number)
    return hand_out(self, work, first, last, number=number)


ParameterServerEngine._hand_out = hand_out_twice
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.zeros((64, 1), "float32")
tfdist.fit(model, x, x, batch_size=4, seed=1, verbose=0, ledger=Ledger(sys.argv[1]))
