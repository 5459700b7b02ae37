"""Default configuration of `tfdist.train`: a CNN on the digits."""

from __future__ import annotations

from ml_collections import ConfigDict

from tfdist.configs import base


def get_config() -> ConfigDict:
    """Return the demo's configuration, which works with every strategy."""
    config = base()
    config.augmentation.std = (16.0,)  # pixels are 0 to 16
    return config
