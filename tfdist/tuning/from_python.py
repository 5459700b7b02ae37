"""`search`: a sweep with a user's own KerasTuner tuner, whose trials are jobs of the launcher."""

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

from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    TfdistError,
    UsageError,
    require,
)
from tfdist.launch.options import Program, imports_tensorflow
from tfdist.outputs.sweep_journal import JOURNAL, TRIALS, SweepState, Trial, read
from tfdist.tuning import sweep
from tfdist.tuning.options import NONE, RunOptions, require_no_rule
from tfdist.tuning.oracle import (
    PROJECT,
    Search,
    complete_space,
    default_dir,
    describe_space,
    own_fit,
)
from tfdist.tuning.sweep import RETRAINED, Sweep
from tfdist.tuning.trial_job import Assignment, TrialFailed, TrialProgram, read_assignment

# Checks of the user's tuner and program.


def sweep_dir_of(tuner: Any, given: str | os.PathLike[str] | None) -> Path:
    """Return where a sweep with this tuner writes; refuse the tuner's own directory."""
    if given is None:
        return default_dir(tuner)
    theirs = Path(tuner.directory, tuner.project_name).resolve()
    require(
        not Path(given).resolve().is_relative_to(theirs),
        "sweep_dir",
        received=f"{given}, in the tuner's own directory",
        expected="another one: with overwrite=True a tuner deletes its own when it is made",
        fix="leave it out, or give one beside it",
        code="directory-of-the-tuner",
    )
    return Path(given)


def require_fresh(tuner: Any) -> None:
    """Raise UsageError for a tuner that has searched."""
    require(
        not tuner.oracle.trials,
        "tfdist.tuning.search",
        received=f"a tuner that has searched already, {len(tuner.oracle.trials)} trials",
        expected="a new one; what a sweep has found is read from its sweep_dir",
        fix="give the tuner another project_name",
        code="tuner-has-searched",
    )


def require_known(tuner: Any, fit_kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that neither `search` nor the fit of the tuner has."""
    from tfdist.training.fitting import fit  # which a program that imports `search` may not need
    from tfdist.training.run import Run

    own = own_fit(tuner)
    signature = inspect.signature(own or fit)
    signature.bind_partial(**fit_kwargs)
    if not own:  # the others are settings of `tfdist.Run`
        Run(**{n: v for n, v in fit_kwargs.items() if n not in signature.parameters})


# Command line of the program that calls `search`, started again for each trial.


def own_program(main: Any, args: Sequence[str]) -> Program:
    """Return how the program whose main module this is was started, to start it again.

    Raises UsageError in an interactive session, which cannot be run again.
    """
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return Program(target=spec.name.removesuffix(".__main__"), args=tuple(args))
    if file is None:
        raise UsageError(
            "tfdist.tuning.search",
            received="a call from an interactive session or a notebook",
            expected="a program: each trial runs it again",
            fix="put it into a file; in one process, use tuner.search",
            code="no-program",
        )
    return Program(target=os.path.abspath(file), is_module=False, args=tuple(args))


def imports_of(source: str) -> list[str]:
    """Return the modules that a program imports at its top, as far as they are installed ones.

    Its own, beside it, are left out: each trial is to import these itself.
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
"""What an oracle of KerasTuner's goes by, beside the space, the objective and the seed."""

_TELL_THEIR_SEED = (keras_tuner.RandomSearch, keras_tuner.GridSearch)

IMPORTS_OF_TRIALS = ("tfdist.tuning.inside", __name__, "tensorboard.plugins.hparams.api")
"""What each trial comes to import, the last by KerasTuner; but for the module that is run."""

_CHECKPOINTS = "checkpoints"


def search(
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
    early_stop: str = NONE,
    retrain_best: bool = False,
    overwrite: bool = False,
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
      hosts, on: where trials run, as ``--hosts`` and ``--on`` of `tfdist.tune`; by default on this
        machine.
      sweep_dir: by default the tuner's directory and project name with ``-sweep`` added.
      backup_every_steps: how often a trial saves, beside the end of each epoch.
      max_failed_trials: end the sweep at so many; it raises TfdistError then.
      trial_timeout_s: a trial that finishes no epoch for so long is ended, and has failed.
      early_stop: ``median``: end a trial that is hopeless by the median stopping rule.
      retrain_best: train the best values anew in the end, and save ``best/model.keras``.
      overwrite: move an earlier sweep in `sweep_dir` aside. The tuner's own `overwrite` concerns
        what KerasTuner itself has written, and so nothing here.

    Raises:
      UsageError: before anything is started.
      TfdistError: too many trials have failed.
      SystemExit: in a trial, which is done; in a sweep that was asked to stop.
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
        early_stop=early_stop,
        retrain_best=retrain_best,
        overwrite=overwrite,
    )
    if isinstance(tuner.oracle, keras_tuner.oracles.HyperbandOracle):
        require_no_rule(early_stop)
    require(
        early_stop == NONE or getattr(tuner, "executions_per_trial", 1) == 1,
        "--early_stop",
        received=f"{early_stop} with several executions per trial",
        expected="one execution, of whose epochs there are medians",
        fix="leave one of both out",
        code="exclusive",
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
    if assignment is None:  # else a search before the one whose trial this is: it is finished
        sweep.require_alone("tfdist.tuning.search", os.environ)
        fitting = {f"argument {n}": arg for n, arg in enumerate(fit_args, 1)} | fit_kwargs
        exit_code, state = sweep.run(TunerSweep(tuner, options, _trial_program(), fitting))
        _raise_unless_done(exit_code, state, options.sweep_dir)
    else:
        complete_space(tuner)
    if not tuner.oracle.trials:  # the sweep was finished before
        lines = read(options.sweep_dir / JOURNAL)
        search_of(tuner, options.sweep_dir, lines[0]).replay(lines, is_over=True)
    tuner.directory, tuner.project_name = str(options.sweep_dir), PROJECT


class TunerSweep(Sweep):
    """A sweep over the space of a KerasTuner tuner; `fitting` has the arguments of the fit."""

    def __init__(
        self, tuner: Any, options: RunOptions, program: TrialProgram, fitting: Mapping[str, Any]
    ) -> None:
        super().__init__(options, program, os.environ)
        self.first_seed = int(tuner.oracle.seed)
        self._tuner = tuner
        self._fitting = fitting
        from tfdist.training.trackers import in_use  # as `fit` in `require_known`

        self.trackers = in_use(fitting.get("callbacks"))

    def describe(self) -> dict[str, Any]:
        """Return the sweep's description; of the arguments of fit, those that JSON has."""
        complete_space(self._tuner)
        tuner, oracle = self._tuner, self._tuner.oracle
        require(
            not hasattr(oracle.objective, "objectives"),  # which a MultiObjective adds up
            "objective",
            received=str(oracle.objective),
            expected="one",
            fix="name one metric",
            code="several-objectives",
        )
        where = "tfdist.tuning.search"
        space = describe_space(oracle.hyperparameters, where=where, function="build(hp)")
        names = ("strategy", "workers", "ps", "early_stop")
        settings = {n: str(getattr(oracle, n)) for n in _SETTINGS if hasattr(oracle, n)}
        settings["executions_per_trial"] = str(tuner.executions_per_trial)
        kinds = (bool, int, float, str)
        plain = {k: v for k, v in self._fitting.items() if isinstance(v, kinds) and k != "verbose"}
        return {
            "tuner": type(tuner).__name__,
            "objective": oracle.objective.name,
            "direction": oracle.objective.direction,
            **{name: getattr(self.options, name) for name in names},
            # Where none is given the oracle draws another at each start, and the first counts. Of
            # the other tuners it cannot be told whether one was given.
            "seed": (tuner.seed or None) if isinstance(tuner, _TELL_THEIR_SEED) else None,
            "max_trials": oracle.max_trials,
            "config": {"tuner": settings, **plain},
            "space": space,
        }

    def search(self, begun: Mapping[str, Any]) -> Search:
        return search_of(self._tuner, self.options.sweep_dir, begun)

    def variables_of(self, trial: Trial, seed: int, *, is_best: bool = False) -> dict[str, str]:
        """Return the assignment of a trial; it has the checkpoints of the trial that it continues.

        The best is trained from the beginning, hyperband's in full.
        """
        sweep_dir, oracle = self.options.sweep_dir.absolute(), self._tuner.oracle
        run_dir = first = sweep_dir / RETRAINED
        values = dict(trial.values)
        if not is_best:
            trials = sweep_dir / TRIALS
            run_dir, first = trials / trial.id, trials / _first_of(trial.id, oracle)
        elif "tuner/epochs" in values:
            values |= {"tuner/epochs": oracle.max_epochs, "tuner/initial_epoch": 0}
            values.pop("tuner/trial_id", None)
        return Assignment(
            sweep_dir=str(sweep_dir),
            trial=run_dir.name,
            run_dir=str(run_dir),
            checkpoints=str(first / _CHECKPOINTS),
            values=values,
            seed=seed,
            backup_every_steps=self.options.backup_every_steps,
            save_model=is_best,
        ).encode()


def _trial_program() -> TrialProgram:
    """Return this program, which each trial runs again."""
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
    """Return the tuner's own oracle, with the sweep's seed."""
    oracle, seed = tuner.oracle, begun["seed"]
    oracle.seed = oracle._seed_state = seed
    if isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        oracle._random_state, oracle.gpr = np.random.RandomState(seed), oracle._make_gpr()
    return Search(oracle, sweep_dir=sweep_dir, max_trials=begun["max_trials"])


def _raise_unless_done(exit_code: int, state: SweepState, sweep_dir: Path) -> None:
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        sys.exit(exit_code)
    if exit_code != EXIT_OK:
        why = state.finished
        if state.is_complete and not state.has_failed:
            log = sweep_dir / RETRAINED / "launch.log"
            why = f"the best trial could not be trained again; {log} says why"
        raise TfdistError(f"sweep {sweep_dir}: {why}")


def _first_of(trial: str, oracle: Any) -> str:
    """Return the trial that this one continues, by way of others or not; else itself."""
    while past := oracle.trials[trial].hyperparameters.values.get("tuner/trial_id"):
        trial = past
    return trial
