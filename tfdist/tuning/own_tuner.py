"""Checks of the user's tuner and program, as `search` requires them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner

from tfdist.cluster import read_environment
from tfdist.errors import UsageError, near, require
from tfdist.launch.options import Program
from tfdist.tuning.options import require_no_rule


def sweep_dir_of(tuner: Any, given: str | os.PathLike[str] | None) -> Path:
    """Return where a sweep with this tuner writes; raise UsageError for what is no tuner."""
    require(
        isinstance(tuner, keras_tuner.Tuner),
        "tfdist.tuning.search",
        received=f"a {type(tuner).__name__}",
        expected="a keras_tuner.Tuner, such as RandomSearch",
        fix="make one from the build function",
        code="no-tuner",
    )
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


def default_dir(tuner: Any) -> Path:
    """Return where a sweep with this tuner writes where nothing else is said."""
    return Path(f"{tuner.directory}/{tuner.project_name}-sweep")


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


def require_one_rule(tuner: Any, early_stop: str) -> None:
    """Raise UsageError for a rule beside hyperband's own."""
    if isinstance(tuner.oracle, keras_tuner.oracles.HyperbandOracle):
        require_no_rule(early_stop)


def of_epochs(tuner: Any) -> str | None:
    """Return the objective where nothing but the epochs of a fit can report it, else None."""
    fits = (tuner.run_trial, getattr(tuner.hypermodel, "fit", None))
    is_plain = all(getattr(one, "__module__", "").startswith("keras_tuner.") for one in fits)
    objective = tuner.oracle.objective
    return str(objective.name) if is_plain and type(objective) is keras_tuner.Objective else None


def require_validation(tuner: Any, fit_kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError for an objective of the validation where there is none.

    A callback might report it; then the first epoch tells.
    """
    objective = of_epochs(tuner) or ""
    data, split, callbacks = map(
        fit_kwargs.get, ("validation_data", "validation_split", "callbacks")
    )
    require(
        not objective.startswith("val_") or data is not None or split or callbacks,
        "objective",
        received=f"{objective!r} without data to validate on",
        expected="what the model reports",
        fix="give search validation_data or validation_split, or go by the training's figure",
        code="no-validation",
    )


def unreported(objective: str, there: Iterable[str]) -> UsageError:
    """Return what to raise where a trial reports only these."""
    there = list(there)
    return UsageError(
        "objective",
        received=f"{objective!r}{near(objective, there)}",
        expected=f"what the model reports: {', '.join(there)}",
        fix="name one of them, or add it to the metrics of model.compile",
        code="unreported-objective",
    )


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
            fix="put it into a file; in one process, use tuner.search with tuning.HyperModel",
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


def require_known(
    given: Iterable[str], *, own: Iterable[str], fit: Callable[[], Iterable[str]]
) -> None:
    """Raise UsageError for an argument that is neither fit's nor search's but almost so.

    Others may be those of a hypermodel's own fit.
    """
    own = list(own)
    for name in given:
        if (meant := near(name, own)) and name not in fit():
            raise UsageError(
                f"search(..., {name}=...)",
                received=f"{name}{meant}",
                expected="an argument of search or of fit",
                fix="correct the name",
                code="unknown-argument",
            )


def require_alone(environ: Mapping[str, str]) -> None:
    """Raise UsageError in one of several tasks, each of which would search."""
    config = read_environment(environ)
    if config is not None and len(config.cluster.tasks()) > 1:
        raise UsageError(
            "tfdist.tuning.search",
            received=f"a call in a {config.cluster.kind} job of several tasks",
            expected="one process, which starts a job for each trial",
            fix="start the program by itself, and name the strategy in search(strategy=...)",
            code="search-in-a-job",
        )
