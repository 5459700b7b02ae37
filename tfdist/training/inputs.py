"""Conversion of the arguments of `fit`, `evaluate` and `predict` to a feed and an epoch plan.

The feeds of batches that the user has made are here, too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from tfdist import phases
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.resolve import as_source, check_supported
from tfdist.data.source import GraphSource, Source, batch_spec, unpack
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import Reading, read, serialized
from tfdist.errors import UsageError, require, require_int
from tfdist.strategy import Job
from tfdist.training.epochs import EpochPlan, VirtualEpochs, share_of
from tfdist.training.feed import (
    AHEAD_STEPS,
    BatchFeed,
    Feed,
    GraphFeed,
    IndexedFeed,
    Order,
    Part,
    digest_is_due,
    digest_of,
    ids_of_rows,
    require_same_examples,
    share_random_states,
)

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """Length of a run over some data; see the arguments of `fit`.

    Attributes:
      once: the data's end is the end, whatever `steps_per_epoch` says.
      most_epochs: what `keras.config.max_epochs` says.
      most_steps: of an epoch: what `keras.config.max_steps_per_epoch` says.
    """

    batch_size: int | None = None
    epochs: int = 1
    steps_per_epoch: int | None = None
    virtual_epochs: VirtualEpochs | None = None
    overfit_batches: int | None = None
    once: bool = False
    most_epochs: int | None = None
    most_steps: int | None = None


def split(arrays: tuple[Any, Any, Any], *, validation_split: float) -> tuple[Any, Any]:
    """Split the last part off as validation data, as Keras does."""
    number = isinstance(validation_split, int | float | np.number)
    require(
        number and 0 <= validation_split < 1,
        "validation_split",
        received=repr(validation_split),
        expected="a number from 0 up to, but not including, 1",
        fix="pass the share of the examples that validation takes, such as 0.1",
        code="not-a-share",
    )
    try:
        return array_slicing.train_validation_split(arrays, validation_split=validation_split)
    except ValueError as error:
        raise UsageError(
            "validation_split",
            received=f"{validation_split}, and this: {' '.join(str(error).split())[:160]}",
            expected="arrays, with an example at least on each side",
            fix="pass arrays, or validation_data",
            code="cannot-split",
        ) from error


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
) -> Feed:
    """Make data ready for a run. Every task calls it alike.

    Raises:
      UsageError: the data cannot be had under this strategy, are empty, or do not fit `length`.
    """
    _check(length)
    _require_class_weight(class_weight)
    source = _source_of(x, y, sample_weight, job=job, shuffle=shuffle)
    batch, examples = _sizes_of(source, length, job=job, seed=seed)
    _require_enough(batch, job)
    order = _order_of(examples, length, batch=batch, shuffle=shuffle)
    plan = _plan(length, batch=batch, examples=order.examples)
    ready = not isinstance(source, GraphSource | PythonSource)  # the user has made the batches
    if ready and length.virtual_epochs and not plan.all_full:
        raise _cut_batches(batch)
    kind = next(feed for kind, feed in _FEEDS if isinstance(source, kind))
    spec = batch_spec(source.element_spec)
    feed: Feed = kind(
        source,
        plan,
        job=job,
        seed=seed,
        order=order,
        batch_spec=spec if class_weight is None else _with_weight(spec),
        rows=batch if ready and not isinstance(source, InputFunctionSource) else None,
        after=_class_weights(class_weight),
    )
    _LOG.info("%s", source.describe())
    return feed


def _source_of(x: Any, y: Any, sample_weight: Any, *, job: Job, shuffle: bool) -> Source:
    """Return the source of some data, of which every task has the same. A collective."""
    source = as_source(x, y, sample_weight=sample_weight)
    check_supported(source, job.kind)
    if isinstance(source, InputFunctionSource) and not shuffle:
        # Each once: not by tasks that may overlap.
        source = StreamSource(source.dataset_for(), transform=source.transform)
    share_random_states(job, source)
    require_same_examples(job, source)
    return source


def _order_of(examples: int | None, length: Length, *, batch: int, shuffle: bool) -> Order:
    """Return the order of the examples, of which `overfit_batches` may leave a few."""
    few = length.overfit_batches
    if few:
        examples = few * batch if examples is None else min(examples, few * batch)
        few = -(-examples // batch)
    return Order(examples=examples, shuffle=shuffle, batches=few)


def _cut_batches(batch: int) -> UsageError:
    return UsageError(
        "virtual_epochs",
        received=f"boundaries inside batches that come ready, of {batch} examples",
        expected="boundaries between batches, or data by index, whose batches can be cut",
        fix=f"make total_examples a multiple of checkpoints * {batch}, or pass arrays",
        code="cut-batches",
    )


def _check(length: Length) -> None:
    numbers = {
        "batch_size": (length.batch_size, 1),
        "epochs": (length.epochs, 0),
        "steps" if length.once else "steps_per_epoch": (length.steps_per_epoch, 1),
        "overfit_batches": (length.overfit_batches, 1),
    }
    for name, (value, least) in numbers.items():
        if value is not None or name == "epochs":
            require_int(name, value, least=least)
    require(
        isinstance(length.virtual_epochs, VirtualEpochs | None),
        "virtual_epochs",
        received=repr(length.virtual_epochs),
        expected="a tfdist.VirtualEpochs",
        fix="write tfdist.VirtualEpochs(total_examples=..., checkpoints=...)",
        code="wrong-type",
    )


def _plan(length: Length, *, batch: int, examples: int | None) -> EpochPlan:
    virtual = length.virtual_epochs
    if virtual is not None:
        if length.epochs != 1 or length.steps_per_epoch is not None:
            raise UsageError(
                "tfdist.fit",
                received="virtual_epochs together with epochs or steps_per_epoch",
                expected="one of the two ways to say how long a run is",
                fix="leave epochs and steps_per_epoch out",
                code="exclusive",
            )
        if length.most_epochs or length.most_steps:
            raise _limited_virtual_epochs()
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
            received="data of unknown length and no steps_per_epoch",
            expected="to know how long an epoch is",
            fix="pass steps_per_epoch (validation_steps, steps), or virtual_epochs",
            code="unknown-length",
        )
    epochs = min(length.epochs, length.most_epochs or length.epochs)
    return EpochPlan.uniform(epochs=epochs, examples=per_epoch, global_batch_size=batch)


def _limited_virtual_epochs() -> UsageError:
    return UsageError(
        "virtual_epochs",
        received="virtual epochs where keras.config limits the epochs of a run or their steps",
        expected="a run that is as long as it says",
        fix="lower total_examples, and leave KERAS_MAX_EPOCHS, KERAS_MAX_STEPS_PER_EPOCH and "
        "keras.config.set_max_epochs and set_max_steps_per_epoch out",
        code="limited-epochs",
    )


def _require_enough(batch: int, job: Job) -> None:
    if batch < job.num_replicas:
        raise UsageError(
            "batch_size",
            received=f"a global batch of {batch} for {job.num_replicas} replicas",
            expected="at least one example for each replica",
            fix=f"pass batch_size={job.num_replicas} or more, or use fewer devices",
            code="batch-too-small",
        )


def _require_class_weight(class_weight: Any) -> None:
    """Raise UsageError unless this is None or a weight by class number."""
    good = class_weight is None or (
        isinstance(class_weight, dict)
        and bool(class_weight)
        and all(
            isinstance(c, int | np.integer) and c >= 0 and isinstance(w, int | float | np.number)
            for c, w in class_weight.items()
        )
    )
    require(
        good,
        "class_weight",
        received=repr(class_weight)[:80],
        expected="a dict of class numbers, from 0 up, and weights",
        fix="write it as {0: 1.0, 1: 2.5}; a class that is not in it weighs 1",
        code="wrong-type",
    )


def _class_weights(class_weight: dict[int, float] | None) -> Callable[[Any], Any] | None:
    if class_weight is None:
        return None
    unlisted = max(class_weight) + 1
    weights = [float(class_weight.get(c, 1.0)) for c in range(unlisted)] + [1.0]

    def weigh(data: Any) -> Any:
        x, y, _ = unpack(data)
        one_hot = y.shape.rank >= 2 and y.shape[-1] != 1
        classes = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [tf.shape(y)[0]])
        classes = tf.cast(tf.round(classes) if classes.dtype.is_floating else classes, tf.int32)
        listed = tf.logical_and(classes >= 0, classes < unlisted)
        return x, y, tf.gather(tf.constant(weights), tf.where(listed, classes, unlisted))

    return weigh


def _with_weight(spec: Any) -> Any:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(spec)
    if weight is not None or y is None or tf.nest.is_nested(y):
        raise UsageError(
            "class_weight",
            received="class_weight with sample weights, several outputs, or no targets",
            expected="one target per example, and no sample weights",
            fix="pass sample_weight alone, with the class weights multiplied in",
            code="class-weight-data",
        )
    if y.shape.rank not in (1, 2):
        raise UsageError(
            "class_weight",
            received=f"targets of shape {y.shape}, of which an example has several classes",
            expected="a class for each example, as a number or one-hot",
            fix="pass sample_weight, with a weight for each of them",
            code="class-weight-data",
        )
    return x, y, tf.TensorSpec([None], tf.float32)


# Choice of a source's feed and batch sizes.


_DEFAULT_BATCH_SIZE = 32
_COUNTING = (
    "a dataset does not tell its length, and is read once to count its batches; steps_per_epoch "
    "(validation_steps, steps) or tf.data.experimental.assert_cardinality(n) saves that"
)


def _sizes_of(source: Source, length: Length, *, job: Job, seed: int) -> tuple[int, int | None]:
    """Return the examples of a global batch, and of one pass, None where that is not known.

    Of a source by index as asked, of batches as they come; a last one that is smaller counts as
    whole.
    """
    whole = source.num_examples
    if isinstance(source, GraphSource | PythonSource):
        batch, steps = length.batch_size, length.steps_per_epoch
        if batch is None and steps and whole and steps <= whole:
            batch = -(-whole // steps)  # as Keras has it
        return batch or _DEFAULT_BATCH_SIZE, whole
    batch = _size_of_first(source, num_replicas=job.num_replicas)
    batches = getattr(source, "num_batches", None)
    if batches is None and isinstance(source, StreamSource) and not source.is_endless:
        batches = _counted(source, length, job=job, seed=seed)
    if batches == 0:
        raise UsageError(
            "data",
            received="a dataset without a batch",
            expected="at least one batch",
            fix="check the files it reads, and drop_remainder",
            code="no-data",
        )
    return batch, None if batches is None else batches * batch


def _counted(source: StreamSource, length: Length, *, job: Job, seed: int) -> int | None:
    """Return how many batches of a stream there are for an epoch, None where nobody has to know.

    It is read once for that, as far as it is used, and as the run will: it may fill a cache.
    """
    known = length.steps_per_epoch is not None or length.virtual_epochs is not None
    if known and not length.once:
        return None
    if job.task_index == 0:
        _LOG.warning(_COUNTING)
    whole = read(source.dataset_for(), _reading_of(job, seed))
    most = (length.steps_per_epoch or -1) if length.once else -1
    return int(whole.take(most).reduce(np.int64(0), lambda n, *_: n + 1))


def _size_of_first(source: Any, *, num_replicas: int) -> int:
    if isinstance(source, PyDatasetSource):
        sizes = _lengths(source.fetch_batch(0))
    else:
        sizes = _lengths(source.batched_spec)
        if None in sizes:
            sizes = _lengths(next(iter(read(source.dataset_for(), Reading(peek=True))), None))
    if len(sizes) > 1 and num_replicas > 1 and not isinstance(source, InputFunctionSource):
        raise UsageError(
            "data",
            received=f"a batch whose parts have {', '.join(map(str, sorted(sizes)))} rows",
            expected="a row for each example in every part, as replicas divide a batch",
            fix="repeat in the data what belongs to all examples, or use strategy single",
            code="uneven-parts",
        )
    return max(*sizes, 1) if sizes else 1


def _lengths(batch: Any) -> set[Any]:
    return {part.shape[0] for part in tf.nest.flatten(batch) if hasattr(part, "shape")}


# Feeds from streams: a dataset of the user's own batches, resumed by reading it again.


_SAY_EVERY_BATCHES = 16
_plain = tf.autograph.experimental.do_not_convert


def _reading_of(job: Job, seed: int) -> Reading:
    return Reading(seed=seed, in_step=job.num_tasks > 1 or job.num_workers > 1)


class StreamFeed(Feed):
    """Feed of a stream: every task reads the same batches and takes its replicas' slices.

    The global batch is then the user's own, whatever the number of tasks. Under ps each worker
    reads its own part of a training stream, over and over: not each example exactly once.
    """

    source: StreamSource

    def __init__(self, source: StreamSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        batches = self.order.batches
        self._reading = _reading_of(self._job, self._seed)
        self.may_be_empty = self._job.num_replicas > 1
        self._in_order = not self.order.shuffle
        self._is_endless = source.is_endless and batches is None
        self._take = -1 if batches is None else batches

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; called eagerly."""
        return self._dataset(first, last, self._reading)

    def first_batch(self) -> Any:
        """As in `Feed`; fills no cache of the user's."""
        reading = dataclasses.replace(self._reading, peek=True)
        return next(iter(self._dataset(0, 1, reading)))[0][0]

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        batches = self._endless(read(self.source.dataset_for(), reading))
        batches = _from_step(first, batches).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        if self._job.num_tasks > 1 and not reading.peek:
            numbered = numbered.map(_plain(functools.partial(self._with_digest, first)))
        return numbered.map(_plain(self._parts)).prefetch(AHEAD_STEPS)

    def _with_digest(self, first: int, step: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        """Note the digests of a batch that tasks are to compare."""

        leaves, targets = _leaves(batch), _leaves(unpack(batch)[1])

        def note() -> tf.Tensor:
            note_of = functools.partial(self._note, len(leaves))
            return tf.numpy_function(note_of, [step, *leaves, *targets], tf.bool)

        due = digest_is_due(step, first=first)
        with tf.control_dependencies([tf.cond(due, note, lambda: tf.constant(True))]):
            return tf.identity(step), batch

    def _note(self, count: int, step: np.ndarray, *arrays: np.ndarray) -> np.bool_:
        self.digests[int(step)] = digest_of(arrays[:count]), digest_of(arrays[count:])
        return np.True_

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the dataset's own graph when order counts, else the worker's batches."""
        with tf.init_scope():
            graph = serialized(self.source.dataset_for(), self._reading)
        if self._in_order:
            return tf.data.Dataset.from_tensors(graph).repeat()
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = _from_graph(graph, self.source)
        return self._endless(batches.shard(self._job.num_workers, index))

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """As in `Feed`."""
        batches = given
        if self._in_order:
            whole = self._endless(_from_graph(given.get_next(), self.source))
            batches = iter(whole.skip(first).take(last - first))
        return lambda step: Part(*self._whole(step, batches.get_next())[0])

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self._is_endless else dataset.take(self._take).repeat()

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Any, ...]:
        data = self._finished(step, data)
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        return tuple(self._part(data, size, replica) for replica in self._job.replica_ids)

    def _part(self, data: Any, size: tf.Tensor, replica: int) -> tuple[Any, Any, Any]:
        if self._job.num_replicas == 1:
            return data, tf.constant(1.0), size
        low, high = share_of(replica, parts=self._job.num_replicas, size=size)
        start = tf.minimum(low, size - 1)
        stop = tf.maximum(high, start + 1)
        share = tf.cast((high - low) / size, tf.float32)
        return tf.nest.map_structure(lambda leaf: _rows(leaf, start, stop), data), share, high - low

    def _whole(self, number: tf.Tensor, data: Any) -> tuple[Any, ...]:
        """Return one part, of a whole batch; `number` is that of no other batch of the run."""
        data = self._finished(number, data)
        return ((data, tf.constant(1.0), tf.cast(tf.shape(_first(data))[0], tf.int64)),)

    def _finished(self, number: tf.Tensor, data: Any) -> Any:
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        ids = ids_of_rows(number, tf.range(size), batch=self.plan.global_batch_size)
        data = self.source.transformed(data, example_ids=ids, epoch=0, seed=self._seed)
        return self._after(data) if self._after else data


class InputFunctionFeed(StreamFeed):
    """Feed of what the user's function gives each task; a replica takes whole batches."""

    source: InputFunctionSource  # type: ignore[assignment]
    counts_fractions = True

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = False
        self._in_order = False

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        """As in `StreamFeed`; a task with several devices reads its stream once for each."""
        job = self._job
        context = tf.distribute.InputContext(
            num_input_pipelines=job.num_tasks,
            input_pipeline_id=job.task_index,
            num_replicas_in_sync=job.num_replicas,
        )
        batches = self._endless(read(self.source.dataset_for(context), reading))
        local = len(job.replica_ids)
        shards = tuple(batches.shard(local, i) if local > 1 else batches for i in range(local))
        steps = _from_step(first, tf.data.Dataset.zip(shards)).take(last - first)

        def parts(step: tf.Tensor, each: Any) -> tuple[Any, ...]:
            numbers = [step * job.num_replicas + replica for replica in job.replica_ids]
            return tuple(self._whole(n, d)[0] for n, d in zip(numbers, each, strict=True))

        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), steps))
        return numbered.map(_plain(parts)).prefetch(AHEAD_STEPS)

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the function's dataset for this worker."""
        context = tf.distribute.InputContext(
            num_input_pipelines=self._job.num_workers,
            input_pipeline_id=(tf.distribute.coordinator.experimental_get_current_worker_index()),
            num_replicas_in_sync=1,
        )
        return self._endless(self.source.dataset_for(context))


def _from_step(first: int, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Leave out the first batches: reads them again, and report on the way that this goes on.

    It may take longer than a task may hang.
    """
    if first == 0:
        return batches

    def said() -> tf.Tensor:
        return tf.numpy_function(_go_on, [], tf.bool)

    def is_due(number: tf.Tensor, _: Any) -> tf.Tensor:
        speaks = (number < first) & (number % _SAY_EVERY_BATCHES == 0)
        with tf.control_dependencies([tf.cond(speaks, said, lambda: tf.constant(True))]):
            return number >= first

    return batches.enumerate().filter(_plain(is_due)).map(_plain(lambda _, batch: batch))


def _go_on() -> np.bool_:
    phases.go_on()
    return np.True_


def _from_graph(graph: tf.Tensor, source: Any) -> tf.data.Dataset:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, structure=source.batched_spec)


def _leaves(nest: Any) -> list[tf.Tensor]:
    """Return the tensors of a batch, those that a sparse or ragged one is made of, too."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def _rows(leaf: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    rest = tf.shape(leaf, tf.int64)[1:]
    first = tf.concat([[start], tf.zeros_like(rest)], 0)
    return tf.sparse.slice(leaf, first, tf.concat([[stop - start], rest], 0))


def _first(data: Any) -> tf.Tensor:
    return next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)


_FEEDS: tuple[tuple[type[Source], Any], ...] = (
    (GraphSource, GraphFeed),
    (PythonSource, IndexedFeed),
    (PyDatasetSource, BatchFeed),
    (InputFunctionSource, InputFunctionFeed),
    (StreamSource, StreamFeed),
)
