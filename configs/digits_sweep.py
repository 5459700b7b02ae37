"""A search on the digits: optimizer, learning rate, batch, dropout; momentum only for sgd.

python -m tfdist.tune --config configs/digits_sweep.py --tuner random --max_trials 20
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: 1,797 scans of 8 x 8 pixels with values 0 to 16, in scikit-learn, no download.
    config.dataset = "tfdist_digits"
    config.model = "cnn"
    config.augmentation.std = (16.0,)

    # How long a trial is: five passes over 1,440 images; hyperband judges at some of the nine.
    config.total_examples = 7_200
    config.checkpoints = 9
    return config


def space(hp: Any, config: ConfigDict) -> None:
    """Sets what is searched; asked for whole before the first trial, then once for each."""
    config.optimizer = hp.Choice("optimizer", ["adam", "sgd"])
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-1, sampling="log", default=1e-3)
    config.global_batch_size = hp.Choice("global_batch_size", [32, 64, 128], default=64)
    config.dropout = hp.Float("dropout", 0.0, 0.5, step=0.1)
    with hp.conditional_scope("optimizer", ["sgd"]):
        if config.optimizer == "sgd":
            config.momentum = hp.Float("momentum", 0.5, 0.99, default=0.9)
