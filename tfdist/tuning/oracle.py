"""KerasTuner in a sweep: the oracle, and the search space, known in full before the first trial.

A config file defines the search space in a function::

    def space(hp, config):
        config.optimizer = hp.Choice("optimizer", ["sgd", "adam"])
        with hp.conditional_scope("optimizer", ["sgd"]):
            if config.optimizer == "sgd":
                config.momentum = hp.Float("momentum", 0.5, 0.99)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import logging
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras_tuner

from tfdist.configs import check, flat
from tfdist.configs.command_line import broken_file
from tfdist.errors import TfdistError, UsageError, near, require
from tfdist.files import one_line_errors, write_text
from tfdist.options import OPTUNA_PACKAGES
from tfdist.tuning.chief import RUNNING, NextTrial

_Build = Callable[[Any, Any], object]


class SearchSpace:
    """All hyperparameters of a config file, and the config flags for a trial's values.

    Raises UsageError if the file has no `space` function, or if it fails.
    """

    def __init__(self, path: str, config: Any) -> None:
        self._path = path.partition(":")[0]  # of file.py:argument
        self._config = config
        self._build = _load(self._path)
        self.hyperparameters = discover_space(self._built, keras_tuner.HyperParameters())
        self.description = describe_space(self.hyperparameters)

    def flags(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the ``--config.field=value`` flags of a trial with these values.

        Raises UsageError if the configuration is invalid, or if the file reads a hyperparameter
        that was unknown before the first trial.
        """
        hp = self.hyperparameters.copy()
        hp.values = {k: v for k, v in values.items() if not k.startswith("tuner/")}
        known = len(hp.space)
        config = self._built(hp)
        if len(hp.space) > known:
            raise UsageError(
                self._path,
                f"hyperparameter {hp.space[known].name!r} was unknown before the first trial",
                fix="read it in every call of space(hp, config), or under hp.conditional_scope()",
                code="search-space",
            )
        check(config)
        before, after = flat(self._config), flat(config)
        return tuple(
            f"--config.{name}={value}" for name, value in after.items() if value != before[name]
        )

    def asked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the file reads in a trial with these values."""
        hp = self.hyperparameters.copy()
        hp.values = dict(values)
        asked = record_asked(hp)
        with contextlib.suppress(UsageError):  # `flags` raises it
            self._built(hp)
        return asked

    def _built(self, hp: Any) -> Any:
        config = copy.deepcopy(self._config)
        try:
            self._build(hp, config)
        except TfdistError:
            raise
        except Exception as error:
            raise broken_file(self._path, error) from error
        return config


def record_asked(hp: Any) -> dict[str, Any]:
    """Return a mapping that records each value that a program reads from `hp` after this call."""
    asked = dict[str, Any]()
    retrieve, get = hp._retrieve, hp.get

    def recording_retrieve(one: Any) -> Any:
        value = retrieve(one)
        if hp.is_active(one):
            asked[one.name] = value
        return value

    def recording_get(name: str) -> Any:
        value = get(name)
        asked[hp._get_name(name)] = value
        return value

    hp._retrieve, hp.get = recording_retrieve, recording_get
    return asked


def describe_space(hyperparameters: Any) -> list[dict[str, Any]]:
    """Return a search space as JSON, for the journal."""
    return list(json.loads(json.dumps(hyperparameters.get_config()["space"])))


def _load(path: str) -> _Build:
    build: Any = runpy.run_path(path).get("space")  # the file ran before, to read the config
    require(
        callable(build),
        path,
        "the config file has no function space(hp, config)",
        fix="define it as in configs/digits_sweep.py",
        code="search-space",
    )
    return build


# Search-space discovery: find all hyperparameters before the first trial.
#
# A program may read a hyperparameter only if another one has a certain value: in a conditional
# scope, under an ``if``, or in a loop over a number of layers. Discovery therefore runs the
# program also with values other than the defaults.

logger = logging.getLogger(__name__)

_MOST = 64
"""Largest number that discovery tries. A larger number may be a size that exceeds the memory."""

_LARGE = 10_000_000
"""Number of parameters above which discovery frees a model before it builds the next model."""

_LAST = 1 - 1e-9


def discover_space(build: Callable[[Any], object], known: Any) -> Any:
    """Return a `keras_tuner.HyperParameters` with all known and all discovered hyperparameters.

    The function calls `build(hp)` for each condition and for each value that may activate other
    hyperparameters. A call changes only that value and the values that activate its hyperparameter.
    """
    known, seen, scopes = known.copy(), list[dict[str, Any]](), list[dict[str, Any]]()
    waiting = [*_others(known.space, {})] if known.space else [{}]
    while waiting:
        values, num_before = waiting.pop(0), len(known.space)
        seen.append(values)
        hp = known.copy()
        _fill(hp, values)
        build(hp)
        known.merge(hp.space, overwrite=False)
        met = [{c.name: c.values[0] for c in s} for s in (*hp.active_scopes, *hp.inactive_scopes)]
        new = [{**values, **scope} for scope in met if scope not in scopes]
        scopes += met
        new += _others(known.space[num_before:], values)
        for one in new:
            if one not in seen and one not in waiting:
                waiting.append(one)
    return known


def complete_space(tuner: Any) -> None:
    """Add the hyperparameters that `build` reads only with values other than the defaults.

    If `build` raises an error, the function adds the hyperparameters read before the error.
    """
    oracle = tuner.oracle
    if tuner.hypermodel is None or not (oracle.tune_new_entries and oracle.allow_new_entries):
        return

    def build(hp: Any) -> None:
        try:
            model = tuner.hypermodel.build(hp)
        except Exception as error:
            logger.debug("%s cannot be built: %s", hp.values, error)
            return
        is_large = getattr(model, "built", False) and model.count_params() > _LARGE
        del model
        if is_large:  # the model has reference cycles, which Python may collect too late
            gc.collect()

    oracle.update_space(discover_space(build, oracle.get_space()))


def _others(space: Iterable[Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `values` plus one non-default value, for each value that may activate others."""
    for one in space:
        parents = {c.name: c.values[0] for c in one.conditions}
        for value in _telling(one):
            if value != one.default:
                yield {**values, **parents, one.name: value}


def _telling(one: Any) -> list[Any]:
    """Return the values of a hyperparameter that may activate others.

    These are all strings and booleans, and the ends of a range up to `_MOST`. A Float has none.
    """
    match type(one).__name__:
        case "Choice" | "Boolean":
            values = list(one.values)
        case "Int":
            values = [one.prob_to_value(0.0), one.prob_to_value(_LAST)]
        case _:
            return []
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return values
    counts = [value for value in values if value <= _MOST]
    return sorted({min(counts), max(counts)}) if counts else []


def _fill(hp: Any, values: Mapping[str, Any]) -> None:
    """Set every active hyperparameter to its value in `values`, or to its default."""
    hp.values = {}
    for one in hp.space:
        if hp.is_active(one):
            hp.values[one.name] = values.get(one.name, one.default)
    for name, value in values.items():
        hp.values.setdefault(name, value)


# KerasTuner's oracle: it chooses the next trial and has a results directory.
#
# To restore an oracle, `Search.replay` repeats all requests and results of the journal. The
# oracle's files are incomplete: KerasTuner 1.4.8 does not save GridSearch's queue or the random
# state of BayesianOptimization. tfdist writes these files for users and never reads them.

PROJECT = "keras_tuner"
"""The name of the project in the sweep directory, for `keras_tuner.RandomSearch(..., directory,
project_name)`."""


class Search:
    """Search with a KerasTuner oracle: `ask` returns a trial, `tell` reports a result."""

    def __init__(self, oracle: Any, *, sweep_dir: Path, max_trials: int | None) -> None:
        self._oracle = oracle
        self._project = sweep_dir / PROJECT
        self._recorded: Mapping[str, Any] | None = None
        self._is_over = False
        self._populate = oracle.populate_space
        if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
            self._populate = functools.partial(self._next_of_grid, oracle.populate_space)
        oracle.verbose, oracle.max_trials = 0, max_trials
        # The oracle would raise while it holds its lock. The chief applies --max_failed_trials.
        oracle.max_consecutive_failed_trials = sys.maxsize
        oracle._set_project_dir(str(sweep_dir), PROJECT)
        oracle.populate_space = self._populate_space
        oracle.save = oracle._save_trial = _not_yet  # `publish` saves, after the journal

    def ask(self) -> NextTrial:
        """Return the next trial, or a status without a trial."""
        number = 0
        while f"runner-{number}" in self._oracle.ongoing_trials:
            number += 1
        trial = self._oracle.create_trial(f"runner-{number}")
        if trial.status != RUNNING:
            return NextTrial(status=trial.status)
        values = dict(trial.hyperparameters.values)
        return NextTrial(status=RUNNING, trial=trial.trial_id, values=values)

    def tell(self, ended: Mapping[str, Any]) -> None:
        """Report the status (COMPLETED or FAILED) and metrics of an ended trial to the oracle.

        Args:
          ended: Line of the journal. Values that the trial read but the oracle did not choose
            become values of the trial, as in KerasTuner.
        """
        name = ended["trial"]
        trial = self._oracle.trials[name]
        for asked, value in (ended.get("hyperparameters") or {}).items():
            trial.hyperparameters.values.setdefault(asked, value)
        objective, tracker = self._oracle.objective.name, trial.metrics
        for line in ended["history"]:
            if objective in line:
                metrics = {key: value for key, value in line.items() if key != "virtual_epoch"}
                for metric in metrics:
                    if metric != objective and not tracker.exists(metric):
                        try:  # KerasTuner makes the Keras metric to infer its direction
                            tracker.register(metric)
                        except Exception:  # for example MeanIoU, which needs arguments (1.4.8)
                            tracker.register(metric, direction="min")
                # KerasTuner counts steps from 0: its users train `best_step + 1` epochs.
                self._oracle.update_trial(name, metrics, step=int(line["virtual_epoch"]) - 1)
        trial = self._oracle.trials[name]
        trial.status, trial.message = ended["status"], ended["reason"] or None
        self._oracle.end_trial(trial)

    def replay(self, lines: Iterable[Mapping[str, Any]], *, is_over: bool = False) -> None:
        """Repeat all requests and results of a journal, to restore the oracle's state.

        With `is_over`, no further request follows, so the oracle does not compute values.
        """
        self._is_over = is_over
        for line in lines:
            if line["event"] == "asked":
                self._recorded = line
                self.ask()
                self._recorded = None
            elif line["event"] == "ended":
                self.tell(line)
            elif line["event"] == "extended":
                self._oracle.max_trials = line["max_trials"]

    def publish(self, trials: Iterable[str] | None = None) -> None:
        """Write KerasTuner's files for some trials (default: all), or raise TfdistError."""
        with one_line_errors(self._project):
            self._project.mkdir(exist_ok=True)
            for name in self._oracle.trials if trials is None else trials:
                directory = self._project / f"trial_{name}"
                directory.mkdir(exist_ok=True)
                _write(directory / "trial.json", self._oracle.trials[name].get_state())
            _write(self._project / "oracle.json", self._oracle.get_state())
            _write(self._project / "tuner0.json", {})

    def _populate_space(self, trial_id: str) -> dict[str, Any]:
        """Return the oracle's answer, or in a replay the recorded answer."""
        line = self._recorded
        recorded = None if line is None else {"status": line["status"], "values": line["values"]}
        if recorded is not None and self._is_over:
            return recorded
        self._oracle.recorded = recorded and recorded["values"]  # for `OptunaOracle`
        answer = dict(self._populate(trial_id))
        if answer.get("values"):
            answer["values"] = {k: _plain(v) for k, v in answer["values"].items()}
        if recorded is None:
            return answer
        if recorded["status"] == RUNNING and answer.get("values") != recorded["values"]:
            text = "trial %s: KerasTuner now chooses other values; keeping the recorded values"
            logger.warning(text, trial_id)
        return recorded

    def _next_of_grid(self, populate: Callable[[str], Any], trial_id: str) -> dict[str, Any]:
        """Return the next trial of GridSearch, also while its last trial still runs.

        GridSearch waits for its last trial, because that trial may add hyperparameters. In a
        sweep, the search space is already complete.
        """
        if self._recorded is not None and self._recorded["status"] != RUNNING:
            return {"status": self._recorded["status"], "values": None}
        answer = dict(populate(trial_id))
        if answer["status"] == RUNNING:
            self._oracle._populate_next.append(trial_id)
        return answer


def make_oracle(
    tuner: str, objective: str, direction: str, *, max_epochs: int, factor: int, **options: Any
) -> Any:
    """Return the oracle of that name. Only hyperband uses `max_epochs` and `factor`."""
    options["objective"] = keras_tuner.Objective(objective, direction)
    if tuner in OPTUNA_PACKAGES:
        from tfdist.tuning.optuna_oracle import OptunaOracle

        return OptunaOracle(tuner, **options)
    if tuner == "hyperband":
        options |= {"max_epochs": max_epochs, "factor": factor}
    kinds = {
        "random": keras_tuner.oracles.RandomSearchOracle,
        "grid": keras_tuner.oracles.GridSearchOracle,
        "bayesian": keras_tuner.oracles.BayesianOptimizationOracle,
        "hyperband": keras_tuner.oracles.HyperbandOracle,
    }
    return kinds[tuner](**options)


def _not_yet(*_: object) -> None:
    """Replace the oracle's save functions, because their writes are not atomic."""


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python value, so that JSON can store it."""
    return value.item() if hasattr(value, "item") else value


def _write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content), durable=False)


# Functions for the user's tuner.


def default_dir(tuner: Any) -> Path:
    return Path(f"{tuner.directory}/{tuner.project_name}-sweep")


def own_fit(tuner: Any) -> Callable[..., Any] | None:
    """Return the user's `run_trial` or `fit`, or `None` if both are KerasTuner's."""
    fits = (tuner.run_trial, getattr(tuner.hypermodel, "fit", None))
    own = (one for one in fits if one and not one.__module__.startswith("keras_tuner."))
    return next(own, None)


def of_epochs(tuner: Any) -> str | None:
    """Return the objective if only the epochs of a fit can report it, otherwise `None`."""
    objective = tuner.oracle.objective
    is_one = own_fit(tuner) is None and type(objective) is keras_tuner.Objective
    return str(objective.name) if is_one else None


def unreported(objective: str, there: Iterable[str]) -> UsageError:
    """Return the error for a trial that reports only these metrics, without the objective."""
    there = list(there)
    return UsageError(
        "objective",
        f"the model reports {', '.join(there)}, not {objective!r}{near(objective, there)}",
        fix="choose a reported metric, or add it to the metrics of model.compile",
        code="objective",
    )
