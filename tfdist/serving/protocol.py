"""Frames between front and replicas, and the model-independent part of TensorFlow Serving's
protocol: addresses, status codes, names of requested models, states of versions.

This module is pure and imports neither TensorFlow nor NumPy. Most stubs of
``tensorflow-serving-api`` import TensorFlow. This module decodes only a request's ModelSpec.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue
from tensorflow_serving.apis.model_pb2 import ModelSpec

from tfdist.cluster.address import is_loopback

Code = enum.IntEnum(
    "Code",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS"
    " PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED"
    " INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED",
    start=0,
)
"""Status codes of gRPC and TensorFlow."""
HTTP_STATUS = {
    Code.CANCELLED: 499,  # nginx's code for a client that has disconnected
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""HTTP status by code. All other codes have status 500."""


class RequestError(Exception):
    """Error answer to a request: a status code and a message for the client."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> NoReturn:
    raise RequestError(Code.INVALID_ARGUMENT, message)


def reason_of(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    text = str(error).removeprefix("Graph execution error:")  # a Session's errors start with it
    return (text.strip().splitlines() or [type(error).__name__])[0][:500]


def error_body(error: RequestError) -> bytes:
    return json.dumps({"error": str(error)}).encode()


class FrameKind(enum.IntEnum):
    """Content of a frame: a request (by protocol and method), an answer or an error."""

    REST_PREDICT = 1
    REST_METADATA = 2
    GRPC_PREDICT = 3
    GRPC_METADATA = 4
    ANSWER = 5
    ERROR = 6


# Frames -------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<IQBH")  # length of the payload, id of the request, kind, batch


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Message between front and replica. `batch` is the number of requests in an answer's batch."""

    id: int
    kind: FrameKind
    payload: bytes
    batch: int = 0


def encode_frame(frame: Frame) -> bytes:
    return _HEAD.pack(len(frame.payload), frame.id, frame.kind, frame.batch) + frame.payload


def encode_error(id: int, error: RequestError) -> bytes:
    text = str(error).encode("utf-8", "replace")[:4096]
    return encode_frame(Frame(id, FrameKind.ERROR, bytes([error.code]) + text))


def decode_error(payload: bytes) -> RequestError:
    return RequestError(Code(payload[0]), payload[1:].decode("utf-8", "replace"))


class FrameBuffer:
    """Parser of frames from a byte stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes to the buffer. Yield the complete frames."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _HEAD.size:
                length, id, kind, batch = _HEAD.unpack_from(self._bytes, at)
                end = at + _HEAD.size + length
                if len(self._bytes) < end:
                    return
                payload = bytes(memoryview(self._bytes)[at + _HEAD.size : end])
                at = end
                yield Frame(id, FrameKind(kind), payload, batch)
        finally:
            del self._bytes[:at]


def require_own_name(host: str) -> None:
    """Raise RequestError if a Host header has the name of a web site.

    The check stops DNS rebinding by the pages of such a site. Names without a dot are allowed.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    if not (is_loopback(name) or "." not in name or name.endswith(".localhost")):
        text = f"Host {host[:100]!r} is not a name of this machine: use localhost or --token"
        raise RequestError(Code.PERMISSION_DENIED, text)


# Addresses ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Model that a request names, with an optional version."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        if self.version is None:
            return f"Latest({self.name})"
        return f"Specific({self.name}, {self.version})"

    def not_found(self) -> RequestError:
        return RequestError(Code.NOT_FOUND, f"Servable not found for request: {self}")


def version_number(text: str) -> int | None:
    """Return the version number in a text, or `None` if the text is not a non-negative int64."""
    number = int(text) if re.fullmatch("[0-9]{1,255}", text) else -1
    return number if 0 <= number < 1 << 63 else None


_MODEL = r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?"
_CALL = re.compile(f"(?i:{_MODEL}):(predict)")
_READ = re.compile(f"(?i:{_MODEL})(?:/(metadata))?")


def parse_path(method: str, path: str) -> tuple[Target, FrameKind | None]:
    """Return the model that an HTTP request names, and the kind of the request.

    The kind is `None` for a request for the versions' states. Raises RequestError for other
    addresses, as TensorFlow Serving does.
    """
    pattern = {"POST": _CALL, "GET": _READ}.get(method)
    match = pattern.fullmatch(path) if pattern else None
    if match is None or version_number(match[2] or "0") is None:
        invalid(f"Malformed request: {method} {path}")
    name, version, what = match.groups()
    target = Target(name=name, version=None if version is None else int(version))
    return target, FrameKind[f"REST_{what.upper()}"] if what else None


# Messages -----------------------------------------------------------------------------------------


def parse_model_spec(payload: bytes) -> Target:
    """Return the model that a gRPC request names in its ModelSpec."""
    try:
        spec = ModelSpec.FromString(BytesValue.FromString(payload).value)
    except DecodeError as error:
        invalid(f"Malformed request: {error}")
    if not spec.name:
        invalid("Missing ModelSpec")
    if spec.version_label:
        invalid(f"Unrecognized servable version label: {spec.version_label}")
    return Target(name=spec.name, version=spec.version.value if spec.HasField("version") else None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VersionState:
    """State of a version. `message` is the reason why it is not served."""

    version: int
    state: str
    message: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatus:
    """Served version of a model, and the states of its versions."""

    served: int | None = None
    states: Sequence[VersionState] = ()


def version_of(target: Target, status: ModelStatus | None) -> int:
    """Return the version that answers the request, or raise RequestError if it is not served."""
    if status is None:
        raise target.not_found()
    if status.served is None:
        reasons = [f"version {s.version}: {s.message}" for s in status.states if s.message]
        message = "; ".join(reasons) or "it is loading"
        raise RequestError(Code.UNAVAILABLE, f"{target.name} is not served yet: {message}")
    if target.version not in (None, status.served):
        raise target.not_found()
    return status.served


def states_of(target: Target, status: ModelStatus | None) -> list[VersionState]:
    """Return the states of a model's versions, newest first, or of the requested version."""
    if status is None:
        message = f"Could not find any versions of model {target.name}"
        raise RequestError(Code.NOT_FOUND, message)
    states = [s for s in status.states if target.version in (None, s.version)]
    if not states and target.version is not None:
        message = f"Could not find version {target.version} of model {target.name}"
        raise RequestError(Code.NOT_FOUND, message)
    return sorted(states, key=lambda one: -one.version)


def status_json(states: Iterable[VersionState]) -> bytes:
    listed = [
        {
            "version": str(one.version),
            "state": one.state,
            "status": {
                "error_code": "UNKNOWN" if one.message else "OK",
                "error_message": one.message,
            },
        }
        for one in states
    ]
    return json.dumps({"model_version_status": listed}, indent=1).encode()
