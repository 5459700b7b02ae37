"""``python -m tfdist.replay run_dir --step k``: one step of a run of `tfdist.train`, once more.

In one process: restores the nearest checkpoint at or before the step, goes on to it as the run
did, and prints the loss, the norms of the gradients and the examples of the batch. Step k is the
one that follows k others; the first is 0. Writes nothing into the run directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, UsageError
from tfdist.outputs.run_directory import RunDirectory, to_json

if TYPE_CHECKING:
    from tfdist.audit.replay import Replay

_SHOWN_EXAMPLES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname).1s %(name)s: %(message)s")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return run_program("tfdist.replay", lambda: _run(_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    config = _config_of(arguments.run_dir)
    # Only now: a wrong directory is answered without the seconds TensorFlow takes to load.
    from tfdist.audit.replay import replay

    found = replay(
        arguments.run_dir,
        config,
        step=arguments.step,
        kind=arguments.strategy,
        replicas=arguments.replicas,
    )
    print(to_json(dataclasses.asdict(found)) if arguments.json else "\n".join(_report(found)))
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.replay",
        description="Runs one step of a run of tfdist.train again, in one process.",
    )
    parser.add_argument("run_dir", help="the run's directory")
    parser.add_argument("--step", type=int, required=True, help="the step, from 0 on")
    parser.add_argument(
        "--strategy",
        choices=("single", "mirrored"),
        help="what to run it under; default what the run wrote down",
    )
    parser.add_argument(
        "--replicas", type=int, help="devices of strategy mirrored; default those of the run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every example")
    return parser


def _config_of(run_dir: str) -> dict[str, Any]:
    config = RunDirectory(run_dir).read_config()
    if config is None or "total_examples" not in config:
        raise UsageError(
            f"run directory {run_dir}",
            received="no config.json of tfdist.train",
            expected="a run of python -m tfdist.train: a program of your own cannot be run again",
            fix="name the directory that has the run's config.json",
            code="not-a-run",
        )
    return config


def _report(found: Replay) -> list[str]:
    start = "the initial weights" if found.restored_step is None else (
        f"the checkpoint of step {found.restored_step}"
    )  # fmt: skip
    lines = [
        f"step {found.step}, strategy {found.strategy}, {found.replicas} replicas, from {start}",
        *(f"{name:<16} {value!r}" for name, value in found.metrics.items()),
        f"{'learning rate':<16} {found.learning_rate!r}",
        f"{'gradient norm':<16} {found.gradient_norm!r}"
        + ("" if found.updated else " (the step changed no weight)"),
        *(f"  {name:<32} {value!r}" for name, value in found.gradient_norms.items()),
    ]
    for replica, (examples, passes) in enumerate(zip(found.examples, found.passes, strict=True)):
        shown = ", ".join(map(str, examples[:_SHOWN_EXAMPLES]))
        more = ", ..." if len(examples) > _SHOWN_EXAMPLES else ""
        of = ", ".join(map(str, sorted(set(passes))))
        lines.append(f"replica {replica}: {len(examples)} examples of pass {of}: {shown}{more}")
    lines.append(f"weights after it: sha256 {found.weights_sha256}")
    if found.equals_checkpoint is not None:
        what = "the same bits as"
        if not found.equals_checkpoint:
            what = f"weights differ by at most {found.checkpoint_difference:.1e} from"
        lines.append(f"{what} the checkpoint of step {found.step + 1}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
