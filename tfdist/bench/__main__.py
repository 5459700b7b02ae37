"""``python -m tfdist.bench scaling``: jobs of several sizes beside each other, on this machine."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.bench import jobs, picture, scaling
from tfdist.bench.shapes import parse_shapes
from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, TfdistError, UsageError

_SHAPES = "1W1PS,2W1PS,4W1PS,2W2PS,2W"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    try:
        print("\n".join(_scaling(arguments)))
    except TfdistError as error:
        print(f"tfdist.bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.bench",
        description="Measures whole jobs of tfdist.train on this machine, through the launcher.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scaling", help="jobs of several sizes, as JSON and PNG")
    command.add_argument("--out", type=Path, required=True, help="a new directory for it all")
    command.add_argument("--shapes", default=_SHAPES, help=f"which jobs (default {_SHAPES})")
    command.add_argument("--repeats", type=int, default=3, help="how often each runs (default 3)")
    command.add_argument("--loss", type=float, help="the loss to time (default: what all reach)")
    command.add_argument("--timeout_s", type=float, default=900.0, help="of one job (default 900)")
    command.add_argument(
        "--profile_ps", action="store_true", help="measure what the steps of ps jobs cost, too"
    )
    command.add_argument(
        "arguments", nargs="*", metavar="-- --config ...", help="the flags of tfdist.train"
    )
    return parser


def _scaling(arguments: argparse.Namespace) -> list[str]:
    shapes, out = parse_shapes(arguments.shapes), arguments.out
    if arguments.repeats < 1:
        raise UsageError(
            "--repeats", received=arguments.repeats, expected="1 or more", fix="use --repeats 3"
        )
    if (out / "runs").exists():
        raise UsageError(
            f"--out {out}",
            received="a directory with runs in it",
            expected="a new one: a finished run would not be measured again",
            fix="name another directory",
        )
    run = functools.partial(
        jobs.run,
        arguments=arguments.arguments,
        timeout_s=arguments.timeout_s,
        profile_ps=arguments.profile_ps,
    )
    table = scaling.measure(
        shapes, repeats=arguments.repeats, loss=arguments.loss, out=out, run=run
    )
    table = {"arguments": arguments.arguments, **table}
    (out / "scaling.json").write_text(json.dumps(table, indent=1) + "\n")
    title = " ".join(arguments.arguments) or "tfdist.train"
    drawn = picture.draw(table, out / "scaling.png", title=title)
    files = [str(out / "scaling.json"), *([str(drawn)] if drawn else [])]
    return [*scaling.lines(table), *files]


if __name__ == "__main__":
    sys.exit(main())
