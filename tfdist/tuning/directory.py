"""The directory of one sweep: whose it is, and whether a command may go on with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist import files
from tfdist.errors import UsageError, require
from tfdist.files import FileLock, Held, is_held, one_line_errors
from tfdist.outputs.run_directory import RunDirectory, differences
from tfdist.outputs.sweep_journal import JOURNAL, LOCK, TRIALS

SWEEP = "sweep.json"
PLOT = "sweep.png"
FORK_LOG = "fork-server.log"

_SAME = (
    *("tuner", "objective", "direction", "factor"),
    *("strategy", "workers", "ps", "early_stop", "seed"),
)


def require_own(path: Path) -> None:
    """Raise UsageError where the directory holds something that is no sweep."""
    names = _names(path)
    require(
        not names or JOURNAL in names,
        f"sweep directory {path}",
        received=f"a directory with {', '.join(sorted(names)[:3])} and no {JOURNAL}",
        expected="an empty one, a new one, or that of a sweep",
        fix="give the sweep another --sweep_dir",
        code="not-a-sweep",
    )


def set_aside(path: Path) -> None:
    """Move an earlier sweep to ``old-1``, ``old-2``, ... inside it; the lock's holder calls it.

    Raises UsageError where a trial of it still runs: its processes would go on writing under these
    names.
    """
    names = _names(path)
    if JOURNAL not in names:
        return
    _require_at_rest(path)
    # The journal goes last: until then the directory is still seen as a sweep's.
    files.move_aside(path, [*sorted(names - {JOURNAL}), JOURNAL])


def _names(path: Path) -> set[str]:
    """Return the files of a sweep, without those that any start writes before it is one."""
    mine = (LOCK, FORK_LOG)
    return {name for name in os.listdir(path) if name not in mine and not name.startswith("old-")}


def _require_at_rest(path: Path) -> None:
    for run_dir in sorted((path / TRIALS).glob("*")):
        require(
            not is_run_in(run_dir),
            "--overwrite",
            received=f"it while {run_dir} is written, as by a runner whose chief was killed",
            expected="a sweep at rest",
            fix="end the runners of the earlier sweep, wait a moment for the save, try again",
            code="sweep-runs",
        )


def is_run_in(run_dir: Path) -> bool:
    """Return whether a job holds a trial's directory, or its checkpoints are written."""
    return is_held(run_dir / "logs") or RunDirectory(run_dir).is_written


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError where a sweep is started again with what would make it another one."""
    now = {**now, "seed": before.get("seed") if now["seed"] is None else now["seed"]}
    found = differences(_identity(before), _identity(now))
    require(
        not found,
        f"sweep directory {path}",
        received=found,
        expected="what the sweep in it began with",
        fix="give this sweep another --sweep_dir, or --overwrite to move the old one aside",
        code="another-sweep",
    )


def _identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a sweep's description, or of its journal's begin, that may not change."""
    space = [{"type": one["class_name"], **one["config"]} for one in description.get("space", ())]
    return {
        **{name: description.get(name) for name in _SAME},
        "config": description.get("config", {}),
        "search space": {f"{number} {one['name']}": one for number, one in enumerate(space)},
    }


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
            code="second-chief",
        ) from held
    with lock:
        yield


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all, for those who read it while the sweep runs."""
    with one_line_errors(path):
        files.write_json(path, content, durable=False)


# Ownership file of a served sweep: which chief has it, and where that is.
#
# A runner that sees another one than its chief has told it, or none, has another directory: one
# that is not shared, or that was copied before this chief was started.

OWNERSHIP = "served.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Contents of the file."""

    sweep: str
    """Drawn by each chief: a copy made before does not have it."""
    address: str
    """Of the chief: where runners find it again if it was started anew elsewhere."""


def read_ownership(sweep_dir: Path) -> Ownership | None:
    """Return it, None where there is none that can be read."""
    try:
        content = json.loads((sweep_dir / OWNERSHIP).read_text(encoding="utf-8"))
        return Ownership(sweep=str(content["sweep"]), address=str(content["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_ownership(sweep_dir: Path, *, address: str) -> Ownership:
    """Write where the chief is, before it listens there; return what is written.

    Raises TfdistError where the file cannot be written.
    """
    ownership = Ownership(sweep=secrets.token_hex(16), address=address)
    write_json(sweep_dir / OWNERSHIP, asdict(ownership))
    return ownership
