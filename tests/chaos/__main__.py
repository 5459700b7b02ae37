"""``python -m tests.chaos``: does what a plan says, and compares each run with an undisturbed one.

Exit code 0 if every run ended as if nothing had happened, 1 if one did not (its directory is kept),
2 for a plan that cannot be carried out.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.campaign import Campaign
from tests.chaos.plan import BY_RUNNER, Case, Plan, PlanError, kills_of_cases, read
from tests.chaos.record import table
from tfdist.launch.guardian import die_with

PLANS = Path(__file__).with_name("plans")


def main() -> int:
    args = _arguments()
    try:
        plan = _chosen(read(args.plan), args)
        _require_rights(plan)
    except (OSError, ValueError) as error:
        print(f"{args.plan}: {error}", file=sys.stderr)
        return 2
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    directory = Path(tempfile.mkdtemp(prefix="chaos-", dir=args.dir))
    say(f"seed {seed}, in {directory}")
    began_s = time.monotonic()
    conduct = partial(_conduct, plan, directory=directory, seed=seed, results=args.results)
    lines: list[dict[str, Any]] = []
    kept: list[Path] = []
    with ProcessPoolExecutor(args.at_once, initializer=die_with, initargs=(os.getpid(),)) as pool:
        for of_case, kept_of_case in pool.map(conduct, plan.cases):
            lines += of_case
            kept += kept_of_case
    print(f"\n{table(lines)}\n")
    bad = sum(line["identical"] is not True for line in lines)
    took_s = time.monotonic() - began_s
    say(f"seed {seed}: {len(lines)} faults in {took_s:.0f} s, {bad} not identical")
    for path in kept:
        say(f"kept {path}")
    if not kept:
        shutil.rmtree(directory)
    return 1 if kept else 0


def _conduct(
    plan: Plan, case: Case, *, directory: Path, seed: int, results: Path | None
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Does what a plan says to a case; returns the results, and the directories that are kept."""
    with open(results or os.devnull, "a") as file:
        campaign = Campaign(case, directory, seed=seed, say=say, results=file)
        campaign.placed([entry for entry in plan.placed if entry.case == case.name])
        campaign.random_kills(kills_of_cases(plan)[case.name])
    return campaign.lines, campaign.kept


def say(line: str) -> None:
    """Shows a line at once."""
    print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--plan", type=Path, default=PLANS / "short.toml", help="(short.toml)")
    parser.add_argument("--kills", type=int, help="random kills, instead of the plan's number")
    parser.add_argument("--seed", type=int, help="of the random kills (a new one)")
    parser.add_argument("--at_once", type=int, default=1, help="cases that run side by side (1)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="leave out the other cases")
    parser.add_argument(
        "--without", nargs="+", default=(), choices=BY_RUNNER, help="leave out runs with these"
    )
    parser.add_argument("--results", type=Path, help="adds one JSON line for each fault")
    parser.add_argument("--dir", type=Path, help="where the runs are made (a temporary directory)")
    return parser.parse_args()


def _chosen(plan: Plan, args: argparse.Namespace) -> Plan:
    names = [case.name for case in plan.cases]
    for name in args.only or ():
        if name not in names:
            raise PlanError(f"--only {name}: expected some of {', '.join(names)}")
    wanted, without = args.only or names, set(args.without)
    placed = [
        entry
        for entry in plan.placed
        if entry.case in wanted and not without & {fault.do for fault in entry.faults}
    ]
    cases = tuple(case for case in plan.cases if case.name in wanted)
    kills = plan.kills if args.kills is None else args.kills
    return Plan(cases=cases, placed=tuple(placed), kills=kills)


def _require_rights(plan: Plan) -> None:
    """Refuses what takes root, before anything runs."""
    kinds = {fault.do for entry in plan.placed for fault in entry.faults}
    if (kinds := kinds & {"fill_disk", "cut_network"}) and os.geteuid():
        raise PlanError(f"run as root, or --without {' '.join(sorted(kinds))}")


if __name__ == "__main__":
    sys.exit(main())
