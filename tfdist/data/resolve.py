"""Conversion of the user's data to a source, and a check that the strategy supports the source."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import Kind
from tfdist.data.arrays import ArraySource, is_array
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import Nest, Source, traced_transform
from tfdist.data.stream import (
    InputFunctionSource,
    StreamSource,
    captured_resources,
    python_operation,
    python_operation_of,
)
from tfdist.errors import UsageError, require

_INSTEAD_OF_ITERATORS = (
    "use tf.data.Dataset.from_generator(function, output_signature=...) or a PyDataset. If it is "
    "a torch DataLoader, use tfdist.data.PythonSource(loader.dataset)"
)
_ACCEPTED = (
    "arrays, a tuple or dict of arrays, a keras.utils.PyDataset, a tf.data.Dataset, a function of "
    "tf.distribute.InputContext, or a tfdist source"
)


def as_source(x: Nest, y: Nest = None, *, sample_weight: Nest = None) -> Source:
    """Return the source for the data arguments of `keras.Model.fit`.

    Raises `UsageError` if the type of `x` is not supported. Also raises it for `y` or
    `sample_weight` if `x` is not an array: then the items of `x` contain them.
    """
    leaves = tf.nest.flatten(x) if isinstance(x, dict | list | tuple) else [x]
    present = [leaf for leaf in leaves if leaf is not None]
    if present and all(map(is_array, present)):
        return ArraySource(x, y, sample_weight=sample_weight)
    source, kind = _source_of(x)
    for argument, value in (("y", y), ("sample_weight", sample_weight)):
        require(
            value is None,
            argument,
            f"a {kind} must contain {argument} itself",
            fix=f"let the {kind} return (x, y) or (x, y, sample_weight), and leave out {argument}",
            code="exclusive",
        )
    return source


def check_supported(source: Source, kind: Kind) -> None:
    """Raise `UsageError` if the strategy does not support the source.

    Under ps the workers build batches only from graph operations. They can neither run the chief's
    Python code nor read its variables. Under pipeline all tasks must read the same batches, so a
    function of InputContext is rejected.
    """
    if kind.has_stages and isinstance(source, InputFunctionSource):
        raise UsageError(
            "x",
            "all stages must read the same batches, but a function of InputContext divides the "
            "data",
            fix="pass the tf.data.Dataset itself",
            code="unsupported-data",
        )
    if not kind.has_servers:
        return
    operation, holds = None, False
    if isinstance(source, StreamSource | InputFunctionSource):
        dataset = source.dataset_for()
        operation = python_operation(dataset)
        holds = next(captured_resources(dataset), None) is not None
    if source.transform is not None and not isinstance(source, PythonSource | PyDatasetSource):
        traced = traced_transform(source)
        operation = operation or python_operation_of(traced.graph.as_graph_def())
        holds = holds or any(tensor.dtype == tf.resource for tensor in traced.captured_inputs)
    require(
        operation is not None or not holds,
        "data under the ps strategy",
        f"{source.kind} uses a variable or a table of the chief (for example a layer with weights "
        "or a lookup), which workers cannot read",
        fix="move the layer into the model, or apply it to the data before training",
        code="unsupported-data",
    )
    require(
        operation is None and not isinstance(source, PythonSource | PyDatasetSource),
        "data under the ps strategy",
        f"{source.kind} calls Python code ({operation or 'for each example or batch'}), which "
        "workers cannot run",
        fix="pass arrays (np.memmap if memory is too small) or a tf.data.Dataset without Python "
        "code, or use multiworker",
        code="unsupported-data",
    )


def _source_of(x: Any) -> tuple[Source, str]:
    if isinstance(x, Source):
        return x, "tfdist source"
    if isinstance(x, tf.data.Dataset):
        return StreamSource(x), "tf.data.Dataset"
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetSource(x), "PyDataset"
    if x is None or isinstance(x, dict | list | tuple | str | bytes):
        fix = "convert each part with np.asarray(...), or read TFDS with tfdist.data.from_tfds(...)"
        raise _not_accepted(x, fix=fix)
    if any(parent.__module__.startswith("grain.") for parent in type(x).__mro__):
        # Keras reads the items of a grain dataset as batches, but PythonSource as examples.
        fix = "pass tfdist.data.PythonSource(dataset) with one example per item"
        raise _not_accepted(x, fix=fix)
    if hasattr(type(x), "__len__") and hasattr(type(x), "__getitem__"):
        return PythonSource(x), "collection of examples"
    if callable(x) and not inspect.isgeneratorfunction(x):
        return InputFunctionSource(x), "function of InputContext"
    raise _not_accepted(x, fix=_INSTEAD_OF_ITERATORS)


def _not_accepted(x: Any, *, fix: str) -> UsageError:
    text = "" if x is None else " ".join(repr(x).split())[:60]
    problem = (
        f"the {type(x).__name__} {text}".rstrip() + f" is not supported (supported: {_ACCEPTED})"
    )
    return UsageError("x", problem, fix=fix, code="unsupported-data")
