"""Replacements of names of Keras, and the state of the step that a thread is tracing for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable

from tfdist.strategy.job import current_job

if TYPE_CHECKING:
    from tfdist.ps.keras_compat import UpdateCounts

_LOG = logging.getLogger(__name__)


class BatchAxes:
    """Which losses of a step have an axis of the batch.

    The size of an axis alone does not tell. The step is traced with two batch sizes: an axis of the
    batch is one whose size differs. In its first trace on several replicas a step reports that it
    has a loss for which this matters; only then are the two traces made.

    Attributes:
      are_wanted: whether a loss of the step may have an axis of the batch.
      shapes: for each of the two batch sizes, the shapes of the losses; None before the traces.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self.shapes: Sequence[Sequence[tf.TensorShape]] | None = None

    def has_batch(self, number: int) -> bool | None:
        """Return whether the loss of this number has an axis of the batch; None if unknown."""
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
      num_replicas: replicas whose gradients are summed; 1 needs no reduction.
      share: this replica's part of the global batch, scalar float32 or a float.
      examples: how many of this replica's examples count, scalar integer.
      part: of a micro-batch, examples / examples of the step, by which its whole loss is weighted.
      micros: micro-batches of the step.
      random_key: int32 [2] of (seed, step, replica), from which every draw of the step comes.
      update_key: of (seed, step), for draws in an optimizer's update, the same on all
        replicas; None where there is one.
      batch: what the step function is given, a nest of tensors ``[examples, ...]``.
      fused: layers take the fused ones of `kernels` in this package.
      local: values of variables, by `id`, that live in the step and not in the variable.
      at_hook: called with the gradients where they enter an optimizer.
      held: values of variables, by `id`, that the step has read once and goes on with.
      taken: what an update takes of sums of gradients, part by part, by the `id` of the sum.
      counts: what optimizers have for their counts of updates; None for what is in the variable.
      updated: parts of variables that a sharded optimizer updates, in the order of its gradients.
      whole_sums: names of operations that give sums over the batch, which count as such.
      means: names of operations that give losses, whose parts by the batch fraction add up.
      sources: functions that return whole values, by the names of the operations that give the
        step's values of metrics; None if the step's values are whole.
      hides_sources: True if a condition, a loop or a function in the step has a metric's result.
      in_update: True while a metric is updated by numbers of the whole batch.
      layers: what holds the losses that layers have added, by the `id` of the layer.
      updates: False if optimizers change nothing, as in a trace that builds or looks at shapes.
      losses: shapes of the losses that gradients are taken of or layers add, in their order.
      batch_axes: which of these losses have an axis of the batch.
      numbers: of the draws of seed generators, by their `id`; those of others count up.
      graph: the step's own.
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
    held: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    taken: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    counts: UpdateCounts | None = None
    updated: Sequence[Any] = ()
    draws: int = 0
    sums: int = 0
    in_hook: bool = False
    in_losses: bool = False
    statistics: list[Variable] = dataclasses.field(default_factory=list)
    whole_sums: set[str] = dataclasses.field(default_factory=set)
    means: set[str] = dataclasses.field(default_factory=set)
    sources: dict[str, Callable[[], Any]] | None = None
    hides_sources: bool = False
    in_update: bool = False
    layers: dict[int, Any] = dataclasses.field(default_factory=dict)
    updates: bool = True
    losses: list[tf.TensorShape] = dataclasses.field(default_factory=list)
    batch_axes: BatchAxes = dataclasses.field(default_factory=BatchAxes)
    numbers: Mapping[int, Iterator[int]] = dataclasses.field(default_factory=dict)
    graph: Any = dataclasses.field(default_factory=tf.compat.v1.get_default_graph)

    def is_in_step(self) -> bool:
        """Return whether what is traced now is of the step itself, and not of a condition in it."""
        return tf.compat.v1.get_default_graph() is self.graph

    @property
    def division(self) -> str:
        """Where a part of the batch is computed by itself, for a warning; empty if it is whole."""
        if self.num_replicas > 1:
            return f"on {self.num_replicas} replicas"
        return "in micro-batches" if self.micros > 1 else ""

    def parts(self) -> list[tf.Tensor]:
        """Return the tensors of the batch."""
        flat = tf.nest.flatten(self.batch, expand_composites=True)
        return [part for part in flat if part is not None]

    def rows(self) -> int | None:
        """Return the examples of the batch, None where they are known at run time alone."""
        shapes = [part.shape for part in tf.nest.flatten(self.batch) if part is not None]
        return shapes[0][0] if shapes and shapes[0].rank else None


_thread = threading.local()


def current() -> StepTrace | None:
    """Return the trace that this thread follows, None outside a tfdist step."""
    return getattr(_thread, "trace", None)


@contextlib.contextmanager
def following(trace: StepTrace) -> Iterator[None]:
    """Make `trace` the current one of this thread, until the block ends."""
    before = current()
    _thread.trace = trace
    try:
        yield
    finally:
        _thread.trace = before


@functools.cache
def warn_once(line: str) -> None:
    """Log a line once in the process, on the chief, or in the stage that it is of."""
    job = current_job()
    if job is None or job.is_chief or (job.stages is not None and job.stages.pipeline == 0):
        _LOG.warning("%s", line)


def ops_behind(
    values: Sequence[Any], until: Collection[str] = frozenset()
) -> Iterator[tf.Operation]:
    """Yield the operations that tensors were computed by, back to those of the names `until`."""
    seen = set()
    waiting = [value.op for value in values]
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            if operation.name not in until:
                waiting += [tensor.op for tensor in operation.inputs]
            yield operation


# Replacement of a name of Keras or TensorFlow while a tfdist step is traced.


Original = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Workaround: what it replaces, by what, and why.

    Attributes:
      owner: the class or module that has the name.
      name: of a method, property or function.
      instead: called while a step is traced: with the original, the trace, and the arguments.
      issue: the public issue, or the line of the released source where there is none.
      anywhere: called outside of a step too, in the whole process, with None for the trace.
    """

    owner: Any
    name: str
    instead: Callable[..., Any]
    issue: str
    anywhere: bool = False

    @property
    def target(self) -> str:
        """Return what is replaced, such as ``SeedGenerator.next``."""
        return f"{self.owner.__name__}.{self.name}"

    @functools.cache  # noqa: B019  # they live as long as the process
    def put_in_place(self) -> None:
        """Replace the name, once a process."""
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
"""All of them; a module of workarounds adds its own as it is imported."""


def replaces(
    owner: Any, name: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have the decorated function stand in for a name while a step is traced; see `Replacement`."""

    def register(instead: Callable[..., Any]) -> Callable[..., Any]:
        REPLACEMENTS.append(Replacement(owner=owner, name=name, instead=instead, **options))
        return instead

    return register
