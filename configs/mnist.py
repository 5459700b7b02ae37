r"""MNIST under any strategy, to about 0.99 in five passes; TFDS downloads 11 MB once.

    python -m tfdist.train --config configs/mnist.py
    python -m tfdist.launch --strategy multiworker --workers 2 \
        -m tfdist.train --config configs/mnist.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: 60,000 scans of 28 x 28 pixels with values 0 to 255, and 10,000 to validate on.
    config.dataset = "mnist"
    config.model = "cnn"
    config.dropout = 0.5
    config.augmentation.mean = (33.3,)
    config.augmentation.std = (78.6,)

    # How long: five passes, cut into ten virtual epochs.
    config.total_examples = 300_000
    config.checkpoints = 10
    config.global_batch_size = 128

    # How: from 1e-3 to 0 along a cosine.
    config.optimizer = "adam"
    config.learning_rate = 1e-3
    config.schedule = "cosine"
    return config
