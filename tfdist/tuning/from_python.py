"""`search`: a sweep with the user's KerasTuner tuner that runs each trial as a launcher job."""

from __future__ import annotations

import ast
import inspect
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner
import numpy as np

from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TfdistError, UsageError, require
from tfdist.launch.options import Program, imports_tensorflow
from tfdist.outputs.sweep_journal import JOURNAL, TRIALS, SweepState, Trial, read
from tfdist.renamed import without_renamed
from tfdist.tuning import sweep
from tfdist.tuning.options import RunOptions
from tfdist.tuning.oracle import (
    PROJECT,
    Search,
    complete_space,
    default_dir,
    describe_space,
    own_fit,
)
from tfdist.tuning.sweep import Sweep
from tfdist.tuning.trial_job import Assignment, TrialFailed, TrialProgram, read_assignment

# Checks of the user's tuner and program.


def sweep_dir_of(tuner: Any, given: str | os.PathLike[str] | None) -> Path:
    """Return the sweep directory for a tuner. Raise UsageError for the tuner's own directory."""
    if given is None:
        return default_dir(tuner)
    theirs = Path(tuner.directory, tuner.project_name).resolve()
    require(
        not Path(given).resolve().is_relative_to(theirs),
        "sweep_dir",
        f"{given} is inside the tuner's directory, which a tuner with overwrite=True deletes",
        fix="leave sweep_dir out, or choose a directory outside",
        code="shared-directory",
    )
    return Path(given)


def require_fresh(tuner: Any) -> None:
    """Raise UsageError if the tuner already has trials."""
    require(
        not tuner.oracle.trials,
        "tfdist.tuning.search",
        f"the tuner already has {len(tuner.oracle.trials)} trials",
        fix="give the tuner another project_name",
        code="another-run",
    )


def require_known(tuner: Any, fit_kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that neither `search` nor the tuner's fit accepts."""
    from tfdist.training.fitting import fit  # imported here: not every caller needs it
    from tfdist.training.run_settings import Run

    own = own_fit(tuner)
    signature = inspect.signature(own or fit)
    signature.bind_partial(**fit_kwargs)
    if not own:  # the remaining arguments are settings of `tfdist.Run`
        Run(**{n: v for n, v in fit_kwargs.items() if n not in signature.parameters})


# Command line of the program that calls `search`. Each trial runs this command again.


def own_program(main: Any, args: Sequence[str]) -> Program:
    """Return the command that started the program with this main module.

    Raises UsageError in an interactive session, because a trial cannot run it again.
    """
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return Program(target=spec.name.removesuffix(".__main__"), args=tuple(args))
    if file is None:
        raise UsageError(
            "tfdist.tuning.search",
            "a trial cannot run an interactive session or a notebook again",
            fix="move the search to a .py file, or use tuner.search in one process",
            code="no-program",
        )
    return Program(target=os.path.abspath(file), is_module=False, args=tuple(args))


def imports_of(source: str) -> list[str]:
    """Return the installed packages that a program imports at its top level.

    Modules beside the program are left out. Each trial imports these modules itself.
    """
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name for name in dict.fromkeys(names) if _is_installed(sys.modules.get(name))]


def _is_installed(module: Any) -> bool:
    parts = Path(getattr(module, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


# The sweep.

_SETTINGS = ("max_epochs", "factor", "hyperband_iterations", "num_initial_points", "alpha", "beta")
"""Settings of KerasTuner's oracles, besides the search space, the objective and the seed."""

_TELL_THEIR_SEED = (keras_tuner.RandomSearch, keras_tuner.GridSearch)

IMPORTS_OF_TRIALS = ("tfdist.tuning.inside", __name__, "tensorboard.plugins.hparams.api")
"""Modules that each trial imports besides its main module. KerasTuner imports the last module."""

_CHECKPOINTS = "checkpoints"


@without_renamed("tuning.search")
def search(  # noqa: D417, PLR0913
    tuner: Any,
    *fit_args: Any,
    strategy: str = "single",
    workers: int = 1,
    ps: int = 1,
    devices_per_worker: int | None = None,
    parallel_trials: int = 1,
    sweep_dir: str | os.PathLike[str] | None = None,
    hosts: str | None = None,
    on: str | None = None,
    backup_every_steps: int | None = None,
    max_failed_trials: int | None = None,
    trial_timeout_s: float = math.inf,
    overwrite: bool = False,
    **fit_kwargs: Any,
) -> None:
    """Run ``tuner.search(*fit_args, **fit_kwargs)`` with each trial as a separate job.

    Each trial runs this program again under the strategy and exits at this call. Only the sweep's
    process runs the code after this call. The tuner is then in the same state as after
    ``tuner.search``. If the sweep was interrupted, run the same program again to resume it.

    Args:
      tuner: A KerasTuner tuner, also of a subclass.
      strategy, workers, ps, devices_per_worker: Settings of every trial, as in `tfdist.launch`.
      parallel_trials: Number of trials that run at once. They share the CPUs and GPUs (default: 1).
      hosts, on: Hosts of the trials, as ``--hosts`` and ``--on`` of `tfdist.tune` (default: this
        machine).
      sweep_dir: Sweep directory (default: tuner's directory and project name, plus ``-sweep``).
      backup_every_steps: Steps between saves of a trial. Each trial also saves after each epoch.
      max_failed_trials: Number of failed trials that ends the sweep with an error (default: none).
      trial_timeout_s: Seconds in which a trial must finish an epoch, or it fails (default: inf).
      overwrite: Whether to move an earlier sweep in `sweep_dir` aside. The tuner's own `overwrite`
        only affects files of KerasTuner.

    Raises:
      UsageError: An argument is invalid, or no host can start trials.
      TfdistError: Too many trials failed.
      SystemExit: The process runs a trial that is done, or the sweep was stopped by a signal.
    """
    options = RunOptions(
        sweep_dir=sweep_dir_of(tuner, sweep_dir),
        strategy=strategy,
        workers=workers,
        ps=ps,
        devices_per_worker=devices_per_worker,
        hosts=hosts,
        on=on,
        parallel_trials=parallel_trials,
        backup_every_steps=backup_every_steps,
        max_failed_trials=max_failed_trials,
        trial_timeout_s=trial_timeout_s,
        overwrite=overwrite,
    )
    require_known(tuner, fit_kwargs)
    assignment = read_assignment(os.environ)
    if assignment is not None and assignment.belongs_to(options.sweep_dir):
        from tfdist.tuning.inside import run_assigned

        try:
            run_assigned(tuner, assignment, fit_args, fit_kwargs)
        except Exception as error:
            raise TrialFailed from error
        sys.exit(EXIT_OK)
    require_fresh(tuner)
    if assignment is None:  # otherwise the trial belongs to a later search of this program
        sweep.require_alone("tfdist.tuning.search", os.environ)
        fitting = {f"argument {n}": arg for n, arg in enumerate(fit_args, 1)} | fit_kwargs
        exit_code, state = sweep.run(TunerSweep(tuner, options, _trial_program(), fitting))
        _raise_unless_done(exit_code, state, options.sweep_dir)
    else:
        complete_space(tuner)
    if not tuner.oracle.trials:  # the sweep had finished before this start
        lines = read(options.sweep_dir / JOURNAL)
        require(
            lines,
            "sweep_dir",
            f"in this trial, the program searches in {options.sweep_dir}, which has no sweep",
            fix="use a path that is the same in each run of the program, without the time",
            code="not-a-run",
        )
        search_of(tuner, options.sweep_dir, lines[0]).replay(lines, is_over=True)
    tuner.directory, tuner.project_name = str(options.sweep_dir), PROJECT


class TunerSweep(Sweep):
    """Sweep over the search space of a KerasTuner tuner. `fitting` holds the fit's arguments."""

    def __init__(
        self, tuner: Any, options: RunOptions, program: TrialProgram, fitting: Mapping[str, Any]
    ) -> None:
        super().__init__(options, program, os.environ)
        self.first_seed = int(tuner.oracle.seed)
        self._tuner = tuner
        self._fitting = fitting

    def describe(self) -> dict[str, Any]:
        """Return the sweep's description, with the fit's arguments that are JSON scalars."""
        complete_space(self._tuner)
        tuner, oracle = self._tuner, self._tuner.oracle
        require(
            not hasattr(oracle.objective, "objectives"),  # an attribute of MultiObjective
            "objective",
            f"a sweep has a single objective, got {oracle.objective}",
            fix="choose one metric",
            code="objective",
        )
        names = ("strategy", "workers", "ps")
        settings = {n: str(getattr(oracle, n)) for n in _SETTINGS if hasattr(oracle, n)}
        settings["executions_per_trial"] = str(tuner.executions_per_trial)
        kinds = (bool, int, float, str)
        plain = {k: v for k, v in self._fitting.items() if isinstance(v, kinds) and k != "verbose"}
        return {
            "tuner": type(tuner).__name__,
            "objective": oracle.objective.name,
            "direction": oracle.objective.direction,
            **{name: getattr(self.options, name) for name in names},
            # Without a seed, the oracle draws a seed at each start, and the sweep keeps the first.
            # Only these tuners show whether the user gave a seed.
            "seed": (tuner.seed or None) if isinstance(tuner, _TELL_THEIR_SEED) else None,
            "max_trials": oracle.max_trials,
            "config": {"tuner": settings, **plain},
            "space": describe_space(oracle.hyperparameters),
        }

    def search(self, begun: Mapping[str, Any]) -> Search:
        return search_of(self._tuner, self.options.sweep_dir, begun)

    def variables_of(self, trial: Trial, seed: int) -> dict[str, str]:
        """Return the assignment of a trial. A trial may continue another trial's checkpoints."""
        sweep_dir = self.options.sweep_dir.absolute()
        trials = sweep_dir / TRIALS
        return Assignment(
            sweep_dir=str(sweep_dir),
            trial=trial.id,
            run_dir=str(trials / trial.id),
            checkpoints=str(trials / _first_of(trial.id, self._tuner.oracle) / _CHECKPOINTS),
            values=dict(trial.values),
            seed=seed,
            backup_every_steps=self.options.backup_every_steps,
        ).encode()


def _trial_program() -> TrialProgram:
    main: Any = sys.modules["__main__"]
    program = own_program(main, sys.argv[1:])
    can_fork = imports_tensorflow(program, search=[os.getcwd(), *sys.path])
    source = Path(main.__file__).read_text(encoding="utf-8") if can_fork else ""
    return TrialProgram(
        command=("-m", "tfdist.tuning.trial", *program.python_args),
        launch_flags=("--start", "auto" if can_fork else "exec"),
        imports=IMPORTS_OF_TRIALS if can_fork else None,
        more_imports=tuple(imports_of(source)),
    )


def search_of(tuner: Any, sweep_dir: Path, begun: Mapping[str, Any]) -> Search:
    """Return a search that uses the tuner's oracle with the sweep's seed."""
    oracle, seed = tuner.oracle, begun["seed"]
    oracle.seed = oracle._seed_state = seed
    if isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        oracle._random_state, oracle.gpr = np.random.RandomState(seed), oracle._make_gpr()
    return Search(oracle, sweep_dir=sweep_dir, max_trials=begun["max_trials"])


def _raise_unless_done(exit_code: int, state: SweepState, sweep_dir: Path) -> None:
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        sys.exit(exit_code)
    if exit_code != EXIT_OK:
        raise TfdistError(f"sweep {sweep_dir}: {state.finished}")


def _first_of(trial: str, oracle: Any) -> str:
    """Return the first trial of the chain that this trial continues, or the trial itself."""
    while past := oracle.trials[trial].hyperparameters.values.get("tuner/trial_id"):
        trial = past
    return trial
