"""Proof from a ledger that every example of every pass was consumed exactly once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.audit.files import Array, Header, LedgerFile, MergedLedger, Record, merge, pair_hash

Order = Callable[[Header, Array], Array]
"""The example at each position of a run: int64[b] -> int64[b]."""
SHOWN = 10
_CHUNK = 1 << 20


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
            first_repeated=tuple(repeated[:SHOWN].tolist()),
            first_missed=tuple(missed[:SHOWN].tolist()),
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
            if firsts[step] >= last or len(found) == SHOWN:
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
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


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
