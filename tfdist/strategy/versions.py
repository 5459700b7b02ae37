"""Versions of TensorFlow and tfdist, compared where the tasks of a job meet.

Two versions may understand each other, or end with an error that names neither, or wait. Under ps
the chief compares them as the others come (`tfdist.ps.members`), under multiworker all do as they
join the ring (`tfdist.strategy.neighbours`).
"""

from __future__ import annotations

import itertools
import sys

import tensorflow as tf

from tfdist.errors import require


def own_versions() -> str:
    """Return this process's, as tasks send them: ``TensorFlow 2.21.0, tfdist 0.1.0``."""
    return f"TensorFlow {tf.__version__}, tfdist {sys.modules['tfdist'].__version__}"


def require_same_versions(theirs: str, *, task: str, own: str, own_task: str) -> None:
    """Raise UsageError with the names of both tasks where `theirs` are not this task's `own`."""
    pairs = itertools.zip_longest(theirs.split(", "), own.split(", "), fillvalue="nothing")
    for found, expected in pairs:
        require(
            found == expected,
            task,
            received=found,
            expected=f"{expected.partition(' ')[2]}, as {own_task} has",
            fix="install the same version on every machine",
            code="version",
        )
