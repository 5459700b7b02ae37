"""Merge of a run's attempts: the examples of each step that count.

A run that resumes at step s goes on from weights that have seen the steps before s and no other:
what earlier attempts recorded from s on is void.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.audit.files import Array, Header, LedgerFile, Record, RecordLocation
from tfdist.errors import TfdistError
from tfdist.training.epochs import EpochPlan

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

    def valid(self) -> Iterator[tuple[LedgerFile, RecordLocation]]:
        """Its records of steps that count; the last of each file may reach past `limit`."""
        for file in self.files:
            yield from (
                (file, location) for location in file.locations if location.first < self.limit
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
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

    def records(self) -> Iterator[tuple[LedgerAttempt, str, Record]]:
        """Every record that counts, cut where it stops to count, in the order of the steps."""
        locations = [(a, file, location) for a in self.attempts for file, location in a.valid()]
        for attempt, file, location in sorted(locations, key=lambda found: found[2].first):
            record = file.read(location)
            last = min(record.last, attempt.limit)
            kept = tuple(array[: last - record.first] for array in record.arrays)
            cut = dataclasses.replace(record, last=last, arrays=kept)
            yield attempt, file.header.task, cut


def merged(files: Sequence[LedgerFile]) -> Merged:
    """Put the files of a ledger together.

    Raises:
      TfdistError: nothing is recorded, or the files are of several runs.
    """
    groups: dict[int, list[LedgerFile]] = {}
    for file in files:
        groups.setdefault(file.header.attempt, []).append(file)
    groups = {n: group for n, group in groups.items() if any(file.locations for file in group)}
    if not groups:
        raise TfdistError("ledger: no step is recorded")
    for group in groups.values():
        _require_one_attempt(group)
    attempts: list[LedgerAttempt] = []
    limit = _recorded_by_all(groups[max(groups)])
    for number in sorted(groups, reverse=True):
        attempt = _attempt(groups[number], limit=limit)
        limit = min(limit, attempt.first)
        attempts.insert(0, attempt)
    firsts = first_examples(attempts[-1].header.plan)
    for attempt in attempts:
        _require_same_run(attempt, attempts[-1], firsts)
    end = max(min(a.last, a.limit) for a in attempts)
    if not end:  # what there is was in flight
        raise TfdistError("ledger: no step is recorded")
    return Merged(attempts=tuple(attempts), firsts=firsts, end=end)


def _attempt(files: Sequence[LedgerFile], *, limit: int) -> LedgerAttempt:
    locations = [location for file in files for location in file.locations]
    return LedgerAttempt(
        header=files[0].header,
        files=tuple(files),
        first=min(location.first for location in locations),
        last=max(location.last for location in locations),
        limit=limit,
    )


def _recorded_by_all(files: Sequence[LedgerFile]) -> int:
    """Up to where every task of the newest attempt got: what one wrote past it was in flight.

    A task begins a range when all have recorded the one before: of one that has no file yet, the
    others have a single record.
    """
    first = min(location.first for file in files for location in file.locations)
    are_all_there = len(files) == files[0].header.num_tasks
    if not are_all_there and all(len(file.locations) < 2 for file in files):
        return first
    return min(max((location.last for location in file.locations), default=first) for file in files)


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
    last = min(attempt.last, attempt.limit, total_steps)
    if attempt.last > total_steps or (
        not different
        and attempt.first < last
        and not np.array_equal(own[attempt.first : last], firsts[attempt.first : last])
    ):
        different.append("the examples of its steps")
    if different:
        raise TfdistError(
            f"ledger: attempts {mine.attempt} and {theirs.attempt} are not of one run: they "
            f"differ in {', '.join(different)}"
        )
