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
from tfdist.renamed import instead_of

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
            raise UsageError(f"config.{name}", "the field is missing", fix=fix, code="CFG001")
        if fault := field.fault(values[name]):
            raise _wrong(name, fault, f"choose another value ({field.help})")
    _check_together(values)


def unknown(name: str, *, where: str = "config") -> UsageError:
    """Return the error for an unknown field, with the closest known field."""
    short = {known.rpartition(".")[2]: known for known in FIELDS}
    hint = near(name, FIELDS) or near(name.rpartition(".")[2], short)
    return UsageError(
        where,
        f"unknown field {name!r}{hint}",
        fix=instead_of(f"--config.{name}") or "see python -m tfdist.train --help for all fields",
        code="CFG003",
    )


def _wrong(name: str, problem: str, fix: str) -> UsageError:
    return UsageError(f"config.{name}", problem, fix=fix, code="CFG004")


def _check_together(values: dict[str, Any]) -> None:
    total, warmup = values["total_examples"], values["warmup_examples"]
    if values["checkpoints"] > total:
        problem = f"{values['checkpoints']} is above total_examples ({total})"
        raise _wrong("checkpoints", problem, "lower it")
    if warmup >= total:
        raise _wrong("warmup_examples", f"{warmup} is not below total_examples", "lower it")
    if warmup and values["schedule"] == "linear":
        fix = "set it to 0, or use schedule cosine"
        raise _wrong("warmup_examples", "schedule linear has no warmup", fix)
    for name, above in (("augmentation.mean", -math.inf), ("augmentation.std", 0)):
        if not values[name] or not all(
            isinstance(n, (int, float)) and above < n < math.inf for n in values[name]
        ):
            fix = "write a finite number for each channel, or one as (0.5,). std is above 0"
            raise _wrong(name, f"{values[name]} is not a list of valid numbers", fix)
    if values["early_stopping_patience"] and not values["validation_split"]:
        problem = "early stopping needs a validation_split"
        raise _wrong("early_stopping_patience", problem, "set validation_split")
