"""``python -m tfdist.top RUN_DIR``: the tasks of a job, their phases, rates and memory, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK
from tfdist.report.live import is_running, view

_EVERY_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return run_program("tfdist.top", lambda: _run(_parser().parse_args(argv)), is_report=True)


def _run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        _show(Path(arguments.run_dir), once=arguments.once)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.top",
        description="Shows the tasks of a job until it is over; Ctrl-C leaves it, the job runs on.",
    )
    parser.add_argument("run_dir", help="the run directory, which the launcher's first line names")
    parser.add_argument("--once", action="store_true", help="print the table once")
    return parser


def _show(run_dir: Path, *, once: bool) -> None:
    console, first = Console(), view(run_dir)
    if once or not console.is_terminal or not is_running(run_dir):
        console.print(first)
        return
    with Live(first, console=console, auto_refresh=False) as live:
        while is_running(run_dir):
            time.sleep(_EVERY_S)
            live.update(view(run_dir), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
