"""Sweeps: KerasTuner or Optuna chooses hyperparameters. tfdist runs each trial as a separate job.

The journal holds the whole state of a sweep. If the sweep's chief is killed, the next chief reads
the journal, replays it into a new oracle and resumes the sweep.

`search` runs each trial as a job and is imported on first use. KerasTuner's ``tuner.search`` runs
all trials in one process. Only `oracle`, `optuna_oracle`, `from_python` and `inside`
import KerasTuner or Keras at their top level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.errors import require_packages
from tfdist.renamed import instead_of

if TYPE_CHECKING:
    from tfdist.tuning.from_python import search

__all__ = ["search"]


def __getattr__(name: str) -> Any:
    if name != "search":
        advice = f". Fix: {known}" if (known := instead_of(f"tuning.{name}")) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    require_packages("tfdist.tuning.search", "keras_tuner", "sklearn", "tensorboard", extra="tune")
    from tfdist.tuning.from_python import search

    return search
