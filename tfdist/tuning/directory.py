"""The directory of one sweep: whose it is, and whether a command may go on with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist import files
from tfdist.errors import UsageError
from tfdist.files import FileLock, Held, is_held, one_line_errors
from tfdist.tuning import journal
from tfdist.tuning.difference import differences

JOURNAL = journal.FILE_NAME
SWEEP = "sweep.json"
PLOT = "sweep.png"
TRIALS = "trials"
FORK_LOG = "fork-server.log"
LOCK = ".chief.lock"

_SAME = (
    *("tuner", "objective", "direction", "factor"),
    *("strategy", "workers", "ps", "early_stop"),
)


def require_own(path: Path) -> None:
    """Raises UsageError where the directory holds something that is no sweep."""
    names = _names(path)
    if names and JOURNAL not in names:
        raise UsageError(
            f"sweep directory {path}",
            received=f"a directory with {', '.join(sorted(names)[:3])} and no {JOURNAL}",
            expected="an empty one, a new one, or that of a sweep",
            fix="give the sweep another --sweep_dir",
        )


def set_aside(path: Path) -> None:
    """Moves an earlier sweep to ``old-1``, ``old-2``, ... inside it; the lock's holder calls it.

    Raises UsageError where a trial of it still runs: its processes would go on writing under these
    names.
    """
    names = _names(path)
    if JOURNAL not in names:
        return
    _require_at_rest(path)
    number = 1
    while (path / f"old-{number}").exists():
        number += 1
    aside = path / f"old-{number}"
    aside.mkdir()
    # The journal goes last: until then the directory is still seen as a sweep's.
    for name in [*sorted(names - {JOURNAL}), JOURNAL]:
        os.replace(path / name, aside / name)


def _names(path: Path) -> set[str]:
    """Returns what there is of a sweep, without what any start writes before it is one."""
    mine = (LOCK, FORK_LOG)
    return {name for name in os.listdir(path) if name not in mine and not name.startswith("old-")}


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
    return is_held(run_dir / "logs") or is_held(run_dir / "checkpoints" / ".lock")


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
    spaces = before.get("space", []), now["space"]
    said += [f"search space: {words}" for words in differences(*spaces)]
    if said:
        raise UsageError(
            f"sweep directory {path}",
            received=", ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else ""),
            expected="what the sweep in it began with",
            fix="give this sweep another --sweep_dir, or --overwrite to move the old one aside",
        )


@contextlib.contextmanager
def chief_lock(path: Path) -> Iterator[None]:
    """Hold a sweep for its one chief; raise UsageError where another process does."""
    lock = FileLock(path / LOCK)
    try:
        with one_line_errors(lock.path):
            lock.acquire()
    except Held as held:
        raise UsageError(
            f"sweep directory {path}",
            received=f"a second chief while process {held.holder} runs the sweep",
            expected="one chief",
            fix="wait for it or end it; --show prints how far it is",
        ) from held
    with lock:
        yield


def make(path: Path) -> None:
    """Makes the directory; raises TfdistError where it cannot."""
    with one_line_errors(f"sweep directory {path}"):
        path.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all, for those who read it while the sweep runs."""
    with one_line_errors(path):
        files.write_json(path, content, durable=False)
