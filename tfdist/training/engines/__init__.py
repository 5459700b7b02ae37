"""Engines that run a range of steps: on all replicas together, or dispatched to workers."""

from __future__ import annotations

from tfdist.strategy import Job
from tfdist.training.engines.base import Engine


def engine_for(job: Job) -> Engine:
    """Return the engine of the job's strategy."""
    if job.kind == "ps":
        from tfdist.ps.engine import ParameterServerEngine

        return ParameterServerEngine(job)
    from tfdist.training.engines.synchronous import SynchronousEngine

    return SynchronousEngine(job)


__all__ = ["Engine", "engine_for"]
