"""The digits on all devices of one machine, which compute each step together.

    python -m tfdist.train --config configs/digits_mirrored.py

On a machine without GPUs, two logical CPUs stand for two devices.
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

    # How long: in examples, so that it does not change with the number of devices.
    config.total_examples = 28_800
    config.checkpoints = 10

    # Of all devices together: each takes its share, 32 of two.
    config.global_batch_size = 64
    config.learning_rate = 1e-3

    # Where: 0 would be every GPU there is.
    config.strategy = "mirrored"
    config.devices_per_worker = 2
    return config
