"""Configuration of `tfdist.train`: its fields, their defaults and valid values.

A config file starts from `base()` and changes some fields:

>>> def get_config():
...     config = base()
...     config.dataset = "mnist"
...     return config

Reading or checking a configuration does not import TensorFlow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tfdist.errors import UsageError, near
from tfdist.options import TrainFields, table

if TYPE_CHECKING:
    from ml_collections import ConfigDict

FIELDS = table(TrainFields)
"""Fields by name. A field of a group is ``group.field``."""

FREE = frozenset(name for name, field in FIELDS.items() if field.free)
"""Fields that may differ between two starts of the same run."""


def base() -> ConfigDict:
    """Return a locked `ConfigDict` of all fields with their defaults (a CNN on the digits)."""
    from ml_collections import config_dict

    config = config_dict.ConfigDict()
    for full, field in FIELDS.items():
        group, _, name = full.rpartition(".")
        if group and group not in config:
            config[group] = config_dict.ConfigDict()
        default = field.default
        if default is None:
            default = config_dict.placeholder(int)
        (config[group] if group else config)[name] = default
    return config.lock()


def flat(config: ConfigDict) -> dict[str, Any]:
    """Return the configuration as a flat dict: ``{"augmentation.random_flip": False, ...}``."""
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        nested = isinstance(value, dict)
        values.update({f"{name}.{k}": v for k, v in value.items()} if nested else {name: value})
    return values


def check(config: ConfigDict) -> None:
    """Raise UsageError for the first field that is unknown, missing or out of range."""
    values = flat(config)
    for name in values:
        if name not in FIELDS:
            raise unknown(name)
    for name, field in FIELDS.items():
        if name not in values:
            fix = "begin the config file with base()"
            raise UsageError(f"config.{name}", "the field is missing", fix=fix, code="CFG007")
        if fault := field.fault(values[name]):
            fix = f"choose another value ({field.help})"
            is_number = isinstance(values[name], (int, float)) and field.type != "bool"
            code = "CFG005" if field.choices else "CFG006" if is_number else "CFG004"
            raise UsageError(f"config.{name}", fault, fix=fix, code=code)
    _check_together(values)


def unknown(name: str, *, where: str = "config") -> UsageError:
    """Return the error for an unknown field, with the closest known field."""
    short = {known.rpartition(".")[2]: known for known in FIELDS}
    hint = near(name, FIELDS) or near(name.rpartition(".")[2], short)
    return UsageError(
        where,
        f"unknown field {name!r}{hint}",
        fix="see python -m tfdist.train --help for all fields",
        code="CFG003",
    )


def _check_together(values: dict[str, Any]) -> None:
    def wrong(code: str, name: str, problem: str, fix: str) -> UsageError:
        return UsageError(f"config.{name}", f"{values[name]} {problem}", fix=fix, code=code)

    total = values["total_examples"]
    if values["checkpoints"] > total:
        raise wrong("CFG009", "checkpoints", f"is above total_examples ({total})", "lower it")
    if values["warmup_examples"] >= total:
        problem = f"is not below total_examples ({total})"
        raise wrong("CFG010", "warmup_examples", problem, "lower it")
    if values["warmup_examples"] and values["schedule"] == "linear":
        problem = "needs another schedule than linear"
        raise wrong("CFG010", "warmup_examples", problem, "set it to 0, or use schedule cosine")
    for name in ("augmentation.mean", "augmentation.std"):
        numbers = [n for n in values[name] if isinstance(n, (int, float)) and math.isfinite(n)]
        if not numbers or len(numbers) < len(values[name]):
            fix = "write (0.5,), or a number for each channel"
            raise wrong("CFG011", name, "has no numbers, or a number that is not finite", fix)
    if min(values["augmentation.std"]) <= 0:
        fix = "use numbers above 0: (1.0,) does not change images"
        raise wrong("CFG011", "augmentation.std", "has a number that is not above 0", fix)
    if values["early_stopping_patience"] and not values["validation_split"]:
        problem = "needs a validation_split"
        raise wrong("CFG013", "early_stopping_patience", problem, "set validation_split")
