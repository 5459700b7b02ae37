"""Two digests that tell whether two runs computed the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def weights_sha256(model: Any) -> str:
    """Return SHA-256 over `model.weights` in order, as little-endian C-order bytes.

    Reads each variable once, one at a time. Not a collective: the chief alone may call it.
    """
    return _sha256(model.weights)


def state_sha256(model: Any, *, read: Callable[[Any], Any] = np.asarray) -> str:
    """Return SHA-256 over `model.weights` and then the variables of its optimizer.

    `read` returns the array of a variable; of a sharded one that is a collective.
    """
    optimizer = getattr(model, "optimizer", None)
    slots = () if optimizer is None else optimizer.variables
    return _sha256([*model.weights, *slots], read=read)


def _sha256(variables: Iterable[Any], *, read: Callable[[Any], Any] = np.asarray) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        array = read(variable)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
