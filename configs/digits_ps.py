r"""The digits with parameter servers: workers compute steps on their own, none waits.

    python -m tfdist.launch --strategy ps --workers 4 --ps 1 \
        -m tfdist.train --config configs/digits_ps.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: 1,797 scans of 8 x 8 pixels with values 0 to 16, in scikit-learn, no download.
    config.dataset = "tfdist_digits"
    config.augmentation.std = (16.0,)

    # Without BatchNormalization, whose statistics the workers would overwrite for one another.
    config.model = "cnn"

    # How long: of all workers together.
    config.total_examples = 28_800
    config.checkpoints = 10

    # Of one worker's step. A gradient is as many updates old as there are other workers, so
    # that the learning rate should not be at the edge of what one process can take.
    config.global_batch_size = 64
    config.learning_rate = 1e-3

    config.strategy = "ps"
    return config
