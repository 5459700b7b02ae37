"""``python -m benchmarks.recovery``: kills at random times, tfdist and torchrun in turn.

Writes `benchmarks/RECOVERY.md` and, beside it, `recovery.jsonl` with a line for each kill. In each
round every side runs its job once, torchrun's in the first rounds only, and is killed three times
on the way: a task, all of them or the launcher, while it starts or trains. All sides get the same
draws, scaled to how long they take. torchrun restarts by ``--max-restarts``; what its job does is
in `torch_job`. A killed launcher is started again by the runner, on every side.

Expected, before the first measurement:

- a death is noticed within 0.1 s by tfdist (the kernel tells it) and within 0.2 s by torchrun
  (which looks every 0.1 s);
- tfdist's tasks run their first line within 1 s of that, those of torchrun within 3 s (it ends the
  other workers and meets again);
- two imports of TensorFlow, Keras and tfdist on two cores take 6 s, two of torch 3 s, so that
  torchrun has its first step sooner: 6 s against 9 s from the kill with two workers;
- forked tasks import nothing: 3 s from the kill to the first step;
- every run of tfdist ends as its undisturbed one; none of torchrun with the usual checkpoint does
  (Dropout and augmentation draw again from the start), and nearly all with the generators' states;
- the workers of a torchrun that was killed go on.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recovery import report
from benchmarks.recovery.torchrun import launcher
from tests.chaos.campaign import Campaign
from tests.chaos.plan import Case
from tests.chaos.run import ORPHANED_S, TFDIST

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.append(str(BENCHMARKS))  # where its modules look for each other

RAW = BENCHMARKS / "recovery" / "recovery.jsonl"
REPORT = BENCHMARKS / "RECOVERY.md"
TWO: dict[str, Any] = {"strategy": "multiworker", "workers": 2}
SIDES = (
    (Case(name="multiworker, 2 workers", start="exec", **TWO), TFDIST),
    (Case(name="torchrun, 2 workers", **TWO), launcher(random_states=False)),
    (Case(name="torchrun, 2 workers, random states saved", **TWO), launcher(random_states=True)),
    (Case(name="multiworker, 2 workers, forked", start="fork", **TWO), TFDIST),
    (Case(name="single", start="exec", strategy="single"), TFDIST),
    (Case(name="mirrored, 2 devices", start="exec", strategy="mirrored", devices=2), TFDIST),
    (Case(name="multiworker, 3 workers", start="exec", strategy="multiworker", workers=3), TFDIST),
)
LEAST_KILLS = 200
_OWN_PATH = re.compile(r' of binary: [^"]*')  # torchrun names the interpreter


def main() -> int:
    args = _arguments()
    if not args.report_only:
        _measure(args)
    lines = [json.loads(line) for line in RAW.read_text().splitlines()]
    REPORT.write_text(report.render(lines, expected=_expected(), asked_for=LEAST_KILLS))
    ours = [line for line in lines[1:] if not line["case"].startswith("torchrun")]
    return int(any(line["identical"] is not True for line in ours))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--rounds", type=int, default=LEAST_KILLS // 15 + 1, help="(14)")
    parser.add_argument("--kills", type=int, default=3, help="of each run (3)")
    parser.add_argument("--peer_rounds", type=int, default=5, help="torchrun's, of them (5)")
    parser.add_argument("--seed", type=int, help="of the kills (a new one)")
    parser.add_argument("--sides", type=int, default=len(SIDES), help="the first so many (7)")
    parser.add_argument("--append", action="store_true", help="rounds to those that are there")
    parser.add_argument("--report_only", action="store_true", help="RECOVERY.md from the lines")
    return parser.parse_args()


def _measure(args: argparse.Namespace) -> None:
    import machine

    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    head: dict[str, Any] = {"seed": seed, "orphaned_s": ORPHANED_S, "machine": machine.describe()}
    kept: list[str] = []
    if args.append:
        first, *kept = RAW.read_text().splitlines()
        head["seed"] = f"{json.loads(first)['seed']}, then {seed}"
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch, open(RAW, "w") as results:
        results.writelines(line + "\n" for line in [json.dumps(head), *kept])
        campaigns = []
        for number, (case, by) in enumerate(SIDES[: args.sides]):
            directory = Path(scratch) / str(number)
            directory.mkdir()
            campaigns.append(
                Campaign(case, directory, seed=seed, say=say, results=results, launcher=by)
            )
        for number in range(args.rounds):
            for (_, by), campaign in zip(SIDES, campaigns, strict=False):
                if by is TFDIST or number < args.peer_rounds:
                    campaign.random_kills(args.kills)
    RAW.write_text(_without_paths(RAW.read_text()))


def _without_paths(text: str) -> str:
    """What torchrun has said of where it runs is of no use to a reader."""
    # `.venv` may be a link: then it names the checkout that the link leads to.
    checkouts = {BENCHMARKS.parent, (BENCHMARKS / ".venv").resolve().parents[1]}
    for checkout in checkouts:
        text = text.replace(f"{checkout}/", "")
    return _OWN_PATH.sub("", text)


def _expected() -> str:
    """The list in this module's docstring."""
    return (__doc__ or "").partition("measurement:\n\n")[2].strip()


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
