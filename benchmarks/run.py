"""``python benchmarks/run.py [--only NAME ...] [--pairs 5]``: measures, and writes RESULTS.md.

Rows that are not measured keep the figures of the last run; every row carries the machine and the
versions it was measured with. Exit code 1 if a measurement failed; a missed target is not a
failure of the run, it stands in the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import demo_start
import harness
import input_by_index
import input_stream
import launcher_help
import launcher_tasks
import machine
import multiworker_cnn
import multiworker_frameworks
import multiworker_overhead
import ps_alone
import ps_cnn
import ps_killed
import ps_straggler
import report
import results
import row
import save_overhead
import sharded_optimizer
import single_cnn
import single_dense
import single_fit
import sweep_digits
import tracker_overhead

ROWS = tuple(
    module.ROW
    for module in (
        single_dense,
        single_cnn,
        single_fit,
        multiworker_cnn,
        multiworker_frameworks,
        multiworker_overhead,
        sharded_optimizer,
        ps_cnn,
        ps_alone,
        ps_killed,
        ps_straggler,
        save_overhead,
        tracker_overhead,
        input_by_index,
        input_stream,
        demo_start,
        launcher_help,
        launcher_tasks,
        sweep_digits,
    )
)
LEAST_PAIRS = 5
QUIET_CORES = 0.1
RAW = harness.HERE / "results.json"
REPORT = harness.HERE / "RESULTS.md"


def main() -> int:
    """Measures the rows asked for, one after the other, and writes after each."""
    args = _arguments()
    found = results.load(RAW)
    failed = False
    for one in ROWS if not args.report_only else ():
        if args.only and one.name not in args.only:
            continue
        measured = _measure(one, pairs=args.pairs)
        failed |= "error" in measured
        found["rows"][one.name] = measured
        results.save(RAW, found)
        REPORT.write_text(report.render(ROWS, found))
    REPORT.write_text(report.render(ROWS, found))
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure beside the peers; write RESULTS.md.")
    names = [one.name for one in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help="A B pairs of each row")
    parser.add_argument("--report_only", action="store_true", help="RESULTS.md from results.json")
    args = parser.parse_args()
    if args.pairs < LEAST_PAIRS:
        say(f"{args.pairs} pairs are too few for a figure to keep; use --pairs {LEAST_PAIRS}")
    return args


def _measure(one: row.Row, *, pairs: int) -> dict[str, object]:
    """Measures the sides in turn, `pairs` times; stops at the first failure and reports it."""
    measured: dict[str, object] = {"machine": machine.describe(), "pairs": []}
    done: list[row.Pair] = []
    measured["pairs"] = done
    try:
        if one.prepare:
            say(f"{one.name}: preparing")
            one.prepare()
        for number in range(pairs):
            done.append(_pair(one, f"{one.name} {number + 1}/{pairs}"))
    except harness.MeasurementError as error:
        say(f"{one.name}: failed\n{error}")
        measured["error"] = str(error)
    for verdict in results.verdicts(one, done):
        say(f"{one.name}: {verdict.claim.what}: {verdict.median:.3g} {verdict.claim.unit}")
    return measured


def _pair(one: row.Row, label: str) -> dict[str, Sequence[row.Record]]:
    pair: dict[str, Sequence[row.Record]] = {}
    for side, measure in one.sides.items():
        start = time.perf_counter()
        pair[side] = measure()
        say(f"{label} {side}: {time.perf_counter() - start:.0f} s")
        others = max(record["others_cores"] for record in pair[side])
        if others > QUIET_CORES:
            say(f"{label} {side}: something else took {others:.1f} cores meanwhile")
    return pair


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
