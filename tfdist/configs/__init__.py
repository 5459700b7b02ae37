"""The configuration of `tfdist.train`: its fields, their defaults, and what they may be.

A config file starts from `base()` and changes what it needs:

>>> def get_config():
...     config = base()
...     config.dataset = "mnist"
...     return config

No TensorFlow is loaded to read or check a configuration.
"""

from __future__ import annotations

from tfdist.configs.fields import FIELDS, base, check

__all__ = ["FIELDS", "base", "check"]
