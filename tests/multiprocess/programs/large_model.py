"""Trains a model whose weights and slots fill memory, each task in a control group of its own.

``GROUPS`` has the directories of the groups, by the task's index, with colons between them.
"""

import json
import os
import pathlib
import sys

INDEX = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
GROUP = pathlib.Path(os.environ["GROUPS"].split(":")[INDEX])
(GROUP / "cgroup.procs").write_text(str(os.getpid()))

import keras  # noqa: E402
import numpy as np  # noqa: E402

import tfdist  # noqa: E402

WIDTH, LAYERS = 2048, 10
L = keras.layers

if __name__ == "__main__":
    options = tfdist.PipelineOptions(split_size=4, cut="layer4" if len(sys.argv) > 1 else "auto")
    strategy = tfdist.make_strategy(pipeline=options, threads=1)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [L.Dense(WIDTH, activation="relu", name=f"layer{i}") for i in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, L.Dense(3, name="head")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
    x, y = np.ones((16, WIDTH), "float32"), np.arange(16) % 3
    history = tfdist.fit(model, x, y, batch_size=16, epochs=3, seed=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    print("trained", flush=True)
