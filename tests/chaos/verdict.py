"""Whether two runs ended alike, and in what they did not."""

from collections.abc import Mapping
from typing import Any


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Returns a line for each part of the end state that is not as it is in the undisturbed run."""
    lines = []
    for name in sorted({*found, *expected}):
        mine, theirs = found.get(name), expected.get(name)
        if mine != theirs:
            lines.append(f"{name}: {_first_difference(mine, theirs)}")
    return lines


def _first_difference(mine: Any, theirs: Any) -> str:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k))
        return f"{key}: {_first_difference(mine.get(key), theirs.get(key))}"
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            return f"{len(mine)} entries, expected {len(theirs)}"
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return f"[{at}]: {_first_difference(mine[at], theirs[at])}"
    return f"{mine!r:.200}, expected {theirs!r:.200}"
