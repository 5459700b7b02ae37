"""Conversion between steps, examples and (virtual) epochs of a run.

All functions here are pure and use integers only. `EpochPlan` returns the examples of each step of
a run, and the ends of its epochs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from tfdist.errors import UsageError, require_int


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualEpochs:
    """Training of `total_examples`, divided into `checkpoints` (default: 1) parts of equal size.

    This follows the design pattern by Lakshmanan, Robinson and Munn ("Machine Learning Design
    Patterns", 2020, chapter 4, Checkpoints). The numbers of examples and checkpoints define a run.
    The data set's size, the batch size and the number of workers do not change it.

    Virtual epoch k ends exactly at example ``total_examples * (k + 1) // checkpoints``. If this
    boundary is inside a batch, the batch is cut there.
    """

    total_examples: int
    checkpoints: int = 1

    def __post_init__(self) -> None:
        for name in ("total_examples", "checkpoints"):
            number = require_int(f"VirtualEpochs: {name}", getattr(self, name), least=1)
            object.__setattr__(self, name, number)  # a Python int, as in checkpoints
        if self.checkpoints > self.total_examples:
            raise UsageError(
                "VirtualEpochs",
                f"checkpoints={self.checkpoints} exceeds total_examples={self.total_examples}",
                fix="lower checkpoints",
                code="out-of-range",
            )

    def boundaries(self) -> tuple[int, ...]:
        """Return the first example of each virtual epoch, then the end of the last epoch."""
        parts = range(self.checkpoints + 1)
        return tuple(self.total_examples * k // self.checkpoints for k in parts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """Start of each epoch of one run, in examples and in steps.

    Attributes:
      global_batch_size: examples of a step. The last step of an epoch may have fewer.
      example_starts: first example of each epoch, then the last epoch's end (all different).
      step_starts: first step of each epoch, then the last epoch's end.
    """

    global_batch_size: int
    example_starts: tuple[int, ...]
    step_starts: tuple[int, ...]

    @classmethod
    def from_boundaries(cls, boundaries: Sequence[int], *, global_batch_size: int) -> EpochPlan:
        """Return a plan with epochs that start at the given examples."""
        sizes = [b - a for a, b in itertools.pairwise(boundaries)]
        steps = itertools.accumulate((-(-size // global_batch_size) for size in sizes), initial=0)
        return cls(
            global_batch_size=global_batch_size,
            example_starts=tuple(boundaries),
            step_starts=tuple(steps),
        )

    @classmethod
    def uniform(cls, *, epochs: int, examples: int, global_batch_size: int) -> EpochPlan:
        """Return a plan of `epochs` epochs of `examples` examples each."""
        boundaries = range(0, (epochs + 1) * examples, examples)
        return cls.from_boundaries(boundaries, global_batch_size=global_batch_size)

    @property
    def num_epochs(self) -> int:
        return len(self.step_starts) - 1

    @property
    def total_steps(self) -> int:
        return self.step_starts[-1]

    @property
    def smallest_step(self) -> int:
        """Number of examples in the smallest step of the run."""
        sizes = {b - a for a, b in itertools.pairwise(self.example_starts)}
        return min(((size - 1) % self.global_batch_size + 1 for size in sizes), default=0)

    @property
    def all_full(self) -> bool:
        """True if every step has `global_batch_size` examples."""
        return self.smallest_step == self.global_batch_size

    def epoch_of(self, step: int) -> int:
        return bisect.bisect_right(self.step_starts, step) - 1

    def steps(self, epoch: int) -> range:
        return range(self.step_starts[epoch], self.step_starts[epoch + 1])

    def span(self, step: int) -> range:
        """Return the examples of `step`, counted from the start of the run."""
        epoch = self.epoch_of(step)
        first = self.example_starts[epoch]
        first += (step - self.step_starts[epoch]) * self.global_batch_size
        return range(first, min(first + self.global_batch_size, self.example_starts[epoch + 1]))

    def examples_before(self, step: int) -> int:
        """Return the number of examples in the steps before `step`."""
        if step >= self.total_steps:
            return self.example_starts[-1]
        return self.span(step).start


def share_of(position: int, *, parts: int, size: int) -> tuple[int, int]:
    """Return the slice ``[first, last)`` of `size` examples for part `position` of `parts`.

    Sizes differ by at most one. With fewer examples than parts, some parts are empty.
    """
    return position * size // parts, (position + 1) * size // parts
