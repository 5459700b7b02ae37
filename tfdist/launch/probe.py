"""`--probe`: run a program briefly under each strategy, and name the fastest strategy.

Each job has a scratch run directory. Its first `fit` measures itself and ends the program
(`tfdist/training/metrics_file.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.errors import EXIT_FAILED, EXIT_OK, TfdistError, named
from tfdist.kinds import KINDS
from tfdist.launch.events import STOP_CODES
from tfdist.launch.job_run import run_job
from tfdist.launch.options import LaunchOptions, check_program
from tfdist.launch.run_dir import earlier_attempts
from tfdist.launch.screen import Console, JobScreen
from tfdist.options import LaunchFlags, table
from tfdist.outputs.run_directory import RunDirectory

STRATEGIES = tuple(name for name, kind in KINDS.items() if not (kind.has_stages or kind.is_elastic))
"""Strategies that run any program on one machine, without stages or shards."""
SECONDS = 20.0
_FEWEST = 3
_LEAST_NOISE = 0.05  # two runs of the same job may differ by as much


class Row(NamedTuple):
    """Result of one strategy. `rate` is 0.0 if there is a `problem` instead."""

    strategy: str
    tasks: str
    rate: float = 0.0
    """Median of the examples per second."""
    noise: float = 0.0
    """Half the interquartile range of the examples per second, divided by `rate`."""
    problem: str = ""

    def __str__(self) -> str:
        shown = f"{self.rate:>12,.0f}  ± {self.noise:.0%}" if self.rate else f"{'-':>12}"
        return (
            f"{self.strategy:<12}{self.tasks:<18}{shown}{'  ' * bool(self.problem)}{self.problem}"
        )


def run_probe(options: LaunchOptions, *, environ: Mapping[str, str]) -> int:
    """Print the examples per second of a program under each strategy. Return the exit code.

    Raises:
        UsageError: The program does not exist.
        SystemExit: A signal stopped a job.
    """
    check_program(options.program)
    print(
        f"probe: {options.program.name} runs {len(STRATEGIES)} times, with {SECONDS:g} s of "
        "training each. Checkpoints, logs and trackers are skipped. Other writes of the program "
        f"happen.\n\n{'strategy':<12}{'tasks':<18}{'examples/s':>12}  noise",
        flush=True,
    )
    rows, scratch = list[Row](), tempfile.mkdtemp(prefix="tfdist-probe-")
    try:
        for row in measured(options, environ=environ, scratch=Path(scratch)):
            rows.append(row)
            print(row, flush=True)
        print(f"\n{verdict(rows)}")
    finally:
        if any(row.problem for row in rows):
            print(f"logs: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return EXIT_OK if any(row.rate for row in rows) else EXIT_FAILED


def measured(options: LaunchOptions, *, environ: Mapping[str, str], scratch: Path) -> Iterator[Row]:
    """Run the program under each strategy, with run directories in `scratch`."""
    for name in STRATEGIES:
        run_dir, code, problem = scratch / name, EXIT_FAILED, ""
        changes = _changes(options, name) | {"run_dir": str(run_dir), "probe_s": SECONDS}
        with open(os.devnull, "wb") as nowhere:  # the logs have the output
            console = Console(nowhere.fileno())
            screen = JobScreen(out=console, err=console, verbosity=-1)
            try:
                job = dataclasses.replace(options, **changes)
                code = run_job(job, environ=environ, screen=screen)
            except TfdistError as error:
                problem = str(error)
        failed = any(attempt["first_failure"] for attempt in earlier_attempts(run_dir))
        if code in STOP_CODES and not failed:
            raise SystemExit(code)
        yield _row(name, changes, run_dir, problem=problem)


def _changes(options: LaunchOptions, strategy: str) -> dict[str, Any]:
    """Return the changes of the options for a strategy. Options of other strategies are unset."""
    rules = table(LaunchFlags).items()
    unset = {
        n: rule.default for n, rule in rules if rule.strategies and strategy not in rule.strategies
    }
    workers = 1 if KINDS[strategy].is_one_process else max(2, options.workers)
    own = {"ps": options.num_ps} if KINDS[strategy].has_servers else {"min_workers": None}
    return (
        unset | own | {"strategy": strategy, "workers": workers, "probe": False, "max_restarts": 0}
    )


def _row(strategy: str, changes: Mapping[str, Any], run_dir: Path, *, problem: str) -> Row:
    workers, ps = changes["workers"], changes["ps"]
    tasks = f"{workers} worker{'s' * (workers > 1)}{f', {ps} ps' if ps else ''}"
    attempts = earlier_attempts(run_dir)
    if not problem and attempts and (failure := attempts[-1]["first_failure"]):
        problem = failure["cause"]
    lines = RunDirectory(run_dir).read_metrics() if run_dir.exists() else []
    points = [(line["seconds"], line["examples"]) for line in lines if "seconds" in line]
    if not problem and not points:
        problem = "no model of the strategy's scope was trained"
    elif not problem and not rates(points):
        problem = f"{points[-1][0]:.1f} s of training are too short"
    if problem:
        return Row(strategy, tasks, problem=" ".join(problem.split()))
    low, middle, high = statistics.quantiles(rates(points), n=4, method="inclusive")
    return Row(strategy, tasks, rate=middle, noise=(high - low) / 2 / middle)


def rates(points: Sequence[tuple[float, int]]) -> list[float]:
    """Return the examples per second between points of (seconds, examples), [] if they are too few.

    The first quarter of the points is a warm-up, in which workers may still trace. A program that
    ignores the end of its first `fit` adds points of other fits, which do not count.
    """
    later = itertools.pairwise(points)
    first = 1 + sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] < pair[1][0], later))
    warm = points[first // 4 : first]
    found = [(n - before) / (s - since) for (since, before), (s, n) in itertools.pairwise(warm)]
    return found if len(found) >= _FEWEST else []


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest strategy, and all that differ from it by less than the noise.

    They are in the order of the rows, which begins with the fewest tasks.
    """
    best = max(rows, key=lambda row: row.rate)
    return [row for row in rows if row.rate and _margin(best, row) < _noise(best, row)]


def verdict(rows: Sequence[Row]) -> str:
    """Return the sentence that names the fastest strategy, and its margin or "within noise"."""
    known = sorted((row for row in rows if row.rate), key=lambda row: -row.rate)
    if len(known) < 2:
        return f"only {known[0].strategy} was measured" if known else "no strategy was measured"
    equal = fastest(rows)
    if len(equal) > 1:
        most = max(_margin(known[0], row) for row in equal)
        names = named([row.strategy for row in equal])
        return f"within noise: {names} differ by {most:.0%}. {equal[0].strategy} is the simplest"
    margin = _margin(known[0], known[1])
    return f"fastest: {known[0].strategy}, {margin:.0%} faster than {known[1].strategy}"


def _margin(best: Row, other: Row) -> float:
    return best.rate / other.rate - 1


def _noise(one: Row, other: Row) -> float:
    return max(_LEAST_NOISE, one.noise + other.noise)
