"""What front and replicas say to each other, and the part of TensorFlow Serving's protocol that
needs no model: addresses, status codes, names of the requested model, states of its versions.

Pure, and without TensorFlow or NumPy. Most stubs of ``tensorflow-serving-api`` load TensorFlow, so
a request is read here only as far as the message in its field 1, which all requests have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import ipaddress
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue
from tensorflow_serving.apis.model_pb2 import ModelSpec

Code = enum.IntEnum(
    "Code",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS"
    " PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED"
    " INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED",
    start=0,
)
"""Status codes of gRPC, which TensorFlow has too."""
HTTP_STATUS = {
    Code.CANCELLED: 499,  # nginx's: the client has gone, and nobody reads the answer
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
"""Status of an HTTP answer by code; 500 for the others."""


class RequestError(Exception):
    """A request that is answered with an error: a code and a line for the client."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> NoReturn:
    raise RequestError(Code.INVALID_ARGUMENT, message)


def reason_of(error: Exception) -> str:
    """Return the first line of an error of any kind that says why."""
    text = str(error).removeprefix("Graph execution error:")  # the head of a Session's
    return (text.strip().splitlines() or [type(error).__name__])[0][:500]


def error_body(error: RequestError) -> bytes:
    return json.dumps({"error": str(error)}).encode()


class Kind(enum.IntEnum):
    """What a frame carries: a request by its form and method, or an answer."""

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
    """One message on the socket between front and replica.

    `batch` is how many requests were answered together with this one.
    """

    id: int
    kind: Kind
    payload: bytes
    batch: int = 0


def encode_frame(frame: Frame) -> bytes:
    return _HEAD.pack(len(frame.payload), frame.id, frame.kind, frame.batch) + frame.payload


def encode_error(id: int, error: RequestError) -> bytes:
    text = str(error).encode("utf-8", "replace")[:4096]
    return encode_frame(Frame(id, Kind.ERROR, bytes([error.code]) + text))


def decode_error(payload: bytes) -> RequestError:
    return RequestError(Code(payload[0]), payload[1:].decode("utf-8", "replace"))


class FrameBuffer:
    """Frames out of the bytes of a stream, in whatever pieces they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes; yield the frames that are whole."""
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
                yield Frame(id, Kind(kind), payload, batch)
        finally:
            del self._bytes[:at]


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name localhost, is of this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def require_own_name(host: str) -> None:
    """Raise RequestError if a Host header has the name of a site, as one that resolves to us has.

    Pages of that site could send requests otherwise. No site has a name of one word.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    if not (is_loopback(name) or "." not in name or name.endswith(".localhost")):
        text = f"Host {host[:100]!r} is not a name of this machine: ask localhost, or use --token"
        raise RequestError(Code.PERMISSION_DENIED, text)


# Addresses ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The model that a request names, and at most a version of it."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        if self.version is None:
            return f"Latest({self.name})"
        return f"Specific({self.name}, {self.version})"

    def not_found(self) -> RequestError:
        return RequestError(Code.NOT_FOUND, f"Servable not found for request: {self}")


def version_number(text: str) -> int | None:
    """Return the version that a text names: the digits of an int64. None for any other text."""
    number = int(text) if re.fullmatch("[0-9]{1,255}", text) else -1
    return number if 0 <= number < 1 << 63 else None


_MODEL = r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?"
_CALL = re.compile(f"(?i:{_MODEL}):(predict)")
_READ = re.compile(f"(?i:{_MODEL})(?:/(metadata))?")


def parse_path(method: str, path: str) -> tuple[Target, Kind | None]:
    """Return the model that an HTTP request names and what is to be done with it.

    None in place of a kind: the states of its versions. Raises RequestError, as the model server of
    TensorFlow does, for all other addresses.
    """
    pattern = {"POST": _CALL, "GET": _READ}.get(method)
    match = pattern.fullmatch(path) if pattern else None
    if match is None or version_number(match[2] or "0") is None:
        invalid(f"Malformed request: {method} {path}")
    name, version, what = match.groups()
    target = Target(name=name, version=None if version is None else int(version))
    return target, Kind[f"REST_{what.upper()}"] if what else None


# Messages -----------------------------------------------------------------------------------------


def parse_model_spec(payload: bytes) -> Target:
    """Return the model that a gRPC request names: field 1 of all requests that name one."""
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
    """A version and how it is; `message` is why it is not served."""

    version: int
    state: str
    message: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatus:
    """The version of a model that gets requests, and the states of all versions."""

    served: int | None = None
    states: Sequence[VersionState] = ()


def version_of(target: Target, status: ModelStatus | None) -> int:
    """Return the version that is to answer; raise RequestError where it is not served."""
    if status is None:
        raise target.not_found()
    if status.served is None:
        reasons = [f"version {s.version}: {s.message}" for s in status.states if s.message]
        message = "; ".join(reasons) or "it is being loaded"
        raise RequestError(Code.UNAVAILABLE, f"{target.name} is not served yet: {message}")
    if target.version not in (None, status.served):
        raise target.not_found()
    return status.served


def states_of(target: Target, status: ModelStatus | None) -> list[VersionState]:
    """Return the states of a model's versions, newest first, or of the one that is asked for."""
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
