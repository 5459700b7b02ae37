"""How a range of steps is run: together on every replica, or handed out to workers."""

from __future__ import annotations

from tfdist.strategy import Job
from tfdist.training.engines.base import Engine


def engine_for(job: Job) -> Engine:
    """The engine of the job's strategy."""
    if job.kind == "ps":
        from tfdist.ps.engine import ParameterServerEngine

        return ParameterServerEngine(job)
    from tfdist.training.engines.synchronous import SynchronousEngine

    return SynchronousEngine(job)


__all__ = ["Engine", "engine_for"]
