"""The table at the end: how many faults of each kind, how soon the job was back, the verdicts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TIMES = ("detect_s", "restart_s", "import_s", "restore_s", "first_step_s")
_HEAD = ("case", "fault", "n", *(f"{name[:-2]} p50/p95" for name in TIMES), "identical")


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Returns the results by case and kind of fault, as lines of aligned columns."""
    rows = [_HEAD]
    for (case, do), group in sorted(grouped(results).items()):
        times = [_both([r[name] for r in group]) for name in TIMES]
        same = sum(r["identical"] is True for r in group)
        rows.append((case, do, str(len(group)), *times, f"{same} of {len(group)}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def grouped(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Any]]:
    """Returns the results of each case and kind of fault; kills inside a save are a kind."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for result in results:
        groups.setdefault((result["case"], kind_of(result)), []).append(result)
    return groups


def kind_of(result: Mapping[str, Any]) -> str:
    """Returns ``kill``, or ``kill in a save`` and the like where the moment makes the kind."""
    moment = result["at"].partition(" ")[0]
    where = {"write": " in a save", "half": " in a save", "start": " while starting"}
    return str(result["do"]).replace("_", " ") + where.get(moment, "")


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _both(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{percentile(known, 0.5):.2f}/{percentile(known, 0.95):.2f}"
