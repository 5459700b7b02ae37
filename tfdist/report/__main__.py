"""``python -m tfdist.report [RUN_DIR ...]``: runs and sweeps as one HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, mutually_exclusive
from tfdist.files import one_line_errors, write_text
from tfdist.loopback import listen, make_server
from tfdist.report.page import render
from tfdist.report.run_records import (
    RunRecord,
    add_run_dir,
    names_of,
    newest_run,
    read_run,
    reading,
    runs_in,
)
from tfdist.report.sweep_section import SweepRecord, is_sweep, read_sweep

_FILE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("tfdist.report", lambda: _run(_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    mutually_exclusive({"--serve": arguments.serve, "--out": arguments.out})
    given = [Path(path) for path in arguments.run_dir] or [newest_run()]
    if not arguments.run_dir:
        print(f"newest run in runs/: {given[0]}")
    paths = [run for path in given for run in runs_in(path)]
    if arguments.serve:
        return _serve(paths, port=arguments.port)
    page = _page(paths)
    out = Path(arguments.out or (given[0] if len(given) == 1 else Path()) / _FILE)
    with one_line_errors(out):
        write_text(out, page, durable=False, private=True)
    print(f"written: {out} (open it in a browser, or use --serve)")
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.report",
        description="Write a report of runs and sweeps as one HTML file that needs no network.",
    )
    add_run_dir(parser, nargs="*")
    parser.add_argument("--out", metavar="FILE", help=f"default: RUN_DIR/{_FILE}, or ./{_FILE}")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on loopback, and update it while a run is active",
    )
    parser.add_argument("--port", type=int, default=8765, metavar="P", help="--serve port (8765)")
    return parser


def _serve(paths: Sequence[Path], *, port: int) -> int:
    _read(paths)  # report an invalid directory before serving
    listener = listen(port, flag="--port")

    def make_page() -> str:
        return _page(paths, is_followed=True)

    with make_server(listener, make_page, path="/", content_type="text/html") as server:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C stops it)", flush=True)
        server.serve_forever()
    return EXIT_OK


def _read(paths: Sequence[Path]) -> tuple[list[RunRecord], list[SweepRecord]]:
    found = [
        replace(read_sweep(path) if is_sweep(path) else read_run(path), name=name)
        for path, name in zip(paths, names_of(paths), strict=True)
    ]
    runs = [one for one in found if isinstance(one, RunRecord)]
    return runs, [one for one in found if isinstance(one, SweepRecord)]


def _page(paths: Sequence[Path], *, is_followed: bool = False) -> str:
    runs, sweeps = _read(paths)
    with reading(", ".join(map(str, paths))):
        page = render(runs, sweeps, is_followed=is_followed)
    return page.encode(errors="backslashreplace").decode()  # a command or path may not be UTF-8


if __name__ == "__main__":
    sys.exit(main())
