"""The command line of `tfdist.tune`: its own flags, and --config.FIELD for all trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.argument_parser import Parser
from tfdist.cluster.address import parse_hosts
from tfdist.errors import (
    UsageError,
    require,
    require_int,
    require_number,
    require_one_of,
)
from tfdist.launch.options import PLACES, LaunchOptions

TUNERS = ("random", "grid", "bayesian", "hyperband")
STRATEGIES = ("single", "mirrored", "multiworker", "ps")
OBJECTIVES = {"val_accuracy": "max", "val_loss": "min", "accuracy": "max", "loss": "min"}
"""What a trial reports, and which way is better."""
DEFAULT_MAX_TRIALS = 20
NONE, MEDIAN = "none", "median"
EARLY_STOPS = (NONE, MEDIAN)
"""Whether a trial may be stopped as hopeless, and by which rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How the trials of a sweep are run, whoever chooses them.

    Raises:
      UsageError: a value out of its range, or values that do not go together.
    """

    sweep_dir: Path
    parallel_trials: int = 1
    strategy: str = "single"
    workers: int = 1
    ps: int = 1
    devices_per_worker: int | None = None
    on: str | None = None
    hosts: str | None = None
    """Those that trials run on, each on one of them, and how many at once: ``a:2,b:2``."""
    rsh: str | None = None
    env: str | None = None
    """Variables that trials on other hosts get, with commas between."""
    max_failed_trials: int | None = None
    trial_timeout_s: float = math.inf
    early_stop: str = NONE
    retrain_best: bool = False
    overwrite: bool = False
    backup_every_steps: int | None = None
    """How often a trial of `tfdist.tuning.search` saves; a configuration says it by itself."""

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
        require(
            self.workers == 1 or self.strategy in ("multiworker", "ps"),
            "--workers",
            received=f"{self.workers} with --strategy {self.strategy}",
            expected="one process, 1",
            fix="use --strategy multiworker; --parallel_trials runs several trials at once",
            code="workers-of-one-process",
        )
        # They mean what they mean to the launcher of each trial, which refuses the same.
        LaunchOptions(on=self.on, hosts=self.hosts, rsh=self.rsh, env=self.env)
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
    def tasks_per_trial(self) -> int:
        """Return how many processes compute in each trial; a ps job's chief only waits."""
        return self.workers + (self.ps if self.strategy == "ps" else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions(RunOptions):
    """What `tfdist.tune` was asked for; raises as `RunOptions`."""

    config: str
    config_flags: tuple[str, ...] = ()
    """``--config.field=value``, of every trial, before the search space sets its own."""
    tuner: str = "random"
    objective: str = "val_accuracy"
    max_trials: int | None = None
    factor: int = 3
    """Of hyperband: one in so many trials is continued, for so many times as long."""
    seed: int | None = None

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)  # super() does not know the class that slots made anew
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
    """Return the options of the command line, or the directory of the sweep to show.

    ``--help`` prints and raises SystemExit(0).

    Raises UsageError for anything that cannot be.
    """
    config_flags = tuple(word for word in argv if word.startswith("--config."))
    values = _parser().parse_args([word for word in argv if word not in config_flags])
    given = {name: value for name, value in vars(values).items() if value is not None}
    if "env" in given:
        given["env"] = ",".join(given["env"])
    show = given.pop("show", None)
    if show is not None:
        return Path(show)
    if "config" not in given:
        raise UsageError(
            "--config",
            received="nothing",
            expected="a config file",
            fix="write --config configs/digits_sweep.py, or --show DIR",
            code="missing",
        )
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
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a config file with space(hp, config)")
    add("--tuner", metavar="|".join(TUNERS), help="who chooses (random)")
    add("--objective", metavar="|".join(OBJECTIVES), help="what is best (val_accuracy)")
    add("--max_trials", type=int, metavar="N", help="of random and bayesian 20; others to the end")
    add("--factor", type=int, metavar="F", help="hyperband: one in F trials is continued (3)")
    add("--seed", type=int, metavar="S", help="of the search and of every trial (drawn)")
    add("--parallel_trials", type=int, metavar="K", help="trials at once (1)")
    add("--strategy", metavar="|".join(STRATEGIES), help="of every trial (single)")
    add("--workers", type=int, metavar="W", help="of every trial (1)")
    add("--ps", type=int, metavar="P", help="parameter servers of every trial (1)")
    add("--devices_per_worker", type=int, metavar="D", help="of every trial (GPUs, or one CPU)")
    add("--hosts", metavar="A:K,B:K", help="hosts of the trials, K at once on each (this machine)")
    add("--on", metavar="|".join(PLACES), help="how trials are started there (ssh)")
    add("--rsh", metavar="CMD", help="the remote shell (ssh)")
    add("--env", metavar="NAME", action="append", help="pass a variable to trials on other hosts")
    add("--sweep_dir", metavar="D", help="where the sweep writes (runs/<config>-<tuner>)")
    add("--max_failed_trials", type=int, metavar="N", help="end at so many failed trials (never)")
    add("--trial_timeout_s", type=float, metavar="S", help="end a trial without progress (never)")
    add("--early_stop", metavar="|".join(EARLY_STOPS), help="end hopeless trials (none)")
    add("--retrain_best", action="store_true", help="train the best anew and save the model")
    add("--overwrite", action="store_true", help="move an earlier sweep aside, into old-1, ...")
    add("--show", metavar="DIR", help="print the sweep in DIR and do nothing else")
    return parser


def require_no_rule(early_stop: str) -> None:
    """Raise UsageError for a rule beside that of hyperband."""
    require(
        early_stop == NONE,
        "--early_stop",
        received=f"{early_stop} with hyperband",
        expected="none: hyperband ends trials itself, and counts on those it goes on with",
        fix="leave it out, or use random search",
        code="exclusive",
    )


def _require_least(least: int, **options: int | None) -> None:
    """Raise UsageError for an option that is neither None nor a whole number of at least so many.

    From Python it may be anything.
    """
    for name, value in options.items():
        if value is not None:
            require_int(f"--{name}", value, least=least, fix=f"write --{name} {least}, for example")
