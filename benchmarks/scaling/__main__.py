"""``python -m benchmarks.scaling``: jobs of several sizes beside each other, on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling import limits, measure, plot
from benchmarks.scaling.measure import Shape, parse_shapes
from tfdist.argument_parser import Parser
from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, TfdistError, UsageError

_SHAPES = "1W1PS,2W1PS,3W1PS,4W1PS,2W2PS,1W,2W,4W"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    try:
        print("\n".join(_scaling(_parser().parse_args(argv))))
    except TfdistError as error:
        print(f"benchmarks.scaling: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.scaling",
        description="Measures whole jobs of tfdist.train on this machine, through the launcher.",
    )
    parser.add_argument("--out", type=Path, required=True, help="a new directory for it all")
    parser.add_argument("--shapes", default=_SHAPES, help=f"which jobs (default {_SHAPES})")
    parser.add_argument("--repeats", type=int, default=3, help="how often each runs (default 3)")
    parser.add_argument("--loss", type=float, help="the loss to time (default: what all reach)")
    parser.add_argument("--timeout_s", type=float, default=900.0, help="of one job (default 900)")
    parser.add_argument(
        "--rate_mbit", type=float, help="measure the ps jobs once more, behind a wire this fast"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- --config ...", help="the flags of tfdist.train"
    )
    return parser


def _scaling(arguments: argparse.Namespace) -> list[str]:
    for name in ("repeats", "rate_mbit"):
        if (value := getattr(arguments, name)) is not None and not value > 0:
            raise UsageError(f"--{name}", f"{value} is not above 0", fix=f"use --{name} 3")
    out, table = arguments.out, _measure(arguments)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(table, indent=1) + "\n")
    title = " ".join(table["arguments"]) or "tfdist.train"
    drawn = plot.draw(table, out / "scaling.png", title=title)
    return [*measure.lines(table), str(out / "scaling.json"), *([str(drawn)] if drawn else [])]


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    out, shapes = arguments.out, _shapes(arguments)
    if not shapes:
        raise UsageError(
            f"--shapes {arguments.shapes}",
            "this machine does not allow the limits of these jobs",
            fix="run the program as root, or choose jobs without a limit",
        )
    if (out / "runs").exists():
        raise UsageError(
            f"--out {out}",
            "the directory has runs, which would not be measured again",
            fix="choose another directory",
        )
    run = functools.partial(
        measure.run_job, arguments=arguments.arguments, timeout_s=arguments.timeout_s
    )
    table = measure.measure(
        shapes, repeats=arguments.repeats, loss=arguments.loss, out=out, run=run
    )
    return {"arguments": arguments.arguments, **table}


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Return the shapes whose limits this machine allows."""
    shapes = list(parse_shapes(arguments.shapes))
    if arguments.rate_mbit:
        limited = [dataclasses.replace(shape, rate_mbit=arguments.rate_mbit) for shape in shapes]
        shapes += [
            shape
            for shape in dict.fromkeys(limited)
            if shape.ps and not shape.cpu_percent and shape not in shapes
        ]
    if any(shape.cpu_percent for shape in shapes) and not limits.possible():
        shapes = [shape for shape in shapes if not shape.cpu_percent]
    rates = {shape.rate_mbit for shape in shapes if shape.rate_mbit}
    if all(measure.possible(rate) for rate in rates):
        return shapes
    return [shape for shape in shapes if not shape.rate_mbit]


if __name__ == "__main__":
    sys.exit(main())
