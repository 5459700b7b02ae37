"""``python -m tfdist.workers [RUN_DIR] N``: change the number of workers of an elastic job."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, UsageError, require
from tfdist.outputs.run_directory import read_json
from tfdist.report.run_records import REPORT_FILE, add_run_dir, is_running, job_in

_MOST_BYTES = 1 << 16
_ANSWER_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("tfdist.workers", lambda: _run(_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    run_dir = job_in(arguments.run_dir)
    report = read_json(run_dir / REPORT_FILE) or {}
    require(
        is_running(run_dir) and isinstance(report.get("control"), str),
        str(run_dir),
        "no elastic job runs here, or it runs on several hosts, where the number is fixed",
        fix="start a job with --elastic on one host, and pass its run directory",
        code="no-launcher",
    )
    workers = arguments.workers
    refusal = _asked(report["control"], {"workers": workers}, run_dir)["refusal"]
    require(
        not refusal,
        "N",
        f"the launcher refuses {workers} workers: {refusal}",
        fix="while the job trains, ask for a number from --min_workers to --shards (at most 32)",
        code="bad-value",
    )
    print(f"{run_dir}: the job changes to {workers} workers")
    return EXIT_OK


def _asked(name: str, request: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the launcher's answer. It answers only the user that runs the job."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(_ANSWER_S)
        try:
            end.connect(f"\0{name}")
            end.send(json.dumps(request).encode())
            answer: dict[str, Any] = json.loads(end.recv(_MOST_BYTES))
        except (OSError, ValueError) as error:
            raise UsageError(
                str(run_dir),
                f"its launcher does not answer ({error})",
                fix="use the launcher's machine and user account (it is closed with --isolate)",
                code="no-launcher",
            ) from None
    return answer


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.workers",
        description="Change the number of workers of a running elastic job, without a restart.",
    )
    add_run_dir(parser)
    parser.add_argument("workers", type=int, metavar="N", help="number of workers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
