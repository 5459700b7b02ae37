"""Strategies made from TF_CONFIG, and communication between tasks.

>>> strategy = make_strategy()
>>> with strategy.scope():
...     model = ...
"""

from __future__ import annotations

from tfdist.strategy.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    chief_first,
    gather,
    reduce,
    scatter,
)
from tfdist.strategy.group import is_chief, on_chief
from tfdist.strategy.job import Job, current_job, job_of, run_dir
from tfdist.strategy.make import make_strategy

__all__ = [
    "Job",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "chief_first",
    "current_job",
    "gather",
    "is_chief",
    "job_of",
    "make_strategy",
    "on_chief",
    "reduce",
    "run_dir",
    "scatter",
]
