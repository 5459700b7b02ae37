"""ResNet-20 on CIFAR-10, after He et al. (2015), section 4.2: 0.91 to 0.92; for GPUs.

TFDS downloads 162 MB once. Under a parameter server use a model without BatchNormalization.

    python -m tfdist.launch --strategy mirrored -m tfdist.train --config configs/cifar10_resnet.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    config = base()

    # What: 50,000 photographs of 32 x 32 pixels in ten classes, and 10,000 to validate on.
    config.dataset = "cifar10"
    config.model = "resnet20"
    config.dropout = 0.0

    # The paper's augmentation; mean and deviation of each colour over the training images.
    config.augmentation.random_crop_padding = 4
    config.augmentation.random_flip = True
    config.augmentation.mean = (125.3, 123.0, 113.9)
    config.augmentation.std = (63.0, 62.1, 66.7)

    # How long: 180 passes of 50,000, validated and saved at each.
    config.total_examples = 9_000_000
    config.checkpoints = 180
    config.global_batch_size = 128

    # How: SGD with momentum, a short rise, then a cosine.
    config.optimizer = "sgd"
    config.learning_rate = 0.1
    config.momentum = 0.9
    config.weight_decay = 1e-4
    config.schedule = "cosine"
    config.warmup_examples = 50_000

    # On GPUs since Ampere and on TPUs; "float32" on others.
    config.precision = "mixed_bfloat16"
    return config
