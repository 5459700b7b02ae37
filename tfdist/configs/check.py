"""Validation of a configuration before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.configs.fields import FIELDS, Field, flat
from tfdist.errors import UsageError, near

if TYPE_CHECKING:
    from ml_collections import ConfigDict


def check(config: ConfigDict) -> None:
    """Raise UsageError for the first field that is unknown, missing or out of its range."""
    values = flat(config)
    known = {field.name: field for field in FIELDS}
    for name in values:
        if name not in known:
            raise unknown(name)
    for field in FIELDS:
        if field.name not in values:
            fix = "begin the config file with base()"
            raise _wrong(field, "nothing", "a value", fix, code="CFG007")
        _check_value(field, values[field.name])
    _check_together(values)


def unknown(name: str, *, where: str = "config") -> UsageError:
    """Return the error for a field that does not exist, with the one that may be meant."""
    names = [field.name for field in FIELDS]
    short = {known.rpartition(".")[2]: known for known in names}
    hint = near(name, names) or near(name.rpartition(".")[2], short)
    return UsageError(
        where,
        received=f"unknown field {name!r}{hint}",
        expected="a field of tfdist.configs",
        fix="see python -m tfdist.train --help for all of them",
        code="CFG003",
    )


def _check_value(field: Field, value: Any) -> None:
    if value is None:
        if field.optional_type is None:
            expected = f"a {type(field.default).__name__}"
            raise _wrong(field, "None", expected, "give it a value", code="CFG004")
        return
    if field.choices and value not in field.choices:
        hint = near(str(value), field.choices)
        expected = f"one of {', '.join(field.choices)}"
        raise _wrong(field, f"{value!r}{hint}", expected, "name one of them", code="CFG005")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    for holds, bound in (
        (field.least is None or value >= field.least, f"{field.least} or more"),
        (field.above is None or value > field.above, f"more than {field.above}"),
        (field.below is None or value < field.below, f"less than {field.below}"),
    ):
        if not holds:
            fix = f"choose another; it is: {field.help}"
            raise _wrong(field, value, bound, fix, code="CFG006")


def _check_together(values: dict[str, Any]) -> None:
    by_name = {field.name: field for field in FIELDS}

    def wrong(code: str, name: str, expected: str, fix: str) -> UsageError:
        return _wrong(by_name[name], values[name], expected, fix, code=code)

    total = values["total_examples"]
    if values["checkpoints"] > total:
        raise wrong("CFG009", "checkpoints", f"at most total_examples ({total})", "lower it")
    if values["warmup_examples"] >= total:
        raise wrong("CFG010", "warmup_examples", f"less than total_examples ({total})", "lower it")
    for name in ("augmentation.mean", "augmentation.std"):
        if not all(isinstance(number, (int, float)) for number in values[name]):
            raise wrong("CFG011", name, "numbers", "write (0.5,), or a number for each channel")
    if not all(values["augmentation.std"]):
        fix = "(1.0,) leaves images as they are"
        raise wrong("CFG011", "augmentation.std", "numbers other than 0", fix)
    steps = values["profile_steps"]
    if steps and not _is_span(steps):
        expected = "(first, last) with first < last, or ()"
        raise wrong("CFG012", "profile_steps", expected, "write (100, 120)")
    if values["early_stopping_patience"] and not values["validation_split"]:
        expected = "0 without a validation_split"
        raise wrong("CFG013", "early_stopping_patience", expected, "name one")


def _is_span(steps: tuple[Any, ...]) -> bool:
    whole = all(isinstance(step, int) for step in steps)
    return len(steps) == 2 and whole and 0 <= steps[0] < steps[1]


def _wrong(field: Field, received: Any, expected: str, fix: str, *, code: str) -> UsageError:
    where = f"config.{field.name}"
    return UsageError(where, received=received, expected=expected, fix=fix, code=code)
