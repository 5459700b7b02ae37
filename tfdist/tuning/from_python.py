"""`search`: a sweep with a user's own KerasTuner tuner, whose trials are jobs of the launcher."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras_tuner
import numpy as np

from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TfdistError, UsageError
from tfdist.launch.machine import this_machine
from tfdist.launch.multihost.hosts import environment_of_tasks
from tfdist.launch.target import imports_tensorflow
from tfdist.tuning import directory, journal, own_tuner
from tfdist.tuning.chief import SweepPlan
from tfdist.tuning.hosts import SweepAddress, sweep_address_of
from tfdist.tuning.journal import SweepState, Trial
from tfdist.tuning.options import NONE, RECONNECT_S, RunOptions, check_least
from tfdist.tuning.oracle import PROJECT, Search
from tfdist.tuning.own_tuner import imports_of, own_program, require_alone, require_known
from tfdist.tuning.remote_runner import RemoteRunner
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.space import complete_space
from tfdist.tuning.sweep_run import RETRAINED, Sweep, fork_template, launch_flags, run_sweep
from tfdist.tuning.trial_job import Assignment, Goal, TrialJob, read_assignment

_SETTINGS = ("max_epochs", "factor", "hyperband_iterations", "num_initial_points", "alpha", "beta")
"""What an oracle of KerasTuner's goes by, beside the space, the objective and the seed."""


_TELL_THEIR_SEED = (keras_tuner.RandomSearch, keras_tuner.GridSearch)


IMPORTS_OF_TRIALS = ("tfdist.tuning.inside", __name__, "tensorboard.plugins.hparams.api")
"""What each trial comes to import, the last by KerasTuner; but for the module that is run."""


def search(
    tuner: Any,
    *fit_args: Any,
    strategy: str = "single",
    workers: int = 1,
    ps: int = 1,
    devices_per_worker: int | None = None,
    parallel_trials: int = 1,
    sweep_dir: str | os.PathLike[str] | None = None,
    backup_every_steps: int | None = None,
    max_failed_trials: int | None = None,
    trial_timeout_s: float = math.inf,
    early_stop: str = NONE,
    retrain_best: bool = False,
    overwrite: bool = False,
    serve: str | None = None,
    join: str | None = None,
    rendezvous_token_file: str | None = None,
    reconnect_s: float = RECONNECT_S,
    **fit_kwargs: Any,
) -> None:
    """Do what ``tuner.search(*fit_args, **fit_kwargs)`` does; every trial is a job of its own.

    Each trial runs this program again, from its beginning to this call, under the strategy, and
    ends there. What comes behind the call runs in the sweep alone, with the tuner as after
    ``tuner.search``. The same program again goes on with a sweep that was broken off.

    Args:
      tuner: of any class of KerasTuner's or derived from one.
      strategy, workers, ps, devices_per_worker: of every trial, as in `tfdist.launch`.
      parallel_trials: trials at once; the CPUs and the GPUs are divided among them.
      sweep_dir: by default the tuner's directory and project name with ``-sweep`` added.
      backup_every_steps: how often a trial saves, beside the end of each epoch.
      max_failed_trials: end the sweep at so many; it raises TfdistError then.
      trial_timeout_s: a trial that finishes no epoch for so long is ended, and has failed.
      early_stop: ``median``: end a trial that is hopeless by the median stopping rule.
      retrain_best: train the best values anew in the end, and save ``best/model.keras``.
      overwrite: move an earlier sweep in `sweep_dir` aside. The tuner's own `overwrite` concerns
        what KerasTuner itself has written, and so nothing here.
      serve: ``host:port`` of this machine, where runners on other hosts come.
      join: ``host:port`` of a sweep's chief: this program is a runner of its, and ends here.
      rendezvous_token_file: the secret of chief and runners; else TFDIST_RENDEZVOUS_TOKEN.
      reconnect_s: for how long a runner looks for its chief.

    Raises:
      UsageError: before anything is started.
      TfdistError: too many trials have failed.
      StartupTimeout: a runner has not found its chief.
      SystemExit: in a trial, which is done; in a runner; in a sweep that was asked to stop.
    """
    require_known(fit_kwargs, own=inspect.signature(search).parameters, fit=_names_of_fit)
    options = RunOptions(
        sweep_dir=own_tuner.sweep_dir_of(tuner, sweep_dir),
        strategy=strategy,
        workers=workers,
        ps=ps,
        devices_per_worker=devices_per_worker,
        parallel_trials=parallel_trials,
        max_failed_trials=max_failed_trials,
        trial_timeout_s=trial_timeout_s,
        early_stop=early_stop,
        retrain_best=retrain_best,
        overwrite=overwrite,
        serve=serve,
        join=join,
        rendezvous_token_file=rendezvous_token_file,
        reconnect_s=reconnect_s,
    )
    check_least("backup_every_steps", backup_every_steps, 1)
    own_tuner.require_one_rule(tuner, early_stop)
    assignment = read_assignment(os.environ)
    if assignment is not None and assignment.belongs_to(options.sweep_dir):
        from tfdist.tuning.inside import run_assigned

        run_assigned(tuner, assignment, fit_args, fit_kwargs)
        sys.exit(EXIT_OK)
    own_tuner.require_fresh(tuner)
    if assignment is None:  # else a search before the one whose trial this is: it is finished
        require_alone(os.environ)
        own_tuner.require_validation(tuner, fit_kwargs)
        if join is not None:
            sys.exit(_join(options))
        asked = SweepRequest(options=options, backup_every_steps=backup_every_steps)
        fitting = {f"argument {n}": arg for n, arg in enumerate(fit_args, 1)} | fit_kwargs
        exit_code, state = _run_sweep(tuner, asked, fitting)
        _raise_unless_done(exit_code, state, options)
    else:
        complete_space(tuner)
    _take_over_results(tuner, options.sweep_dir)


def _run_sweep(
    tuner: Any, asked: SweepRequest, fitting: Mapping[str, Any]
) -> tuple[int, SweepState]:
    options = asked.options
    return run_sweep(
        Sweep(
            options=options,
            describe=lambda: _describe(tuner, options, fitting),
            search_of=lambda begun: _search(tuner, options.sweep_dir, begun),
            plan_of=lambda begun: plan_of(tuner, asked, seed=begun["seed"]),
            best_of=lambda trial, begun: best_of(tuner, asked, trial, seed=begun["seed"]),
            runner=_runner(options),
            first_seed=int(tuner.oracle.seed),
            sweep_address=_sweep_address(options),
        )
    )


def _join(options: RunOptions) -> int:
    """Run trials for a chief that runs this program too; return the exit code."""
    sweep_address, runner = _sweep_address(options), _runner(options)
    assert sweep_address is not None
    try:
        return RemoteRunner(options, runner, sweep_address=sweep_address).run()
    finally:
        runner.close()


def _sweep_address(options: RunOptions) -> SweepAddress | None:
    main: Any = sys.modules["__main__"]
    program = own_program(main, sys.argv[1:])
    return sweep_address_of(
        options,
        os.environ,
        program=program.target,
        program_file=main.__file__,
        args=program.args,
    )


def _runner(options: RunOptions) -> LauncherRunner:
    """Return what runs this program again for each trial, on this machine."""
    environ = environment_of_tasks(os.environ)
    machine = this_machine(environ)
    main: Any = sys.modules["__main__"]
    program = own_program(main, sys.argv[1:])
    is_plain = imports_tensorflow(program, search=[os.getcwd(), *sys.path])
    return LauncherRunner(
        program=("-m", "tfdist.tuning.trial", *program.python_args),
        launch_flags=(
            *launch_flags(options, cpus=machine.cpus),
            *("--start", "auto" if is_plain else "exec"),
        ),
        gpus=machine.gpus,
        places=options.parallel_trials,
        environ=environ,
        timeout_s=options.trial_timeout_s,
        warm=fork_template(
            options,
            machine=machine,
            environ=environ,
            modules=IMPORTS_OF_TRIALS,
            more=imports_of(Path(main.__file__).read_text(encoding="utf-8")),
        )
        if is_plain
        else None,
    )


def _names_of_fit() -> Iterable[str]:
    from tfdist.training.fitting import fit  # the trials need it, and it takes a moment

    return inspect.signature(fit).parameters


def _describe(tuner: Any, options: RunOptions, fitting: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sweep is; of the arguments of fit, those that JSON has."""
    complete_space(tuner)
    oracle = tuner.oracle
    if not isinstance(oracle.objective.name, str) or not oracle.objective.direction:
        raise UsageError(
            "objective", received=repr(oracle.objective), expected="one", fix="name one metric"
        )
    plain = (bool, int, float, str)
    space = json.loads(json.dumps(oracle.hyperparameters.get_config()["space"]))
    if not space:
        raise UsageError(
            "tfdist.tuning.search",
            received="a search space without a hyperparameter",
            expected="one or more",
            fix='ask hp for a value in build(hp): hp.Float("dropout", 0.0, 0.5)',
        )
    return {
        "tuner": type(tuner).__name__,
        "objective": oracle.objective.name,
        "direction": oracle.objective.direction,
        "strategy": options.strategy,
        "workers": options.workers,
        "ps": options.ps,
        "early_stop": options.early_stop,
        # Where none is given the oracle draws another at each start, and the first counts. Of the
        # other tuners it cannot be told whether one was given.
        "seed": (tuner.seed or None) if isinstance(tuner, _TELL_THEIR_SEED) else None,
        "max_trials": oracle.max_trials,
        "config": {
            **{f"tuner.{n}": str(getattr(oracle, n)) for n in _SETTINGS if hasattr(oracle, n)},
            "tuner.executions_per_trial": str(tuner.executions_per_trial),
            **{
                name: value
                for name, value in fitting.items()
                if isinstance(value, plain) and name != "verbose"
            },
        },
        "space": space,
    }


def _search(tuner: Any, sweep_dir: Path, begun: Mapping[str, Any]) -> Search:
    """Return the tuner's own oracle with the sweep's seed, and with no limit of its own."""
    oracle, seed = tuner.oracle, begun["seed"]
    oracle.seed = oracle._seed_state = seed
    oracle.max_trials = begun["max_trials"]
    oracle.max_consecutive_failed_trials = sys.maxsize  # it would raise with its lock held
    if isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        oracle._random_state, oracle.gpr = np.random.RandomState(seed), oracle._make_gpr()
    return Search(oracle, sweep_dir=sweep_dir)


def _raise_unless_done(exit_code: int, state: SweepState, options: RunOptions) -> None:
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        sys.exit(exit_code)
    if exit_code != EXIT_OK:
        why = state.finished
        if state.is_complete and not state.has_failed:
            log = options.sweep_dir / RETRAINED / "launch.log"
            why = f"the best trial could not be trained again; {log} says why"
        raise TfdistError(f"sweep {options.sweep_dir}: {why}")


def _take_over_results(tuner: Any, sweep_dir: Path) -> None:
    """Leave the tuner as its own search would, with the results of the sweep."""
    if not tuner.oracle.trials:  # the sweep was finished before
        lines = journal.read(sweep_dir / directory.JOURNAL)
        _search(tuner, sweep_dir, lines[0]).replay(lines)
    tuner.directory, tuner.project_name = str(sweep_dir), PROJECT


# Trials of a sweep from Python, as jobs of the launcher.

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """Request of a sweep from Python."""

    options: RunOptions
    backup_every_steps: int | None

    def assignment(
        self,
        trial: str,
        values: Mapping[str, Any],
        *,
        seed: int,
        run_dir: Path,
        checkpoints: Path,
        save_model: bool = False,
    ) -> Assignment:
        """Return what a trial is told."""
        return Assignment(
            sweep_dir=str(self.options.sweep_dir.absolute()),
            trial=trial,
            run_dir=str(run_dir.absolute()),
            checkpoints=str(checkpoints.absolute()),
            values=values,
            seed=seed,
            backup_every_steps=self.backup_every_steps,
            save_model=save_model,
        )


def plan_of(tuner: Any, asked: SweepRequest, *, seed: int) -> SweepPlan:
    """Return how the trials are run."""
    options, objective = asked.options, tuner.oracle.objective

    def variables_of(trial: Trial) -> dict[str, str]:
        trials = options.sweep_dir / directory.TRIALS
        first = _first_of(trial.id, tuner.oracle)
        return asked.assignment(
            trial.id,
            trial.values,
            seed=seed,
            run_dir=trials / trial.id,
            checkpoints=trials / first / _CHECKPOINTS,
        ).encode()

    return SweepPlan(
        sweep_dir=options.sweep_dir,
        objective=objective.name,
        direction=objective.direction,
        max_epochs=None,
        max_failed_trials=options.max_failed_trials,
        early_stop=options.early_stop,
        variables_of=variables_of,
    )


def best_of(tuner: Any, asked: SweepRequest, trial: Trial, *, seed: int) -> TrialJob:
    """Return the job that trains a trial's values from the beginning, hyperband's in full."""
    values, objective = dict(trial.values), tuner.oracle.objective
    if "tuner/epochs" in values:
        values |= {"tuner/epochs": tuner.oracle.max_epochs, "tuner/initial_epoch": 0}
        values.pop("tuner/trial_id", None)
    run_dir = asked.options.sweep_dir / RETRAINED
    assignment = asked.assignment(
        RETRAINED,
        values,
        seed=seed,
        run_dir=run_dir,
        checkpoints=run_dir / _CHECKPOINTS,
        save_model=True,
    )
    goal = Goal(objective=objective.name, direction=objective.direction)
    return TrialJob(run_dir=run_dir, flags=(), variables=assignment.encode(), goal=goal, place=0)


def _first_of(trial: str, oracle: Any) -> str:
    """Return the trial that this one continues, by way of others or not; else itself."""
    while past := oracle.trials[trial].hyperparameters.values.get("tuner/trial_id"):
        trial = past
    return trial
