"""Files of a run: its run directory, and its evaluator's files beside the checkpoints.

Only the chief writes to the run directory. It writes `config.json` first, which identifies the run
that owns the directory. It writes `summary.json` with the status ``done`` last, which marks the run
as finished.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError, named, require
from tfdist.files import is_held, move_aside, one_line_errors, open_untrusted, write_text

DONE = "done"
COUNTERS = frozenset(
    {
        *("step", "examples", "virtual_epoch", "examples_per_second", "worker_steps"),
        *("learning_rate", "fit"),
    }
)
"""Fields of a line of `metrics.jsonl` that are not metrics."""
_REMOVED_FIELDS = (
    *("ledger", "profile_steps", "tracker", "backup_every", "publish", "keep_checkpoints"),
    *("gradient_accumulation_steps", "sharded_optimizer", "fused_kernels"),
)
"""Fields that an earlier version wrote to configurations."""
_LAUNCHERS_OWN = frozenset({"logs", "report.json", "live.json"})
_SHOWN_DIFFERENCES = 3


class Claim(enum.Enum):
    """State of the run directory when a run claims it."""

    NEW = "new"
    RESUMED = "resumed"
    FINISHED = "finished"


class RunDirectory:
    """Paths, files and owner of one run directory. The constructor does not access files."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.model_file = self.path / "model.keras"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    def claim(
        self, config: Mapping[str, Any], overwrite: bool = False, *, free: Collection[str] = ()
    ) -> Claim:
        """Claim the directory for the run of `config`. The chief calls it first.

        Args:
          config: JSON values. Nested keys are compared one by one.
          overwrite: Whether to move an earlier run's files to ``old-1`` (``old-2``, ...) inside.
          free: Dotted keys that may differ between two starts of the same run.

        Returns:
          NEW after writing `config`, RESUMED for an unfinished run of the same configuration,
          FINISHED for a finished run. RESUMED and FINISHED change no file.

        Raises:
          UsageError: The directory belongs to a run with another configuration, or a run with
            `overwrite` finds that another run is still writing to it.
          TfdistError: The directory cannot be written.
        """
        with self._one_line_errors():
            if overwrite:
                self._move_aside()
            theirs = self.read_config()
            if theirs is None:
                self.path.mkdir(parents=True, exist_ok=True)
                write_text(self.config_file, to_json(config, indent=1) + "\n")
                return Claim.NEW
        found = differences(theirs, json.loads(to_json(config)), free=free)
        require(
            not found,
            f"run directory {self.path}",
            f"it has a run with another configuration: {found}",
            fix="choose another run_dir, or pass --overwrite to move the old run aside",
            code="another-run",
        )
        summary = self.read_summary()
        return Claim.FINISHED if summary and summary.get("status") == DONE else Claim.RESUMED

    @property
    def is_written(self) -> bool:
        """Return whether a running job writes checkpoints to the directory."""
        return is_held(self.checkpoints / ".lock")

    def withdraw(self) -> None:
        """Release a directory claimed as NEW, if the run was rejected before its first step."""
        if self.metrics_file.exists() or self.checkpoints.exists():
            return
        with contextlib.suppress(OSError):
            self.config_file.unlink()
            self.path.rmdir()  # fails, as intended, if it has other files

    def read_config(self) -> dict[str, Any] | None:
        """Return the configuration of the run that owns the directory, `None` without an owner."""
        config = read_json(self.config_file)
        return config and {key: config[key] for key in config if key not in _REMOVED_FIELDS}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with self._one_line_errors():
            write_text(self.summary_file, to_json(summary, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary, or `None` if it is not written yet."""
        return read_json(self.summary_file)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append the line of one virtual epoch to `metrics.jsonl`, with non-finite values as null.

        The line is flushed to the disk, because the next checkpoint continues from this line.
        """
        with (
            self._one_line_errors(),
            open(self.metrics_file, "a", encoding="utf-8", opener=open_untrusted) as file,
        ):
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, except a line that a crash truncated."""
        with self._one_line_errors():
            return _read_lines(self.metrics_file)

    def write_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines of `metrics.jsonl`, if they differ."""
        text = "".join(to_json(line) + "\n" for line in lines)
        with self._one_line_errors():
            file = self.metrics_file
            if not file.exists() or file.read_bytes() != text.encode():
                write_text(file, text)

    def drop_metrics_from(self, virtual_epoch: int) -> None:
        """Remove the lines from `virtual_epoch` on, which a resumed run repeats."""
        if self.metrics_file.exists():
            lines = self.read_metrics()
            self.write_metrics(line for line in lines if line["virtual_epoch"] < virtual_epoch)

    def _move_aside(self) -> None:
        """Move all files of the earlier run, but not the files that the launcher just wrote."""
        if not self.config_file.exists():
            return
        require(
            not self.is_written,
            "--overwrite",
            f"a run is active in {self.path}",
            fix="stop that run, or choose another run_dir",
            code="second-writer",
        )
        # Move the configuration last: until then the directory counts as owned.
        last = self.config_file.name
        kept = {last, *_LAUNCHERS_OWN}
        # Skip temporary files: they exist only for a moment (the launcher writes every second).
        there = (n for n in os.listdir(self.path) if not n.startswith(("old-", ".partial-")))
        names = [name for name in there if name not in kept]
        move_aside(self.path, [*names, last])

    def _one_line_errors(self) -> contextlib.AbstractContextManager[None]:
        return one_line_errors(f"run directory {self.path}")


class Evaluations:
    """The files of one run's evaluator. The constructor does not access files.

    They are stored beside the checkpoints and move with them, because checkpoints of different runs
    have the same names.
    """

    def __init__(self, checkpoints: str | os.PathLike[str]) -> None:
        folder = Path(checkpoints)
        self.metrics_file = folder / "metrics.evaluator.jsonl"
        self.best_file = folder / "best.evaluator.keras"
        self.stop_file = folder / "stop.evaluator.json"

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines, except a line that a crash truncated."""
        with self._one_line_errors():
            return [
                line
                for line in _read_lines(self.metrics_file)
                if isinstance(line.get("step"), int) and isinstance(line.get("checkpoint", ""), str)
            ]

    def with_line(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the lines with `line`, without lines of its step and later steps (which a run
        repeats after it restores an older checkpoint)."""
        return [*(past for past in self.lines() if past["step"] < line["step"]), dict(line)]

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with self._one_line_errors():
            write_text(self.metrics_file, "".join(to_json(line) + "\n" for line in lines))

    def ask_to_stop(self, why: Mapping[str, Any]) -> None:
        """Request that the chief ends training before its next range of steps."""
        with self._one_line_errors():
            write_text(self.stop_file, to_json(why) + "\n")

    @property
    def is_stop_requested(self) -> bool:
        """Return whether the evaluator has requested the end of training."""
        return self.stop_file.exists()

    def _one_line_errors(self) -> contextlib.AbstractContextManager[None]:
        return one_line_errors(f"evaluator, in {self.metrics_file.parent}")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration with nested keys flattened to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping)
        found.update(flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return found


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, free: Collection[str] = ()
) -> str:
    """Return ``key=new (there: old)`` for each difference of two configurations, "" if equal.

    Differences in the dotted keys of `free` are ignored.
    """
    old, new, missing = flat(before), flat(now), object()
    keys = [k for k in old | new if k not in free and old.get(k, missing) != new.get(k, missing)]
    shown = (
        f"{key}={new.get(key, 'nothing')!r} (there: {old.get(key, 'nothing')!r})" for key in keys
    )
    return named(shown, most=_SHOWN_DIFFERENCES)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return strictly valid JSON: non-finite numbers become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert `value` to JSON types: NumPy scalars to numbers, non-finite numbers to `None`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, except a line that a crash truncated."""
    try:
        with open(file, encoding="utf-8", errors="replace", opener=open_untrusted) as opened:
            text = opened.read()
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def read_json(file: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, None if the file is missing, UsageError if it has no object."""
    try:
        with open(file, encoding="utf-8", opener=open_untrusted) as opened:
            content = json.load(opened)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TfdistError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UsageError(
            str(file),
            "the file is incomplete or not JSON",
            fix="pass another run directory",
            code="not-json",
        )
    return content
