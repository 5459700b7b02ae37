"""Format of one checkpoint: a shard of raw bytes, and a manifest that lists its arrays.

A shard is the arrays one after another, little-endian and in C order. The manifest is JSON with
the checksum of each shard and one of its own. Both are synced to the disk as they are written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.errors import TfdistError, UsageError
from tfdist.files import fsync

FORMAT = "tfdist-checkpoint"
VERSION = 1
_MANIFEST = "manifest.json"
_CHECKSUM = "manifest_sha256"
_SHARD = "arrays"
# Offsets are multiples of this, so that a shard can be memory-mapped as any dtype.
_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 16 << 20
# With these a file is not what was written, and will not be at a second try.
_DAMAGE = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        *(errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA),
    )
)
_NUMPY_NAMES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_ML_NAMES = frozenset(
    name
    for name in dir(ml_dtypes)
    if isinstance(scalar := getattr(ml_dtypes, name), type) and issubclass(scalar, np.generic)
)

Array = np.ndarray[Any, np.dtype[Any]]


class Damaged(Exception):
    """A checkpoint that cannot be read as it was written; the message says what is wrong."""


class Unreadable(TfdistError):
    """A checkpoint that may be whole, and cannot be read now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of raw bytes."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where one array lies, from `offset` bytes into its shard."""

    shard: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the arrays themselves."""

    step: int
    best: bool
    meta: Mapping[str, Any]
    shards: Mapping[str, Shard]
    arrays: Mapping[str, Entry]

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON; raise TypeError where `meta` is not JSON."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "best": self.best,
            "meta": dict(self.meta),
            "shards": {name: asdict(shard) for name, shard in self.shards.items()},
            "arrays": {name: asdict(entry) for name, entry in self.arrays.items()},
        }
        body[_CHECKSUM] = _checksum(body)
        return json.dumps(body, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, text: bytes, *, where: str) -> Manifest:
        """Read what `to_bytes` wrote; raise Damaged, or UsageError for a later format."""
        try:
            body = json.loads(text)
            checksum = body.pop(_CHECKSUM, None)
            if body["format"] != FORMAT:
                raise Damaged(f"{_MANIFEST} is not of a tfdist checkpoint")
            if body["version"] > VERSION:
                raise _newer_format(where, body["version"])
            if checksum != _checksum(body):
                raise Damaged(f"{_MANIFEST} does not match its checksum")
            return cls(
                step=body["step"],
                best=body["best"],
                meta=body["meta"],
                shards={name: Shard(**shard) for name, shard in body["shards"].items()},
                arrays={
                    name: Entry(**{**entry, "shape": tuple(entry["shape"])})
                    for name, entry in body["arrays"].items()
                },
            )
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{_MANIFEST} is cut short or not JSON") from error


def write_checkpoint(
    directory: Path, arrays: Mapping[str, Any], *, step: int, best: bool, meta: Mapping[str, Any]
) -> None:
    """Write a shard and the manifest into a new `directory` and fsync each; raise OSError."""
    shutil.rmtree(directory, ignore_errors=True)
    os.mkdir(directory)
    shard, entries = _write_shard(directory / f"{_SHARD}.bin", arrays)
    manifest = Manifest(step=step, best=best, meta=meta, shards={_SHARD: shard}, arrays=entries)
    write_bytes(directory / _MANIFEST, manifest.to_bytes())
    fsync(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read that of a checkpoint; raise as `read_arrays`, and UsageError for a later format."""
    file = directory / _MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise _reading_failed(file, error) from error
    return Manifest.from_bytes(text, where=f"checkpoint {directory}")


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise Damaged where a shard is missing or not as long as it was written, or TfdistError."""
    for shard in manifest.shards.values():
        _check_size(directory / shard.file, shard)


def read_arrays(directory: Path, manifest: Manifest) -> dict[str, Array]:
    """Read the arrays and verify their checksum; hold them once.

    Raises Damaged; UsageError where this user may not read them; and Unreadable where they may be
    whole and cannot be read now.
    """
    arrays: dict[str, Array] = {}
    for name, shard in manifest.shards.items():
        entries = {key: entry for key, entry in manifest.arrays.items() if entry.shard == name}
        arrays.update(_read_shard(directory / shard.file, shard=shard, entries=entries))
    return {key: arrays[key] for key in manifest.arrays}


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new small file and fsync; raise OSError."""
    with FileIO(path, "xb") as file:
        _write_all(file, memoryview(data), hashlib.sha256())
        os.fsync(file.fileno())


def _write_shard(path: Path, arrays: Mapping[str, Any]) -> tuple[Shard, dict[str, Entry]]:
    digest = hashlib.sha256()
    entries = {}
    size_bytes = 0
    with FileIO(path, "xb") as file:
        for name in arrays:
            array = np.asarray(arrays[name])
            dtype = _storable(name, array)
            padding = bytes(-size_bytes % _ALIGNMENT_BYTES)
            for piece in (memoryview(padding), raw_bytes(array)):
                _write_all(file, piece, digest)
                size_bytes += len(piece)
            entries[name] = Entry(
                shard=_SHARD, offset=size_bytes - array.nbytes, dtype=dtype, shape=array.shape
            )
        os.fsync(file.fileno())
    return Shard(file=path.name, size_bytes=size_bytes, sha256=digest.hexdigest()), entries


def _read_shard(path: Path, *, shard: Shard, entries: Mapping[str, Entry]) -> dict[str, Array]:
    digest = hashlib.sha256()
    arrays = {}
    position = 0
    try:
        with FileIO(path, "rb") as file:
            _check_size(path, shard)
            for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
                dtype = _dtype(entry.dtype)
                gap = np.empty(entry.offset - position, np.uint8)
                array = np.empty(entry.shape, dtype.newbyteorder("<"))
                for target in (gap, array.reshape(-1).view(np.uint8)):
                    _read_all(file, target.data, digest)
                position = entry.offset + array.nbytes
                arrays[name] = array.astype(dtype, copy=False)
    except OSError as error:
        raise _reading_failed(path, error) from error
    except (ValueError, TypeError, EOFError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    if digest.hexdigest() != shard.sha256 or position != shard.size_bytes:
        raise Damaged(f"{path.name} does not match its checksum")
    return arrays


def _check_size(path: Path, shard: Shard) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _reading_failed(path, error) from error
    if size_bytes != shard.size_bytes:
        raise Damaged(f"{path.name} has {size_bytes} bytes of {shard.size_bytes}")


def _storable(name: str, array: Array) -> str:
    dtype = array.dtype.name
    if dtype in _NUMPY_NAMES or dtype in _ML_NAMES:
        return dtype
    raise UsageError(
        f"checkpoint: array {name!r}",
        received=f"dtype {dtype}",
        expected="numbers or booleans",
        fix="keep strings and objects in the metadata, as JSON",
        code="unsupported-dtype",
    )


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in _ML_NAMES else name)


def raw_bytes(array: Array) -> memoryview:
    """Return the array's little-endian bytes in C order, without a copy where it lies like that."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _write_all(file: FileIO, data: memoryview, digest: Any) -> None:
    while data:
        written = file.write(data[:_CHUNK_BYTES])
        digest.update(data[:written])
        data = data[written:]


def _read_all(file: FileIO, target: memoryview, digest: Any) -> None:
    while target:
        count = file.readinto(target[:_CHUNK_BYTES])
        if not count:
            raise EOFError("ends too early")
        digest.update(target[:count])
        target = target[count:]


def _reading_failed(path: Path, error: OSError) -> Exception:
    """Return what to raise where a file of a checkpoint cannot be read.

    Only what is damaged is passed over for an older one, and later removed.
    """
    if error.errno in _DAMAGE:
        return Damaged(f"{path.name}: {error.strerror}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(
            f"checkpoint {path}",
            received=error.strerror,
            expected="a file that can be read",
            fix="give this user the right to read it, or choose another directory",
            code="no-permission",
        )
    return Unreadable(f"checkpoint {path}: {error.strerror or error}")


def _newer_format(where: str, version: object) -> UsageError:
    return UsageError(
        where,
        received=f"format version {version}",
        expected=f"{VERSION} or lower",
        fix="use the tfdist that wrote it, or a later one",
        code="newer-format",
    )


def _checksum(body: Mapping[str, Any]) -> str:
    # Once through JSON first: it makes integer keys strings, and those sort in another order.
    text = json.dumps(json.loads(json.dumps(body)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
