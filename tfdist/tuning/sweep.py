"""One sweep of `tfdist.tune`, from checked options to its exit code."""

from __future__ import annotations

import json
import logging
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tfdist.configs.fields import FREE, flat
from tfdist.errors import EXIT_OK, UsageError
from tfdist.tuning import directory
from tfdist.tuning.chief import Chief, Plan
from tfdist.tuning.journal import Journal
from tfdist.tuning.lock import ChiefLock
from tfdist.tuning.options import SweepOptions
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.screen import SweepScreen, leaderboard
from tfdist.tuning.search import Search, make_oracle
from tfdist.tuning.space import SearchSpace
from tfdist.tuning.state import Trial, fold

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run(
    options: SweepOptions,
    config: Any,
    *,
    cpus: int,
    gpus: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Runs a sweep, or goes on with it; returns the exit code.

    Args:
      config: what the config file and ``--config.FIELD`` say, before the search space.
      cpus, gpus: those that the trials share.
      environ: of the trials.

    Raises:
      UsageError: before anything is started.
      TfdistError: the sweep directory cannot be written.
    """
    _check(options, config)
    space = SearchSpace(options.config, config)
    directory.make(options.sweep_dir)
    with ExitStack() as stack:
        stack.enter_context(ChiefLock(options.sweep_dir))
        directory.prepare(options.sweep_dir, overwrite=options.overwrite)
        path = options.sweep_dir / directory.JOURNAL
        journal = Journal(path, time_of_day=time.time)
        _begin(options, config, space, journal)
        state = fold(journal.lines)
        if state.is_complete:
            logger.info("the sweep in %s is finished; --overwrite runs it again", path.parent)
            leaderboard(state, options.sweep_dir)
            return EXIT_OK
        _warn_if_crowded(options, cpus=cpus)
        search = _search(options, config, space, journal)
        runner = LauncherRunner(
            program=("-m", "tfdist.train", f"--config={options.config}", *options.config_flags),
            launch_flags=_launch_flags(options, cpus=cpus),
            gpus=gpus,
            places=options.parallel_trials,
            environ=environ,
            timeout_s=options.trial_timeout_s,
        )
        screen = stack.enter_context(SweepScreen(options.sweep_dir))
        plan = _plan(options, config, space, seed=state.begun["seed"])
        chief = Chief(plan, search=search, journal=journal, runner=runner, observer=screen)
        for signum in _STOP_SIGNALS:
            signal.signal(signum, lambda received, _: chief.stop(received))
        screen.begin(chief.state)
        exit_code = chief.run()
        screen.end(chief.state)
        return exit_code


def _check(options: SweepOptions, config: Any) -> None:
    if config.run_dir:
        raise UsageError(
            "config.run_dir",
            received=repr(config.run_dir),
            expected="''; every trial has a directory of its own in --sweep_dir",
            fix="leave it out, and give --sweep_dir",
        )
    if config.strategy not in ("auto", options.strategy):
        raise UsageError(
            "--strategy",
            received=f"{options.strategy} with config.strategy={config.strategy!r}",
            expected="the same, or 'auto' in the config file",
            fix=f"use --strategy {config.strategy}, or leave config.strategy out",
        )
    if options.objective.startswith("val_") and not config.validation_split:
        raise UsageError(
            "--objective",
            received=f"{options.objective} without a validation_split",
            expected="what a trial reports: accuracy, loss",
            fix="name a validation_split, or use --objective loss",
        )
    if options.tuner == "hyperband" and config.checkpoints < options.factor:
        raise UsageError(
            "config.checkpoints",
            received=f"{config.checkpoints} with --tuner hyperband --factor {options.factor}",
            expected=f"{options.factor} or more: trials are judged after some of them",
            fix=f"use --config.checkpoints={options.factor**2}",
        )


def _begin(options: SweepOptions, config: Any, space: SearchSpace, journal: Journal) -> None:
    """Writes down which sweep this is, or makes sure that it is the one that was."""
    values = {k: v for k, v in flat(config).items() if k not in FREE}
    now = {
        "tuner": options.tuner,
        "objective": options.objective,
        "direction": options.direction,
        "factor": options.factor,
        "strategy": options.strategy,
        "workers": options.workers,
        "ps": options.ps,
        "seed": options.seed,
        "max_trials": options.max_trials,
        "config": json.loads(json.dumps(values)),
        "space": space.description(),
    }
    if not journal.lines:
        seed = options.seed or random.SystemRandom().randrange(1, 2**31)
        journal.add("begun", **{**now, "seed": seed})
        return
    before = fold(journal.lines).begun
    directory.require_same(options.sweep_dir, before, now)
    if before["max_trials"] != options.max_trials:
        journal.add("extended", max_trials=options.max_trials)


def _search(options: SweepOptions, config: Any, space: SearchSpace, journal: Journal) -> Search:
    begun = journal.lines[0]
    oracle = make_oracle(
        options.tuner,
        hyperparameters=space.hyperparameters,
        objective=options.objective,
        direction=options.direction,
        seed=begun["seed"],
        max_trials=begun["max_trials"],
        max_epochs=config.checkpoints,
        factor=options.factor,
    )
    search = Search(oracle, sweep_dir=options.sweep_dir)
    search.replay(journal.lines)
    search.publish()
    return search


def _plan(options: SweepOptions, config: Any, space: SearchSpace, *, seed: int) -> Plan:
    def flags_of(trial: Trial) -> tuple[str, ...]:
        flags = space.flags(trial.values)
        if config.seed is not None or any(f.startswith("--config.seed=") for f in flags):
            return flags
        return (*flags, f"--config.seed={seed}")

    return Plan(
        sweep_dir=options.sweep_dir,
        parallel_trials=options.parallel_trials,
        objective=options.objective,
        direction=options.direction,
        max_epochs=config.checkpoints,
        max_failed_trials=options.max_failed_trials,
        flags_of=flags_of,
    )


def _launch_flags(options: SweepOptions, *, cpus: int) -> list[str]:
    threads = max(1, cpus // (options.parallel_trials * options.tasks_per_trial))
    flags = ["--strategy", options.strategy, "--workers", str(options.workers)]
    flags += ["--ps", str(options.ps)] if options.strategy == "ps" else []
    return [*flags, "--threads_per_task", str(threads)]


def _warn_if_crowded(options: SweepOptions, *, cpus: int) -> None:
    tasks = options.parallel_trials * options.tasks_per_trial
    if tasks > cpus:
        logger.warning(
            "%d trials at once are %d processes that compute, on %d CPUs: they share them",
            options.parallel_trials,
            tasks,
            cpus,
        )
