"""Files of a run: those of its directory, and those of its evaluator among the checkpoints.

In the run directory only the chief writes. `config.json` is written first and says which run the
directory belongs to; `summary.json` with the status ``done`` is written last and says that it is
finished.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError, named, require
from tfdist.files import is_held, move_aside, one_line_errors, open_untrusted, write_text

DONE = "done"
COUNTERS = frozenset({"step", "examples", "virtual_epoch", "examples_per_second", "worker_steps"})
"""What a line of `metrics.jsonl` says beside the metrics."""
_REMOVED_FIELDS = ("ledger", "profile_steps")
"""Fields of configurations that an earlier version wrote."""
_LAUNCHERS_OWN = frozenset({"logs", "report.json", "live.json"})
_SHOWN_DIFFERENCES = 3


class Claim(enum.Enum):
    """What a run found when it claimed its directory."""

    NEW = "new"
    RESUMED = "resumed"
    FINISHED = "finished"


class RunDirectory:
    """Paths, files and ownership of one run directory; creating the object touches nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.model_file = self.path / "model.keras"
        self.plot_file = self.path / "metrics.png"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    def claim(
        self, config: Mapping[str, Any], overwrite: bool = False, *, free: Collection[str] = ()
    ) -> Claim:
        """Take the directory for the run that `config` describes; the chief calls it first.

        Args:
          config: JSON; nested keys are compared one by one.
          overwrite: moves what an earlier run wrote to ``old-1`` (``old-2``, ...) inside it.
          free: dotted keys that may differ between two starts of the same run.

        Returns:
          NEW, with `config` written; RESUMED for an unfinished run of the same configuration;
          FINISHED for a finished one. The latter two leave everything as it is.

        Raises:
          UsageError: the directory belongs to a run of another configuration, or `overwrite` is
            asked for while a run goes on in it.
          TfdistError: it cannot be written.
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
            received=found,
            expected="the configuration of the run that is in it",
            fix="give this run a run_dir of its own, or --overwrite to move the old one aside",
            code="another-run",
        )
        summary = self.read_summary()
        return Claim.FINISHED if summary and summary.get("status") == DONE else Claim.RESUMED

    @property
    def is_written(self) -> bool:
        """Return whether a run goes on that writes its checkpoints there."""
        return is_held(self.checkpoints / ".lock")

    def withdraw(self) -> None:
        """Give back a directory claimed as NEW by a run that was a mistake and did no step."""
        if self.metrics_file.exists() or self.checkpoints.exists():
            return
        with contextlib.suppress(OSError):
            self.config_file.unlink()
            self.path.rmdir()  # only where nothing else is in it

    def read_config(self) -> dict[str, Any] | None:
        """Return the configuration of the run that owns the directory, None where none does."""
        config = read_json(self.config_file)
        return config and {key: config[key] for key in config if key not in _REMOVED_FIELDS}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result of the run, whole or not at all."""
        with self._one_line_errors():
            write_text(self.summary_file, to_json(summary, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary, None before there is one."""
        return read_json(self.summary_file)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line, that of one virtual epoch, to `metrics.jsonl`; non-finite becomes null.

        It is on the disk then, as the checkpoint will be that a run goes on from after this line.
        """
        with (
            self._one_line_errors(),
            open(self.metrics_file, "a", encoding="utf-8", opener=open_untrusted) as file,
        ):
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without one that a crash cut short."""
        with self._one_line_errors():
            return _read_lines(self.metrics_file)

    def drop_metrics_after(self, step: int) -> None:
        """Withdraw the lines of steps that a run resumed at `step` is about to do again."""
        self._keep_metrics(lambda line: line["step"] <= step)

    def drop_metrics_from(self, virtual_epoch: int) -> None:
        """Withdraw the lines of virtual epochs that a resumed run does again, from this one."""
        self._keep_metrics(lambda line: line["virtual_epoch"] < virtual_epoch)

    def _keep_metrics(self, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        with self._one_line_errors():
            if self.metrics_file.exists():
                _write_lines(self.metrics_file, filter(is_kept, _read_lines(self.metrics_file)))

    def _move_aside(self) -> None:
        """Move everything but what the launcher has just begun to write for this start."""
        if not self.config_file.exists():
            return
        require(
            not self.is_written,
            "--overwrite",
            received=f"it while a run goes on in {self.path}",
            expected="a run at rest",
            fix="end that run, or give this one a run_dir of its own",
            code="run-goes-on",
        )
        # The configuration goes last: until then the directory is still seen as taken.
        last = self.config_file.name
        kept = {last, *_LAUNCHERS_OWN}
        # What is being written now is so only for a moment, and the launcher writes every second.
        there = (n for n in os.listdir(self.path) if not n.startswith(("old-", ".partial-")))
        names = [name for name in there if name not in kept]
        move_aside(self.path, [*names, last])

    def _one_line_errors(self) -> contextlib.AbstractContextManager[None]:
        return one_line_errors(f"run directory {self.path}")


class Evaluations:
    """The files of one run's evaluator; creating the object touches nothing.

    They are among the checkpoints, so that they go where those go: the checkpoints of two runs have
    the same names.
    """

    def __init__(self, checkpoints: str | os.PathLike[str]) -> None:
        folder = Path(checkpoints)
        self.metrics_file = folder / "metrics.evaluator.jsonl"
        self.best_file = folder / "best.evaluator.keras"
        self.stop_file = folder / "stop.evaluator.json"

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines, without one that a crash cut short."""
        with self._one_line_errors():
            return [
                line
                for line in _read_lines(self.metrics_file)
                if isinstance(line.get("step"), int) and isinstance(line.get("checkpoint", ""), str)
            ]

    def with_line(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the lines with this one and without those of its step and of later ones, which a
        run that went back to a checkpoint does again."""
        return [*(past for past in self.lines() if past["step"] < line["step"]), dict(line)]

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write these lines in place of those there are."""
        with self._one_line_errors():
            _write_lines(self.metrics_file, lines)

    def ask_to_stop(self, why: Mapping[str, Any]) -> None:
        """Have the chief end the training before its next range of steps."""
        with self._one_line_errors():
            write_text(self.stop_file, to_json(why) + "\n")

    @property
    def is_stop_requested(self) -> bool:
        """Return whether the evaluator has asked for the end of the training."""
        return self.stop_file.exists()

    def _one_line_errors(self) -> contextlib.AbstractContextManager[None]:
        return one_line_errors(f"evaluator, in {self.metrics_file.parent}")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration with the keys of nested ones dotted."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping)
        found.update(flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return found


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, free: Collection[str] = ()
) -> str:
    """Return ``key=new (there: old)`` for what differs between two configurations; "" for nothing.

    The dotted keys of `free` may differ.
    """
    old, new, missing = flat(before), flat(now), object()
    keys = [k for k in old | new if k not in free and old.get(k, missing) != new.get(k, missing)]
    shown = (
        f"{key}={new.get(key, 'nothing')!r} (there: {old.get(key, 'nothing')!r})" for key in keys
    )
    return named(shown, most=_SHOWN_DIFFERENCES)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that every reader takes: what is not finite becomes null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it: NumPy scalars as numbers, non-finite numbers as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without one that a crash cut short."""
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


def _write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_text(file, "".join(to_json(line) + "\n" for line in lines))


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a file, None without the file; UsageError where it is something else."""
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
            received="a file that is half written or not JSON",
            expected="what a run wrote",
            fix="name another run directory",
            code="not-json",
        )
    return content
