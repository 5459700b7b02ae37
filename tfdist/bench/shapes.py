"""The size of a job in one word: ``2W1PS``, two workers and one ps; ``2W``, two of multiworker.

``2W1PS@50`` is the same behind one wire of 50 Mbit/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tfdist.errors import UsageError

_WORD = re.compile(r"([1-9]\d{0,3})W(?:([1-9]\d{0,3})PS)?(?:@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How many workers a job has, and how many ps; without ps it is a multiworker job."""

    workers: int
    ps: int = 0
    rate_mbit: float | None = None

    @classmethod
    def parse(cls, word: str) -> Shape:
        """Returns the shape that `word` names; `UsageError` where it names none."""
        found = _WORD.fullmatch(word.strip().upper())
        if found is None or (found[3] and not float(found[3])):
            raise UsageError(
                "--shapes",
                received=repr(word),
                expected="shapes such as 2W1PS, 2W for a multiworker job, 2W1PS@50 at 50 Mbit/s",
                fix="write --shapes 1W1PS,2W1PS,2W",
            )
        rate_mbit = float(found[3]) if found[3] else None
        return cls(workers=int(found[1]), ps=int(found[2] or 0), rate_mbit=rate_mbit)

    @property
    def name(self) -> str:
        """The word for it."""
        behind = f"@{self.rate_mbit:g}" if self.rate_mbit else ""
        return f"{self.workers}W" + (f"{self.ps}PS" if self.ps else "") + behind

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags for it."""
        workers = ("--workers", str(self.workers))
        if self.ps:
            return ("--strategy", "ps", *workers, "--ps", str(self.ps))
        return ("--strategy", "multiworker", *workers)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the shapes of ``1W1PS,2W``, each once."""
    return tuple(dict.fromkeys(Shape.parse(word) for word in text.split(",")))
