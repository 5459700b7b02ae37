"""The digits in one process, on one device.

python -m tfdist.train --config configs/digits_single.py
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

    # How long: 20 passes over 1,440 images, validated and saved ten times.
    config.total_examples = 28_800
    config.checkpoints = 10
    config.global_batch_size = 64

    # How: what Adam is usually begun with.
    config.optimizer = "adam"
    config.learning_rate = 1e-3

    # Where: one GPU, or one CPU; anything else that TF_CONFIG says is refused.
    config.strategy = "single"
    return config
