"""Setup of a pipeline: the tasks connect to the chief, then to each other. Each runs a stage.

A pipeline has no TensorFlow server. Every task connects to the chief's address in TF_CONFIG. The
chief sums a few numbers over the tasks, and the tasks set up a ring with these sums. The ring then
carries the sums over all tasks. Separate connections between neighbouring stages carry
activations and gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.cluster import TaskConfig
from tfdist.cluster.address import split_address
from tfdist.errors import StartupTimeout, require_int, require_one_of
from tfdist.strategy import rendezvous
from tfdist.strategy.ring import Ring, Sum, accepted, connect, exactly

_LOG = logging.getLogger(__name__)
_HELLO = struct.Struct("<12sI")
_MAGIC = b"tfdist-stage"
_RETRY_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Options that divide a model into stages and a batch into micro-batches.

    Other values than these raise UsageError.

    Attributes:
      split_size: Maximum examples in a micro-batch. `None` makes four micro-batches per stage.
        ``auto`` tries a few sizes at the first step and uses the fastest.
      schedule: ``1f1b``, ``gpipe``, or ``serial`` (micro-batches in sequence).
      keep: ``tape`` keeps the activations of unfinished micro-batches. ``recompute`` computes them
        again. ``compiled`` keeps them inside a single compiled call for all passes of a step.
      cut: Name of the last layer of each stage except the last stage, or ``auto`` to divide by
        measured times.
    """

    split_size: int | str | None = None
    schedule: str = "1f1b"
    keep: str = "tape"
    cut: Sequence[str] | str | None = "auto"

    def __post_init__(self) -> None:
        if self.split_size not in (None, "auto"):
            fix = 'pass a number of examples, such as 12, or "auto"'
            require_int("split_size", self.split_size, least=1, fix=fix)
        require_one_of("schedule", self.schedule, ("1f1b", "gpipe", "serial"))
        require_one_of("keep", self.keep, ("tape", "recompute", "compiled"))


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Choices:
    """Automatic choices of a job, which a resumed run reuses.

    Attributes:
      cuts: Nodes of the model's graph after which a stage ends, by `cut_key`.
      split_size: Most examples in a micro-batch, `None` if not chosen.
      exact: Whether the run must resume with the same bits.
    """

    cuts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    split_size: int | None = None
    exact: bool = False

    def state(self) -> dict[str, Any]:
        """Return the choices as a JSON object for `take`."""
        return {"cuts": dict(self.cuts), "split_size": self.split_size}

    def take(self, state: Mapping[str, Any]) -> None:
        """Add the choices in a checkpoint. Keep existing choices for other models."""
        self.cuts.update(state.get("cuts", {}))
        if "cut_of" in state:  # as tfdist 0.2.0 writes it
            self.cuts[cut_key(*state["cut_of"])] = state["cut"]
        self.split_size = state.get("split_size") or self.split_size


def cut_key(digest: str, count: int) -> str:
    """Return the key of a graph's cut into `count` stages."""
    return f"{digest}/{count}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """Place of this task in its pipeline.

    Attributes:
      index: Index of this task's stage.
      count: Number of stages.
      names: Names of the pipeline's tasks, by stage.
      options: Options given to `make_strategy`.
      before: Connection to the previous stage, `None` in the first stage.
      after: Connection to the next stage, `None` in the last stage.
      pipeline: Index of this task's pipeline.
      pipelines: Number of pipelines in the job.
      peers: Ring over the same stage of all pipelines, `None` for a single pipeline.
      chosen: Automatic choices of the job.
    """

    index: int
    count: int
    names: tuple[str, ...]
    options: PipelineOptions
    before: socket.socket | None = None
    after: socket.socket | None = None
    pipeline: int = 0
    pipelines: int = 1
    peers: Ring | None = None
    chosen: Choices = dataclasses.field(default_factory=Choices)


def join(
    config: TaskConfig, options: PipelineOptions, *, timeout_s: float, ports: range | None
) -> tuple[Stages, Ring | None]:
    """Return this task's place and its ring (`None` in a job of one task). A collective.

    Raises:
      StartupTimeout: a task did not start in time, or a task cannot reach its neighbour.
    """
    tasks = config.cluster.training_tasks()
    count = config.options.stages or len(tasks)
    rank, pipelines = tasks.index(config.task), len(tasks) // count
    pipeline, index = divmod(rank, count)
    places = [f" of pipeline {i // count}" if pipelines > 1 else "" for i in range(len(tasks))]
    names = tuple(
        f"{task} (stage {i % count}{place})"
        for i, (task, place) in enumerate(zip(tasks, places, strict=True))
    )
    if len(tasks) == 1:
        return Stages(index=0, count=1, names=names, options=options), None
    addresses = [config.cluster.address(task) for task in tasks]
    with meeting(config, timeout_s=timeout_s) as total:
        found = [
            connect(
                rank, addresses, names, total=total, timeout_s=timeout_s, ports=ports, stride=stride
            )
            for stride in ((1, 1, count) if pipelines > 1 else (1, 1))
        ]
    ends = [pair for pair in found if pair is not None]
    if len(ends) < len(found):
        raise StartupTimeout(
            f"{config.task}: a stage cannot connect to the next stage. Fix: open the ports between"
            " the tasks' hosts (--ports sets the range)"
        )
    of_all, (after, before), *of_peers = ends
    peers = [Ring(pipeline, names[index::count], ends) for ends in of_peers]
    for end, is_used in ((before, index > 0), (after, index < count - 1)):
        if not is_used:
            end.close()
    place = Stages(
        index=index,
        count=count,
        names=names[pipeline * count :][:count],
        options=options,
        before=before if index else None,
        after=after if index < count - 1 else None,
        pipeline=pipeline,
        pipelines=pipelines,
        peers=peers[0] if peers else None,
    )
    return place, Ring(rank, names, of_all)


@contextlib.contextmanager
def meeting(config: TaskConfig, *, timeout_s: float) -> Iterator[Sum]:
    """Yield a function that sums an int32 vector over the tasks at the chief. A collective."""
    deadline_s = time.monotonic() + timeout_s
    tasks, is_chief = config.cluster.training_tasks(), config.task == config.cluster.chief_task
    with contextlib.ExitStack() as stack:
        if is_chief:
            listener = stack.enter_context(rendezvous.answering(config))
            others = {_HELLO.pack(_MAGIC, i): t for i, t in enumerate(tasks) if t != config.task}
            found = accepted([listener], others, deadline_s)
        else:
            found = {b"": _at_chief(config, tasks.index(config.task), deadline_s, timeout_s)}
        ends = [stack.enter_context(end) for end in found.values()]
        if is_chief and (missing := [task for hello, task in others.items() if hello not in found]):
            raise StartupTimeout(rendezvous.waited_for(config, missing, timeout_s, timeout_s))
        for end in ends:
            end.settimeout(timeout_s)
        try:
            yield lambda values: _total(values, ends, chief=is_chief)
        except OSError as error:
            raise StartupTimeout(
                f"{config.task}: a task disconnected during startup: {error}"
            ) from error


def _total(values: np.ndarray, ends: Sequence[socket.socket], *, chief: bool) -> np.ndarray:
    values = np.ascontiguousarray(values)
    if not chief:
        ends[0].sendall(values.tobytes())
        return np.frombuffer(exactly(ends[0], values.nbytes), values.dtype)
    parts = [np.frombuffer(exactly(end, values.nbytes), values.dtype) for end in ends]
    whole: np.ndarray = np.sum([values, *parts], axis=0, dtype=values.dtype)
    for end in ends:
        end.sendall(whole.tobytes())
    return whole


def _at_chief(config: TaskConfig, index: int, deadline_s: float, timeout_s: float) -> socket.socket:
    chief = config.cluster.chief_task
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            address = split_address(config.cluster.address(chief))
            end = socket.create_connection(address, timeout=left_s)
            end.sendall(_HELLO.pack(_MAGIC, index))
            return end
        except OSError as error:
            _LOG.debug("%s: %s", chief, error)
            time.sleep(min(_RETRY_S, left_s))
    raise StartupTimeout(rendezvous.waited_for(config, [chief], timeout_s, timeout_s))
