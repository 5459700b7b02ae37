r"""The digits on several machines, or processes, which compute each step together.

    python -m tfdist.launch --strategy multiworker --workers 2 \
        -m tfdist.train --config configs/digits_multiworker.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: 1,797 scans of 8 x 8 pixels with values 0 to 16, in scikit-learn, no download.
    config.dataset = "tfdist_digits"
    config.model = "cnn"
    config.augmentation.std = (16.0,)

    # How long: the same examples in each step, however many workers there are.
    config.total_examples = 28_800
    config.checkpoints = 10

    # Of all workers together; one that does not divide by them is shared out unevenly.
    config.global_batch_size = 64
    config.learning_rate = 1e-3

    # Where: refuses to run as one process by mistake.
    config.strategy = "multiworker"
    return config
