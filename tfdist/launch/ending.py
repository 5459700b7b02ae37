"""End of a job: its last lines, the command that resumes it, and the run that a job continues."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tfdist.cluster import settings
from tfdist.errors import EXIT_FAILED, EXIT_USAGE, TfdistError, named
from tfdist.files import is_held
from tfdist.launch.events import STOP_CODES
from tfdist.launch.live import LIVE_FILE
from tfdist.launch.multihost.host_agreement import without_secrets
from tfdist.launch.options import DEFAULT_MODULE, LaunchOptions, refuse
from tfdist.launch.run_dir import REPORT_FILE, RUNS, earlier_attempts, slurm_prefix
from tfdist.options import LaunchFlags, names_of, table
from tfdist.outputs.run_directory import COUNTERS, RunDirectory, read_json

SPAWN = "tfdist.launch.spawn"
"""Module that the tasks of `tfdist.spawn` run."""

_OF_ONE_START = ("run_dir", "resume", "dry_run")
_MAX_METRICS = 6


def command_of(options: LaunchOptions) -> dict[str, Any]:
    """Return the program, the arguments and the flags that identify a command.

    Secrets in the arguments are hidden.
    """
    program = options.program
    target = program.target if program.is_module else os.path.abspath(program.target)
    flags = _changed(options).items()
    return {
        "program": without_secrets([target, *program.args]),
        "flags": {name: value for name, value in flags if table(LaunchFlags)[name].identifies},
    }


def _changed(options: LaunchOptions) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names_of(LaunchFlags)}
    return {n: value for n, value in values.items() if value != table(LaunchFlags)[n].default}


def continued_run(options: LaunchOptions, environ: Mapping[str, str]) -> Path | None:
    """Return the run directory that the job continues without ``--run_dir``, or `None`.

    With ``--resume`` it is the newest unfinished run of the same command. Runs with a finished step
    have priority, because other runs have no state to resume. If Slurm has requeued the job, it
    is the newest run that this command started in the Slurm job.

    Raises:
        UsageError: ``--resume`` is set, and there is no such run.
    """
    if options.resume:
        runs = _runs_of(options, "*")
        runs = [run for run in runs if _read(run / REPORT_FILE)["exit_code"] != 0]
        if not runs:
            fix = "leave --resume out to start a new run, or name a run with --run_dir"
            refuse("resume", f"{RUNS}/ has no unfinished run of this command", fix, code="no-run")
        return max(runs, key=_progress)
    if options.run_dir is None and settings.integer(environ, "SLURM_RESTART_COUNT"):
        return max(_runs_of(options, f"{slurm_prefix(environ)}*"), key=_progress, default=None)
    return None


def _runs_of(options: LaunchOptions, pattern: str) -> list[Path]:
    """Return the runs of this command that no launcher is running."""
    command, found = command_of(options), []
    for run in Path(RUNS).absolute().glob(pattern):
        report = _read(run / REPORT_FILE)
        job = report.get("job")
        if (
            isinstance(job, Mapping)
            and {name: job.get(name) for name in command} == command
            and "exit_code" in report
            and not is_held(run / "logs" / ".lock")
        ):
            found.append(run)
    return found


def _progress(run: Path) -> tuple[bool, float]:
    live = _read(run / LIVE_FILE)
    return live.get("step") is not None, float(live.get("at", 0))


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(TfdistError):
        return read_json(file) or {}
    return {}


def resume_command(options: LaunchOptions, run_dir: Path) -> str:
    """Return the command that continues a run, for a shell in this directory.

    Secrets are hidden. The run directory is absolute: in a shell in another directory, a relative
    path would start a new run.
    """
    program, where = options.program, str(run_dir.absolute())
    if program.target == SPAWN:
        return f"tfdist.spawn(..., run_dir={where!r})"
    flags = {name: v for name, v in _changed(options).items() if name not in _OF_ONE_START}
    words = [
        f"--{n}" if v is True else f"--{n}={v}" for n, v in {"run_dir": where, **flags}.items()
    ]
    if program.target != DEFAULT_MODULE:
        words += program.python_args
    elif program.args:
        words += ["--", *program.args]
    python, *rest = sys.orig_argv
    is_script = rest and rest[0] == shutil.which("tfdist")
    launcher = ["tfdist", "launch"] if is_script else [python, "-m", "tfdist.launch"]
    return shlex.join([*launcher, *without_secrets(words)])


def shown(path: Path) -> str:
    """Return a path relative to the working directory if it is inside, else the whole path."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def closing_lines(run_dir: Path, *, exit_code: int, seconds: float, resume: str) -> list[str]:
    """Return at most five lines on the result: time, metrics, files, report, how to resume."""
    after, where = timedelta(seconds=round(seconds)), shlex.quote(shown(run_dir))
    result = "stopped" if exit_code in STOP_CODES else "failed"
    lines = [f"{result} after {after} (exit code {exit_code})" if exit_code else f"done in {after}"]
    with contextlib.suppress(TfdistError):
        lines += _metric_lines(RunDirectory(run_dir).read_metrics())
    with contextlib.suppress(OSError):
        names = sorted(f"{e.name}{'/' * e.is_dir()}" for e in os.scandir(run_dir))
        files = [name for name in names if not name.startswith((".", "old-", LIVE_FILE))]
        lines.append(f"files in {where}: {named(files)}")
    lines.append(f"report: tfdist report {where}")
    if not exit_code:
        return lines
    never_began = exit_code in (EXIT_FAILED, EXIT_USAGE) and not _has_steps(run_dir)
    return [*lines, f"{'after the fix' if never_began else 'resume'}: {resume}"]


def _has_steps(run_dir: Path) -> bool:
    """Return whether the report has an attempt that finished a step."""
    return any(
        entry.get("first_step_s") is not None or (entry.get("first_failure") or {}).get("step")
        for entry in earlier_attempts(run_dir)
    )


def _metric_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    if not lines:
        return []
    last = [
        f"{name} {'not finite' if value is None else f'{value:.4g}'}"
        for name, value in lines[-1].items()
        if name not in COUNTERS and isinstance(value, int | float | None)
    ]
    at = f"step {lines[-1].get('step')} (end of epoch {lines[-1].get('virtual_epoch')})"
    text = f"metrics at {at}: {named(last, most=_MAX_METRICS)}"
    name = "val_loss" if any("val_loss" in line for line in lines) else "loss"
    known = [line for line in lines if isinstance(line.get(name), int | float)]
    finite = [line for line in known if math.isfinite(line[name])]
    if finite:
        best = min(finite, key=lambda line: float(line[name]))
        text += f"; best {name} {best[name]:.4g} at step {best.get('step')}"
    return [text]
