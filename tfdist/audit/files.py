"""Ledger files: the examples that each step of a run consumed, as recorded by its tasks.

``ledger/attempt-<n>-<task>.bin`` begins with one line of JSON, the `Header`, and goes on with
records of a range of steps each. A record is appended and flushed when its range is done, so that
a kill loses no more than the range in flight; what is cut at the end of a file is left out. A
change anywhere else is found by a checksum: of the first line, of a record's head, of its payload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdist.errors import TfdistError, UsageError
from tfdist.training.epochs import EpochPlan

MODES = ("hash", "full")
_FORMAT = "tfdist ledger 1"
_NAME = re.compile(r"attempt-(\d+)-([A-Za-z0-9_.-]+)\.bin")
_HEAD = struct.Struct("<IIqqii")
_CHECKSUM = struct.Struct("<I")
_LONGEST_HEADER = 1 << 26


class _Changed(Exception):
    """Bytes that are not as they were written."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file says of the run and of the process that writes it.

    Attributes:
      mode: ``full``: each example of each step; ``hash``: a sum of hashes for each step.
      attempt: the start of the run, from 1 on; the same in all its tasks.
      task: who writes.
      num_tasks: tasks that write a file in this attempt.
      strategy: single, mirrored, multiworker, ps or pipeline.
      num_replicas: that compute a step together.
      threads: of one operation.
      num_examples: in one pass over the data.
      shuffle: each pass in an order of its own.
      seed: of the run.
      global_batch_size: examples of a step.
      example_starts: first example of each virtual epoch, and the end of the last.
    """

    mode: str
    attempt: int
    task: str
    num_tasks: int
    strategy: str
    num_replicas: int
    threads: int
    num_examples: int
    shuffle: bool
    seed: int
    global_batch_size: int
    example_starts: tuple[int, ...]

    @property
    def plan(self) -> EpochPlan:
        """Steps and examples of the virtual epochs of the run."""
        batch = self.global_batch_size
        return EpochPlan.from_boundaries(self.example_starts, global_batch_size=batch)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One range of steps ``[first, last)`` as one task did it.

    Attributes:
      worker: under ps, the worker that did it; else -1.
      begun: under ps, how often some worker began it; else 1.
      arrays: of mode ``full``: indices and passes ``[steps, replicas, share]``, -1 where a share
        is smaller, and the checksum of the examples' content ``[steps]``; of mode ``hash``: the
        lowest pass ``[steps]``, and for it and those that follow the number of examples and the
        sum of their hashes, both ``[steps, passes]``.
    """

    first: int
    last: int
    worker: int = -1
    begun: int = 1
    arrays: tuple[Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordLocation:
    """Where in a file a record is; see `Record`."""

    first: int
    last: int
    worker: int
    begun: int
    start: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFile:
    """A file, read through once: its header, its sound records, and what is wrong with it."""

    path: Path
    header: Header
    locations: tuple[RecordLocation, ...]
    cut_bytes: int = 0
    damaged: str = ""

    def read(self, location: RecordLocation) -> Record:
        """Read one record."""
        with open(self.path, "rb") as file:
            file.seek(location.start)
            arrays = from_bytes(file.read(location.size_bytes))
        return Record(
            first=location.first,
            last=location.last,
            worker=location.worker,
            begun=location.begun,
            arrays=arrays,
        )


class LedgerWriter:
    """Appends the records of one task to a new file; makes the file with the first of them."""

    def __init__(self, directory: str | os.PathLike[str], header: Header) -> None:
        self._path = Path(directory) / f"attempt-{header.attempt}-{header.task}.bin"
        self._header = header
        self._file: BinaryIO | None = None

    def append(self, record: Record) -> None:
        """Write a record through to the operating system; raise TfdistError if it cannot."""
        try:
            file = self._file or self._open()
            file.write(packed(record))
            file.flush()
        except OSError as error:
            raise TfdistError(f"ledger {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        if self._file is not None:
            # What could not be written is tried once more; `append` has raised it.
            with contextlib.suppress(OSError):
                self._file.close()

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "xb")  # noqa: SIM115
        self._file.write(_first_line(self._header))
        return self._file


def packed(record: Record) -> bytes:
    """Return a record as it stands in a file."""
    payload = to_bytes(record.arrays)
    about = (record.first, record.last, record.worker, record.begun)
    head = _HEAD.pack(len(payload), zlib.crc32(payload), *about)
    return head + _CHECKSUM.pack(zlib.crc32(head)) + payload


def next_attempt(directory: str | os.PathLike[str]) -> int:
    """One more than the highest attempt that has a file in `directory`."""
    return max((attempt for attempt, _ in _files(Path(directory))), default=0) + 1


def read_directory(directory: str | os.PathLike[str]) -> list[LedgerFile]:
    """Read every file of a ledger through, oldest attempt first.

    A file that was cut before its first line was whole is one without a record, where another of
    its attempt tells what it would have said.

    Raises:
      UsageError: there is none, or one of a format that this version does not know.
      TfdistError: one cannot be read, or its first line was changed.
    """
    found = _files(Path(directory))
    if not found:
        raise UsageError(
            str(directory),
            received="no ledger",
            expected="the files of a run that kept one",
            fix="start the run with --config.ledger=full or hash, or tfdist.fit(ledger=...)",
            code="no-ledger",
        )
    read = [(attempt, path, scan(path)) for attempt, path in found]
    headers = {attempt: file.header for attempt, _, file in read if file is not None}
    files = []
    for attempt, path, file in read:
        if file is not None:
            files.append(file)
        elif attempt in headers:
            task = path.stem.partition(f"attempt-{attempt}-")[2]
            header = dataclasses.replace(headers[attempt], task=task)
            files.append(LedgerFile(path=path, header=header, locations=()))
    return files


def scan(path: Path) -> LedgerFile | None:
    """Read a file through; None for one that was cut before its first line was whole."""
    try:
        with open(path, "rb") as file:
            line = file.readline(_LONGEST_HEADER)
            return _scanned(file, line, path) if line.endswith(b"\n") else None
    except OSError as error:
        raise TfdistError(f"ledger {path}: {error.strerror or error}") from error


def _scanned(file: BinaryIO, line: bytes, path: Path) -> LedgerFile:
    header = _header(line, path)
    locations: list[RecordLocation] = []
    at, size_bytes = len(line), os.fstat(file.fileno()).st_size
    cut_bytes, damaged = 0, ""
    while at < size_bytes:
        try:
            location = _next_location(file, at)
        except _Changed:
            damaged = f"{path.name}: damaged from byte {at} on ({size_bytes - at} bytes unread)"
            break
        if location is None:
            cut_bytes = size_bytes - at
            break
        locations.append(location)
        at = location.start + location.size_bytes
    return LedgerFile(
        path=path, header=header, locations=tuple(locations), cut_bytes=cut_bytes, damaged=damaged
    )


def _files(directory: Path) -> list[tuple[int, Path]]:
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TfdistError(f"ledger {directory}: {error.strerror}") from error
    found = [(match, directory / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), path) for match, path in found)


def _first_line(header: Header) -> bytes:
    content = {"format": _FORMAT, **dataclasses.asdict(header)}
    checksum = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, "crc32": checksum}).encode() + b"\n"


def _header(line: bytes, path: Path) -> Header:
    try:
        content = json.loads(line)
        if content.pop("format") != _FORMAT:
            raise ValueError
        del content["crc32"]
        header = Header(**{**content, "example_starts": tuple(content["example_starts"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            str(path),
            received="a file that does not begin like a ledger of this version",
            expected=f"{_FORMAT!r}",
            fix="read it with the tfdist that wrote it, or take it out of the directory",
            code="other-format",
        ) from error
    if _first_line(header) != line:
        raise TfdistError(f"ledger {path}: its first line was changed")
    return header


def _next_location(file: BinaryIO, at: int) -> RecordLocation | None:
    """The record at a byte, None for one that was cut; raises _Changed."""
    file.seek(at)
    head = file.read(_HEAD.size)
    checksum = file.read(_CHECKSUM.size)
    if len(checksum) < _CHECKSUM.size:
        return None
    if zlib.crc32(head) != _CHECKSUM.unpack(checksum)[0]:
        raise _Changed
    size_bytes, payload_checksum, first, last, worker, begun = _HEAD.unpack(head)
    start = file.tell()
    payload = file.read(size_bytes)
    if len(payload) < size_bytes:
        return None
    if zlib.crc32(payload) != payload_checksum:
        raise _Changed
    return RecordLocation(
        first=first, last=last, worker=worker, begun=begun, start=start, size_bytes=size_bytes
    )


# Compact encoding of a ledger record's arrays as bytes, and decoding.


Array = np.ndarray[Any, Any]


def to_bytes(arrays: Sequence[Array]) -> bytes:
    """Compress them, integers in the smallest type that holds them."""
    stream = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(stream, _narrow(array), allow_pickle=False)
    return zlib.compress(stream.getvalue(), 1)


def from_bytes(payload: bytes) -> tuple[Array, ...]:
    """Read what `to_bytes` wrote; integers as int64, so that sums of them do not overflow."""
    stream = io.BytesIO(zlib.decompress(payload))
    arrays = []
    while stream.tell() < len(stream.getbuffer()):
        array = np.lib.format.read_array(stream, allow_pickle=False)
        arrays.append(array.astype(np.int64) if array.dtype.kind == "i" else array)
    return tuple(arrays)


def _narrow(array: Array) -> Array:
    array = np.asarray(array)
    if array.dtype.kind != "i" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array
