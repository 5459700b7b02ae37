"""One sweep of `tfdist.tune`, from checked options to its exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tfdist.configs.fields import FREE, flat
from tfdist.errors import UsageError
from tfdist.launch.machine import Machine
from tfdist.launch.multihost.hosts import environment_of_tasks
from tfdist.tuning import hosts
from tfdist.tuning.chief import SweepPlan
from tfdist.tuning.hosts import SweepAddress
from tfdist.tuning.journal import Trial
from tfdist.tuning.options import SweepOptions
from tfdist.tuning.remote_runner import RemoteRunner
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.sweep_run import RETRAINED, Sweep, fork_template, launch_flags, run_sweep
from tfdist.tuning.trial_job import Goal, TrialJob

if TYPE_CHECKING:  # they load KerasTuner, and with it TensorFlow
    from tfdist.tuning.oracle import Search
    from tfdist.tuning.space import SearchSpace


def run(
    options: SweepOptions,
    config: Any,
    *,
    machine: Machine,
    environ: Mapping[str, str],
) -> int:
    """Run a sweep, or go on with it; return the exit code.

    Args:
      config: what the config file and ``--config.FIELD`` say, before the search space.
      machine: whose CPUs and GPUs the trials share.
      environ: of the trials.

    Raises:
      UsageError: before anything is started.
      TfdistError: the sweep directory cannot be written.
    """
    _check(options, config)
    sweep_address = sweep_meeting(options, environ)

    @functools.cache
    def space() -> SearchSpace:
        return _space(options, config)

    exit_code, _ = run_sweep(
        Sweep(
            options=options,
            describe=lambda: describe(options, config, space()),
            search_of=lambda begun: _search(options, config, space(), begun),
            plan_of=lambda begun: _plan(options, config, space(), seed=begun["seed"]),
            best_of=lambda trial, begun: _best(
                options, _flags_of(trial, config=config, space=space(), seed=begun["seed"])
            ),
            runner=runner_of(options, machine=machine, environ=environ),
            sweep_address=sweep_address,
        )
    )
    return exit_code


def _space(options: SweepOptions, config: Any) -> SearchSpace:
    """Return the search space; the first time takes seconds, as KerasTuner loads TensorFlow."""
    with _silent_standard_error():  # TensorFlow writes four lines there, whatever its log level
        from tfdist.tuning.space import SearchSpace

    return SearchSpace(options.config, config)


@contextlib.contextmanager
def _silent_standard_error() -> Iterator[None]:
    """Drop what is written to standard error, by C++ too; an exception is printed later."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


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


def describe(options: SweepOptions, config: Any, space: SearchSpace) -> dict[str, Any]:
    """Return what the sweep is, as its journal begins."""
    values = {k: v for k, v in flat(config).items() if k not in FREE}
    return {
        "tuner": options.tuner,
        "objective": options.objective,
        "direction": options.direction,
        "factor": options.factor,
        "strategy": options.strategy,
        "workers": options.workers,
        "ps": options.ps,
        "seed": options.seed,
        "max_trials": options.max_trials,
        "early_stop": options.early_stop,
        "config": json.loads(json.dumps(values)),
        "space": space.description(),
    }


def _search(
    options: SweepOptions, config: Any, space: SearchSpace, begun: Mapping[str, Any]
) -> Search:
    from tfdist.tuning.oracle import Search, make_oracle

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
    return Search(oracle, sweep_dir=options.sweep_dir)


def _flags_of(trial: Trial, *, config: Any, space: SearchSpace, seed: int) -> tuple[str, ...]:
    flags = space.flags(trial.values)
    if config.seed is not None or any(f.startswith("--config.seed=") for f in flags):
        return flags
    return (*flags, f"--config.seed={seed}")


def _best(options: SweepOptions, flags: tuple[str, ...]) -> TrialJob:
    """Return the whole run with a trial's flags; the model is saved at its end."""
    return TrialJob(
        run_dir=options.sweep_dir / RETRAINED,
        flags=(*flags, "--config.save_model=true"),
        goal=Goal(objective=options.objective, direction=options.direction),
        place=0,
    )


def _plan(options: SweepOptions, config: Any, space: SearchSpace, *, seed: int) -> SweepPlan:
    return SweepPlan(
        sweep_dir=options.sweep_dir,
        objective=options.objective,
        direction=options.direction,
        max_epochs=config.checkpoints,
        max_failed_trials=options.max_failed_trials,
        early_stop=options.early_stop,
        flags_of=partial(_flags_of, config=config, space=space, seed=seed),
    )


# Trials of `tfdist.tune` as runs of `tfdist.train`, for the chief and its runners.


def runner_of(
    options: SweepOptions, *, machine: Machine, environ: Mapping[str, str]
) -> LauncherRunner:
    """Return what runs the trials on this machine."""
    environ = environment_of_tasks(environ)
    return LauncherRunner(
        program=("-m", "tfdist.train", f"--config={options.config}", *options.config_flags),
        launch_flags=launch_flags(options, cpus=machine.cpus),
        gpus=machine.gpus,
        places=options.parallel_trials,
        environ=environ,
        timeout_s=options.trial_timeout_s,
        warm=fork_template(options, machine=machine, environ=environ, modules=["tfdist.app.run"]),
    )


def sweep_meeting(options: SweepOptions, environ: Mapping[str, str]) -> SweepAddress | None:
    """Return where chief and runners meet; raise UsageError where there is no token."""
    return hosts.sweep_address_of(
        options,
        environ,
        program=options.config,
        program_file=options.config,
        args=options.config_flags,
    )


def join(options: SweepOptions, *, machine: Machine, environ: Mapping[str, str]) -> int:
    """Run trials for the chief of a sweep; return the exit code. Raises as `RemoteRunner.run`."""
    where = sweep_meeting(options, environ)
    assert where is not None, "no --join"
    here = runner_of(options, machine=machine, environ=environ)
    try:
        return RemoteRunner(options, here, sweep_address=where).run()
    finally:
        here.close()
