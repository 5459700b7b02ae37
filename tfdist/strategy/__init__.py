"""Strategies made from TF_CONFIG, and communication between tasks.

>>> strategy = make_strategy()
>>> with strategy.scope():
...     model = ...
"""

from __future__ import annotations

from tfdist.strategy.group import barrier, broadcast, is_chief, on_chief
from tfdist.strategy.job import Job, current_job, job_of, run_dir
from tfdist.strategy.make import make_strategy

__all__ = [
    "Job",
    "barrier",
    "broadcast",
    "current_job",
    "is_chief",
    "job_of",
    "make_strategy",
    "on_chief",
    "run_dir",
]
