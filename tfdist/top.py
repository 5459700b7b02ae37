"""``python -m tfdist.top [RUN_DIR]``: the tasks of a job, their phases, rates and memory, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, require
from tfdist.outputs.run_directory import COUNTERS, RunDirectory, read_json
from tfdist.report.pieces import UNKNOWN, clock, duration, number
from tfdist.report.run_records import LIVE_FILE, add_run_dir, is_running, job_in, reading

_EVERY_S = 1.0
_LATE_S = 5.0
"""Seconds without a heartbeat after which a task is shown as late."""
_WIDTH = 120
"""Columns of the output if it is not a terminal."""
_STYLES = {"running": "green", "waiting": "yellow", "ended": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("tfdist.top", lambda: _run(_parser().parse_args(argv)), is_report=True)


def _run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):  # the user quits with Ctrl-C
        _show(job_in(arguments.run_dir), once=arguments.once)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.top",
        description="Show the tasks of a job until it ends. Ctrl-C stops the display, not the job.",
    )
    add_run_dir(parser)
    parser.add_argument("--once", action="store_true", help="print the table once")
    return parser


def _show(run_dir: Path, *, once: bool) -> None:
    console, first = Console(), view(run_dir)
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if once or not console.is_terminal or not is_running(run_dir):
        console.print(first)
        return
    with Live(first, console=console, auto_refresh=False) as live:
        while is_running(run_dir):
            time.sleep(_EVERY_S)
            live.update(view(run_dir), refresh=True)


def read_live(run_dir: Path) -> dict[str, Any]:
    """Return the launcher's last status of a job, or raise UsageError if there is none."""
    status = read_json(run_dir / LIVE_FILE) or {}
    require(
        status or is_running(run_dir),
        str(run_dir),
        f"{LIVE_FILE} is missing" if run_dir.is_dir() else "the directory does not exist",
        fix="pass the run directory from the launcher's first line",
        code="not-a-run",
    )
    return status


def view(run_dir: Path) -> RenderableType:
    """Return the current view of a job: a summary, the table of tasks, the last metrics."""
    status = read_live(run_dir)
    if not status:
        return Text("starting")
    is_going, lines = is_running(run_dir), RunDirectory(run_dir).read_metrics()
    with reading(run_dir / LIVE_FILE):
        if not is_going:  # the guardian has killed the tasks together with their launcher
            gone = [{**task, "state": "ended"} for task in status["tasks"]]
            status = {**status, "tasks": gone}
        # The last heartbeat may be some steps older than the last line of metrics.
        steps = [status["step"], *(line["step"] for line in lines[-1:] if not is_going)]
        status = {**status, "step": max((s for s in steps if s is not None), default=None)}
        head = Text.assemble(f"{run_dir}  ", _head(status, is_going=is_going))
        return Group(head, _table(status), _metrics(lines[-1:]))


def _head(status: Mapping[str, Any], *, is_going: bool) -> Text:
    state = status["state"] if is_going else "over"
    if not is_going and status["state"] != "ended":
        state = f"its launcher was killed (last status at {clock(status['at'])})"
    facts = [
        status["strategy"],
        f"attempt {status['attempt']}",
        f"step {number(status['step'])}",
        f"{number(status['steps_per_s'])} steps/s",
        duration(status["at"] - status["began_at"]),
    ]
    text = Text.assemble((state, "bold"), "  ", "  ".join(facts))
    if status["failure"]:
        text.append(f"\n{status['failure']}", style="red")
    return text


def _table(status: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    has_hosts = any(task["host"] for task in status["tasks"])
    for name in ("task", *(["host"] if has_hosts else []), "state", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("for", "step", "steps/s", "memory", "peak", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in status["tasks"]:
        table.add_row(*map(Text, _cells(task, has_hosts=has_hosts)), style=_style(task))
    return table


def _style(task: Mapping[str, Any]) -> str:
    if task["status"] not in (None, 0) or (task["silent_s"] or 0) > _LATE_S:
        return "red"
    return _STYLES.get(task["state"], "")


def _cells(task: Mapping[str, Any], *, has_hosts: bool) -> list[str]:
    late_s = task["silent_s"] or 0
    state = task["state"] if late_s <= _LATE_S else f"silent for {duration(late_s)}"
    return [
        task["task"],
        *([task["host"] or ""] if has_hosts else []),
        state,
        {"sum": "waiting"}.get(task["phase"], task["phase"]) or "",
        duration(task["phase_s"]),
        number(task["step"]),
        number(task["steps_per_s"]),
        _mebibytes(task["memory_bytes"]),
        _mebibytes(task["peak_memory_bytes"]),
        str(task["restarts"]),
    ]


def _mebibytes(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / 2**20:,.0f} MiB"


def _metrics(last: list[dict[str, Any]]) -> Text:
    values = [
        f"{name} {'not finite' if value is None else number(value)}"
        for line in last
        for name, value in line.items()
        if (name not in COUNTERS and isinstance(value, int | float | None))
        or (name in ("learning_rate", "examples_per_second") and value)
    ]
    return Text("last epoch: " + "  ".join(values) if values else "", style="dim")


if __name__ == "__main__":
    sys.exit(main())
