"""Run fingerprint: the settings of optimizer and layers, compared on resuming.

Settings are the plain values of ``get_config``, lists of numbers, regularizers and constraints.
Left out is what may change between the attempts of a run, or does so by itself: names, seeds
(draws follow from the run's seed), the learning rate (the checkpoint's, or the program's schedule),
and whether a layer is trainable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.errors import UsageError

_FREE = frozenset(["name", "seed", "learning_rate", "trainable", "dtype", "initial_scale"])
_BY_CLASS = ("_regularizer", "_constraint")
_DIFFERENCES_SHOWN = 4
Settings = dict[str, Any]


def describe(model: keras.Model) -> dict[str, list[Settings]]:
    """Return the model's optimizers (from the outermost inwards), layers and losses, as JSON."""
    loss = getattr(model, "loss", None)
    return {
        "optimizer": [_settings(o) for o in _optimizers(model.optimizer)],
        "layer": [
            {**_settings(layer), "precision": layer.dtype_policy.name}
            for layer in model._flatten_layers(include_self=False, recursive=True)
        ],
        "loss": [_settings(each) for each in _each(loss)],
    }


def require_same(
    saved: Mapping[str, Sequence[Settings]] | None, mine: dict[str, list[Settings]], *, where: str
) -> None:
    """Raise UsageError that names the settings in which a saved run differs; None passes."""
    differences = [] if saved is None else list(_differences(saved, mine))
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise UsageError(
            where,
            received="a checkpoint of another configuration: "
            + "; ".join(differences[:_DIFFERENCES_SHOWN])
            + rest,
            expected="the optimizer and the layers it was saved with",
            fix="use another directory, or start from its weights with initial_weights",
        )


def _differences(
    saved: Mapping[str, Sequence[Settings]], mine: dict[str, list[Settings]]
) -> Iterator[str]:
    for group, now in mine.items():
        before = saved.get(group, [])
        if len(before) != len(now):
            yield f"{len(before)} {group}s -> {len(now)}"
            continue
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            if old["class"] != new["class"]:
                yield f"{group} {i} {old['class']} -> {new['class']}"
                continue
            for key in sorted({*old, *new}):
                if old.get(key) != new.get(key):
                    yield f"{group} {i} ({new['class']}) {key} {old.get(key)} -> {new.get(key)}"


def _optimizers(optimizer: Any) -> Iterator[Any]:
    while optimizer is not None:
        yield optimizer
        yield from getattr(optimizer, "optimizers", ())  # of a MultiOptimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _settings(thing: Any) -> Settings:
    if thing is None or isinstance(thing, str):
        return {"class": str(thing)}
    try:
        config = thing.get_config()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        config = {}  # a class of the user's own that says nothing of itself
    plain = _plain(config) if isinstance(config, dict) else {}
    return {**plain, "class": getattr(thing, "__name__", type(thing).__name__)}


def _each(loss: Any) -> list[Any]:
    return keras.tree.flatten(loss) if isinstance(loss, list | tuple | dict) else [loss]


def _plain(config: Settings) -> Settings:
    """Those of the settings that are compared, as JSON has them."""
    plain: Settings = {}
    for key, value in config.items():
        if key in _FREE:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            plain[key] = value
        elif _is_numbers(value):
            plain[key] = json.loads(json.dumps(value))  # tuples as lists
        elif key.endswith(_BY_CLASS) and isinstance(value, dict):
            plain[key] = {"class": value.get("class_name"), **_plain(value.get("config") or {})}
    return plain


def _is_numbers(value: Any) -> bool:
    """Return whether a setting is a list of numbers, or of such lists, as a layer's strides are."""
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return value is None or isinstance(value, bool | int | float)
