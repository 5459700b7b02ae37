"""Command line of `tfdist.tune`: its flags, and --config.FIELD flags for all trials."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser
from tfdist.cluster.address import parse_hosts
from tfdist.errors import (
    require,
    require_int,
    require_number,
    require_one_of,
)
from tfdist.launch.options import PLACES, LaunchOptions

TUNERS = ("random", "grid", "bayesian", "hyperband")
STRATEGIES = ("single", "mirrored", "multiworker", "ps")
OBJECTIVES = {"val_accuracy": "max", "val_loss": "min", "accuracy": "max", "loss": "min"}
"""Metrics that a trial reports, and whether the maximum or the minimum is best."""
DEFAULT_MAX_TRIALS = 20
NONE, MEDIAN = "none", "median"
EARLY_STOPS = (NONE, MEDIAN)
"""Rules that can stop a hopeless trial."""


def _flag(default: Any, shown: str, about: str) -> Any:
    """Return a dataclass field for a flag, with its default and its ``--help`` texts."""
    return field(default=default, metadata={"metavar": shown, "help": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options for the jobs of a sweep's trials.

    Raises:
      UsageError: A value is out of range, or two options exclude each other.
    """

    sweep_dir: Path = field(
        metadata={"metavar": "D", "help": "where the sweep writes (runs/<config>-<tuner>)"}
    )
    parallel_trials: int = _flag(1, "K", "trials at once (1)")
    strategy: str = _flag("single", "|".join(STRATEGIES), "of every trial (single)")
    workers: int = _flag(1, "W", "of every trial (1)")
    ps: int = _flag(1, "P", "parameter servers of every trial (1)")
    devices_per_worker: int | None = _flag(None, "D", "of every trial (GPUs, or one CPU)")
    hosts: str | None = _flag(
        None, "A:K,B:K", "hosts of the trials, K at once on each (this machine)"
    )
    on: str | None = _flag(None, "|".join(PLACES), "how trials are started there (ssh)")
    rsh: str | None = _flag(None, "CMD", "the remote shell (ssh)")
    env: str | None = _flag(None, "NAME", "pass a variable to trials on other hosts")
    max_failed_trials: int | None = _flag(None, "N", "end at so many failed trials (never)")
    trial_timeout_s: float = _flag(math.inf, "S", "end a trial without progress (never)")
    early_stop: str = _flag(NONE, "|".join(EARLY_STOPS), "end hopeless trials (none)")
    retrain_best: bool = _flag(False, "", "train the best anew and save the model")
    overwrite: bool = _flag(False, "", "move an earlier sweep aside, into old-1, ...")
    backup_every_steps: int | None = None
    """Steps between saves of a `tfdist.tuning.search` trial. A config file has its own field."""

    def __post_init__(self) -> None:
        require_one_of("--strategy", self.strategy, STRATEGIES)
        require_one_of("--early_stop", self.early_stop, EARLY_STOPS)
        counts = ("parallel_trials", "workers", "ps", "max_failed_trials")
        for name in (*counts, "devices_per_worker", "backup_every_steps"):
            _require_least(1, **{name: getattr(self, name)})
        if self.trial_timeout_s != math.inf:
            fix = "leave it out to wait for ever"
            require_number(
                "--trial_timeout_s", self.trial_timeout_s, above=0, unit="seconds", fix=fix
            )
        LaunchOptions(  # each trial's launcher would reject the same values
            strategy=self.strategy if self.hosts is None else "auto",
            workers=self.workers,
            on=self.on,
            hosts=self.hosts,
            rsh=self.rsh,
            env=self.env,
        )
        require(
            self.hosts is None or self.parallel_trials == 1,
            "--parallel_trials",
            received=f"{self.parallel_trials} with --hosts {self.hosts}",
            expected="the trials at once in the list of hosts",
            fix="leave it out, and write a:2,b:2 for two trials at once on each host",
            code="exclusive",
        )
        if self.hosts is not None:
            parse_hosts(self.hosts)

    @property
    def is_here(self) -> bool:
        """Return whether all trials run on this machine."""
        return self.on in (None, "local") and self.hosts is None

    @property
    def tasks_per_trial(self) -> int:
        """Return the number of processes that compute in each trial, without a ps job's chief."""
        return self.workers + (self.ps if self.strategy == "ps" else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions(RunOptions):
    """Options of `tfdist.tune`. Invalid values raise UsageError, as in `RunOptions`."""

    config: str = field(
        metadata={"metavar": "FILE", "help": "a config file with space(hp, config)"}
    )
    tuner: str = _flag("random", "|".join(TUNERS), "who chooses (random)")
    objective: str = _flag("val_accuracy", "|".join(OBJECTIVES), "what is best (val_accuracy)")
    max_trials: int | None = _flag(None, "N", "of random and bayesian 20; others to the end")
    factor: int = _flag(3, "F", "hyperband: one in F trials is continued (3)")
    seed: int | None = _flag(None, "S", "of the search and of every trial (drawn)")
    config_flags: tuple[str, ...] = ()
    """``--config.field=value`` flags of every trial. The search space's values override them."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)  # slots=True made a new class, so super() does not work
        require_one_of("--tuner", self.tuner, TUNERS)
        require_one_of("--objective", self.objective, OBJECTIVES)
        if self.tuner == "hyperband":
            require_no_rule(self.early_stop)
        _require_least(1, max_trials=self.max_trials)
        _require_least(2, factor=self.factor)
        if self.seed is not None:
            fix = "KerasTuner draws another one for 0; write --seed 1, or leave it out"
            require_int("--seed", self.seed, least=1, fix=fix)

    @property
    def direction(self) -> str:
        return OBJECTIVES[self.objective]


def parse(argv: Sequence[str]) -> SweepOptions | Path:
    """Return the parsed options, or with ``--show`` the sweep directory to print."""
    config_flags = tuple(word for word in argv if word.startswith("--config."))
    parser = _parser()
    given = vars(parser.parse_args([word for word in argv if word not in config_flags]))
    if "env" in given:
        given["env"] = ",".join(given["env"])
    if "show" in given:
        return Path(given["show"])
    if "config" not in given:
        parser.error("the following arguments are required: --config")
    tuner = given.get("tuner", "random")
    sweep_dir = Path(given.pop("sweep_dir", f"runs/{Path(given['config']).stem}-{tuner}"))
    if "max_trials" not in given and tuner in ("random", "bayesian"):
        given["max_trials"] = DEFAULT_MAX_TRIALS
    return SweepOptions(**given, sweep_dir=sweep_dir, config_flags=config_flags)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.tune",
        description="Searches for hyperparameters; every trial is a job of its own. The same "
        "command again goes on with a sweep that was broken off.",
        epilog="--config.FIELD=VALUE changes a field of every trial. "
        "--show DIR prints a sweep that is finished or running.",
        argument_default=argparse.SUPPRESS,
    )
    kinds: dict[str, dict[str, Any]]
    kinds = {"int": {"type": int}, "float": {"type": float}, "bool": {"action": "store_true"}}
    of_runs = RunOptions.__dataclass_fields__
    for one in sorted(fields(SweepOptions), key=lambda one: one.name in of_runs):
        how = {"action": "append"} if one.name == "env" else kinds.get(str(one.type).split()[0], {})
        words = {name: text for name, text in one.metadata.items() if text}
        if words:
            parser.add_argument(f"--{one.name}", **words, **how)
    parser.add_argument("--show", metavar="DIR", help="print the sweep in DIR and do nothing else")
    return parser


def require_no_rule(early_stop: str) -> None:
    """Raise UsageError if hyperband is combined with an early-stopping rule."""
    require(
        early_stop == NONE,
        "--early_stop",
        received=f"{early_stop} with hyperband",
        expected="none: hyperband ends trials itself, and counts on those it goes on with",
        fix="leave it out, or use random search",
        code="exclusive",
    )


def _require_least(least: int, **options: int | None) -> None:
    """Raise UsageError if an option is not None and not an integer of at least `least`."""
    for name, value in options.items():
        if value is not None:
            require_int(f"--{name}", value, least=least, fix=f"write --{name} {least}, for example")
