"""Sweeps: KerasTuner searches, tfdist runs every trial as a job of its own.

The journal of a sweep is its only truth. The chief of a sweep that was killed reads it, brings a
new oracle to the same state by asking and telling it the same, and goes on.

`search`, whose trials are jobs, loads on first use. KerasTuner's own ``tuner.search`` works in one
process. Only `oracle`, `from_python` and `inside` load KerasTuner, and with it Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.errors import require_packages

_HOME_OF = {"search": "tfdist.tuning.from_python"}

if TYPE_CHECKING:
    from tfdist.tuning.from_python import search

__all__ = ["search"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_packages(f"tfdist.tuning.{name}", "keras_tuner", "sklearn", "tensorboard", extra="tune")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
