"""Format of a checkpoint: a shard of raw bytes, and a manifest that lists its arrays.

A shard contains the arrays in sequence, little-endian and in C order. The manifest is JSON with the
checksums of the shard and of the manifest. Both files are synced to the disk after the write.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.errors import TfdistError, UsageError, require
from tfdist.files import fsync, open_untrusted

FORMAT = "tfdist-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_CHECKSUM = "manifest_sha256"
_SHARD = "arrays"
# Offsets are multiples of 64 bytes, so that a shard can be memory-mapped as any dtype.
_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 16 << 20
# Limit far above the largest models. Reading a manifest needs about 20 times its size in memory.
_MANIFEST_BYTES = 256 << 20
_PLAIN_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
_NUMBERS = [
    each
    for each in vars(ml_dtypes).values()
    if isinstance(each, type) and issubclass(each, np.generic)
]
_CODES = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, [*_CODES, *_NUMBERS])}
_MOST_DIMENSIONS = 64  # limit of NumPy
# These errors mean that the file is damaged. A second try would fail too.
_DAMAGE = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO),
        *(errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA),
    )
)

Array = np.ndarray[Any, np.dtype[Any]]


class Damaged(Exception):
    """Error for a damaged checkpoint. The message names the problem."""


class Unreadable(TfdistError):
    """Error for a checkpoint that may be intact but cannot be read now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a checkpoint, without the content of the arrays.

    Attributes:
      shard: ``file``, ``size_bytes`` and ``sha256`` of the file of arrays.
      arrays: ``shard``, ``offset`` in bytes, ``dtype`` and ``shape`` of each array, by name.
    """

    step: int
    best: bool
    meta: Mapping[str, Any]
    shard: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Any]]


def write_checkpoint(
    directory: Path, arrays: Mapping[str, Any], *, step: int, best: bool, meta: Mapping[str, Any]
) -> None:
    """Write a shard and the manifest into a new `directory` and fsync both.

    Raises OSError, TypeError if `meta` is not JSON, and UsageError for too much metadata or an
    unsupported dtype.
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
    text = json.dumps(body, indent=1).encode() + b"\n"
    require(
        len(text) <= _MANIFEST_BYTES,
        "checkpoint: metadata",
        f"the metadata needs {len(text)} bytes of JSON, more than {_MANIFEST_BYTES}",
        fix="return less data from get_state of your callbacks",
        code="too-large",
    )
    with FileIO(directory / MANIFEST, "xb") as file:
        _write_all(file, memoryview(text), hashlib.sha256())
        os.fsync(file.fileno())
    fsync(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest. Raise Damaged, Unreadable, or UsageError for a newer format."""
    file = directory / MANIFEST
    if directory.is_symlink():
        raise Damaged("it is a symbolic link")
    try:
        with FileIO(file, "rb", opener=open_untrusted) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            if size_bytes > _MANIFEST_BYTES:
                raise Damaged(f"{MANIFEST} has {size_bytes} bytes of at most {_MANIFEST_BYTES}")
            text = opened.read(size_bytes)
    except OSError as error:
        raise _reading_failed(file, error) from error
    try:
        body = json.loads(text)
        checksum = body.pop(_CHECKSUM, None)
        if body["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} is not the manifest of a tfdist checkpoint")
        if body["version"] > VERSION:
            raise UsageError(
                f"checkpoint {directory}",
                f"the checkpoint has format version {body['version']}, but this tfdist reads only "
                f"versions up to {VERSION}",
                fix="use the version of tfdist that wrote the checkpoint, or a later version",
                code="version",
            )
        if checksum != _checksum(body):
            raise Damaged(f"{MANIFEST} does not match its checksum")
        shard = body["shards"][_SHARD]
        is_valid = (
            is_count(body["step"])
            and isinstance(body["best"], bool)
            and isinstance(body["meta"], dict)
            and isinstance(body["arrays"], dict)
            and is_count(shard["size_bytes"])
            and isinstance(shard["sha256"], str)
            and _PLAIN_NAME.fullmatch(shard["file"])
        )
        if not is_valid:
            raise Damaged(f"{MANIFEST} has a value of a wrong type")
        return Manifest(
            step=body["step"],
            best=body["best"],
            meta=body["meta"],
            shard=shard,
            arrays=body["arrays"],
        )
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is cut short or not JSON") from error
    except MemoryError as error:
        raise Unreadable(f"checkpoint {file}: not enough memory to read it") from error


def is_count(value: object) -> bool:
    """Return whether a JSON value is an integer of at least 0 that fits an int64."""
    return type(value) is int and 0 <= value < 1 << 63


def is_counts(value: object) -> bool:
    """Return whether a JSON value is a list of integers like a shape (see `is_count`)."""
    return isinstance(value, list) and all(map(is_count, value))


def check_size(directory: Path, manifest: Manifest) -> None:
    """Raise Damaged if the shard is missing or has another size, Unreadable for other errors."""
    path, expected = directory / manifest.shard["file"], manifest.shard["size_bytes"]
    try:
        found = path.lstat()
    except OSError as error:
        raise _reading_failed(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is not a regular file")
    if found.st_size != expected:
        raise Damaged(f"{path.name} has {found.st_size} bytes of {expected}")


def read_arrays(directory: Path, manifest: Manifest) -> dict[str, Array]:
    """Read a copy of the arrays and verify their checksum.

    Raises Damaged, or Unreadable if the file may be intact but cannot be read now.
    """
    check_size(directory, manifest)
    path, digest = directory / manifest.shard["file"], hashlib.sha256()
    arrays: dict[str, Array] = {}
    try:
        with FileIO(path, "rb", opener=open_untrusted) as file:
            for name, gap_bytes, dtype, shape in _layout(manifest):
                gap = np.empty(gap_bytes, np.uint8)
                array = np.empty(shape, dtype.newbyteorder("<"))
                for target in (gap, array.reshape(-1).view(np.uint8)):
                    _read_all(file, target.data, digest)
                arrays[name] = array.astype(dtype, copy=False)
    except OSError as error:
        raise _reading_failed(path, error) from error
    except MemoryError as error:  # the size of the file is already verified
        raise Unreadable(f"checkpoint {path}: not enough memory to read it") from error
    except (ValueError, EOFError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    if digest.hexdigest() != manifest.shard["sha256"]:
        raise Damaged(f"{path.name} does not match its checksum")
    return {name: arrays[name] for name in manifest.arrays}


def _layout(manifest: Manifest) -> list[tuple[str, int, np.dtype[Any], list[int]]]:
    """Return name, bytes of padding before it, dtype and shape of each array, in file order.

    Raises Damaged unless the arrays and their padding fill the shard.
    """
    layout, position = [], 0
    try:
        for name, entry in sorted(manifest.arrays.items(), key=lambda item: item[1]["offset"]):
            dtype, shape, start = _DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
            gap_bytes = start - position
            if not is_counts(shape) or len(shape) > _MOST_DIMENSIONS:
                raise ValueError(name)
            if not is_count(start) or not 0 <= gap_bytes < _ALIGNMENT_BYTES:
                raise ValueError(name)
            layout.append((name, gap_bytes, dtype, shape))
            position = start + math.prod(shape) * dtype.itemsize
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{MANIFEST} has an array with an invalid type or position") from error
    if position != manifest.shard["size_bytes"]:
        raise Damaged(f"{MANIFEST} has arrays of {position} bytes, which do not fill the shard")
    return layout


def _write_shard(path: Path, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the arrays. Return `shard` and `arrays` of the `Manifest`."""
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
                f"a checkpoint holds numbers and booleans, not dtype {array.dtype}",
                fix="keep strings and objects in the metadata, as JSON",
                code="not-saveable",
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
    """Return the array's little-endian bytes in C order. Copy the array only if necessary."""
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
    """Return the error of a failed read. After Damaged, the store reads an older checkpoint."""
    if error.errno in _DAMAGE:
        return Damaged(f"{path.name}: {error.strerror}")
    return Unreadable(f"checkpoint {path}: {error.strerror or error}")


def _checksum(body: Mapping[str, Any]) -> str:
    # Convert to JSON and back first: integer keys become strings, which sort in another order.
    text = json.dumps(json.loads(json.dumps(body)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
