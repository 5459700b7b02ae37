"""Overfits four batches of the digits on purpose: the first thing to try with a new model.

A model that cannot bring the training loss of 256 images to nearly nothing has a mistake in it.
Validation accuracy means nothing here.

    python -m tfdist.train --config configs/overfit_digits.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: the first four batches of the training data, over and over.
    config.dataset = "tfdist_digits"
    config.overfit_batches = 4
    config.global_batch_size = 64
    config.augmentation.std = (16.0,)

    # Nothing that makes learning by heart harder.
    config.model = "cnn"
    config.dropout = 0.0

    # How long: 100 passes over 256 images.
    config.total_examples = 25_600
    config.checkpoints = 5

    config.optimizer = "adam"
    config.learning_rate = 1e-3
    return config
