"""A row of the table: what is measured on each side, and what is claimed of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness

Record = dict[str, Any]
Pair = Mapping[str, Sequence[Record]]
"""What each side printed, the sides measured one after the other."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One comparison with a target.

    Attributes:
      what: what is compared, as one line of the table.
      value: the figure of one pair; the claim is its median over the pairs.
      target: what the median must reach; None for a figure that is only reported.
      at_least: True if more is better.
      unit: of the figure; ``x`` for a ratio.
      expected: what was expected before the first measurement, and why.
    """

    what: str
    value: Callable[[Pair], float]
    target: float | None
    at_least: bool
    unit: str
    expected: str

    def met(self, median: float) -> bool | None:
        """Whether this median reaches the target; None without one."""
        if self.target is None:
            return None
        return median >= self.target if self.at_least else median <= self.target


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
      name: of its script, and for ``run.py --only``.
      title: its heading.
      sides: a side's name to what measures it once; measured in this order in every pair.
      claims: what is compared.
      notes: what a reader of the figures should know.
      prepare: called once before the first pair, for a warm-up that is not counted.
    """

    name: str
    title: str
    sides: Mapping[str, Callable[[], list[Record]]]
    claims: Sequence[Claim]
    notes: str = ""
    prepare: Callable[[], None] | None = None


def figure(pair: Pair, side: str, key: str, **having: Any) -> float:
    """The figure `key` of the one record of a side that has these values."""
    return only([r[key] for r in matching(pair, side, **having)])


def best(pair: Pair, side: str, key: str, **having: Any) -> float:
    """The largest figure `key` among the records of a side that have these values."""
    return max(r[key] for r in matching(pair, side, **having))


def matching(pair: Pair, side: str, **having: Any) -> list[Record]:
    """The records of a side that have these values."""
    return [r for r in pair[side] if all(r.get(k) == v for k, v in having.items())]


def only(figures: Sequence[float]) -> float:
    """The single element."""
    if len(figures) != 1:
        raise ValueError(f"expected one figure, received {len(figures)}")
    return float(figures[0])


def script(
    name: str,
    side: str,
    *flags: str,
    python: str = harness.PROJECT_PYTHON,
    core: int | None = None,
    timeout_s: float = 180.0,
) -> list[Record]:
    """Measures one side of a script of this folder in a process of its own, pinned to `core`."""
    command = [python, str(harness.HERE / name), "--side", side, *flags]
    return harness.measure(command, timeout_s=timeout_s, core=core)


def launched(
    launcher_flags: Sequence[str], name: str, side: str, *flags: str, timeout_s: float = 240.0
) -> list[Record]:
    """Measures one side of a script as a job of `tfdist.launch`; its tasks pin themselves."""
    with tempfile.TemporaryDirectory() as scratch:
        launch = ["-m", "tfdist.launch", "--run_dir", f"{scratch}/run", *launcher_flags]
        program = [str(harness.HERE / name), "--side", side, *flags]
        return harness.measure([harness.PROJECT_PYTHON, *launch, *program], timeout_s=timeout_s)


def main(
    row: Row, measures: Mapping[str, Callable[[argparse.Namespace], None]], *, epochs: int = 4
) -> None:
    """The command line of a row's script.

    ``--side S`` measures S in this process (this is what the harness starts); without it each
    side is measured once, each in processes of its own.
    """
    parser = argparse.ArgumentParser(description=row.title)
    parser.add_argument("--side", choices=sorted(measures), help="measure in this process")
    parser.add_argument("--epochs", type=int, default=epochs, help="the first is not timed")
    parser.add_argument("--steps", type=int, default=None, help="steps an epoch")
    args = parser.parse_args()
    if args.side:
        measures[args.side](args)
        return
    for measure in row.sides.values():
        for record in measure():
            print(json.dumps(record), flush=True)
