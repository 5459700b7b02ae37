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
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.errors import TfdistError, UsageError, require
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

Array = np.ndarray[Any, np.dtype[Any]]


class Damaged(Exception):
    """A checkpoint that cannot be read as it was written; the message says what is wrong."""


class Unreadable(TfdistError):
    """A checkpoint that may be whole, and cannot be read now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the arrays themselves.

    Attributes:
      shard: of the file of the arrays: ``file``, ``size_bytes`` and ``sha256``.
      arrays: of each array: ``shard``, ``offset`` in bytes, ``dtype`` and ``shape``.
    """

    step: int
    best: bool
    meta: Mapping[str, Any]
    shard: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Any]]


def write_checkpoint(
    directory: Path, arrays: Mapping[str, Any], *, step: int, best: bool, meta: Mapping[str, Any]
) -> None:
    """Write a shard and the manifest into a new `directory` and fsync each.

    Raises OSError, and TypeError where `meta` is not JSON.
    """
    shutil.rmtree(directory, ignore_errors=True)
    os.mkdir(directory)
    shard, entries = _write_shard(directory / f"{_SHARD}.bin", arrays)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "best": best,
        "meta": dict(meta),
        "shards": {_SHARD: shard},
        "arrays": entries,
    }
    body[_CHECKSUM] = _checksum(body)
    write_bytes(directory / _MANIFEST, json.dumps(body, indent=1).encode() + b"\n")
    fsync(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read that of a checkpoint; raise as `read_arrays`, and UsageError for a later format."""
    file = directory / _MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise _reading_failed(file, error) from error
    try:
        body = json.loads(text)
        checksum = body.pop(_CHECKSUM, None)
        if body["format"] != FORMAT:
            raise Damaged(f"{_MANIFEST} is not of a tfdist checkpoint")
        if body["version"] > VERSION:
            raise UsageError(
                f"checkpoint {directory}",
                received=f"format version {body['version']}",
                expected=f"{VERSION} or lower",
                fix="use the tfdist that wrote it, or a later one",
                code="newer-format",
            )
        if checksum != _checksum(body):
            raise Damaged(f"{_MANIFEST} does not match its checksum")
        return Manifest(
            step=body["step"],
            best=body["best"],
            meta=body["meta"],
            shard=body["shards"][_SHARD],
            arrays=body["arrays"],
        )
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{_MANIFEST} is cut short or not JSON") from error


def check_size(directory: Path, manifest: Manifest) -> None:
    """Raise Damaged where the shard is missing or not as long as it was written, or TfdistError."""
    path, expected = directory / manifest.shard["file"], manifest.shard["size_bytes"]
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _reading_failed(path, error) from error
    if size_bytes != expected:
        raise Damaged(f"{path.name} has {size_bytes} bytes of {expected}")


def read_arrays(directory: Path, manifest: Manifest) -> dict[str, Array]:
    """Read the arrays and verify their checksum; hold them once.

    Raises Damaged; UsageError where this user may not read them; and Unreadable where they may be
    whole and cannot be read now.
    """
    check_size(directory, manifest)
    path, digest = directory / manifest.shard["file"], hashlib.sha256()
    arrays: dict[str, Array] = {}
    position = 0
    try:
        with FileIO(path, "rb") as file:
            for name, entry in sorted(manifest.arrays.items(), key=lambda item: item[1]["offset"]):
                dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
                gap = np.empty(entry["offset"] - position, np.uint8)
                array = np.empty(entry["shape"], dtype.newbyteorder("<"))
                for target in (gap, array.reshape(-1).view(np.uint8)):
                    _read_all(file, target.data, digest)
                position = entry["offset"] + array.nbytes
                arrays[name] = array.astype(dtype, copy=False)
    except OSError as error:
        raise _reading_failed(path, error) from error
    except (ValueError, TypeError, EOFError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    if digest.hexdigest() != manifest.shard["sha256"] or position != manifest.shard["size_bytes"]:
        raise Damaged(f"{path.name} does not match its checksum")
    return {name: arrays[name] for name in manifest.arrays}


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new small file and fsync; raise OSError."""
    with FileIO(path, "xb") as file:
        _write_all(file, memoryview(data), hashlib.sha256())
        os.fsync(file.fileno())


def _write_shard(path: Path, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the arrays; return the file and the entries of `Manifest`."""
    digest = hashlib.sha256()
    entries = {}
    size_bytes = 0
    with FileIO(path, "xb") as file:
        for name in arrays:
            array = np.asarray(arrays[name])
            dtype = array.dtype.name
            require(
                array.dtype.kind in "biufc" or hasattr(ml_dtypes, dtype),
                f"checkpoint: array {name!r}",
                received=f"dtype {array.dtype}",
                expected="numbers or booleans",
                fix="keep strings and objects in the metadata, as JSON",
                code="unsupported-dtype",
            )
            padding = bytes(-size_bytes % _ALIGNMENT_BYTES)
            for piece in (memoryview(padding), raw_bytes(array)):
                _write_all(file, piece, digest)
                size_bytes += len(piece)
            start = size_bytes - array.nbytes
            entries[name] = {"shard": _SHARD, "offset": start, "dtype": dtype, "shape": array.shape}
        os.fsync(file.fileno())
    digest_hex = digest.hexdigest()
    return {"file": path.name, "size_bytes": size_bytes, "sha256": digest_hex}, entries


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


def _checksum(body: Mapping[str, Any]) -> str:
    # Once through JSON first: it makes integer keys strings, and those sort in another order.
    text = json.dumps(json.loads(json.dumps(body)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
