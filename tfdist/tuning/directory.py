"""The directory of one sweep: whose it is, and whether a command may go on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError
from tfdist.tuning import journal, lock
from tfdist.tuning.difference import differences

JOURNAL = journal.FILE_NAME
SWEEP = "sweep.json"
PLOT = "sweep.png"
TRIALS = "trials"

_SAME = ("tuner", "objective", "factor", "strategy", "workers", "ps", "early_stop")


def prepare(path: Path, *, overwrite: bool) -> None:
    """Makes the directory fit for a sweep; the holder of its lock calls it.

    With `overwrite` an earlier sweep is moved to ``old-1``, ``old-2``, ... inside it.

    Raises UsageError where it holds something that is no sweep, or an earlier one to be moved of
    which a trial still runs: its processes would go on writing under these names.
    """
    names = {name for name in os.listdir(path) if name != lock.FILE_NAME}
    others = {name for name in names if not name.startswith("old-")}
    if others and JOURNAL not in names:
        raise UsageError(
            f"sweep directory {path}",
            received=f"a directory with {', '.join(sorted(others)[:3])} and no {JOURNAL}",
            expected="an empty one, a new one, or that of a sweep",
            fix="give the sweep another --sweep_dir",
        )
    if overwrite and JOURNAL in names:
        _require_at_rest(path)
        number = 1
        while f"old-{number}" in names:
            number += 1
        aside = path / f"old-{number}"
        aside.mkdir()
        # The journal goes last: until then the directory is still seen as a sweep's.
        for name in [*sorted(others - {JOURNAL}), JOURNAL]:
            os.replace(path / name, aside / name)


def _require_at_rest(path: Path) -> None:
    for run_dir in sorted((path / TRIALS).glob("*")):
        if is_run_in(run_dir):
            raise UsageError(
                "--overwrite",
                received=f"it while {run_dir} is written, as by a runner whose chief was killed",
                expected="a sweep at rest",
                fix="end the runners of the earlier sweep, wait a moment for the save, try again",
            )


def is_run_in(run_dir: Path) -> bool:
    """Returns whether a job holds a trial's directory, or its checkpoints are written."""
    return lock.is_held(run_dir / "logs") or lock.is_held(run_dir / "checkpoints" / ".lock")


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError where a sweep is started again with what would make it another one."""
    said = [
        f"{name}={now.get(name)!r} (there: {before.get(name)!r})"
        for name in _SAME
        if before.get(name) != now.get(name)
    ]
    if now["seed"] is not None and now["seed"] != before.get("seed"):
        said.append(f"seed={now['seed']} (there: {before.get('seed')})")
    old, new = before.get("config", {}), now["config"]
    said += [
        f"config.{name}={new.get(name)!r} (there: {old.get(name)!r})"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    said += [f"search space: {words}" for words in differences(before["space"], now["space"])]
    if said:
        raise UsageError(
            f"sweep directory {path}",
            received=", ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else ""),
            expected="what the sweep in it began with",
            fix="give this sweep another --sweep_dir, or --overwrite to move the old one aside",
        )


def make(path: Path) -> None:
    """Makes the directory; raises TfdistError where it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TfdistError(f"sweep directory {path}: {error.strerror or error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all, for those who read it while the sweep runs."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise TfdistError(f"{path}: {error.strerror or error}") from error
