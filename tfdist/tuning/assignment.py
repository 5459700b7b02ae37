"""What a sweep tells a trial that is a run of the user's own program: one variable, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "TFDIST_TRIAL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One trial of one sweep."""

    sweep_dir: str
    """Absolute: it says which of a program's searches the trial belongs to."""
    trial: str
    run_dir: str
    checkpoints: str
    """Its own, or those of the trial that it continues."""
    values: Mapping[str, Any]
    seed: int
    backup_every_steps: int | None = None
    save_model: bool = False

    def encode(self) -> dict[str, str]:
        """Returns the variable."""
        return {VARIABLE: json.dumps(asdict(self))}

    def belongs_to(self, sweep_dir: Path) -> bool:
        """Returns whether it is a trial of the sweep in this directory."""
        return Path(self.sweep_dir) == sweep_dir.absolute()


def read(environ: Mapping[str, str]) -> Assignment | None:
    """Returns the trial that this process is to run; None where no sweep has started it."""
    text = environ.get(VARIABLE)
    return Assignment(**json.loads(text)) if text else None
