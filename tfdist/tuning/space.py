"""Search space of a config file, complete before the first trial.

A config file says what is searched in one of two functions::

    def space(hp, config):
        config.optimizer = hp.Choice("optimizer", ["sgd", "adam"])
        with hp.conditional_scope("optimizer", ["sgd"]):
            if config.optimizer == "sgd":
                config.momentum = hp.Float("momentum", 0.5, 0.99)

or ``get_search_space()``, which returns a `keras_tuner.HyperParameters` whose names are fields.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import runpy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras_tuner

from tfdist.configs import check
from tfdist.configs.fields import flat, unknown
from tfdist.errors import TfdistError, UsageError, require

_Build = Callable[[Any, Any], object]


class SearchSpace:
    """All hyperparameters of a config file, and what a trial's values make of its configuration.

    Raises UsageError where the file has no space, an empty one, or one that does not run.
    """

    def __init__(self, path: str, config: Any) -> None:
        self._path = path
        self._config = config
        self._build = _load(path)
        self.hyperparameters = discover_space(self._built, keras_tuner.HyperParameters())
        require(
            self.hyperparameters.space,
            path,
            received="a search space without a hyperparameter",
            expected="one or more",
            fix='ask hp for a value in space(hp, config): hp.Float("dropout", 0.0, 0.5)',
            code="empty-space",
        )

    def description(self) -> list[dict[str, Any]]:
        """Return the space as JSON has it, to be written down and compared."""
        plain: list[dict[str, Any]] = json.loads(
            json.dumps(self.hyperparameters.get_config()["space"])
        )
        return plain

    def flags(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the ``--config.field=value`` that make a trial of these values.

        Raises UsageError where they make no configuration that can be run, or where the file asks
        for a hyperparameter that was not there before the first trial.
        """
        hp = self.hyperparameters.copy()
        hp.values = {k: v for k, v in values.items() if not k.startswith("tuner/")}
        known = len(hp.space)
        config = self._built(hp)
        if len(hp.space) > known:
            raise UsageError(
                self._path,
                received=f"hyperparameter {hp.space[known].name!r}, new in this trial",
                expected="a space that is known before the first trial",
                fix="ask for it under hp.conditional_scope(), whatever the values are",
                code="new-hyperparameter",
            )
        check(config)
        before, after = flat(self._config), flat(config)
        return tuple(
            f"--config.{name}={_text(value)}"
            for name, value in after.items()
            if value != before[name]
        )

    def _built(self, hp: Any) -> Any:
        config = copy.deepcopy(self._config)
        try:
            self._build(hp, config)
        except TfdistError:
            raise
        except Exception as error:
            raise _broken(self._path, error) from error
        return config


def _load(path: str) -> _Build:
    names = runpy.run_path(path)  # it has run before, for its configuration
    if callable(build := names.get("space")):
        return build
    if not callable(search_space := names.get("get_search_space")):
        raise UsageError(
            path,
            received="no search space",
            expected="a function space(hp, config) or get_search_space()",
            fix="copy it from configs/digits_sweep.py",
            code="no-space",
        )
    given = search_space()
    require(
        isinstance(given, keras_tuner.HyperParameters),
        path,
        received=f"a {type(given).__name__} from get_search_space()",
        expected="a keras_tuner.HyperParameters",
        fix="make one, and name its hyperparameters after fields",
        code="no-space",
    )

    def build_from(hp: Any, config: Any) -> None:
        hp.merge(given.space, overwrite=False)
        for one in given.space:
            if hp.is_active(one):
                set_field(config, one.name, hp.values[one.name])

    return build_from


def set_field(config: Any, name: str, value: object) -> None:
    """Set ``augmentation.random_flip``; raise UsageError for a field that does not exist."""
    if name not in flat(config):
        raise unknown(name, where="search space")
    group, _, field = name.rpartition(".")
    (config[group] if group else config)[field] = value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _broken(path: str, error: Exception) -> UsageError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f"{path}, line {frames[-1].lineno}" if frames else path
    said = " ".join(str(error).split())
    return UsageError(
        where,
        received=(frames[-1].line if frames else "") or "the search space",
        expected=f"a search space that runs ({type(error).__name__}: {said})",
        fix="correct the config file; configs/digits_sweep.py is an example",
        code="broken-space",
    )


# Search-space discovery: all hyperparameters, before the first trial.
#
# A program asks for some of them only where others have certain values: under a condition, an
# ``if``, or in a loop over a number of layers. So it is asked with other values than the defaults,
# too.

logger = logging.getLogger(__name__)

_MOST = 64
"""What is higher is a size and no count, and what is built of it may be too large to be tried."""

_LARGE = 10_000_000
"""A model of more parameters is given back before the next is built, which takes a moment."""

_LAST = 1 - 1e-9


def discover_space(build: Callable[[Any], object], known: Any) -> Any:
    """Return a `keras_tuner.HyperParameters` of all that are known and all that are asked for.

    `build(hp)` is called for each condition and each value that tells something: with nothing else
    changed, but what it took to be asked for the hyperparameter at all.
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
    """Add what `build` asks for only with other values than the defaults that the tuner has tried.

    What cannot be built has asked for its hyperparameters before; a trial of it fails by itself.
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
        if is_large:  # it refers to itself, and Python might look for such only after some more
            gc.collect()

    oracle.update_space(discover_space(build, oracle.get_space()))


def _others(space: Iterable[Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `values` with one more: each that tells something, of each of the hyperparameters."""
    for one in space:
        parents = {c.name: c.values[0] for c in one.conditions}
        for value in _telling(one):
            if value != one.default:
                yield {**values, **parents, one.name: value}


def _telling(one: Any) -> list[Any]:
    """Return the values of a hyperparameter on which others may depend.

    Each word and each switch; of numbers the ends, as each call may build a model.
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
    """Give every active hyperparameter its value, those not in `values` their default."""
    hp.values = {}
    for one in hp.space:
        if hp.is_active(one):
            hp.values[one.name] = values.get(one.name, one.default)
    for name, value in values.items():
        hp.values.setdefault(name, value)
