"""``python -m tfdist.ledger run_dir``: did the run consume every example exactly once?

Reads what the tasks of a run wrote down (``--config.ledger=full`` or ``hash``, or
``tfdist.fit(ledger=...)``), puts its attempts together, and proves exactly-once for each pass over
the data, or lists what was repeated or missed. Exit code 0: proved; 1: not; 2: usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_FAILED, EXIT_OK
from tfdist.outputs.run_directory import RunDirectory

if TYPE_CHECKING:
    from tfdist.audit.ledger import PassProof, Proof


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return run_program("tfdist.ledger", lambda: _run(_parser().parse_args(argv)), is_report=True)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.same_as:
        return _compare(arguments.run_dir, arguments.same_as, as_json=arguments.json)
    return _prove(arguments.run_dir, as_json=arguments.json)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.ledger",
        description="Proves that a run consumed every example of every pass exactly once.",
    )
    parser.add_argument("run_dir", help="a run's directory, or that of its ledger")
    parser.add_argument(
        "--same_as",
        metavar="RUN_DIR",
        help="compare each step with that of another run instead: the same examples, and in mode "
        "full the same bits after augmentation, whatever the number of workers",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _prove(run_dir: str, *, as_json: bool) -> int:
    from tfdist.audit.ledger import prove, read_directory

    summary = RunDirectory(run_dir).read_summary() or {}
    files = read_directory(_ledger_of(run_dir))
    proof = prove(files, order=_order, steps_done=summary.get("steps"))
    if as_json:
        print(json.dumps(_as_json(proof)))
    else:
        print("\n".join(_report(proof, run_dir)))
    return EXIT_OK if proof.proved else EXIT_FAILED


def _compare(run_dir: str, other: str, *, as_json: bool) -> int:
    import numpy as np

    from tfdist.audit.ledger import Tally, merge, ranges, read_directory

    files = [read_directory(_ledger_of(path)) for path in (run_dir, other)]
    damaged = [file.damaged for found in files for file in found if file.damaged]
    ledgers = [merge(found) for found in files]
    end = min(ledger.end for ledger in ledgers)
    mine, theirs = map(Tally, ledgers)
    same = (mine.counts[:end] == theirs.counts[:end]) & (mine.hashes[:end] == theirs.hashes[:end])
    examples = np.flatnonzero(~same).tolist()
    content: list[int] | None = None
    if mine.content is not None and theirs.content is not None:
        content = np.flatnonzero(mine.content[:end] != theirs.content[:end]).tolist()
    if as_json:
        report = {"steps": end, "other_examples": examples, "other_content": content}
        print(json.dumps({**report, "damaged": damaged}))
    else:
        print("".join(f"{line}\n" for line in damaged), end="")
        print(f"steps 0 to {end - 1} are in both")
        print(f"steps with other examples: {ranges(examples)}")
        shown = "not recorded (mode hash)" if content is None else ranges(content)
        print(f"steps with other bits after augmentation: {shown}")
    return EXIT_FAILED if examples or content or damaged else EXIT_OK


def _ledger_of(run_dir: str) -> Path:
    inside = RunDirectory(run_dir).ledger
    return inside if inside.is_dir() else Path(run_dir)


def _order(header: Any, positions: Any) -> Any:
    # Only where it is asked for: a run of whole passes is proved without TensorFlow.
    from tfdist.data.draws import example_at_numpy

    return example_at_numpy(
        positions, num_examples=header.num_examples, seed=header.seed, shuffle=header.shuffle
    )


def _report(proof: Proof, run_dir: str) -> list[str]:
    ledger, header = proof.ledger, proof.ledger.header
    lines = [
        f"{run_dir}: {header.num_examples:,} examples, batches of {header.global_batch_size:,}, "
        f"seed {header.seed}, ledger {'full' if ledger.is_full else 'hash'}",
        *map(_attempt_line, ledger.attempts),
    ]
    if ledger.end < ledger.header.plan.total_steps:
        lines.append(f"recorded up to step {ledger.end:,} of {ledger.header.plan.total_steps:,}")
    lines += proof.problems
    lines += [_pass_line(part, header.num_examples) for part in proof.passes if not part.proved]
    lines += [
        f"virtual epoch {e.number + 1}: {e.seen:,} of {e.expected:,} examples"
        + ("" if e.seen != e.expected else ", some of them repeated or others than its own")
        for e in proof.epochs
        if not e.proved
    ]
    lines.append(_parts_line("passes", proof.passes))
    lines.append(_parts_line("virtual epochs", proof.epochs))
    lines.append(
        "proved: each example of each pass exactly once, as far as the run got"
        if proof.proved
        else "NOT proved: see above"
    )
    return lines


def _attempt_line(attempt: Any) -> str:
    header, void = attempt.header, attempt.void_steps
    tasks = "1 task" if header.num_tasks == 1 else f"{header.num_tasks} tasks"
    replicas = "1 replica" if header.num_replicas == 1 else f"{header.num_replicas} replicas"
    return (
        f"attempt {header.attempt}: {header.strategy}, {tasks}, {replicas}, "
        f"steps {attempt.first:,} to {attempt.last - 1:,}"
        + (f"; {void:,} of them void: done again later, or in flight at the end" if void else "")
    )


def _pass_line(part: PassProof, num_examples: int) -> str:
    kind = "" if part.whole else f" (the run came to {part.expected:,} of {num_examples:,})"
    line = f"pass {part.number}{kind}: {part.seen:,} examples consumed"
    if part.repeated is None:
        steps = ", ".join(map(str, part.steps)) or "none"
        return line + f"; the hash is not theirs; steps out of order: {steps}"
    for what, count, first in (
        ("repeated", part.repeated, part.first_repeated),
        ("missed", part.missed, part.first_missed),
    ):
        if count:
            more = ", ..." if count > len(first) else ""
            line += f"; {count:,} {what}: {', '.join(map(str, first))}{more}"
    return line


def _parts_line(name: str, parts: Sequence[Any]) -> str:
    return f"{name}: {sum(part.proved for part in parts):,} of {len(parts):,} proved"


def _as_json(proof: Proof) -> dict[str, Any]:
    ledger = proof.ledger
    attempts = [
        {
            **{name: getattr(a.header, name) for name in ("attempt", "strategy", "mode")},
            "tasks": [file.header.task for file in a.files],
            "replicas": a.header.num_replicas,
            "first_step": a.first,
            "last_step": a.last - 1,
            "void_steps": a.void_steps,
        }
        for a in ledger.attempts
    ]
    return {
        "proved": proof.proved,
        "steps": ledger.end,
        "attempts": attempts,
        "passes": [{**dataclasses.asdict(p), "proved": p.proved} for p in proof.passes],
        "epochs": [dataclasses.asdict(part) for part in proof.epochs],
        "problems": list(proof.problems),
    }


if __name__ == "__main__":
    sys.exit(main())
