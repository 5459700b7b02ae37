"""Range tests in a job: each task writes what it saw, and whether the model is what it was."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist


def main(out: Path) -> None:
    task = "{type}-{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.RandomState(0).randn(96, 6).astype("float32")
    y = x.sum(1, keepdims=True)
    tfdist.fit(model, x, y, batch_size=16, verbose=0, seed=3)
    before = state(model)
    found = tfdist.find_learning_rate(model, x, y, 16, lowest=1e-4, highest=1.0, steps=20)
    same = state(model) == before
    refused = ""
    try:
        tfdist.find_learning_rate(model, np.nan * x, y, 16, steps=10)
    except tfdist.UsageError as error:
        refused = error.code
    seen = {
        "rates": found.rates,
        "losses": found.losses,
        "suggestion": found.suggestion,
        "same": same,
        "same after an error": state(model) == before,
        "refused": refused,
    }
    (out / f"{task}.json").write_text(json.dumps(seen))
    tfdist.barrier()


def state(model: keras.Model) -> list[str]:
    """The bytes of every variable, of this task's replicas."""
    variables = [*model.weights, *model.optimizer.variables]
    return [v.numpy().tobytes().hex() for v in variables]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
