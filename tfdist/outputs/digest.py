"""Two digests that tell whether two runs computed the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def weights_sha256(model: Any) -> str:
    """Return SHA-256 over `model.weights` in order, as little-endian C-order bytes.

    Reads each variable once, one at a time. Not a collective: the chief alone may call it.
    """
    return _sha256(model.weights)


def state_sha256(model: Any) -> str:
    """Return SHA-256 over `model.weights` and then the variables of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return _sha256([*model.weights, *(optimizer.variables if optimizer is not None else ())])


def _sha256(variables: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        array = np.asarray(variable)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
