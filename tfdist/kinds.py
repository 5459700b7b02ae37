"""Kinds of strategies, and their registry.

A kind says how its jobs differ. Its room has the code, which the kind names as ``module:name``. The
launcher and the parser of TF_CONFIG use the kinds too, so this module imports no room.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of strategy.

    Attributes:
      name: Value of ``--strategy``.
      make: Function that makes a task's `tfdist.strategy.Job`.
      engine: Class that runs the steps, a `tfdist.training.program.Engine`.
      is_one_process: Whether the job has one process, which needs no address.
      has_several_tasks: Whether the job has tasks with addresses.
      has_servers: Whether a chief sends steps to the workers, and parameter servers hold the
        variables. Each worker then runs its own steps.
      has_stages: Whether each task computes a part of the model's layers.
      has_one_device: Whether a task computes on one device (False: on all visible GPUs).
      can_shrink: Whether a restarted job can have fewer tasks.
      elastic_form: Name of the kind that runs such a job with ``--elastic`` ("" if none does).
      is_elastic: Whether the launcher can change the members of a running job.
    """

    name: str
    make: str = ""
    engine: str = "tfdist.training.engines:SynchronousEngine"
    is_one_process: bool = False
    has_several_tasks: bool = False
    has_servers: bool = False
    has_stages: bool = False
    has_one_device: bool = False
    can_shrink: bool = False
    elastic_form: str = ""
    is_elastic: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_one_replica(self) -> bool:
        """Return whether the job computes on one device of one process."""
        return self.is_one_process and self.has_one_device

    @property
    def is_synchronous(self) -> bool:
        """Return whether all tasks run each step together, and sum over the tasks."""
        return not self.has_servers

    @property
    def has_collectives(self) -> bool:
        """Return whether several tasks run each step together."""
        return self.has_several_tasks and self.is_synchronous

    @property
    def has_tensorflow_servers(self) -> bool:
        """Return whether each task starts a TensorFlow server. Stages have their own links."""
        return self.has_several_tasks and not (self.has_stages or self.is_elastic)

    @property
    def divides_variables(self) -> bool:
        """Return whether each server or stage holds a part of the variables."""
        return self.has_servers or self.has_stages

    @property
    def has_whole_workers(self) -> bool:
        """Return whether each of several workers computes the whole model."""
        return self.has_several_tasks and not self.has_stages


_MAKE = "tfdist.strategy.make"

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                name="single",
                make=f"{_MAKE}:one_device_job",
                is_one_process=True,
                has_one_device=True,
            ),
            Kind(name="mirrored", make=f"{_MAKE}:mirrored_job", is_one_process=True),
            Kind(
                name="multiworker",
                make=f"{_MAKE}:multiworker_job",
                has_several_tasks=True,
                can_shrink=True,
                elastic_form="elastic",
            ),
            Kind(
                name="elastic",
                make="tfdist.elastic.job:elastic_job",
                engine="tfdist.elastic.engine:ElasticEngine",
                has_several_tasks=True,
                has_one_device=True,
                elastic_form="elastic",
                is_elastic=True,
            ),
            Kind(
                name="ps",
                make="tfdist.ps.strategy:parameter_server_job",
                engine="tfdist.ps.engine:ParameterServerEngine",
                has_several_tasks=True,
                has_servers=True,
                has_one_device=True,
            ),
            Kind(
                name="pipeline",
                make="tfdist.pipeline.job:pipeline_job",
                engine="tfdist.pipeline.engine:PipelineEngine",
                has_several_tasks=True,
                has_stages=True,
                has_one_device=True,
            ),
        )
    }
)
"""The kinds by name. A new kind needs an entry here and a room."""

AUTO = Kind(name="auto", elastic_form="elastic")
"""No kind yet: the cluster or the devices decide."""


def kind_of(strategy: str) -> Kind:
    """Return the kind of a strategy's name, `AUTO` for ``auto``."""
    return AUTO if strategy == AUTO.name else KINDS[strategy]


def kinds_that(attribute: str) -> tuple[str, ...]:
    """Return the names of the kinds with a true attribute, such as ``has_servers``."""
    return tuple(name for name, kind in KINDS.items() if getattr(kind, attribute))


def load(name: str) -> Any:
    """Return the object that a kind names as ``module:name``. Only jobs of its kind import it."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
