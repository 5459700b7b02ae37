"""The mark in the directory of a sweep that is served: whose it is, and where its chief is.

A runner that sees another mark than its chief has told it, or none, has another directory: one that
is not shared, or that was copied before this chief was started.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist.tuning.directory import write_json

FILE_NAME = "served.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What the file says."""

    sweep: str
    """Drawn once for a sweep."""
    chief: str
    """Drawn by each chief: a copy made before does not have it."""
    address: str
    """Of the chief: where runners find it again if it was started anew elsewhere."""


def read(sweep_dir: Path) -> Mark | None:
    """Returns the mark, None where there is none that can be read."""
    try:
        told = json.loads((sweep_dir / FILE_NAME).read_text(encoding="utf-8"))
        return Mark(
            sweep=str(told["sweep"]), chief=str(told["chief"]), address=str(told["address"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def leave(sweep_dir: Path, *, address: str) -> Mark:
    """Writes where the chief is, before it listens there; returns the mark.

    Raises TfdistError where the file cannot be written.
    """
    before = read(sweep_dir)
    sweep = before.sweep if before else secrets.token_hex(16)
    mark = Mark(sweep=sweep, chief=secrets.token_hex(16), address=address)
    write_json(sweep_dir / FILE_NAME, asdict(mark))
    return mark
