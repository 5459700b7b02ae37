"""TensorFlow Datasets as sources: one task prepares the dataset, then all tasks read by index."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.arrays import ArraySource
from tfdist.data.cache import exclusive
from tfdist.data.draws import draws_nothing
from tfdist.data.source import Nest, Source, Transform
from tfdist.data.tfrecord import MEMORY_LIMIT_BYTES, TFRecordSource
from tfdist.errors import TfdistError, UsageError, near, require, require_packages

_log = logging.getLogger(__name__)


def from_tfds(
    name: str,
    split: str,
    *,
    data_dir: str | Path | None = None,
    convert: Callable[[dict[str, Any]], Nest] | None = None,
    transform: Transform | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    prepare_timeout_s: float = 3600.0,
) -> Source:
    """Return a split of a TFDS dataset as a source of ``(x, y)``. Every task may call it.

    `name`, `split` and `data_dir` are as in `tfds.load` ("mnist", "train[:90%]"). `convert`
    converts the dict of features to an example in graph operations (default: the dataset's
    supervised pair). `transform` changes each batch (default: none). If the split exceeds
    `memory_limit_bytes` (default: 1 GiB) and has TFRecord files, it is read by index. Other splits
    are held in memory. Raises `UsageError` for an unknown name or examples without a fixed shape,
    `TfdistError` for an unknown split, and `StartupTimeout` after `prepare_timeout_s` (default:
    3600) seconds of wait.
    """
    builder = prepare(name, data_dir=data_dir, timeout_s=prepare_timeout_s)
    # Files are read in sequence, so that the examples have the order of the files.
    reading = _tfds().ReadConfig(interleave_cycle_length=1, try_autocache=False)
    try:
        dataset = builder.as_dataset(split=split, shuffle_files=False, read_config=reading)
    except ValueError as error:  # unknown split
        raise TfdistError(f"dataset {name}: {error}") from error
    convert = convert or _supervised_pair(builder)
    dataset = dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    for leaf in (leaves := tf.nest.flatten(dataset.element_spec)):
        require(
            leaf.shape.is_fully_defined(),
            f"dataset {builder.name}",
            f"the examples have no fixed shape: {leaf.shape}",
            fix="pass a function convert= that resizes or pads an example",
            code="shapes-differ",
        )
    example_bytes = sum(leaf.shape.num_elements() * (leaf.dtype.size or 64) for leaf in leaves)
    size_bytes = int(dataset.cardinality()) * example_bytes
    if size_bytes > memory_limit_bytes and builder.info.file_format.value == "tfrecord":
        return _from_tfrecords(builder, split, convert, dataset.element_spec, transform)
    batches = list(dataset.batch(4096).as_numpy_iterator())
    arrays = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    parts = arrays if isinstance(arrays, tuple) else (arrays,)
    x, y, sample_weight = (*parts, None, None)[:3]
    return ArraySource(x, y, sample_weight=sample_weight, transform=transform)


@draws_nothing()  # TFDS draws names of temporary folders only in the task that prepares
def prepare(name: str, *, data_dir: str | Path | None = None, timeout_s: float = 3600.0) -> Any:
    """Return the TFDS builder of a dataset, and prepare the dataset if necessary.

    One process prepares the dataset. The others log that they wait, until its lock is released.
    """
    builder = _builder(name, data_dir)
    if builder.is_prepared():
        return builder
    lock_file = Path(builder.data_dir_root, f".tfdist-{builder.name}.lock")
    with (
        contextlib.nullcontext()  # in a bucket
        if "://" in str(builder.data_dir_root)
        else exclusive(lock_file, purpose=f"preparing dataset {name}", timeout_s=timeout_s)
    ):
        # A new builder, because a builder reads the directory when it is created.
        builder = _builder(name, data_dir)
        if not builder.is_prepared():
            _log.info("preparing dataset %s in %s", name, builder.data_dir)
            if not sys.stderr.isatty():
                _tfds().disable_progress_bar()
            builder.download_and_prepare()
    return builder


def _tfds() -> Any:
    require_packages("dataset", "tensorflow_datasets", extra="tfds")
    import tensorflow_datasets

    return tensorflow_datasets


def _builder(name: str, data_dir: str | Path | None) -> Any:
    if name.partition("/")[0].partition(":")[0] == "tfdist_digits":
        require_packages(f"dataset {name}", "tensorflow_datasets", extra="digits")
        import tfdist.data.digits  # noqa: F401  (registers the builder)
    tfds = _tfds()
    try:
        return tfds.builder(name, data_dir=None if data_dir is None else str(data_dir))
    except tfds.core.registered.DatasetNotFoundError:
        known = [*tfds.list_builders(with_community_datasets=False), "tfdist_digits"]
        raise UsageError(
            "dataset",
            f"{name!r} is unknown{near(name, known)}",
            fix="use a name from tfds.list_builders(), or import the module that defines the "
            "builder",
            code="unknown-value",
        ) from None


def _supervised_pair(builder: Any) -> Callable[[dict[str, Any]], Nest]:
    keys = builder.info.supervised_keys
    if keys is None:
        raise UsageError(
            f"dataset {builder.name}",
            "the dataset has no supervised pair, so tfdist cannot tell inputs from targets",
            fix="pass convert=lambda example: (x, y), made from the features "
            f"{', '.join(builder.info.features)}",
            code="unsupported-data",
        )

    def pick(example: dict[str, Any]) -> Nest:
        return tuple(tf.nest.map_structure(lambda key: example[key], part) for part in keys)

    return pick


def _from_tfrecords(
    builder: Any, split: str, convert: Callable[[dict[str, Any]], Nest], spec: Nest, transform: Any
) -> Source:
    features = builder.info.features
    parts = builder.info.splits[split].file_instructions
    spans = [(str(part.filename), part.skip, part.take) for part in parts]

    def parse(records: tf.Tensor) -> Nest:
        def one(record: tf.Tensor) -> Nest:
            return convert(features.deserialize_example(record))

        return tf.map_fn(one, records, fn_output_signature=spec)

    return TFRecordSource([file for file, _, _ in spans], parse, transform=transform, spans=spans)
