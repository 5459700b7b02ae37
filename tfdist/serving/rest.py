"""TensorFlow Serving's JSON: requests to arrays, arrays to answers, errors in its words.

Forms and texts follow ``tensorflow_serving/util/json_tensor.cc``. Pure, and without TensorFlow.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import orjson

from tfdist.serving.protocol import RequestError, invalid

DEFAULT_SIGNATURE = "serving_default"
_NAMES = {"float32": "float", "float64": "double", "float16": "half", "object": "string"}
_MOST_DIMENSIONS = 64  # of a NumPy array
_SHOWN = 500  # characters of a value in an error
_TEXT_OR_INF = re.compile(rb'(?s)("(?:[^"\\]++|\\.?)*+"?)|Inf(?:inity)?')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Input or output of a signature: `shape` has -1 for a dimension that is left open."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array of `shape` can be fed."""
        if self.shape is None:
            return True
        pairs = zip(self.shape, shape, strict=False)
        return len(shape) == len(self.shape) and all(want in (-1, has) for want, has in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JsonRequest:
    """A predict request, its inputs by name; of row or column form."""

    signature: str
    row: bool
    inputs: Mapping[str, np.ndarray]


def decode_predict(body: bytes, signatures: Mapping[str, Mapping[str, TensorSpec]]) -> JsonRequest:
    """Return the request in a JSON body.

    Args:
      body: of the HTTP request.
      signatures: the inputs of each signature of the model, by their names.

    Raises:
      RequestError: with the text that TensorFlow Serving gives.
    """
    document = parse(body)
    signature = signature_of(document)
    specs = signatures.get(signature)
    if specs is None:
        invalid(f'Serving signature name: "{signature}" not found in signature def')
    if "instances" in document and "inputs" in document:
        _format(
            document,
            "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist ",
        )
    has_bools = b"true" in body or b"false" in body
    if "instances" in document:
        instances = document["instances"]
        if not isinstance(instances, list):
            _format(document, "Excepting 'instances' to be an list/array")
        if not instances:
            _format(document, "No values in 'instances' array")
        inputs = _rows(instances, specs, has_bools)
        return JsonRequest(signature=signature, row=True, inputs=inputs)
    if "inputs" in document:
        inputs = _columns(document["inputs"], specs, has_bools)
        return JsonRequest(signature=signature, row=False, inputs=inputs)
    invalid("Missing 'inputs' or 'instances' key")


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; NaN and Infinity are taken as TensorFlow Serving does."""
    if not body:
        invalid("JSON Parse error: The document is empty")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = _parse_slowly(body, error)
    if not isinstance(document, dict):
        _format(document, "Is not object")
    return document


def _parse_slowly(body: bytes, found: orjson.JSONDecodeError) -> Any:
    """Parse by Python's own parser, which knows NaN; orjson's error says where it is wrong."""
    if b"NaN" in body or b"Inf" in body:
        try:
            return json.loads(_TEXT_OR_INF.sub(lambda part: part[1] or b"Infinity", body))
        except (ValueError, RecursionError):
            pass
    invalid(f"JSON Parse error: {found.msg} at offset: {found.pos}")


def signature_of(document: Mapping[str, Any]) -> str:
    """Return the name of the signature that a request asks for."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        _format(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return name or DEFAULT_SIGNATURE


def _rows(
    instances: list[Any], specs: Mapping[str, TensorSpec], has_bools: bool
) -> dict[str, np.ndarray]:
    if not isinstance(instances[0], dict) and len(specs) > 1:
        invalid(
            "instances is a plain list, but expecting list of objects as multiple input tensors "
            "required as per tensorinfo_map"
        )
    objects = _is_object(instances[0])
    for at, row in enumerate(instances):
        if objects and not _is_object(row):
            invalid(f"Expecting object but got list at item {at} of input list")
        if not objects and _is_object(row):
            invalid(f"Expecting value/list but got object at item {at} of input list")
        if objects and set(row) != set(specs):
            _wrong_keys(at, row, specs)
    if not objects:
        ((name, spec),) = specs.items()
        return {name: _array(instances, spec, name, has_bools)}
    return {
        name: _array([row[name] for row in instances], spec, name, has_bools, f" key: {name}")
        for name, spec in specs.items()
    }


def _wrong_keys(at: int, row: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> NoReturn:
    for name in row:
        if name not in specs:
            invalid(
                f"Failed to process element: {at} key: {name} of 'instances' list. Error: "
                f"INVALID_ARGUMENT: JSON object: does not have named input: {name}"
            )
    invalid(
        f"Failed to process element: {at} of 'instances' list. JSON object: {_shown(row)} keys "
        f"must be equal to: {','.join(sorted(specs))}"
    )


def _columns(value: Any, specs: Mapping[str, TensorSpec], has_bools: bool) -> dict[str, np.ndarray]:
    if not _is_object(value):
        if len(specs) > 1:
            invalid(
                "inputs is a plain value/list, but expecting an object as multiple input tensors "
                "required as per tensorinfo_map"
            )
        ((name, spec),) = specs.items()
        return {name: _column(value, spec, name, has_bools)}
    for name in specs:
        if name not in value:
            invalid(f"Missing named input: {name} in 'inputs' object.")
    return {name: _column(value[name], spec, name, has_bools) for name, spec in specs.items()}


def _column(value: Any, spec: TensorSpec, name: str, has_bools: bool) -> np.ndarray:
    array = _converted(value, spec.dtype, has_bools)
    if array is None:
        _leaves(value, spec.dtype)
        invalid(f"JSON Value: {_shown(value)} cannot be read as {_type_name(spec.dtype)}")
    require_fit(array.shape, spec, name)
    return array


def _array(
    rows: list[Any], spec: TensorSpec, name: str, has_bools: bool, key: str = ""
) -> np.ndarray:
    """Return the values of one input, a row for each element of 'instances'."""
    array = _converted(rows, spec.dtype, has_bools)
    if array is None:
        want = _shape_of(rows[0])
        for at, row in enumerate(rows):
            try:
                _leaves(row, spec.dtype)
                if (has := _shape_of(row)) != want:
                    sizes = math.prod(want), math.prod(has)
                    what = f"shape {_listed(want)} but got: {_listed(has)}"
                    if sizes[0] != sizes[1]:
                        what = f"tensor size: {sizes[0]} but got: {sizes[1]}"
                    invalid(f"Expecting {what}")
            except RequestError as error:
                invalid(
                    f"Failed to process element: {at}{key} of 'instances' list. Error: "
                    f"INVALID_ARGUMENT: {error}"
                )
        invalid(f"Failed to process input {name}")
    require_fit(array.shape, spec, name)
    return array


def require_fit(shape: Sequence[int], spec: TensorSpec, name: str) -> None:
    """Raise RequestError unless an input has the shape that the signature asks for."""
    if not spec.fits(shape):
        wanted = _listed(["?" if n < 0 else n for n in spec.shape or ()])
        invalid(f"input {name}: shape {_listed(shape)} does not match signature: {wanted}")


def _converted(value: Any, dtype: np.dtype[Any], has_bools: bool) -> np.ndarray | None:
    """Return a nest of lists as an array, or None where it is ragged or of another type.

    Bools, which NumPy takes for numbers, are looked for where the request `has_bools`.
    """
    if dtype.kind == "O":
        return _text(value)
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError):
        return None
    if array.size == 0:
        return array.astype(dtype) if array.dtype.kind in "fiub" else None
    if dtype.kind == "b":
        return array if array.dtype.kind == "b" else None
    if array.dtype.kind not in "fiu" or (has_bools and _holds_bool(value)):
        return None
    if array.dtype.kind in "iu":
        least, most = _whole_numbers(dtype)
        fits = least <= int(array.min()) and int(array.max()) <= most
        return array.astype(dtype) if fits else None
    if dtype.kind in "iu":
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    overflowed = np.isinf(cast) & ~np.isinf(array.astype(np.float64))
    return None if overflowed.any() else cast


def _whole_numbers(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the largest whole number between which a type has them all."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return int(limits.min), int(limits.max)
    most = 2 ** (np.finfo(dtype).nmant + 1) - 1
    return -most, most


def _holds_bool(value: Any) -> bool:
    return any(map(_holds_bool, value)) if isinstance(value, list) else isinstance(value, bool)


def _text(value: Any) -> np.ndarray | None:
    """Return a nest of texts and ``{"b64": ...}`` as an array of bytes."""
    try:
        leaves = _leaves(value, np.dtype(object))
    except RequestError:
        return None
    texts = [
        leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else from_base64(leaf)
        for leaf in leaves
    ]
    return np.array(texts, object).reshape(_shape_of(value))


def from_base64(value: Mapping[str, Any]) -> bytes:
    """Return the bytes in ``{"b64": ...}``; raise RequestError."""
    try:
        text = value["b64"].encode("ascii")
        padded = text + b"=" * (-len(text) % 4)
        return base64.b64decode(
            padded, altchars=b"-_" if set(text) & set(b"-_") else None, validate=True
        )
    except (UnicodeEncodeError, binascii.Error):
        invalid("Unable to base64 decode")


def _leaves(value: Any, dtype: np.dtype[Any]) -> list[Any]:
    """Return the values in a nest; raise the RequestError for the first that is out of place."""
    return list(_walk(value, _shape_of(value), 0, dtype))


def _walk(value: Any, shape: tuple[int, ...], level: int, dtype: np.dtype[Any]) -> Iterator[Any]:
    if not isinstance(value, list):
        if level != len(shape):
            invalid(
                f"JSON Value: {_shown(value)} found at incorrect level: {level + 1} in the JSON "
                f"DOM. Expected at level: {len(shape)}"
            )
        _check_leaf(value, dtype)
        yield value
        return
    if level >= len(shape):
        invalid(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        invalid(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: "
            f"{shape[level]}"
        )
    for one in value:
        yield from _walk(one, shape, level + 1, dtype)


def _check_leaf(value: Any, dtype: np.dtype[Any]) -> None:
    if dtype.kind == "O" and isinstance(value, dict):
        if not is_base64(value):
            invalid(f"JSON Value: {_shown(value)} not formatted correctly for base64 data")
        from_base64(value)
        return
    text = dtype.kind == "O"
    if isinstance(value, str) if text else _converted(value, dtype, True) is not None:
        return
    shown, kind, wanted = _shown(value), json_type(value), _type_name(dtype)
    if kind == "Number" and dtype.kind == "f":
        invalid(f"Cannot convert JSON value: {shown} to {wanted} without loss of precision.")
    invalid(f"JSON Value: {shown} Type: {kind} is not of expected type: {wanted}")


def _shape_of(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) > _MOST_DIMENSIONS:
            invalid(f"Encountered list at unexpected level: {_MOST_DIMENSIONS}")
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not is_base64(value)


def is_base64(value: Mapping[str, Any]) -> bool:
    """Return whether an object is ``{"b64": text}``."""
    return len(value) == 1 and isinstance(value.get("b64"), str)


# Answers ------------------------------------------------------------------------------------------


def encode_predict(outputs: Mapping[str, np.ndarray], *, row: bool) -> bytes:
    """Return the JSON answer: ``predictions`` with a row per instance, or ``outputs``."""
    values = {name: _plain(name, array) for name, array in outputs.items()}
    if not row:
        only = next(iter(values.values())) if len(values) == 1 else values
        return dumps({"outputs": only}, outputs)
    _require_rows(outputs)
    if len(values) == 1:
        return dumps({"predictions": next(iter(values.values()))}, outputs)
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return dumps({"predictions": rows}, outputs)


def dumps(document: Any, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return JSON in which what is not finite is NaN or Infinity, as TensorFlow Serving has it."""
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays.values()):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(document, default=_listed_values, separators=(",", ":")).encode()


def _listed_values(values: Any) -> Any:
    """Return an array or a number of NumPy as JSON's values, a float with the digits of its type.

    0.1 of float32 is 0.10000000149 where it is read as a double.
    """
    return (values.astype(str).astype(float) if values.dtype.kind == "f" else values).tolist()


def _plain(name: str, array: np.ndarray) -> Any:
    """Return values that `dumps` takes; those of an output ``..._bytes`` as base64."""
    if array.dtype.kind in "fiub":
        return array if array.ndim else array[()]
    if array.dtype.kind != "O":
        return array.tolist()
    if name.endswith("_bytes"):
        return _mapped(array, lambda text: {"b64": base64.b64encode(text).decode()})
    return _mapped(array, lambda text: text.decode("utf-8", "replace"))


def _mapped(array: np.ndarray, function: Any) -> Any:
    made = np.empty(array.shape, object)
    made.reshape(-1)[:] = [function(one) for one in array.reshape(-1)]
    return made.tolist()


def _require_rows(outputs: Mapping[str, np.ndarray]) -> None:
    sizes = {name: array.shape[0] if array.ndim else None for name, array in outputs.items()}
    for name, size in sizes.items():
        if size is None:
            invalid(f"Tensor name: {name} has no shape information ")
        if size != next(iter(sizes.values())):
            invalid(f"Tensor name: {name} has inconsistent batch size: {size}")


def _type_name(dtype: np.dtype[Any]) -> str:
    return _NAMES.get(dtype.name, dtype.name)


def json_type(value: Any) -> str:
    """Return TensorFlow Serving's name of a JSON value's type."""
    names = {type(None): "Null", dict: "Object", list: "Array", str: "String"}
    if isinstance(value, bool):
        return str(value)
    return names.get(type(value), "Number")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _listed(shape: Sequence[object]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _format(value: Any, problem: str) -> NoReturn:
    invalid(f"JSON Value: {_shown(value)} {problem}")
