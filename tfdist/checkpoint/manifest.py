"""Checkpoint manifest: JSON beside the shards that lists the arrays, with a checksum."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError

FORMAT = "tfdist-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
_CHECKSUM = "manifest_sha256"
# With these a file is not what was written, and will not be at a second try.
_DAMAGE = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        *(errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA),
    )
)


class Damaged(Exception):
    """A checkpoint that cannot be read as it was written; the message says what is wrong."""


class Unreadable(TfdistError):
    """A checkpoint that may be whole, and cannot be read now."""


class NewerFormat(Exception):
    """A checkpoint written by a later tfdist than this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of raw bytes."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where one array lies: little-endian, C order, from `offset` bytes into its shard."""

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
    def read(cls, directory: Path) -> Manifest:
        """Read that of a checkpoint; raise Damaged, NewerFormat, or as `reading_failed` says."""
        file = directory / FILE_NAME
        try:
            return cls.from_bytes(file.read_bytes())
        except OSError as error:
            raise reading_failed(file, error) from error

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Read what `to_bytes` wrote; raise Damaged or NewerFormat."""
        try:
            body = json.loads(text)
            checksum = body.pop(_CHECKSUM, None)
            if body["format"] != FORMAT:
                raise Damaged(f"{FILE_NAME} is not of a tfdist checkpoint")
            if body["version"] > VERSION:
                raise NewerFormat(f"format version {body['version']}")
            if checksum != _checksum(body):
                raise Damaged(f"{FILE_NAME} does not match its checksum")
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{FILE_NAME} is cut short or not JSON") from error


def reading_failed(path: Path, error: OSError) -> Damaged | TfdistError:
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
        )
    return Unreadable(f"checkpoint {path}: {error.strerror or error}")


def _checksum(body: Mapping[str, Any]) -> str:
    # Once through JSON first: it makes integer keys strings, and those sort in another order.
    text = json.dumps(json.loads(json.dumps(body)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
