"""TensorFlow Serving's JSON: conversion of requests to arrays and of arrays to answers.

Formats and most messages follow TensorFlow Serving's ``json_tensor.cc``. Pure, without TensorFlow.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from tfdist.serving.protocol import invalid

DEFAULT_SIGNATURE = "serving_default"
_NAMES = {"float32": "float", "float64": "double", "float16": "half", "object": "string"}
_SHOWN = 500  # characters of a value in an error
_URL_SAFE = str.maketrans("-_", "+/")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Input or output of a signature. `shape` has -1 for a dimension of unknown size."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


def decode_predict(
    body: bytes, signatures: Mapping[str, Mapping[str, TensorSpec]]
) -> tuple[str, dict[str, np.ndarray], bool]:
    """Return a JSON body's signature name, its inputs by name, and whether it has 'instances'.

    Raises RequestError. Common errors have TensorFlow Serving's messages.
    """
    document = parse(body)
    signature = document.get("signature_name") or DEFAULT_SIGNATURE
    if not isinstance(signature, str):
        invalid("'signature_name' key must be a string value.")
    specs = signatures.get(signature)
    if specs is None:
        invalid(f'Serving signature name: "{signature}" not found in signature def')
    row = "instances" in document
    if row == ("inputs" in document):
        invalid("Missing 'inputs' or 'instances' key, or both are present")
    values = _by_row(document["instances"], specs) if row else _by_name(document["inputs"], specs)
    # Check for bools and strings if the body has true, false or more strings than keys.
    content = document["instances" if row else "inputs"]
    more = body.count(b'"') // 2 - len(document) - ("signature_name" in document)
    if more > 0:
        objects = content if isinstance(content, list) else [content]
        more -= sum(len(one) for one in objects if isinstance(one, dict))
    has_others = b"true" in body or b"false" in body or more > 0
    inputs = {name: _array(values[name], spec, name, has_others) for name, spec in specs.items()}
    return signature, inputs, row


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. NaN and Infinity are valid numbers."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            document = json.loads(body)  # json accepts NaN, but orjson's error message is better
        except (ValueError, RecursionError):
            invalid(f"JSON Parse error: {error.msg} at offset: {error.pos}")
    if not isinstance(document, dict):
        invalid(f"JSON Value: {_shown(document)} Is not object")
    return document


def _by_row(instances: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return each input's values from 'instances': a list of objects or of one input's values."""
    if not isinstance(instances, list) or not instances:
        invalid("Expecting 'instances' to be a list/array with values")
    if not _is_object(instances[0]):
        return _of_only_input("instances", instances, specs)
    for at, row in enumerate(instances):
        if not isinstance(row, dict) or row.keys() != specs.keys():
            invalid(
                f"Failed to process element: {at} of 'instances' list. JSON object: {_shown(row)} "
                f"keys must be equal to: {','.join(sorted(specs))}"
            )
    return {name: [row[name] for row in instances] for name in specs}


def _by_name(inputs: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return each input's values from 'inputs': an object or one input's values."""
    if not _is_object(inputs):
        return _of_only_input("inputs", inputs, specs)
    for name in specs:
        if name not in inputs:
            invalid(f"Missing named input: {name} in 'inputs' object.")
    return dict(inputs)


def _of_only_input(key: str, values: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    if len(specs) != 1:
        invalid(
            f"{key} is a plain value/list, but expecting objects as multiple input tensors "
            "required as per tensorinfo_map"
        )
    return dict.fromkeys(specs, values)


def _array(value: Any, spec: TensorSpec, name: str, has_others: bool) -> np.ndarray:
    array = _converted(value, spec.dtype, has_others)
    if array is None:
        wanted = _NAMES.get(spec.dtype.name, spec.dtype.name)
        invalid(
            f"input {name}: the values are not equally nested lists of type {wanted}, or a number "
            "loses precision"
        )
    require_fit(array.shape, spec, name)
    return array


def require_fit(shape: Sequence[int], spec: TensorSpec, name: str) -> None:
    """Raise RequestError if an input's shape does not match the signature."""
    if spec.shape is None:
        return
    pairs = zip(spec.shape, shape, strict=False)
    if len(shape) != len(spec.shape) or any(want not in (-1, has) for want, has in pairs):
        wanted = _listed(["?" if n < 0 else n for n in spec.shape])
        invalid(f"input {name}: shape {_listed(shape)} does not match signature: {wanted}")


def _converted(value: Any, dtype: np.dtype[Any], has_others: bool) -> np.ndarray | None:
    """Return nested lists as an array, or `None` if they are ragged or of another type.

    With `has_others`, the function first rejects bools and strings. NumPy would convert bools to
    numbers and pad each string to the longest one.
    """
    if dtype.kind == "O":
        return _text(value)
    try:
        if has_others and not _has_only((bool,) if dtype.kind == "b" else (int, float), value):
            return None
        array = np.array(value)
        if dtype == np.uint64 and array.dtype.kind == "f":  # for example [1, 2**63]
            whole = all(isinstance(one, int) for one in np.array(value, object).reshape(-1))
            array = np.array(value, dtype) if whole else array
    except (ValueError, OverflowError, TypeError, RecursionError):
        return None
    if array.size == 0:
        return array.astype(dtype) if array.dtype.kind in "fiub" else None
    if dtype.kind == "b":
        return array if array.dtype.kind == "b" else None
    if array.dtype.kind not in "fiu":
        return None
    if array.dtype.kind in "iu":
        if dtype.kind in "iu":
            least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        else:  # the range in which the float type represents all integers
            most = 2 ** (ml_dtypes.finfo(dtype).nmant + 1) - 1
            least = -most
        fits = least <= int(array.min()) and int(array.max()) <= most
        return array.astype(dtype) if fits else None
    if dtype.kind in "iu":
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    overflowed = np.isinf(cast) & ~np.isinf(array.astype(np.float64))
    return None if overflowed.any() else cast


def _has_only(kinds: tuple[type, ...], value: Any) -> bool:
    if isinstance(value, list):
        return all(_has_only(kinds, one) for one in value)
    return type(value) in kinds


def _text(value: Any) -> np.ndarray | None:
    """Return nested strings and ``{"b64": ...}`` objects as an array of bytes, or `None`."""
    array = np.array(value, object)
    flat = array.reshape(-1)
    for at, leaf in enumerate(flat):
        if isinstance(leaf, str):
            flat[at] = leaf.encode("utf-8", "surrogatepass")
        elif _is_base64(leaf):
            text = leaf["b64"].translate(_URL_SAFE)
            try:
                flat[at] = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
            except ValueError:
                invalid("Unable to base64 decode")
        else:
            return None
    return array


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


# Answers ------------------------------------------------------------------------------------------


def encode_predict(outputs: Mapping[str, np.ndarray], *, row: bool) -> bytes:
    """Return the JSON answer: ``predictions`` with a row per instance, or ``outputs``."""
    halves = {name: array for name, array in outputs.items() if array.dtype.kind == "V"}
    outputs = {**outputs, **{name: array.astype(np.float32) for name, array in halves.items()}}
    sizes = {len(array) if array.ndim else None for array in outputs.values()}
    if row and (None in sizes or len(sizes) > 1):
        invalid("The outputs have no row for each instance: send 'inputs' instead of 'instances'")
    values = {name: _plain(name, array) for name, array in outputs.items()}
    content: Any = values
    if len(values) == 1:
        (content,) = values.values()
    elif row:
        rows = zip(*values.values(), strict=True)
        content = [dict(zip(values, one, strict=True)) for one in rows]
    document = {"predictions" if row else "outputs": content}
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in outputs.values()):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)

    def listed(values: Any) -> Any:
        # Keep the digits of the float type: a float32 of 0.1 is 0.10000000149 as a double.
        return (values.astype(str).astype(float) if values.dtype.kind == "f" else values).tolist()

    # json writes NaN and Infinity, as TensorFlow Serving does.
    return json.dumps(document, default=listed, separators=(",", ":")).encode()


def _plain(name: str, array: np.ndarray) -> Any:
    """Return values for JSON. Outputs with names that end in ``_bytes`` become base64."""
    if array.dtype.kind in "fiub":
        return array if array.ndim else array[()]
    if array.dtype.kind != "O":
        return array.tolist()

    def encode(text: bytes) -> Any:
        if name.endswith("_bytes"):
            return {"b64": base64.b64encode(text).decode()}
        return text.decode("utf-8", "replace")

    return np.vectorize(encode, otypes=[object])(array).tolist()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _listed(shape: Sequence[object]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
