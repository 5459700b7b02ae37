"""Command line of `tfdist.tune`: its flags, and --config.FIELD flags for all trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.cluster.address import parse_hosts
from tfdist.errors import UsageError, mutually_exclusive, require
from tfdist.launch.options import LaunchOptions
from tfdist.options import (
    OBJECTIVES,
    HostFlags,
    SweepFlags,
    TrialFlags,
    check,
    flags_of,
    names_of,
    read,
    shown,
    underscored,
)

DEFAULT_MAX_TRIALS = 20
_USAGE = """usage: python -m tfdist.tune --config=FILE [--config.FIELD=VALUE ...] [flags]

Searches for hyperparameters. Each trial runs as a separate job. Run the same command
again to resume an interrupted sweep. --config.FIELD=VALUE changes a field of every trial."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrialFlags):
    """Options for the jobs of a sweep's trials.

    Raises:
      UsageError: A value is out of range, or two options exclude each other.
    """

    def __post_init__(self) -> None:
        check(self, "--{0.name}", code="bad-value")
        object.__setattr__(self, "ps", self.num_ps)  # the journal has the number
        LaunchOptions(  # each trial's launcher would reject the same values
            strategy=self.strategy if self.hosts is None else "auto",
            workers=self.workers,
            **{name: getattr(self, name) for name in names_of(HostFlags)},
        )
        require(
            self.hosts is None or self.parallel_trials == 1,
            "--parallel_trials",
            "--hosts already sets the number of parallel trials",
            fix="leave it out, and write a:2,b:2 for two trials at once on each host",
            code="exclusive",
        )
        if self.hosts is not None:
            parse_hosts(self.hosts)

    @property
    def is_here(self) -> bool:
        return self.on in (None, "local") and self.hosts is None

    @property
    def tasks_per_trial(self) -> int:
        """Return the number of processes that compute in each trial, without a ps job's chief."""
        return self.workers + (self.num_ps if self.kind.has_servers else 0)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions, SweepFlags):
    """Options of `tfdist.tune`. Invalid values raise UsageError, as in `RunOptions`."""

    config_flags: tuple[str, ...] = ()
    """``--config.field=value`` flags of every trial. The search space's values override them."""

    @property
    def direction(self) -> str:
        return OBJECTIVES[self.objective]


def parse(argv: Sequence[str]) -> SweepOptions | tuple[str, Path]:
    """Return the parsed options, or ``show`` or ``best`` and a sweep directory."""
    made = flags_of(SweepOptions)
    words = [underscored(word, made) if word.startswith("--") else word for word in argv]
    config_flags = tuple(word for word in words if word.startswith("--config."))
    given = read(made, [word for word in words if word not in config_flags])
    views = [(name, Path(given[name])) for name in ("show", "best") if name in given]
    mutually_exclusive({f"--{name}": path for name, path in views})
    if views:
        return views[0]
    if "config" not in given:
        raise UsageError("--config", "no config file", fix="write --config=FILE", code="no-value")
    if "env" in given:
        given["env"] = ",".join(given["env"])
    tuner = made["tuner"].value
    sweep_dir = Path(given.pop("sweep_dir", f"runs/{Path(given['config']).stem}-{tuner}"))
    require(
        "factor" not in given or tuner == "hyperband",
        "--factor",
        f"--tuner {tuner} does not use it",
        fix="leave it out, or use --tuner hyperband",
        code="unused-option",
    )
    if tuner not in ("grid", "hyperband"):
        given.setdefault("max_trials", DEFAULT_MAX_TRIALS)
    return SweepOptions(**given, sweep_dir=sweep_dir, config_flags=config_flags)


def help_text(*, full: bool) -> str:
    """Return the text of ``--help``, or of ``--helpfull``."""
    return shown(_USAGE, flags_of(SweepOptions), full=full)
