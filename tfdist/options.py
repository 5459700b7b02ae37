"""Options of all programs. Each option is one field with its type, default, bounds and help.

Flags, ``TFDIST_*`` variables, the ``tfdist`` section of TF_CONFIG, the fields of a configuration
and the tables of the docs derive from these classes. The rooms add rules between options.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tfdist.errors import UsageError, near
from tfdist.kinds import AUTO, KINDS, Kind, kind_of, kinds_that
from tfdist.renamed import instead_of

if TYPE_CHECKING:
    from absl import flags

T = TypeVar("T")

STRATEGIES = (AUTO.name, *KINDS)
PLACES = ("local", "ssh", "slurm", "ray")
OPTUNA_PACKAGES = {
    "tpe": ("optuna",),
    "cmaes": ("optuna", "cmaes"),
    "gp": ("optuna", "scipy", "torch"),
}
"""Tuners of Optuna, and the packages that each needs."""
TUNERS = ("random", "grid", "bayesian", "hyperband", *OPTUNA_PACKAGES)
OBJECTIVES = {"val_accuracy": "max", "val_loss": "min", "accuracy": "max", "loss": "min"}
"""Metrics that a trial reports, and whether the maximum or the minimum is best."""

CLUSTER, HOSTS = "TFDIST_CLUSTER", "TFDIST_HOSTS"
NODE_RANK, LOCAL_RANK = "TFDIST_NODE_RANK", "TFDIST_LOCAL_RANK"
STRATEGY, PS, PORTS = "TFDIST_STRATEGY", "TFDIST_PS", "TFDIST_PORTS"
EVALUATOR, RUN_DIR = "TFDIST_EVALUATOR", "TFDIST_RUN_DIR"
STAGES = "TFDIST_STAGES"
RESTARTS, UNCOUNTED_RESTARTS = "TFDIST_RESTARTS", "TFDIST_RESTARTS_UNCOUNTED"
"""Variables with a task's earlier starts. An indexed Job of Kubernetes has two such counts."""
PLACE = {
    CLUSTER: "the only source to read: tf_config, mpi, slurm, hosts, skypilot, lws or "
    "sagemaker (none runs the process on its own)",
    HOSTS: "hosts of the job with the number of tasks on each (default: 1), as a:2,b:2 or n[1-4]:2",
    NODE_RANK: "index of this host in TFDIST_HOSTS, from 0 (default: the position of HOSTNAME)",
    LOCAL_RANK: "index of this task on its host, from 0",
    RESTARTS: "number of earlier starts of this task",
    UNCOUNTED_RESTARTS: "number of further earlier starts of this task",
}
"""Variables without a flag, with their help. They may differ between the tasks of a job."""
LAUNCHED = "_TFDIST_JOB"
"""Variable that tfdist's launcher sets in its tasks. Such a task reads only TF_CONFIG."""
TRIAL = "_TFDIST_TRIAL"
"""Variable with the trial of a sweep that a process of the user's program runs, as JSON."""

_MAX_TASKS = 10_000
_MAX_SECONDS = 1e9
_TYPES: Mapping[str, type[Any]] = {
    "int": Integral,
    "float": Real,
    "bool": bool,
    "str": str,
    "tuple": tuple,
    "Path": Path,
}
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "tuple": "a list of numbers",
    "Path": "a path",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """Name, type, default, bounds and help of one option."""

    name: str = ""
    type: str = ""
    default: Any = None
    help: str = ""
    """Text of ``--help``. An option without it has no flag."""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    strategies: tuple[str, ...] = ()
    """Strategies that use the option (empty: all)."""
    variable: str = ""
    """``TFDIST_*`` variable that sets the option in a task of another launcher."""
    repeated: bool = False
    """True for a flag whose values are collected."""
    submit: str | None = None
    """Help of the same flag in ``tfdist submit``, which has no such flag if it is `None`."""
    submit_default: str | None = None
    identifies: bool = False
    """True if a launcher's command with another value is another job for ``--resume``."""
    free: bool = False
    """True for a configuration field that may differ between two starts of the same run."""

    @property
    def bounds(self) -> str:
        """Return the bounds in words, "" without bounds."""
        forms = {
            "{:.12g} or more": self.least,
            "more than {:.12g}": self.above,
            "{:.12g} or less": self.most,
            "less than {:.12g}": self.below,
        }
        return "; ".join(form.format(bound) for form, bound in forms.items() if bound is not None)

    def fault(self, value: Any) -> str:
        """Return the sentence that states the problem of a value, or "" for a valid value."""
        if value is None and self.default is None:
            return ""
        shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
        if self.choices and value not in self.choices:
            return (
                f"{shown} is not one of {', '.join(self.choices)}{near(str(value), self.choices)}"
            )
        is_bool = isinstance(value, bool)
        if not isinstance(value, _TYPES[self.type]) or is_bool != (self.type == "bool"):
            return f"{shown} is not {_IN_WORDS[self.type]}"
        if self.default is None and isinstance(value, str) and not value.strip():
            return "the value is empty"
        if self.name in ("run_dir", "sweep_dir") and re.match(r"[a-z][a-z0-9+.-]+:/", str(value)):
            return f"{shown} is a URL, and the directory must be local (callbacks accept URLs)"
        if self.type not in ("int", "float") or value == self.default:
            return ""
        is_within = (
            -math.inf < value < math.inf
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return "" if is_within else f"{shown} is out of range ({self.bounds or 'finite'})"


def option(default: Any, help: str = "", **rules: Any) -> Any:
    """Return a dataclass field for an option. `MISSING` as the default makes it required."""
    return field(default=default, metadata={"option": Option(help=help, **rules)})


def _table(of: Any) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    for one in fields(of):
        if dataclasses.is_dataclass(one.default):
            for name, inner in _table(one.default).items():
                full = f"{one.name}.{name}"
                found[full] = dataclasses.replace(inner, name=full)
        elif "option" in one.metadata:
            kind = re.match(r"\w+", str(one.type))
            found[one.name] = dataclasses.replace(
                one.metadata["option"], name=one.name, type=kind and kind[0], default=one.default
            )
    return found


table: Callable[[Any], Mapping[str, Option]] = functools.cache(_table)
"""Return the options of a class by name. An option of a nested class is ``group.name``."""


def names_of(of: Any) -> list[str]:
    """Return the names of the flags of a class."""
    return [one.name for one in table(of).values() if one.help]


def check(options: Any, where: str, *, code: str, fix: str = "correct it") -> None:
    """Raise UsageError for the first invalid option. `where` is a format for an `Option`."""
    for name, one in table(type(options)).items():
        if fault := one.fault(getattr(options, name)):
            raise UsageError(where.format(one), fault, fix=fix, code=code)


def part(of: type[T], options: Any, **changes: Any) -> T:
    """Return the options of class `of` with the values of `options`, except for `changes`."""
    return of(**{one.name: getattr(options, one.name) for one in fields(of)} | changes)  # type: ignore[arg-type]


# Options of the tasks of a job


@dataclass(frozen=True, kw_only=True)
class _Shape:
    strategy: str = option(
        "auto",
        "kind of the job; auto decides by --ps, --stages, --workers and the devices",
        choices=STRATEGIES,
        variable=STRATEGY,
        identifies=True,
        submit="",
    )
    devices_per_worker: int | None = option(
        None,
        "devices of each worker (default: its part of the GPUs; one under ps and pipeline; or one "
        "CPU)",
        least=1,
        variable="TFDIST_DEVICES_PER_WORKER",
        identifies=True,
        submit="devices of each worker (all that it sees)",
    )

    @property
    def kind(self) -> Kind:
        """Return the kind of the strategy, `AUTO` if the tasks and devices decide."""
        return kind_of(self.strategy)


@dataclass(frozen=True, kw_only=True)
class JobOptions(_Shape):
    """Settings shared by all tasks of a job, which are the ``tfdist`` section of TF_CONFIG."""

    startup_timeout_s: float = option(
        60.0,
        "seconds that the tasks wait for each other at the start",
        above=0,
        most=_MAX_SECONDS,
        variable="TFDIST_STARTUP_TIMEOUT_S",
        submit="seconds that the tasks wait for each other at the start (300)",
        submit_default="300",  # a scheduler starts tasks at different times
    )
    min_workers: int | None = option(
        None,
        "fewest workers: to start (ps), to restart without lost hosts (multiworker), to continue "
        "(elastic) (default: all; elastic: 1)",
        least=1,
        strategies=kinds_that("has_servers") + kinds_that("can_shrink") + kinds_that("is_elastic"),
        variable="TFDIST_MIN_WORKERS",
        submit="",
    )
    run_dir: str | None = option(
        None,
        "directory to which the job writes (default: runs/<time>-<random>)",
        variable=RUN_DIR,
        submit="directory to which the job writes (Slurm: runs/NAME-JOBID; Kubernetes: NAME in the "
        "first --volume, or runs/NAME)",
    )
    attempt: int = option(1, least=1)
    """Number of this start of the job, from 1."""
    threads_per_task: int | None = option(
        None,
        "CPU threads of each task (default: the CPUs divided among the tasks)",
        least=1,
        submit="CPU threads of each task (--cpus)",
    )
    evaluator: bool = option(
        False,
        "add a task outside the training that evaluates each checkpoint",
        strategies=kinds_that("has_several_tasks"),
        variable=EVALUATOR,
        submit="",
    )
    split_bytes: int | None = option(
        None,
        "split trainable variables of more bytes over the parameter servers",
        least=1,
        strategies=kinds_that("has_servers"),
        variable="TFDIST_SPLIT_BYTES",
        identifies=True,
        submit="",
    )
    stages: int | None = option(
        None,
        "stages of each pipeline, with one task for each",
        least=1,
        strategies=kinds_that("has_stages"),
        variable=STAGES,
        identifies=True,
        submit="",
    )
    shards: int | None = option(
        None,
        "parts of each batch; the results depend on them (default: 4, or 8 if there are more than "
        "4 workers)",
        least=1,
        most=1024,
        strategies=kinds_that("is_elastic"),
        identifies=True,
    )
    ports: str | None = option(
        None,
        "ports that the tasks may use on each host, as 20000-20100 (default: any)",
        variable=PORTS,
        submit="",
    )
    control: str | None = option(None)
    """Name of the launcher's socket for the members of an elastic job."""
    probe_s: float | None = option(None, above=0)
    """Seconds after which the job's first `fit` ends the program, for a measurement."""

    def __post_init__(self) -> None:
        check(self, "tfdist.{0.name}", code="bad-value")


@dataclass(frozen=True, kw_only=True)
class _Counts:
    workers: int = option(
        1, "processes that compute", least=1, most=_MAX_TASKS, identifies=True, submit=""
    )
    ps: int | None = option(
        None,
        "parameter servers (default: 1 in a ps job)",
        least=0,
        most=_MAX_TASKS,
        strategies=kinds_that("has_servers"),
        variable=PS,
        identifies=True,
        submit="",
    )

    @property
    def num_ps(self) -> int:
        """Return the number of parameter servers in a ps job (default: 1)."""
        return self.ps or 1


@dataclass(frozen=True, kw_only=True)
class JobSettings(_Counts, JobOptions):
    """Settings of a job from its ``TFDIST_*`` variables: options and number of ps."""

    def __post_init__(self) -> None:
        check(self, "{0.variable}", code="bad-value", fix="correct it, or unset it")


# Flags


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """Hosts of a job or of a sweep."""

    hosts: str | None = option(
        None, "hosts with the number of tasks (tune: of trials) on each, as a:2,b:2"
    )
    on: str | None = option(
        None,
        "start the other hosts' agents as processes here, by ssh, by srun in a Slurm allocation, "
        "or as actors of a Ray cluster (default: ssh with --hosts, else local)",
        choices=PLACES,
    )
    rsh: str | None = option(
        None, "command of --on ssh that runs a shell command on {host} (default: ssh {host})"
    )
    env: str | None = option(
        None,
        "NAME,NAME: variables for the other hosts, besides TF_, KERAS_, TFDIST_ and similar names",
        repeated=True,
    )


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(HostFlags, JobSettings):
    """Flags of the launcher."""

    grace_s: float = option(
        10.0,
        "seconds for a task to exit before the launcher kills it",
        least=0,
        most=_MAX_SECONDS,
        submit="seconds between a task's stop signal and its end (60)",
        submit_default="60",
    )
    max_restarts: int = option(
        0,
        "restarts of a failed job",
        least=0,
        most=1_000_000,
        submit="restarts of a failed job (3)",
        submit_default="3",  # a scheduler replaces a lost node slowly
    )
    restart_window_s: float = option(
        3600.0, "seconds after which a restart does not count", above=0, most=_MAX_SECONDS
    )
    hang_timeout_s: float = option(
        300.0,
        "seconds after which a task counts as hanging, 2 or more (0: no check)",
        least=0,
        most=_MAX_SECONDS,
        submit="seconds that workers may run after one has exited, under Slurm (300)",
    )
    resume: bool = option(False, "continue the newest unfinished run of this command in runs/")
    elastic: bool = option(
        False,
        "let a multiworker job on CPUs continue if a worker is lost, with the same results (not "
        "with --on ray or slurm)",
        identifies=True,
    )
    metrics_port: int | None = option(
        None, "loopback port that serves metrics to Prometheus", least=1, most=65_535
    )
    verbosity: int = option(0, "absl's level of the launcher: -1 shows only warnings and failures")
    start: str = option(
        "auto",
        "start a new Python for each task, or import TensorFlow once and fork",
        choices=("auto", "exec", "fork"),
    )
    isolate: bool = option(
        False, "run the job in a private network, whose ports other processes cannot reach"
    )
    independent: bool = option(
        False, "let each task train its own model, in a program without make_strategy"
    )
    probe: bool = option(
        False,
        "train 20 s under single, mirrored, multiworker and ps, and print the examples per second",
    )
    dry_run: bool = option(
        False,
        "print each task's command and TF_CONFIG, and start no task",
        submit="print the script or the manifests, and submit nothing",
    )


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Flags of `tfdist.train`, besides its configuration."""

    verbosity: int = option(0, "absl's level: -1 shows warnings, 1 also debug messages")
    overwrite: bool = option(
        False, "move an earlier run or sweep in the directory aside, into old-1, old-2, ..."
    )


@dataclass(frozen=True, kw_only=True)
class TrialFlags(TrainFlags, HostFlags, _Counts, _Shape):
    """Flags for the jobs of a sweep's trials."""

    sweep_dir: Path = option(  # noqa: RUF009
        MISSING, "directory to which the sweep writes (default: runs/<config>-<tuner>)"
    )
    parallel_trials: int = option(1, "trials at once", least=1)
    strategy: str = option(
        "single",
        "strategy of every trial",
        choices=tuple(kind.name for kind in KINDS.values() if not kind.has_stages),
    )
    max_failed_trials: int | None = option(
        None, "end the sweep at this number of failed trials (default: never)", least=1
    )
    trial_timeout_s: float = option(
        math.inf, "seconds without progress after which a trial ends", above=0
    )
    backup_every_steps: int | None = option(None, least=1)
    """Steps between saves of a `tfdist.tuning.search` trial. A config file has its own field."""


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Flags for the search of `tfdist.tune`."""

    config: str = option(MISSING, "config file with space(hp, config)")
    tuner: str = option("random", "algorithm (Optuna: tpe, cmaes, gp)", choices=TUNERS)
    objective: str = option("val_accuracy", "metric of the best trial", choices=tuple(OBJECTIVES))
    max_trials: int | None = option(
        None, "trials of the search (default: all of grid and hyperband, else 20)", least=1
    )
    factor: int = option(3, "hyperband continues one in FACTOR trials", least=2)
    seed: int | None = option(
        None,
        "seed of the search and of every trial (default: drawn)",
        least=1,  # KerasTuner draws another seed for 0
    )
    show: str | None = option(None, "print the sweep in this directory and exit")
    best: str | None = option(None, "print the best trial of the sweep in this directory and exit")


# Configuration of `tfdist.train`


@dataclass(frozen=True, kw_only=True)
class _Augmentation:
    """Augmentation and normalisation of images, drawn from (seed, pass, example)."""

    random_crop_padding: int = option(
        0, "pixels of padding on each side before a random crop to the old size", least=0
    )
    random_flip: bool = option(False, "flip images from left to right, with probability 0.5")
    mean: tuple[float, ...] = option((0.0,), "value to subtract, per channel or one for all")
    std: tuple[float, ...] = option((1.0,), "value to divide by, per channel or one for all")


@dataclass(frozen=True, kw_only=True)
class TrainFields:
    """Fields of a configuration of `tfdist.train`."""

    dataset: str = option("tfdist_digits", "TFDS name (tfdist_digits needs no download)")
    data_dir: str = option("", "directory of the TFDS data ('': the default of TFDS)", free=True)
    train_split: str = option("train", "TFDS split, also with slices: 'train[:90%]'")
    validation_split: str = option("test", "TFDS split for the validation ('': no validation)")
    model: str = option(
        "cnn", "network (see tfdist/app/recipe.py)", choices=("dense", "cnn", "resnet20")
    )
    dropout: float = option(0.25, "fraction of units to drop", least=0, below=1)
    initial_weights: str = option(
        "", ".keras or .weights.h5 file, or checkpoint directory, to start from"
    )
    total_examples: int = option(28800, "length of the run in training examples", least=1)
    checkpoints: int = option(
        10, "number of virtual epochs, each with a validation, a log line and a save", least=1
    )
    global_batch_size: int = option(
        64, "examples per step over all replicas (ps: per step of a worker)", least=1
    )
    early_stopping_patience: int = option(
        0, "virtual epochs without a lower validation loss before the run stops (0: never)", least=0
    )
    optimizer: str = option("adam", "optimizer", choices=("sgd", "adam", "adamw"))
    learning_rate: float = option(0.001, "maximum learning rate", above=0)
    schedule: str = option(
        "constant",
        "learning rate over the run: constant, or to 0 along a cosine or a line",
        choices=("constant", "cosine", "linear"),
    )
    warmup_examples: int = option(
        0, "examples over which the learning rate rises (not with `linear`)", least=0
    )
    momentum: float = option(0.9, "Nesterov momentum of sgd", least=0, below=1)
    weight_decay: float = option(0.0, "decoupled weight decay", least=0)
    clip_norm: float = option(0.0, "maximum norm of all gradients (0: no limit)", least=0)
    precision: str = option(
        "float32", "Keras dtype policy", choices=("float32", "mixed_bfloat16", "mixed_float16")
    )
    seed: int | None = option(
        None,
        "seed of weights, order, augmentation and dropout (drawn and recorded if not set)",
        least=0,
        below=2**32,
    )
    augmentation: _Augmentation = _Augmentation()
    strategy: str = option("auto", "auto: the launcher's", choices=STRATEGIES, free=True)
    devices_per_worker: int = option(0, "replicas in each task (0: all)", least=0, free=True)
    run_dir: str = option("", "run directory ('': the launcher's, or in runs/)", free=True)
    backup_every_steps: int = option(
        0,
        "steps between further saves (0: save only at the end of each virtual epoch)",
        least=0,
        free=True,
    )
    save_model: bool = option(False, "save the trained model as model.keras", free=True)
    objective_file: str = option(
        "",
        "file for the metrics of each virtual epoch as name=value, which Katib reads ('': none)",
        free=True,
    )
    max_staleness: int | None = option(
        None,
        "under ps: most updates by other workers between a step's read and write (null: any)",
        least=0,
        free=True,
    )
    overfit_batches: int = option(
        0,
        "number of batches to train on, to check that the model can learn (0: all)",
        least=0,
    )


# Parsing, with absl.flags


def flags_of(of: type, *, prefix: str = "") -> flags.FlagValues:
    """Return the flags of a class. Each name begins with `prefix`."""
    from absl import flags  # 30 ms

    made = flags.FlagValues()
    made.set_gnu_getopt(False)  # parsing stops at the first word that is not a flag
    for one in table(of).values():
        name = prefix + one.name
        default = None if one.default is MISSING else one.default
        if one.type in ("tuple", "Path"):
            default = None if default is None else str(default)
        if not one.help:
            continue
        flag: Any
        if one.type == "bool":
            flag = flags.BooleanFlag(name, default, one.help)
        elif one.choices:
            flag = flags.EnumFlag(name, default, one.help, one.choices)
        elif one.repeated:
            parser = flags.ArgumentParser[str]()
            flag = flags.MultiFlag(parser, None, name=name, default=None, help_string=one.help)
        else:
            kinds = {"int": flags.IntegerParser, "float": flags.FloatParser}
            lower = one.least if one.above is None else one.above
            kind = kinds.get(one.type)
            parser = kind(lower, one.most) if kind else flags.ArgumentParser()
            flag = flags.Flag(parser, flags.ArgumentSerializer(), name, default, one.help)
        made[name] = flag
    return made


def read(made: flags.FlagValues, words: Sequence[str]) -> dict[str, Any]:
    """Parse `words` and return the values of the given flags.

    Raises:
        UsageError: A flag is unknown or its value is invalid. The message has the name of an
            unknown flag without its value, which may be a secret.
    """
    from absl import flags

    try:
        rest = made(["", *words])[1:]
    except (flags.Error, ValueError) as error:
        problem = " ".join(str(error).split()).removesuffix(" ?")
        where, code, fix = "command line", "command-line", "see --help"
        if found := re.fullmatch(r"flag (--[\w.]+)=(.*?): (.*)", problem):
            reason = ": ".join(map(str, error.__context__.args)) if error.__context__ else found[3]
            where, code = found[1], "bad-value"
            problem = reason if found[2] in reason else f"{found[2]!r} is invalid: {reason}"
        elif found := re.fullmatch(r"Missing value for flag (--[\w.]+)", problem):
            where, code = found[1], "no-value"
        elif isinstance(error, flags.UnrecognizedFlagError):
            code = "unknown-flag"
            fix = instead_of(f"--{error.flagname}") or fix
        raise UsageError(where, problem, fix=fix, code=code) from None
    if rest:
        problem = f"{rest[0]!r} is not a flag"
        raise UsageError("command line", problem, fix="see --help", code="unknown-flag")
    return {name: made[name].value for name in made if made[name].present}


def underscored(word: str, booleans: Collection[str] = ()) -> str:
    """Return a flag with underscores in its name, for ``--dry-run``, ``--no-dry-run`` or ``-h``."""
    name, equals, value = word.partition("=")
    name = "help" if name == "-h" else name.lstrip("-").replace("-", "_")
    if not name:
        return word
    if name.removeprefix("no_") in booleans:
        name = name.replace("no_", "no", 1)
    return f"--{name}{equals}{value}"


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether the flags ask for ``--help`` or ``--helpfull``."""
    return not {"-h", "--help", "--helpfull"}.isdisjoint(words)


def shown(usage: str, *parts: flags.FlagValues, full: bool = False) -> str:
    """Return a program's usage and its flags, with ``--helpfull`` also the flags of absl."""
    parsers = [part.get_help(include_special_flags=full) for part in parts]
    ours = "--help: show the flags of this program (--helpfull: absl's too)"
    return "\n\n".join([usage, *parsers, ours])
