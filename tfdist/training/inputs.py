"""Conversion of the arguments of `fit`, `evaluate` and `predict` to a feed and an epoch plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.resolve import as_source, check_supported
from tfdist.data.source import GraphSource, Source, preprocessed, spec_of_batches, unpack
from tfdist.data.stream import InputFunctionSource, Reading, StreamSource, read
from tfdist.errors import UsageError, require, require_int
from tfdist.strategy import Job
from tfdist.training.epochs import EpochPlan, VirtualEpochs
from tfdist.training.feed import (
    BatchFeed,
    Feed,
    GraphFeed,
    IndexedFeed,
    InputFunctionFeed,
    Order,
    StreamFeed,
    reading_of,
    require_even,
)
from tfdist.training.program import is_own
from tfdist.training.task_agreement import (
    require_same_examples,
    require_same_lengths,
    share_random_states,
)

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """Length of a run over some data. The other attributes are arguments of `fit`.

    Attributes:
      once: True to stop at the end of the data, regardless of `steps_per_epoch`.
      most_epochs: maximum number of epochs, from `keras.config.max_epochs`.
      most_steps: maximum number of steps of an epoch, from `keras.config.max_steps_per_epoch`.
    """

    batch_size: int | None = None
    epochs: int = 1
    steps_per_epoch: int | None = None
    virtual_epochs: VirtualEpochs | None = None
    overfit_batches: int | None = None
    once: bool = False
    most_epochs: int | None = None
    most_steps: int | None = None


def prepare(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    job: Job,
    length: Length,
    shuffle: bool,
    seed: int,
    class_weight: dict[int, float] | None = None,
    model: keras.Model | None = None,
) -> Feed:
    """Return the feed of a run's data, which `model` may preprocess. Every task calls it.

    Raises:
      UsageError: the strategy does not support the data, or they are empty or do not fit `length`.
    """
    length = _checked(length)
    _require_class_weight(class_weight)
    if _is_of_keras_hub(model):
        x, y, sample_weight = keras.tree.traverse(_list_as_array, (x, y, sample_weight))
    source = as_source(x, y, sample_weight=sample_weight)
    if _is_of_keras_hub(model) and getattr(model, "preprocessor", True) is not None:
        source = preprocessed(source, getattr(model, "preprocess_samples", None))
    source = _checked_source(source, job=job, shuffle=shuffle)
    if isinstance(source, PyDatasetSource) and not length.once:
        source.on_epoch_end()  # as in Keras' fit, before its batches are counted
    batch, examples = _sizes_of(source, length, job=job, seed=seed)
    order = _order_of(examples, length, batch=batch, shuffle=shuffle)
    plan = _plan(length, batch=batch, examples=order.examples)
    steps = len(plan.steps(0)) if plan.num_epochs else 0
    lengths = {"batch_size": batch, "epochs": plan.num_epochs, "steps of an epoch": steps}
    require_same_lengths(job, lengths | {"steps": plan.total_steps})
    ready = not isinstance(source, GraphSource | PythonSource)  # the user's data are batches
    require(
        plan.all_full or not (ready and length.virtual_epochs),
        "virtual_epochs",
        f"a virtual epoch ends inside a batch of {batch} examples, which tfdist cannot divide",
        fix=f"make total_examples a multiple of checkpoints * {batch}, or pass arrays",
        code="unsupported-data",
    )
    kind = next(feed for kind, feed in _FEEDS if isinstance(source, kind))
    spec = spec_of_batches(source)
    weights = _class_weights(class_weight)
    feed: Feed = kind(
        source,
        plan,
        job=job,
        seed=seed,
        order=order,
        batch_spec=spec if weights is None else _with_weight(spec),
        weigh=None if weights is None else _weighing(weights),
    )
    feed.class_weights = weights
    _LOG.info("%s", source.describe())
    return feed


def _checked_source(source: Source, *, job: Job, shuffle: bool) -> Source:
    """Return the source for this strategy, after a check that all tasks match. A collective."""
    check_supported(source, job.kind)
    if isinstance(source, InputFunctionSource) and not shuffle:
        # From one dataset, tasks read each example once. Their input functions may overlap.
        source = StreamSource(source.dataset_for(), transform=source.transform)
    share_random_states(job, source)
    require_same_examples(job, source)
    return source


def _is_of_keras_hub(model: Any) -> bool:
    """Return whether the model's `fit` is KerasHub's, which preprocesses the data."""
    return model is not None and is_own(model, "fit") and hasattr(model, "preprocess_samples")


def _list_as_array(part: Any) -> Any:
    """Return the array of a list, which KerasHub's models also accept, or `None` for other data."""
    if not isinstance(part, list):
        return None
    try:
        return np.asarray(part)
    except ValueError:  # rows of several lengths: `as_source` rejects the list
        return part


def _order_of(examples: int | None, length: Length, *, batch: int, shuffle: bool) -> Order:
    """Return the order of the examples, limited by `overfit_batches`."""
    few = length.overfit_batches
    if few:
        examples = few * batch if examples is None else min(examples, few * batch)
        few = -(-examples // batch)
    return Order(examples=examples, shuffle=bool(shuffle), batches=few)


def _checked(length: Length) -> Length:
    """Return the length with Python integers, as in checkpoints. Reject wrong lengths."""
    numbers: dict[str, Any] = {"epochs": require_int("epochs", length.epochs, least=0)}
    for name in ("batch_size", "steps_per_epoch", "overfit_batches"):
        value = getattr(length, name)
        if value is not None:
            shown = "steps" if length.once and name == "steps_per_epoch" else name
            numbers[name] = require_int(shown, value, least=1)
    return dataclasses.replace(length, **numbers)


def _plan(length: Length, *, batch: int, examples: int | None) -> EpochPlan:
    virtual = length.virtual_epochs
    if virtual is not None:
        if length.epochs != 1 or length.steps_per_epoch is not None:
            raise UsageError(
                "tfdist.fit",
                "virtual_epochs excludes epochs and steps_per_epoch",
                fix="leave out epochs and steps_per_epoch",
                code="exclusive",
            )
        return EpochPlan.from_boundaries(virtual.boundaries(), global_batch_size=batch)
    per_epoch = length.steps_per_epoch * batch if length.steps_per_epoch else examples
    if length.once and per_epoch and examples:
        per_epoch = min(per_epoch, examples)
    if length.most_steps:
        most = length.most_steps * batch
        per_epoch = min(per_epoch or most, most)
    if per_epoch is None:
        raise UsageError(
            "tfdist.fit",
            "the length of the data is unknown, and steps_per_epoch is not set",
            fix="pass steps_per_epoch (validation_steps, steps), or virtual_epochs",
            code="unknown-length",
        )
    epochs = min(length.epochs, length.most_epochs or length.epochs)
    return EpochPlan.uniform(epochs=epochs, examples=per_epoch, global_batch_size=batch)


def _require_class_weight(class_weight: Any) -> None:
    classes = class_weight if isinstance(class_weight, dict) else ()
    require(
        class_weight is None
        or (classes and all(isinstance(c, int | np.integer) and c >= 0 for c in classes)),
        "class_weight",
        f"{class_weight!r:.80} is not a dict of class numbers (from 0) and weights",
        fix="write a dict such as {0: 1.0, 1: 2.5} (if a class is missing, its weight is 1)",
        code="bad-value",
    )


def _class_weights(class_weight: dict[int, float] | None) -> list[float] | None:
    if class_weight is None:
        return None
    return [float(class_weight.get(c, 1.0)) for c in range(max(class_weight) + 1)]


def _weighing(weights: list[float]) -> Callable[[Any], Any]:
    unlisted = len(weights)

    def weigh(data: Any) -> Any:
        x, y, _ = unpack(data)
        columns = y if y.shape.rank == 2 else y[:, tf.newaxis]
        number = columns[:, 0]
        number = tf.cast(tf.round(number) if number.dtype.is_floating else number, tf.int32)
        one_hot = tf.shape(columns)[-1] > 1  # a generator's width may be known only at run time
        classes = tf.where(one_hot, tf.argmax(columns, axis=-1, output_type=tf.int32), number)
        listed = tf.logical_and(classes >= 0, classes < unlisted)
        return x, y, tf.gather(tf.constant([*weights, 1.0]), tf.where(listed, classes, unlisted))

    return weigh


def _with_weight(spec: Any) -> Any:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(spec)
    one_each = y is not None and not tf.nest.is_nested(y) and y.shape.rank in (1, 2)
    require(
        one_each and weight is None,
        "class_weight",
        "class_weight needs a single output with a class for each example, and no sample weights",
        fix="pass only sample_weight, multiplied by the class weights",
        code="unsupported-data",
    )
    return x, y, tf.TensorSpec([None], tf.float32)


# Choice of a source's feed and batch size.


_DEFAULT_BATCH_SIZE = 32
_COUNTING = (
    "the length of a dataset is unknown: it is read once to count its batches. To avoid this, pass "
    "steps_per_epoch (validation_steps, steps) or use tf.data.experimental.assert_cardinality(n)"
)


def _sizes_of(source: Source, length: Length, *, job: Job, seed: int) -> tuple[int, int | None]:
    """Return the number of examples of a global batch, and of one pass (`None` if unknown).

    Data by index use the requested batch size. Ready-made batches keep their size, and a smaller
    last batch counts as full.
    """
    whole = source.num_examples
    if isinstance(source, GraphSource | PythonSource):
        batch, steps = length.batch_size, length.steps_per_epoch
        if batch is None and steps and whole and steps <= whole:
            batch = -(-whole // steps)  # as in Keras
        return batch or _DEFAULT_BATCH_SIZE, whole
    if isinstance(source, InputFunctionSource) and (replicas := job.num_replicas) > 1:
        # A step uses a batch for each replica.
        context = tf.distribute.InputContext(num_replicas_in_sync=replicas)
        per_replica = StreamSource(source.dataset_for(context))
        batch = _size_of_first(per_replica, num_replicas=1) * replicas
        batches = per_replica.num_batches and -(-per_replica.num_batches // replicas)
    else:
        batch = _size_of_first(source, num_replicas=job.num_replicas)
        batches = getattr(source, "num_batches", None)
    if batches is None and isinstance(source, StreamSource) and not source.is_endless:
        batches = _counted(source, length, job=job, seed=seed)
    if not isinstance(source, InputFunctionSource):  # the number may differ by task
        require_same_lengths(job, {"batches": -1 if batches is None else batches})
    if batches == 0:
        raise UsageError(
            "data",
            "the dataset has no batches",
            fix="check the files that it reads, and drop_remainder",
            code="no-data",
        )
    return batch, None if batches is None else batches * batch


def _counted(source: StreamSource, length: Length, *, job: Job, seed: int) -> int | None:
    """Return the number of a stream's batches in an epoch, or `None` if it is not needed.

    This reads once the part of the stream that the run uses. It may fill a cache.
    """
    known = length.steps_per_epoch is not None or length.virtual_epochs is not None
    if known and not length.once:
        return None
    if job.task_index == 0:
        _LOG.warning(_COUNTING)
    whole = read(source.dataset_for(), reading_of(job, seed))
    bounds = (length.steps_per_epoch if length.once else None, length.most_steps)
    most = min((bound for bound in bounds if bound), default=-1)
    return int(whole.take(most).reduce(np.int64(0), lambda n, *_: n + 1))


def _size_of_first(source: Any, *, num_replicas: int) -> int:
    if isinstance(source, PyDatasetSource):
        sizes = _lengths(source.fetch_batch(0))
    else:
        sizes = _lengths(source.batched_spec)
        if None in sizes:
            sizes = _lengths(next(iter(read(source.dataset_for(), Reading(peek=True))), None))
    if num_replicas > 1 and not isinstance(source, InputFunctionSource):
        require_even(sizes)
    return max(*sizes, 1) if sizes else 1


def _lengths(batch: Any) -> set[Any]:
    return {part.shape[0] for part in tf.nest.flatten(batch) if hasattr(part, "shape")}


_FEEDS: tuple[tuple[type[Source], Any], ...] = (
    (GraphSource, GraphFeed),
    (PythonSource, IndexedFeed),
    (PyDatasetSource, BatchFeed),
    (InputFunctionSource, InputFunctionFeed),
    (StreamSource, StreamFeed),
)
