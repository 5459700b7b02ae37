"""Ledger: the examples that each step of a run consumed, as recorded by its tasks.

Its files are written and read again, the attempts of a run put together (`merge`), and it is proved
that every example of every pass was consumed exactly once (`prove`).

``ledger/attempt-<n>-<task>.bin`` begins with one line of JSON, the `Header`, and goes on with
records of a range of steps each. A record is appended and flushed when its range is done, so that
a kill loses no more than the range in flight; what is cut at the end of a file is left out. A
change anywhere else is found by a checksum: of the first line, of a record's head, of its payload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdist.errors import TfdistError, UsageError, named
from tfdist.files import one_line_errors
from tfdist.training.epochs import EpochPlan

MODES = ("hash", "full")
_FORMAT = "tfdist ledger 1"
_NAME = re.compile(r"attempt-(\d+)-([A-Za-z0-9_.-]+)\.bin")
_HEAD = struct.Struct("<IIqqii")
_CHECKSUM = struct.Struct("<I")
Array = np.ndarray[Any, Any]


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
      payload: the arrays, by `to_bytes`.
    """

    first: int
    last: int
    worker: int = -1
    begun: int = 1
    payload: bytes

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The rows of its steps.

        Of mode ``full``: indices and passes ``[steps, replicas, share]``, -1 where a share is
        smaller, and the checksum of the examples' content ``[steps]``. Of mode ``hash``: the lowest
        pass ``[steps]``, and for it and those that follow the number of examples and the sum of
        their hashes, both ``[steps, passes]``.
        """
        return tuple(array[: self.last - self.first] for array in from_bytes(self.payload))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFile:
    """A file as it was read: its header, its sound records, and what is wrong with it."""

    path: Path
    header: Header
    records: tuple[Record, ...]
    damaged: str = ""


class LedgerWriter:
    """Appends the records of one task to a new file; makes the file with the first of them."""

    def __init__(self, directory: str | os.PathLike[str], header: Header) -> None:
        self._path = Path(directory) / f"attempt-{header.attempt}-{header.task}.bin"
        self._header = header
        self._file: BinaryIO | None = None

    def append(self, record: Record) -> None:
        """Write a record through to the operating system; raise TfdistError if it cannot."""
        with one_line_errors(f"ledger {self._path}"):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "xb")  # noqa: SIM115
                self._file.write(_first_line(self._header))
            about = (record.first, record.last, record.worker, record.begun)
            head = _HEAD.pack(len(record.payload), zlib.crc32(record.payload), *about)
            self._file.write(head + _CHECKSUM.pack(zlib.crc32(head)) + record.payload)
            self._file.flush()

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        if self._file is not None:
            # What could not be written is tried once more; `append` has raised it.
            with contextlib.suppress(OSError):
                self._file.close()


def next_attempt(directory: str | os.PathLike[str]) -> int:
    """One more than the highest attempt that has a file in `directory`."""
    return max((attempt for attempt, _ in _files(Path(directory))), default=0) + 1


def read_directory(directory: str | os.PathLike[str]) -> list[LedgerFile]:
    """Read every file of a ledger, oldest attempt first.

    A file that was cut before its first line was whole is left out, as if it had not been begun.

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
    return [file for _, path in found if (file := read_file(path)) is not None]


def read_file(path: Path) -> LedgerFile | None:
    """Read a file; None for one that was cut before its first line was whole."""
    with one_line_errors(f"ledger {path}"):
        data = path.read_bytes()
    at = data.find(b"\n") + 1
    if not at:
        return None
    header, records, damaged = _header(data[:at], path), [], ""
    while at < len(data):
        start = at + _HEAD.size + _CHECKSUM.size
        if start > len(data):
            break
        head = data[at : at + _HEAD.size]
        is_sound = zlib.crc32(head) == _CHECKSUM.unpack(data[at + _HEAD.size : start])[0]
        if is_sound:
            size_bytes, checksum, first, last, worker, begun = _HEAD.unpack(head)
            payload = data[start : start + size_bytes]
            if len(payload) < size_bytes:
                break
            is_sound = zlib.crc32(payload) == checksum
        if not is_sound:
            left = len(data) - at
            damaged = f"{path.name}: damaged from byte {at} on ({left} bytes unread)"
            break
        record = Record(first=first, last=last, worker=worker, begun=begun, payload=payload)
        records.append(record)
        at = start + size_bytes
    return LedgerFile(path=path, header=header, records=tuple(records), damaged=damaged)


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


# Compact encoding of a record's arrays as bytes, and decoding.


def to_bytes(arrays: Sequence[Array]) -> bytes:
    """Compress them, integers in the smallest type that holds them."""
    stream = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(stream, _narrow(np.asarray(array)), allow_pickle=False)
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
    if array.dtype.kind != "i" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array


# Merge of a run's attempts: the examples of each step that count.
#
# A run that resumes at step s goes on from weights that have seen the steps before s and no other:
# what earlier attempts recorded from s on is void.


SALT = 0x6C65646765722E31
"""First key of the hash of an example, here and in the graph of a recorded step."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SAME = ("num_examples", "shuffle", "seed", "global_batch_size")
_OWN = ("task", "threads")  # of a file alone: tasks may be on machines of several kinds


def _mix(values: Array) -> Array:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def pair_hash(indices: Any, passes: Any) -> Array:
    """Return the hash of each example in its pass, uint64, that ledgers of mode ``hash`` sum up."""
    indices, passes = np.atleast_1d(indices), np.atleast_1d(passes)
    keys = _mix(np.uint64(SALT) + passes.astype(np.int64).astype(np.uint64) * _GAMMA)
    return _mix(keys + indices.astype(np.int64).astype(np.uint64) * _GAMMA)


def first_examples(plan: EpochPlan) -> Array:
    """Return the first example of each step, and the end of the last, int64 ``[steps + 1]``."""
    epochs, batch = itertools.pairwise(plan.example_starts), plan.global_batch_size
    spans = [np.arange(first, end, batch, dtype=np.int64) for first, end in epochs]
    return np.concatenate([*spans, np.array(plan.example_starts[-1:], np.int64)])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAttempt:
    """One start of the run.

    Attributes:
      header: of one of its files; those of the others say the same but for task and threads.
      files: by task.
      first: the step it began at.
      last: the end of what it recorded.
      limit: the step from which on it is void.
    """

    header: Header
    files: tuple[LedgerFile, ...]
    first: int
    last: int
    limit: int

    @property
    def void_steps(self) -> int:
        """Steps that a later attempt did again, or that were in flight when the last one ended."""
        return max(0, self.last - max(self.limit, self.first))

    @property
    def end(self) -> int:
        """The end of what counts."""
        return min(self.last, self.limit)

    def valid(self) -> Iterator[Record]:
        """Its records of steps that count."""
        for record in itertools.chain.from_iterable(file.records for file in self.files):
            if record.first < self.limit:
                yield dataclasses.replace(record, last=min(record.last, self.limit))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergedLedger:
    """The whole run, as far as it got.

    Attributes:
      attempts: oldest first.
      firsts: first example of each step, and the end of the last, by the newest attempt.
      end: the end of what is recorded.
    """

    attempts: tuple[LedgerAttempt, ...]
    firsts: Array
    end: int

    @property
    def header(self) -> Header:
        """That of the newest attempt."""
        return self.attempts[-1].header

    @property
    def is_full(self) -> bool:
        """True when every attempt that counts has recorded each example."""
        return all(a.header.mode == "full" for a in self.attempts if any(a.valid()))

    def records(self) -> list[Record]:
        """Every record that counts, in the order of the steps."""
        return sorted((r for a in self.attempts for r in a.valid()), key=lambda r: r.first)


def merge(files: Sequence[LedgerFile]) -> MergedLedger:
    """Put the files of a ledger together.

    Raises:
      TfdistError: nothing is recorded, or the files are of several runs.
    """
    groups: dict[int, list[LedgerFile]] = {}
    for file in files:
        groups.setdefault(file.header.attempt, []).append(file)
    groups = {n: group for n, group in groups.items() if any(file.records for file in group)}
    limit = _recorded_by_all(groups[max(groups)]) if groups else 0
    attempts: list[LedgerAttempt] = []
    for number in sorted(groups, reverse=True):
        group = groups[number]
        _require_one_attempt(group)
        attempt = LedgerAttempt(
            header=group[0].header,
            files=tuple(group),
            first=min(record.first for file in group for record in file.records),
            last=max(record.last for file in group for record in file.records),
            limit=limit,
        )
        limit = min(limit, attempt.first)
        attempts.insert(0, attempt)
    end = max((attempt.end for attempt in attempts), default=0)
    if not end:  # what there is was in flight
        raise TfdistError("ledger: no step is recorded")
    firsts = first_examples(attempts[-1].header.plan)
    for attempt in attempts:
        _require_same_run(attempt, attempts[-1], firsts)
    return MergedLedger(attempts=tuple(attempts), firsts=firsts, end=end)


def _recorded_by_all(files: Sequence[LedgerFile]) -> int:
    """Up to where every task of the newest attempt got: what one wrote past it was in flight.

    A task begins a range when all have recorded the one before: of one that has no file yet, the
    others have a single record.
    """
    first = min(record.first for file in files for record in file.records)
    are_all_there = len(files) == files[0].header.num_tasks
    if not are_all_there and all(len(file.records) < 2 for file in files):
        return first
    return min(max((record.last for record in file.records), default=first) for file in files)


def _require_one_attempt(files: Sequence[LedgerFile]) -> None:
    first = files[0].header
    for header in (file.header for file in files):
        names = [field.name for field in dataclasses.fields(Header) if field.name not in _OWN]
        different = [name for name in names if getattr(header, name) != getattr(first, name)]
        if different:
            raise TfdistError(
                f"ledger: {first.task} and {header.task} of attempt {first.attempt} are not of one "
                f"run: they differ in {', '.join(different)}"
            )


def _require_same_run(attempt: LedgerAttempt, newest: LedgerAttempt, firsts: Array) -> None:
    mine, theirs = attempt.header, newest.header
    different = [name for name in _SAME if getattr(mine, name) != getattr(theirs, name)]
    own, total_steps = first_examples(mine.plan), mine.plan.total_steps
    steps = slice(attempt.first, max(attempt.first, min(attempt.end, total_steps)))
    has_others = not different and not np.array_equal(own[steps], firsts[steps])
    if attempt.last > total_steps or has_others:
        different.append("the examples of its steps")
    if different:
        raise TfdistError(
            f"ledger: attempts {mine.attempt} and {theirs.attempt} are not of one run: they "
            f"differ in {', '.join(different)}"
        )


# Proof that every example of every pass was consumed exactly once.


_SHOWN = 10
_CHUNK = 1 << 20
Order = Callable[[Header, Array], Array]
"""The example at each position of a run: int64[b] -> int64[b]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassProof:
    """One pass over the data.

    Attributes:
      number: from 0 on.
      expected: examples of it that the run has come to; fewer than all in the last pass.
      seen: examples that its steps consumed.
      whole: the run has come to its end.
      repeated: how many examples came more than once, None where a hash cannot tell.
      missed: how many never came.
      first_repeated: the first ten.
      first_missed: the first ten.
      steps: where it differs from the order of the run, the first ten; shown by a hash.
    """

    number: int
    expected: int
    seen: int
    whole: bool
    repeated: int | None = 0
    missed: int | None = 0
    first_repeated: tuple[int, ...] = ()
    first_missed: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def proved(self) -> bool:
        """Each of its examples came exactly once."""
        return self.seen == self.expected and self.repeated == 0 and self.missed == 0


class Tally:
    """What the records of a run say, counted over all tasks.

    Attributes:
      total: examples of the steps that are recorded.
      num_passes: passes that these belong to.
      counts: examples of each step.
      hashes: sum of their hashes.
      content: sum of the checksums of their content; None where an attempt did not record it.
      repeats: steps with an example that came before in its pass, where each is recorded.
    """

    def __init__(self, ledger: MergedLedger) -> None:
        self._ledger = ledger
        self._num_examples = ledger.header.num_examples
        self._full = ledger.is_full
        self.total = int(ledger.firsts[ledger.end])
        self.num_passes = -(-self.total // self._num_examples)
        self.counts = np.zeros(ledger.end, np.int64)
        self.hashes = np.zeros(ledger.end, np.uint64)
        self.content = np.zeros(ledger.end, np.uint64) if ledger.is_full else None
        self.repeats = np.zeros(ledger.end, bool)
        self._seen: dict[int, Array] = {}
        self._sums: dict[int, tuple[int, int]] = {}
        self._strays: set[int] = set()
        self._twice: list[str] = []
        for record in ledger.records():
            if record.begun > 1:
                who = f" (last by worker-{record.worker})" if record.worker >= 0 else ""
                steps = ranges(range(record.first, record.last))
                self._twice.append(f"steps {steps}: handed out {record.begun} times{who}")
            self._add(record)

    def _add(self, record: Record) -> None:
        """Count a record: of each of its rows the passes, numbers of examples and hashes."""
        arrays, rows = record.arrays, slice(record.first, record.last)
        if arrays[0].ndim == 3:  # mode full: an example is a row
            indices, passes, content = arrays
            steps, *place = np.nonzero(indices >= 0)
            indices, passes = indices[steps, *place], passes[steps, *place]
            counts, hashes = np.ones_like(indices), pair_hash(indices, passes)
            if self.content is not None:
                self.content[rows] += content.astype(np.uint64)
        else:
            lowest, counts, hashes = arrays
            steps, more = np.nonzero(counts)
            counts, hashes = counts[steps, more], hashes[steps, more]
            indices, passes = np.zeros_like(counts), lowest[steps] + more
        steps = steps + record.first
        np.add.at(self.counts, steps, counts)
        np.add.at(self.hashes, steps, hashes)
        own = (indices < self._num_examples) & (passes >= 0) & (passes < self.num_passes)
        self._strays.update(steps[~own].tolist())
        for number in np.unique(passes[own]).tolist():
            mine = own & (passes == number)
            seen, total = self._sums.get(number, (0, 0))
            total = (total + int(hashes[mine].sum(dtype=np.uint64))) % 2**64
            self._sums[number] = seen + int(counts[mine].sum()), total
            if self._full:
                examples = self._seen.setdefault(number, np.zeros(self._num_examples, np.uint16))
                np.add.at(examples, indices[mine], 1)
                self.repeats[steps[mine][examples[indices[mine]] > 1]] = True

    def problems(self) -> list[str]:
        """Return what was found that belongs to no pass."""
        problems = list(self._twice)
        if self._strays:
            steps = ranges(sorted(self._strays))
            problems.append(f"steps {steps}: examples or passes that the run does not have")
        sizes = np.diff(self._ledger.firsts)
        wrong = np.flatnonzero(self.counts != sizes[: self._ledger.end])
        if len(wrong):
            found = f"{self.counts[wrong[0]]} instead of {sizes[wrong[0]]}"
            steps = ranges(wrong)
            problems.append(f"steps {steps}: not their number of examples (the first: {found})")
        return problems

    def prove_pass(self, number: int, order: Order) -> PassProof:
        """Report what is known of one pass."""
        start = number * self._num_examples
        expected = min(self._num_examples, self.total - start)
        whole = expected == self._num_examples
        if self._full:
            return self._pass_by_examples(number, expected, whole, order)
        seen, total = self._sums.get(number, (0, 0))
        proof = PassProof(number=number, expected=expected, seen=seen, whole=whole)
        if (seen, total) == (expected, self._expected_sum(number, expected, whole, order)):
            return proof
        steps = self._steps_out_of_order(start, start + expected, order)
        return dataclasses.replace(proof, repeated=None, missed=None, steps=steps)

    def _pass_by_examples(self, number: int, expected: int, whole: bool, order: Order) -> PassProof:
        seen = self._seen.get(number, np.zeros(self._num_examples, np.uint16))
        wanted = np.ones(self._num_examples, bool)
        if not whole:
            start = number * self._num_examples
            wanted[:] = False
            wanted[order(self._ledger.header, np.arange(start, start + expected))] = True
        repeated = np.flatnonzero((seen > 1) | (~wanted & (seen > 0)))
        missed = np.flatnonzero(wanted & (seen == 0))
        return PassProof(
            number=number,
            expected=expected,
            seen=int(seen.sum(dtype=np.int64)),
            whole=whole,
            repeated=len(repeated),
            missed=len(missed),
            first_repeated=tuple(repeated[:_SHOWN].tolist()),
            first_missed=tuple(missed[:_SHOWN].tolist()),
        )

    def _expected_sum(self, number: int, expected: int, whole: bool, order: Order) -> int:
        total, start = 0, number * self._num_examples
        for first in range(0, expected, _CHUNK):
            examples = np.arange(first, min(first + _CHUNK, expected))
            if not whole:
                examples = order(self._ledger.header, start + examples)
            hashes = pair_hash(examples, np.full(len(examples), number))
            total = (total + int(hashes.sum(dtype=np.uint64))) % 2**64
        return total

    def _steps_out_of_order(self, first: int, last: int, order: Order) -> tuple[int, ...]:
        """The first steps with examples in ``[first, last)`` whose sum is not that of the order."""
        ledger = self._ledger
        found: list[int] = []
        firsts = ledger.firsts
        start = int(np.searchsorted(firsts, first, side="right")) - 1
        for step in range(start, ledger.end):
            if firsts[step] >= last or len(found) == _SHOWN:
                break
            positions = np.arange(firsts[step], firsts[step + 1])
            hashes = pair_hash(order(ledger.header, positions), positions // self._num_examples)
            if hashes.sum(dtype=np.uint64) != self.hashes[step]:
                found.append(step)
        return tuple(found)


def ranges(steps: Sequence[int] | Array) -> str:
    """Show steps in order: ``3, 7 to 9``."""
    listed = np.asarray(steps, np.int64)
    if not len(listed):
        return "none"
    breaks = np.flatnonzero(np.diff(listed) > 1)
    firsts = listed[np.concatenate([[0], breaks + 1])]
    lasts = listed[np.concatenate([breaks, [len(listed) - 1]])]
    shown = [f"{a} to {b}" if b > a else f"{a}" for a, b in zip(firsts, lasts, strict=True)]
    return named(shown, most=_SHOWN)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochProof:
    """One virtual epoch: its steps ``[first, last)``, as far as the run got."""

    number: int
    first: int
    last: int
    expected: int
    seen: int
    proved: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What a ledger shows.

    Attributes:
      ledger: the attempts, put together.
      passes: one for each that the run has come to.
      epochs: likewise the virtual epochs.
      problems: what else speaks against it, a line each.
    """

    ledger: MergedLedger
    passes: tuple[PassProof, ...]
    epochs: tuple[EpochProof, ...]
    problems: tuple[str, ...]

    @property
    def proved(self) -> bool:
        """Every example of every pass came exactly once, as far as the run got."""
        passes = all(part.proved for part in self.passes)
        return not self.problems and passes and all(part.proved for part in self.epochs)


def prove(files: Sequence[LedgerFile], *, order: Order, steps_done: int | None = None) -> Proof:
    """Report whether each example of each pass was consumed exactly once.

    `order` is asked where a pass was not finished, or a hash shows that something is wrong.
    `steps_done` is what the run itself says it did, where it came to its end.
    Raises TfdistError for files of several runs, or without a step.
    """
    ledger = merge(files)
    problems = [file.damaged for file in files if file.damaged] + _coverage(ledger)
    if steps_done is not None and ledger.end < steps_done:
        problems.append(f"steps {ledger.end} to {steps_done - 1}: done and not recorded")
    tally = Tally(ledger)
    problems += tally.problems()
    passes = tuple(tally.prove_pass(number, order) for number in range(tally.num_passes))
    return Proof(
        ledger=ledger,
        passes=passes,
        epochs=_epochs(ledger, tally, passes),
        problems=tuple(problems),
    )


def _coverage(ledger: MergedLedger) -> list[str]:
    """Steps that no attempt has recorded, or not all of its tasks, or more than once."""
    problems = []
    covered = np.zeros(ledger.end, np.int64)
    for attempt in ledger.attempts:
        header, start, last = attempt.header, attempt.first, attempt.end
        if start >= last:
            continue
        covered[start:last] += 1
        if len(attempt.files) < header.num_tasks:
            there = ", ".join(file.header.task for file in attempt.files)
            problems.append(
                f"attempt {header.attempt}: {len(attempt.files)} of {header.num_tasks} tasks "
                f"have a file: {there}"
            )
        for file in attempt.files:
            times = np.zeros(last, np.int64)
            for record in file.records:
                times[record.first : min(record.last, last)] += 1
            for wrong, finding in ((times == 0, "not recorded"), (times > 1, "recorded twice")):
                if wrong[start:].any():
                    steps = ranges(np.flatnonzero(wrong[start:]) + start)
                    who = f"by {file.header.task} in attempt {header.attempt}"
                    problems.append(f"steps {steps}: {finding} {who}")
    if (covered == 0).any():
        problems.append(f"steps {ranges(np.flatnonzero(covered == 0))}: in no attempt")
    return problems


def _epochs(
    ledger: MergedLedger, tally: Tally, passes: Sequence[PassProof]
) -> tuple[EpochProof, ...]:
    firsts, all_sizes, proofs = ledger.firsts, np.diff(ledger.firsts), []
    for number, (first, end) in enumerate(itertools.pairwise(ledger.header.plan.step_starts)):
        last = min(end, ledger.end)
        if first >= last:
            break
        steps = slice(first, last)
        sizes, counts = all_sizes[steps], tally.counts[steps]
        touched = range(
            int(firsts[first]) // ledger.header.num_examples,
            int(firsts[last] - 1) // ledger.header.num_examples + 1,
        )
        sound = not tally.repeats[steps].any()
        if not ledger.is_full:
            sound = all(passes[i].proved for i in touched)
        proofs.append(
            EpochProof(
                number=number,
                first=first,
                last=last,
                expected=int(sizes.sum()),
                seen=int(counts.sum()),
                proved=bool((sizes == counts).all() and sound),
            )
        )
    return tuple(proofs)
