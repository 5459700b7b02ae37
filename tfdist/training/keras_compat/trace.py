"""Replacements of names in Keras, and the state of the step that a thread is tracing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.strategy.job import current_job

if TYPE_CHECKING:
    from tfdist.ps.keras_compat import UpdateCounts

_LOG = logging.getLogger(__name__)
nn = getattr(backend, "ops", backend).nn  # Keras 3.16 moved it
_INSTALLED = tuple(map(int, keras.__version__.split(".")[:2]))


class BatchAxes:
    """Record of the losses of a step that have a batch axis.

    The size of an axis does not identify a batch axis. The engine therefore traces the step with
    two batch sizes, and an axis with two different sizes is a batch axis. The engine does this only
    if the first trace on several replicas finds a loss that may have a batch axis.

    Attributes:
      are_wanted: Whether a loss of the step may have a batch axis.
      shapes: Shapes of the losses for each of the two batch sizes. `None` before these traces.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self.shapes: Sequence[Sequence[tf.TensorShape]] | None = None

    def has_batch(self, number: int) -> bool | None:
        """Return whether the loss of this number has a batch axis, or `None` if unknown."""
        found = [shapes[number] for shapes in self.shapes or () if number < len(shapes)]
        ranks = {shape.rank for shape in found}
        if len(found) < 2 or len(ranks) > 1 or None in ranks:
            return None
        sizes = [{one, other} for one, other in zip(*found, strict=True)]
        if any(len(both) == 2 and None not in both for both in sizes):
            return True
        return None if any(None in both for both in sizes) else False


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class StepTrace:
    """State of the step that this thread is tracing, for the replacements.

    Attributes:
      num_replicas: Number of replicas that sum gradients. 1 needs no reduction.
      share: Batch fraction of this replica, a scalar float32 tensor or a float.
      examples: Number of this replica's examples without padding, a scalar integer.
      part: Weight of a micro-batch's loss: its examples / the step's examples (default: 1.0).
      micros: Number of micro-batches in the step (default: 1).
      random_key: Key for all draws of the step, int32 [2] from (seed, step, replica).
      update_key: Key for draws in an optimizer's update, from (seed, step), so equal on all
        replicas. `None` if there is only one replica.
      batch: Argument of the step function, a nest of tensors ``[examples, ...]``.
      fused: Whether layers use the fused kernels of `kernels` in this package.
      local: Values of variables that the step holds in tensors, by the variable's `id`.
      at_hook: Function that the gradient hook calls with the gradients.
      instead_of_update: Function that the gradient hook calls with the optimizer, the weighted
        gradients and their variables. Optimizers then change nothing. The result is a function
        to call if the step reads one of the variables later.
      held: Values of variables that the step reads once and then reuses, by `id`.
      taken: Functions that return an update's part of a summed gradient, by the sum's `id`.
      packed: Function that packs the pairs of gradients and variables for an update.
      counts: Optimizers' update counts in this step. `None` to use the counts in the variables.
      updated: Parts of variables that a sharded optimizer updates, in the order of its gradients.
      whole_sums: Names of operations that return sums of losses over the batch.
      sources: Functions that return whole metric values, by the name of the operation with the
        step's value. `None` if the step's values are whole.
      layers: Holders of the losses that layers have added, by the `id` of the layer.
      updates: False if optimizers must change nothing, as in a trace to build or to find shapes.
      unbuilt: Optimizers that are not built, with the variables to update, if `updates` is False.
      losses: Shapes of the losses of gradients and layers, in order of computation.
      batch_axes: Record of the losses that have a batch axis.
      numbers: Draw numbers of seed generators, by `id`. Other generators count upwards.
      graph: Graph of the step.
    """

    num_replicas: int
    share: tf.Tensor | float
    examples: tf.Tensor | int
    random_key: tf.Tensor
    update_key: tf.Tensor | None = None
    part: tf.Tensor | float = 1.0
    micros: int = 1
    batch: Any = ()
    fused: bool = False
    local: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    at_hook: Callable[[Sequence[Any]], None] | None = None
    instead_of_update: Callable[[Any, list[Any], Any], Callable[[], Any]] | None = None
    held: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    taken: dict[int, Callable[[], tf.Tensor]] = dataclasses.field(default_factory=dict)
    packed: Callable[[list[Any]], list[Any]] = list
    counts: UpdateCounts | None = None
    updated: Sequence[Any] = ()
    draws: int = 0
    sums: int = 0
    in_hook: bool = False
    in_losses: bool = False
    statistics: list[keras.Variable] = dataclasses.field(default_factory=list)
    whole_sums: set[str] = dataclasses.field(default_factory=set)
    sources: dict[str, Callable[[], Any]] | None = None
    layers: dict[int, Any] = dataclasses.field(default_factory=dict)
    updates: bool = True
    unbuilt: list[tuple[Any, list[Any]]] = dataclasses.field(default_factory=list)
    losses: list[tf.TensorShape] = dataclasses.field(default_factory=list)
    batch_axes: BatchAxes = dataclasses.field(default_factory=BatchAxes)
    numbers: Mapping[int, Iterator[int]] = dataclasses.field(default_factory=dict)
    graph: Any = dataclasses.field(default_factory=tf.compat.v1.get_default_graph)

    def is_in_step(self) -> bool:
        """Return whether the current graph is the step's own, not a condition's graph within it."""
        return tf.compat.v1.get_default_graph() is self.graph

    @property
    def division(self) -> str:
        """Phrase for warnings that says how the batch is divided. Empty if it is whole."""
        if self.num_replicas > 1:
            return f"on {self.num_replicas} replicas"
        return "in micro-batches" if self.micros > 1 else ""

    def parts(self) -> list[tf.Tensor]:
        """Return the tensors of the batch."""
        flat = tf.nest.flatten(self.batch, expand_composites=True)
        return [part for part in flat if part is not None]

    def rows(self) -> int | None:
        """Return the number of examples in the batch, or `None` if it is unknown until run time."""
        shapes = [part.shape for part in tf.nest.flatten(self.batch) if part is not None]
        return shapes[0][0] if shapes and shapes[0].rank else None


def bare_trace(examples: Any, **more: Any) -> StepTrace:
    """Return the trace of a step on one replica, to build, time or inspect a model."""
    key = tf.zeros([2], tf.int32)
    return StepTrace(num_replicas=1, share=1.0, examples=examples, random_key=key, **more)


_thread = threading.local()


def current() -> StepTrace | None:
    """Return the trace of this thread, or `None` outside a tfdist step."""
    return getattr(_thread, "trace", None)


@contextlib.contextmanager
def following(trace: StepTrace) -> Iterator[None]:
    """Make `trace` the current trace of this thread until the block ends."""
    before = current()
    _thread.trace = trace
    try:
        yield
    finally:
        _thread.trace = before


@functools.cache
def warn_once(line: str) -> None:
    """Log a line once per process, on the chief and in the stages of the first pipeline."""
    job = current_job()
    if job is None or job.is_chief or (job.stages is not None and job.stages.pipeline == 0):
        _LOG.warning("%s", line)


def ops_behind(values: Sequence[Any]) -> Iterator[tf.Operation]:
    """Yield the operations that computed the tensors."""
    seen = set()
    waiting = [value.op for value in values]
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            waiting += [tensor.op for tensor in operation.inputs]
            yield operation


# Replacement of a name of Keras or TensorFlow while a tfdist step is traced.


Original = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Workaround that replaces a name in Keras or TensorFlow, with its reason.

    Attributes:
      owner: Class or module that has the name.
      name: Name of a method, property or function.
      instead: Function called while a step is traced, with the original, trace and arguments.
      issue: Link to the public issue, or to the line of released source if no issue exists.
      until: First Keras release that does not need it, such as ``(3, 16)`` (default: none).
      anywhere: Whether `instead` also runs outside steps, with `None` as trace (default: False).
    """

    owner: Any
    name: str
    instead: Callable[..., Any]
    issue: str
    until: tuple[int, int] | None = None
    anywhere: bool = False

    @property
    def target(self) -> str:
        """Full name of the replaced object, such as ``SeedGenerator.next``."""
        return f"{self.owner.__name__}.{self.name}"

    @property
    def is_needed(self) -> bool:
        """Return whether the installed Keras needs it."""
        return self.until is None or self.until > _INSTALLED

    @functools.cache  # noqa: B019  # they live as long as the process
    def put_in_place(self) -> None:
        """Replace the name, once per process."""
        found = getattr(self.owner, self.name)
        is_property = isinstance(found, property)
        original = found.fget if is_property else found

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            trace = current()
            if trace is None and not self.anywhere:
                return original(*args, **kwargs)
            return self.instead(original, trace, *args, **kwargs)

        made = property(replacement, found.fset, doc=found.__doc__) if is_property else replacement
        setattr(self.owner, self.name, made)


REPLACEMENTS: list[Replacement] = []
"""All replacements. A module of workarounds adds its own when it is imported."""

CONTEXTS: list[Callable[[], AbstractContextManager[None]]] = []
"""Contexts around the trace of each replica's step. A module adds its own, like replacements."""


def replaces(
    owner: Any, name: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as a `Replacement` of a name."""

    def register(instead: Callable[..., Any]) -> Callable[..., Any]:
        REPLACEMENTS.append(Replacement(owner=owner, name=name, instead=instead, **options))
        return instead

    return register
