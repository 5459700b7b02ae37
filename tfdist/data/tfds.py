"""TensorFlow Datasets: prepared once for all tasks of a job, then read by index."""

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
from tfdist.data.cache import exclusive, private_cache_dir
from tfdist.data.draws import draws_nothing
from tfdist.data.python_indexed import PythonSource
from tfdist.data.source import Nest, Source, Transform
from tfdist.data.tfrecord import TFRecordSource
from tfdist.errors import UsageError, near, require, require_packages

_log = logging.getLogger(__name__)
MEMORY_LIMIT_BYTES = 2**30
_READ_BATCH = 4096
_OWN_DATASETS = ("tfdist_digits",)


def load(
    name: str,
    split: str,
    *,
    data_dir: str | Path | None = None,
    file_format: str | None = None,
    convert: Callable[[dict[str, Any]], Nest] | None = None,
    transform: Transform | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    prepare_timeout_s: float = 3600.0,
) -> Source:
    """Return a split of a TFDS dataset as a source of ``(x, y)``; every task may call it.

    `name` and `split` are as in `tfds.load` ("mnist", "train[:90%]"). `convert` makes one
    example, by default the dataset's supervised pair, of the dict of features: in graph
    operations, or NumPy for `file_format="array_record"`. A split of up to `memory_limit_bytes`
    is held in memory. A larger one is read by index: TFRecords under every strategy,
    `array_record` in Python. Raises `UsageError` for unknown names and splits, and for examples
    without one fixed shape; `StartupTimeout` if another task prepares for too long.
    """
    builder = prepare(name, data_dir=data_dir, file_format=file_format, timeout_s=prepare_timeout_s)
    _require_split(builder, split)
    convert = convert or _supervised_pair(builder)
    is_array_record = builder.info.file_format.value == "array_record"
    read = _from_array_record if is_array_record else _from_tf_data
    source = read(builder, split, convert, memory_limit_bytes)
    source.transform = transform
    return source


@draws_nothing()  # TFDS draws names of temporary folders: who finds the data prepared does not
def prepare(
    name: str,
    *,
    data_dir: str | Path | None = None,
    file_format: str | None = None,
    timeout_s: float = 3600.0,
) -> Any:
    """Return the TFDS builder of a prepared dataset.

    One process at a time prepares; the others wait for it, say so, and find it done. The lock ends
    with its owner, however that ends.
    """
    builder = _builder(name, data_dir=data_dir, file_format=file_format)
    if builder.is_prepared():
        return builder
    lock_file, purpose = _lock_file(builder), f"preparing dataset {name}"
    with (
        contextlib.nullcontext()
        if lock_file is None
        else exclusive(lock_file, purpose=purpose, timeout_s=timeout_s)
    ):
        # Anew, because a builder reads what is there when it is made.
        builder = _builder(name, data_dir=data_dir, file_format=file_format)
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


def _builder(name: str, *, data_dir: str | Path | None, file_format: str | None) -> Any:
    if name.partition("/")[0].partition(":")[0] in _OWN_DATASETS:
        require_packages(f"dataset {name}", "tensorflow_datasets", extra="digits")
        import tfdist.data.digits  # noqa: F401  (registers the builder)
    tfds = _tfds()
    options: dict[str, Any] = {} if file_format is None else {"file_format": file_format}
    try:
        return tfds.builder(name, data_dir=None if data_dir is None else str(data_dir), **options)
    except tfds.core.registered.DatasetNotFoundError:
        raise UsageError(
            "dataset",
            received=repr(name) + near(name, _known_names()),
            expected="a name that tfds.list_builders() knows",
            fix="check the name, or import the module that defines the builder",
            code="unknown-value",
        ) from None


def _known_names() -> list[str]:
    return [*_tfds().list_builders(with_community_datasets=False), *_OWN_DATASETS]


def _lock_file(builder: Any) -> Path | None:
    """Return where the lock is: beside the data, or in the cache for data in a bucket.

    None if there is no private cache: processes that prepare data in a bucket then do so at once.
    """
    root = str(builder.data_dir_root)
    directory = private_cache_dir() if "://" in root else Path(root)
    return None if directory is None else directory / f".tfdist-{builder.name}.lock"


def _require_split(builder: Any, split: str) -> None:
    if not builder.info.splits:  # as under tfds.testing.mock_data, which takes any name
        return
    try:
        count = builder.info.splits[split].num_examples
    except (KeyError, ValueError):
        names = sorted(builder.info.splits)
        base = split.partition("[")[0]
        raise UsageError(
            f"dataset {builder.name}",
            received=f"split {split!r}{near(base, names)}",
            expected=f"one of {', '.join(names)}, or a part such as {names[0]}[:90%]",
            fix="change the split",
            code="unknown-value",
        ) from None
    require(
        count,
        f"dataset {builder.name}",
        received=f"split {split!r}, which is empty",
        expected="at least one example",
        fix="choose a larger part",
        code="no-examples",
    )


def _supervised_pair(builder: Any) -> Callable[[dict[str, Any]], Nest]:
    keys = builder.info.supervised_keys
    if keys is None:
        raise UsageError(
            f"dataset {builder.name}",
            received="no supervised pair in it",
            expected="convert=, which makes (x, y) of one example",
            fix=f"write convert=lambda example: ...; features: {', '.join(builder.info.features)}",
            code="no-supervised-pair",
        )

    def pick(example: dict[str, Any]) -> Nest:
        return tuple(tf.nest.map_structure(lambda key: example[key], part) for part in keys)

    return pick


def _from_tf_data(
    builder: Any,
    split: str,
    convert: Callable[[dict[str, Any]], Nest],
    memory_limit_bytes: int,
) -> Source:
    tfds = _tfds()
    # One file after the other: the order of the examples is that of the files.
    reading = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(split=split, shuffle_files=False, read_config=reading)
    dataset = dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    spec = dataset.element_spec
    _require_fixed_shapes(builder, spec)
    size_bytes = _size_bytes(spec, int(dataset.cardinality()))
    if size_bytes <= memory_limit_bytes:
        batches = list(dataset.batch(_READ_BATCH).as_numpy_iterator())
        arrays = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
        return _in_memory(arrays)
    if builder.info.file_format.value == "tfrecord":
        return _from_tfrecords(builder, split, convert, spec)
    raise UsageError(
        f"dataset {builder.name}",
        received=f"{size_bytes / 1e9:.1f} GB in {builder.info.file_format.value} files",
        expected=f"up to {memory_limit_bytes / 1e9:.1f} GB, or files with access by index",
        fix='pass file_format="array_record" or "tfrecord", or a larger memory_limit_bytes',
        code="too-large",
    )


def _from_tfrecords(
    builder: Any, split: str, convert: Callable[[dict[str, Any]], Nest], spec: Nest
) -> Source:
    features = builder.info.features
    parts = builder.info.splits[split].file_instructions
    spans = [(str(part.filename), part.skip, part.take) for part in parts]

    def parse(records: tf.Tensor) -> Nest:
        def one(record: tf.Tensor) -> Nest:
            return convert(features.deserialize_example(record))

        return tf.map_fn(one, records, fn_output_signature=spec)

    return TFRecordSource([file for file, _, _ in spans], parse, spans=spans)


def _from_array_record(
    builder: Any,
    split: str,
    convert: Callable[[dict[str, Any]], Nest],
    memory_limit_bytes: int,
) -> Source:
    source = PythonSource(builder.as_data_source(split=split), convert=convert)
    if _size_bytes(source.element_spec, source.num_examples) > memory_limit_bytes:
        return source
    return _in_memory(source.fetch(np.arange(source.num_examples)))


def _in_memory(arrays: Nest) -> Source:
    parts = arrays if isinstance(arrays, tuple) else (arrays,)
    x, y, sample_weight = (*parts, None, None)[:3]
    return ArraySource(x, y, sample_weight=sample_weight)


def _require_fixed_shapes(builder: Any, spec: Nest) -> None:
    loose = [leaf for leaf in tf.nest.flatten(spec) if not leaf.shape.is_fully_defined()]
    if loose:
        raise UsageError(
            f"dataset {builder.name}",
            received=f"examples of shape {loose[0].shape}",
            expected="one fixed shape for all examples",
            fix="pass convert=, which resizes or pads one example",
            code="shapes-differ",
        )


def _size_bytes(spec: Nest, num_examples: int) -> int:
    leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
    return sum(
        num_examples * leaf.shape.num_elements() * (leaf.dtype.size or 64) for leaf in leaves
    )
