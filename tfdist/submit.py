"""``python -m tfdist.submit --to slurm|kubernetes ...``: a job for a scheduler.

Takes the launcher's flags and a few of its own, renders an sbatch script or manifests, and submits
them, or prints them with ``--dry_run``. Exit code 2: nothing was submitted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, TfdistError, UsageError
from tfdist.launch import options as launcher
from tfdist.launch.options import LaunchOptions
from tfdist.ops.submit import rendering, tools
from tfdist.ops.submit.flags import Given, check_scheduler, help_text, split
from tfdist.ops.submit.pods import INSTANCE

# A cluster's tasks come at different times, and a place in it is lost for longer than a moment.
_DEFAULTS = {"startup_timeout_s": "300", "grace_s": "60", "max_restarts": "3"}
_HELP = {
    "devices_per_worker": "devices of each worker (all that it sees)",
    "threads_per_task": "CPU threads of each task (--cpus)",
    "startup_timeout_s": "how long the tasks wait for each other at the start (300)",
    "grace_s": "how long before its end a task is told to save and stop (60)",
    "max_restarts": "how often a job that failed is started again (3)",
    "hang_timeout_s": "how long workers may run on when one has ended, under Slurm (300)",
    "run_dir": "where the job writes (runs/NAME, in the first --volume)",
    "ports": "the ports that tasks may have (any)",
    "dry_run": "print what would be submitted",
}
_NOT_HERE = {
    **dict.fromkeys(
        ("start", "fork_server", "isolate", "restart_window_s"),
        "a flag that a scheduler has a use for",
    ),
    **dict.fromkeys(
        ("hosts", "node_rank", "rendezvous_port", "rendezvous_token_file", "host_timeout_s"),
        "no hosts: the scheduler knows them, and each task finds itself",
    ),
}
"""Flags of the launcher that are refused here, and what is expected in their place."""

_SLURM_ALONE = {"hang_timeout_s": "--time: a pod that is done does not end the others"}
_EXIT_SIGPIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line asks for and returns the exit code."""
    try:
        takes_value = {flag.name: flag.read is not None for flag in launcher.FLAGS}
        given = split(sys.argv[1:] if argv is None else argv, launcher=takes_value)
        print(_help() if given.help else _answer(given), flush=True)
        return EXIT_OK
    except TfdistError as error:
        print(f"tfdist.submit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python's end would write to it again
        return _EXIT_SIGPIPE


def _help() -> str:
    kept = (flag for flag in launcher.FLAGS if flag.name not in (*_NOT_HERE, "help"))
    return help_text([(flag.name, flag.shown, _HELP.get(flag.name, flag.help)) for flag in kept])


def _answer(given: Given) -> str:
    to = check_scheduler(given)
    if given.one("status") or given.one("logs"):
        return _look(given, to).rstrip("\n")
    options = _launch_options(given, to)
    rendered = rendering.render(given, to=to, job=_common(options))
    if options.dry_run:
        done = tools.Submitted(text=rendered.text)
    elif to == "slurm":
        done = tools.sbatch(rendered.text, name=rendered.name)
    else:
        kind, namespace = rendering.kind(given), given.one("namespace")
        done = tools.apply(rendered.text, name=rendered.name, kind=kind, namespace=namespace)
    for line in (*rendered.notes, *done.warnings):
        print(f"tfdist.submit: {line}", file=sys.stderr)
    return done.text.rstrip("\n")


def _look(given: Given, to: str) -> str:
    status, logs, namespace = (given.one(name) for name in ("status", "logs", "namespace"))
    for name in filter(None, (status, logs)):
        rendering.check_name(name)
    if to == "slurm":
        if status:
            return tools.squeue(status)
        path = Path(tools.slurm_output(logs or ""))
        if not path.is_file():
            fix = "wait until the job has begun"
            expected = "a file that the job has begun to write"
            raise UsageError("--logs", received=str(path), expected=expected, fix=fix)
        return path.read_text(errors="replace")
    if status:
        kind = rendering.kind(given)
        return tools.pods(status, kind=kind, namespace=namespace, label=INSTANCE)
    return tools.pod_logs(logs or "", namespace=namespace, label=INSTANCE)


def _launch_options(given: Given, to: str) -> LaunchOptions:
    """Return the launcher's flags, checked by the launcher, with the defaults of a cluster."""
    refused = _NOT_HERE if to == "slurm" else {**_NOT_HERE, **_SLURM_ALONE}
    for name, expected in refused.items():
        if name in given.launcher:
            fix = f"leave --{name} out"
            raise UsageError(f"--{name}", received="it", expected=expected, fix=fix)
    values = {**_DEFAULTS, **given.launcher}
    argv = [f"--{name}" if text is None else f"--{name}={text}" for name, text in values.items()]
    options = launcher.parse([*argv, *given.program])
    assert options is not None  # --help has been answered
    return options


def _common(options: LaunchOptions) -> rendering.LauncherFlags:
    program = options.program
    of_program: dict[str, Any] = {"program": program.python_args, "program_name": program.name}
    names = (
        field.name for field in fields(rendering.LauncherFlags) if field.name not in of_program
    )
    flags: dict[str, Any] = {name: getattr(options, name) for name in names}
    return rendering.LauncherFlags(**flags, **of_program)


if __name__ == "__main__":
    sys.exit(main())
