"""Raw figures to claims: a median over pairs, and whether it reaches its target."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import row

FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came out for one claim; `values` has one figure a pair."""

    claim: row.Claim
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The figure of the claim."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        return self.claim.met(self.median)


def verdicts(one: row.Row, pairs: Sequence[row.Pair]) -> list[Verdict]:
    """The claims of a row over its pairs; none without pairs."""
    if not pairs:
        return []
    return [
        Verdict(claim=claim, values=[claim.value(pair) for pair in pairs]) for claim in one.claims
    ]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Smallest, median and largest."""
    return min(values), statistics.median(values), max(values)


def series(pairs: Sequence[row.Pair]) -> dict[tuple[str, str, str], list[float]]:
    """The figure of each pair, by side, variant and key; lists and labels are left out."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for pair in pairs:
        for side, records in pair.items():
            for record in records:
                for key, value in _figures(record).items():
                    found.setdefault((side, _variant(record), key), []).append(value)
    return found


def load(path: Path) -> dict[str, Any]:
    """What an earlier run wrote, or an empty result."""
    if not path.exists():
        return {"format": FORMAT, "rows": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path}: format {found.get('format')} where {FORMAT} was expected")
    return found


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Writes the raw figures."""
    path.write_text(json.dumps(results, indent=1) + "\n")


VARIANT_KEYS = ("steps_per_execution", "jit_compile", "channels_last", "fused", "lean")


def _variant(record: row.Record) -> str:
    return ", ".join(f"{key}={record[key]}" for key in VARIANT_KEYS if key in record)


def _figures(record: row.Record) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in record.items()
        if isinstance(value, (int, float)) and key not in VARIANT_KEYS
    }
