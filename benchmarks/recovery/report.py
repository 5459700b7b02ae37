"""RECOVERY.md from the lines of a measurement; a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.record import grouped, percentile

HEAD = """# Recovery

Written by `python -m benchmarks.recovery` from `benchmarks/recovery/recovery.jsonl`; not by hand.

A job that trains a few thousand small steps is killed with SIGKILL at random times, several times
a run, and each run is compared with one that was left alone: weights and optimizer byte for byte,
for tfdist also the best model, History, the callbacks' state and every line of `metrics.jsonl`.
Both sides save every 6 steps and at each epoch's end, and run one after the other in each round.
torchrun's script (`benchmarks/recovery/torch_job.py`) saves model, optimizer, scheduler, epoch and
step, written beside and renamed, and goes on inside an epoch by the sampler's order; in the second
row also the state of each rank's random number generator.

All times are in seconds, p50 / p95, by a clock that the processes share:

- *detect*: from the kill to the launcher's line that names what failed; where the launcher itself
  was killed, until its tasks were gone;
- *restart*: from there to the first line of the last task's program;
- *import*: from there until the last task has imported its framework;
- *restore*: reading the checkpoint and setting everything from it, in the chief;
- *first step*: from the kill until the last task has done its first steps again;
- *beside import*: the same less the import.
"""
QUIET_LOAD = 1.0
_COLUMNS = ("detect_s", "restart_s", "import_s", "restore_s", "first_step_s")


def render(lines: Sequence[Mapping[str, Any]], *, expected: str, asked_for: int) -> str:
    """Returns the whole file; the first line is about the machine, each other one a fault."""
    about, *results = lines
    ours = [r for r in results if not r["case"].startswith("torchrun")]
    parts = [HEAD, *_table(results), ""]
    went_on = [r for r in results if r["place"] == "its tasks went on"]
    if went_on:
        parts.append(
            f"After {len(went_on)} kills of torchrun itself its workers went on; the runner ended"
            f" them {about['orphaned_s']:g} s later, before it gave the command again.\n"
        )
    again = sum(r["failed_again"] for r in results if r not in ours)
    if again:
        parts.append(
            f"{again} restarts of torchrun failed by themselves, and torchrun made another: they"
            " are in its times, and do not count against it. One of tfdist's would count as"
            " different.\n"
        )
    load = float(about["machine"]["load before"].split()[0])
    if load > QUIET_LOAD:
        parts.append(
            f"**The machine had other work to do (load {load:g}): verdicts hold, times are only"
            " upper bounds.**\n"
        )
    same = sum(r["identical"] is True for r in ours)
    parts.append(f"tfdist: {len(ours)} kills, {same} of them in runs that ended identical.")
    if len(ours) < asked_for:
        parts.append(f"The table is meant to be of at least {asked_for} kills.")
    parts += ["", *_aims(ours), "", "## Expected before measuring", "", expected, ""]
    parts += ["## Measured with", "", f"- seed: {about['seed']}"]
    parts += [f"- {name}: {value}" for name, value in about["machine"].items()]
    return "\n".join(parts) + "\n"


def _table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [*(name[:-2].replace("_", " ") for name in _COLUMNS), "beside import"]
    rows = [("job", "fault", "n", *names, "identical")]
    for (case, kind), group in grouped(results).items():
        times = [_both([r[name] for r in group]) for name in _COLUMNS]
        times.append(_both([_beside_import(r) for r in group]))
        same = sum(r["identical"] is True for r in group)
        rows.append((case, kind, str(len(group)), *times, f"{same} of {len(group)}"))
    lines = [f"| {' | '.join(row)} |" for row in [rows[0], *sorted(rows[1:])]]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def _aims(ours: Sequence[Mapping[str, Any]]) -> list[str]:
    """The aims that were set, and what came out."""
    detect = [r["detect_s"] for r in ours if r["do"] in ("kill", "kill_all") and r["detect_s"]]
    two = [r for r in ours if r["case"] == "multiworker, 2 workers"]
    beside = [b for r in two if (b := _beside_import(r)) is not None]
    lines = []
    if detect:
        lines.append(f"- a death is noticed within 1 s: p95 {percentile(detect, 0.95):.2f} s")
    if beside:
        lines.append(
            "- two workers have their first step within the import and 2 s:"
            f" p50 {percentile(beside, 0.5):.2f} s, p95 {percentile(beside, 0.95):.2f} s beside it"
        )
    forked = [r for r in ours if "forked" in r["case"] and r["first_step_s"]]
    for whose, killed in (("", False), (", the import of a launcher started anew included", True)):
        steps = [r["first_step_s"] for r in forked if (r["do"] == "kill_launcher") is killed]
        if steps:
            aim = "" if killed else " within 3 s"
            lines.append(
                f"- two forked workers have their first step{aim}:"
                f" p50 {percentile(steps, 0.5):.2f} s, p95 {percentile(steps, 0.95):.2f} s{whose}"
            )
    return lines


def _beside_import(result: Mapping[str, Any]) -> float | None:
    first, imported = result["first_step_s"], result["import_s"]
    return None if first is None or imported is None else first - imported


def _both(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{percentile(known, 0.5):.2f} / {percentile(known, 0.95):.2f}"
