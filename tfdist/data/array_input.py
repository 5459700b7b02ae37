"""Conversion of array-like input to a NumPy array or an eager tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError


def is_array(value: object) -> bool:
    """Tell whether Keras would take `value` as an array (pandas, JAX and torch included)."""
    return (
        isinstance(value, np.ndarray | tf.Tensor | tf.SparseTensor | tf.RaggedTensor)
        or hasattr(value, "__array__")
        or _is_scipy_sparse(value)
    )


def as_column(value: Any, *, where: str) -> Any:
    """Return `value` as NumPy array (memmaps stay memmaps) or dense eager tensor.

    Raises `UsageError`, which begins with `where`, for what cannot be indexed by example.
    """
    require_dense(value, where=where)
    if not is_array(value):
        raise UsageError(
            where,
            received=f"{type(value).__name__} {str(value)[:60]!r}",
            expected="an array, a tensor, or a tuple or dict of them",
            fix="wrap it in np.asarray(...)",
        )
    array = _to_array(value)
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        array = _strings(array, where=where)
    if len(array.shape) == 0:
        raise UsageError(
            where,
            received="a scalar",
            expected="an array with an axis of examples",
            fix="pass one entry for each example",
        )
    return array


def require_dense(value: Any, *, where: str) -> None:
    """Raise `UsageError`, which begins with `where`, for a sparse or ragged array."""
    if _is_scipy_sparse(value) or isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise UsageError(
            where,
            received=f"a {type(value).__name__}",
            expected="a dense array: rows of sparse and ragged arrays have no fixed size",
            fix="pass .toarray() or .to_tensor(), or a tf.data.Dataset of batches",
        )


def describe_lengths(parts: dict[str, Any]) -> str:
    """Return such as ``x: 100, y['a']: 99`` for the arrays of each part."""
    found = []
    for name, part in parts.items():
        for path, leaf in _with_paths(part, name):
            found.append(f"{path}: {leaf.shape[0]}")
    return ", ".join(found)


def _with_paths(nest: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(nest, dict):
        pairs = nest.items()
    elif isinstance(nest, tuple):
        pairs = enumerate(nest)  # type: ignore[assignment]
    else:
        return [] if nest is None else [(path, nest)]
    return [found for key, part in pairs for found in _with_paths(part, f"{path}[{key!r}]")]


def _to_array(value: Any) -> Any:
    if isinstance(value, np.ndarray | tf.Tensor):
        return value
    if isinstance(value, tf.Variable):
        return tf.identity(value)
    if _is_pandas(value):
        # Keras gives a Series of n numbers the shape (n, 1).
        array = value.to_numpy()
        return array[:, None] if array.ndim == 1 else array
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
    return np.asarray(value)


def _strings(array: np.ndarray[Any, Any], *, where: str) -> np.ndarray[Any, Any]:
    if all(isinstance(item, str | bytes) for item in array.flat):
        return array
    kinds = sorted({type(item).__name__ for item in array.flat})
    raise UsageError(
        where,
        received=f"an array of Python objects ({', '.join(kinds[:4])})",
        expected="numbers, or strings throughout",
        fix="convert the columns to one number type (.astype), or pass them as a dict",
    )


def _is_pandas(value: object) -> bool:
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "to_numpy")


def _is_scipy_sparse(value: object) -> bool:
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocoo")
