"""Did the run consume every example of every pass exactly once? What a ledger says to that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.outputs.ledger import LedgerFile
from tfdist.outputs.ledger_arrays import Array
from tfdist.outputs.ledger_merge import Merged, merged
from tfdist.outputs.ledger_tally import Order, PassProof, Tally, ranges


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

    ledger: Merged
    passes: tuple[PassProof, ...]
    epochs: tuple[EpochProof, ...]
    problems: tuple[str, ...]

    @property
    def proved(self) -> bool:
        """Every example of every pass came exactly once, as far as the run got."""
        passes = all(part.proved for part in self.passes)
        return not self.problems and passes and all(part.proved for part in self.epochs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Each step in numbers, over all tasks: examples, sum of hashes, sum of content."""

    counts: Array
    hashes: Array
    content: Array | None


def prove(files: Sequence[LedgerFile], *, order: Order, steps_done: int | None = None) -> Proof:
    """Says whether each example of each pass was consumed exactly once.

    `order` is asked where a pass was not finished, or a hash shows that something is wrong.
    `steps_done` is what the run itself says it did, where it came to its end.
    Raises TfdistError for files of several runs, or without a step.
    """
    ledger = merged(files)
    problems = [file.damaged for file in files if file.damaged] + _coverage(ledger)
    if steps_done is not None and ledger.end < steps_done:
        problems.append(f"steps {ledger.end} to {steps_done - 1}: done and not recorded")
    tally = Tally(ledger)
    for _, _, record in ledger.records():
        tally.add(record)
    problems += tally.problems()
    passes = tuple(tally.prove_pass(number, order) for number in range(tally.num_passes))
    return Proof(
        ledger=ledger,
        passes=passes,
        epochs=_epochs(ledger, tally, passes),
        problems=tuple(problems),
    )


def steps_of(ledger: Merged) -> Steps:
    """Sums up each step, to compare it with that of another run."""
    tally = Tally(ledger)
    for _, _, record in ledger.records():
        tally.add(record)
    return Steps(
        counts=tally.step_counts,
        hashes=tally.step_hashes,
        content=tally.content if ledger.is_full else None,
    )


def _coverage(ledger: Merged) -> list[str]:
    """Steps that no attempt has recorded, or not all of its tasks, or more than once."""
    problems = []
    covered = np.zeros(ledger.end, np.int64)
    for attempt in ledger.attempts:
        header, start, last = attempt.header, attempt.first, min(attempt.last, attempt.limit)
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
            for place in file.places:
                times[place.first : min(place.last, last)] += 1
            for wrong, told in ((times == 0, "not recorded"), (times > 1, "recorded twice")):
                if wrong[start:].any():
                    steps = ranges(np.flatnonzero(wrong[start:]) + start)
                    who = f"by {file.header.task} in attempt {header.attempt}"
                    problems.append(f"steps {steps}: {told} {who}")
    if (covered == 0).any():
        problems.append(f"steps {ranges(np.flatnonzero(covered == 0))}: in no attempt")
    return problems


def _epochs(ledger: Merged, tally: Tally, passes: Sequence[PassProof]) -> tuple[EpochProof, ...]:
    plan, proofs = ledger.plan, []
    for number, first in enumerate(plan.epoch_steps[:-1]):
        last = min(int(plan.epoch_steps[number + 1]), ledger.end)
        if first >= last:
            break
        steps: Any = slice(int(first), last)
        sizes, counts = plan.sizes[steps], tally.step_counts[steps]
        touched = range(
            int(plan.firsts[first]) // ledger.header.num_examples,
            int(plan.firsts[last] - 1) // ledger.header.num_examples + 1,
        )
        sound = not tally.repeats[steps].any()
        if not ledger.is_full:
            sound = all(passes[i].proved for i in touched)
        proofs.append(
            EpochProof(
                number=number,
                first=int(first),
                last=last,
                expected=int(sizes.sum()),
                seen=int(counts.sum()),
                proved=bool((sizes == counts).all() and sound),
            )
        )
    return tuple(proofs)
