"""Finding all hyperparameters of a search space before the first trial.

A program asks for some of them only where others have certain values: under a condition, an ``if``,
or in a loop over a number of layers. So it is asked with other values than the defaults, too.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_MOST = 64
"""What is higher is a size and no count, and what is built of it may be too large to be tried."""

_LARGE = 10_000_000
"""A model of more parameters is given back before the next is built, which takes a moment."""

_LAST = 1 - 1e-9


def explored(build: Callable[[Any], object], known: Any) -> Any:
    """Returns a `keras_tuner.HyperParameters` of all that are known and all that are asked for.

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
    """Adds what `build` asks for only with other values than the defaults that the tuner has tried.

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

    oracle.update_space(explored(build, oracle.get_space()))


def _others(space: Iterable[Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields `values` with one more: each that tells something, of each of the hyperparameters."""
    for one in space:
        parents = {c.name: c.values[0] for c in one.conditions}
        for value in _telling(one):
            if value != one.default:
                yield {**values, **parents, one.name: value}


def _telling(one: Any) -> list[Any]:
    """Returns the values of a hyperparameter on which others may depend.

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
    """Gives every active hyperparameter its value, those not in `values` their default."""
    hp.values = {}
    for one in hp.space:
        if hp.is_active(one):
            hp.values[one.name] = values.get(one.name, one.default)
    for name, value in values.items():
        hp.values.setdefault(name, value)
