"""A sweep that is finished or running, from its directory alone; it may belong to another user."""

from __future__ import annotations

from pathlib import Path

from tfdist.errors import UsageError
from tfdist.files import is_held
from tfdist.tuning import directory, journal
from tfdist.tuning.screen import leaderboard
from tfdist.tuning.state import fold


def show(path: Path) -> None:
    """Prints the sweep in a directory and writes nothing; raises UsageError where there is none."""
    lines = journal.read(path / directory.JOURNAL)
    if not lines:
        raise UsageError(
            "--show",
            received=f"{path}, where no sweep is",
            expected=f"a sweep directory, with {directory.JOURNAL}",
            fix="give the --sweep_dir of the sweep",
        )
    leaderboard(fold(lines), path, is_running=is_held(path / directory.LOCK))
