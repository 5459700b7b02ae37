"""Checks what a configuration is set to, wherever that was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.configs import FIELDS, base, check
from tfdist.configs.check import unknown
from tfdist.errors import UsageError
from tfdist.lint.findings import Finding, Place, of_error

_NAMES = frozenset(field.name for field in FIELDS)
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in FIELDS}
WITHOUT_PS = ("single", "mirrored", "multiworker")
_ONE_FIELD = ("CFG003", "CFG004", "CFG005", "CFG006", "CFG011", "CFG012")

_CODES: tuple[tuple[str, str], ...] = (
    (r"a field of tfdist\.configs", "CFG003"),
    (r"one of .*", "CFG005"),
    (r"at most total_examples .*", "CFG009"),
    (r"less than total_examples .*", "CFG010"),
    (r"\S+ or more|more than \S+|less than \S+", "CFG006"),
    (r"numbers.*", "CFG011"),
    (r"\(first, last\).*", "CFG012"),
    (r"0 without a validation_split", "CFG013"),
    (r"a value", "CFG007"),
    (r"an? .*|true or false|another type", "CFG004"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field that was set; `known` is whether `value` is what it will be for certain."""

    name: str
    value: Any
    place: Place
    known: bool = True


def code_of(error: UsageError) -> str:
    """Returns the rule for what tfdist.configs refuses."""
    for pattern, code in _CODES:
        if re.fullmatch(pattern, error.expected):
            return code
    return "CFG006"


def check_one(setting: Setting) -> Iterator[Finding]:
    """Yields why a field cannot have its value, whatever the others have."""
    if setting.name not in _NAMES:
        yield of_error("CFG003", setting.place, unknown(setting.name))
        return
    try:
        check(configuration({setting.name: setting.value}))
    except TypeError:
        default = _DEFAULTS[setting.name]
        kind = "int" if default is None else type(default).__name__
        yield Finding(
            code="CFG004",
            place=setting.place,
            received=f"{setting.value!r} for {setting.name}",
            expected=f"a value of type {kind}",
            fix=f"write it as the default is written: {default!r}",
        )
    except UsageError as error:
        if code_of(error) in _ONE_FIELD:
            yield of_error(code_of(error), setting.place, error)


def check_together(
    settings: Mapping[str, Setting], *, place: Place, replicas: int | None = None
) -> Iterator[Finding]:
    """Yields what is wrong with fields that are right one by one.

    `settings` has every field that was set; `place` is where a default is, that others contradict.
    """
    values = {**_DEFAULTS, **{s.name: s.value for s in settings.values() if s.known}}
    unsure = {s.name for s in settings.values() if not s.known}
    try:
        check(configuration({s.name: s.value for s in settings.values() if s.known}))
    except UsageError as error:
        if not _names_of(error) & unsure:
            yield of_error(code_of(error), _place(error, settings, place), error)
    yield from check_batch(settings, place=place, replicas=replicas)
    for code, names, received, expected, fix in _doubts(values, settings):
        if not unsure & set(names):
            at = next((settings[name].place for name in names if name in settings), place)
            yield Finding(code=code, place=at, received=received, expected=expected, fix=fix)


def check_batch(
    settings: Mapping[str, Setting], *, place: Place, replicas: int | None
) -> Iterator[Finding]:
    """Yields a global batch that has no example for some replica."""
    names = ("global_batch_size", "devices_per_worker")
    if any(name in settings and not settings[name].known for name in names):
        return
    batch, devices = (_value(settings, name) for name in names)
    least = max(replicas or 1, devices)
    if batch < least:
        at = next((settings[name].place for name in names if name in settings), place)
        yield Finding(
            code="CFG014",
            place=at,
            received=f"a global batch of {batch} for {least} replicas",
            expected=f"global_batch_size of {least} or more",
            fix="raise global_batch_size, or use fewer tasks or devices",
        )


def _doubts(
    values: Mapping[str, Any], settings: Mapping[str, Setting]
) -> Iterator[tuple[str, tuple[str, ...], str, str, str]]:
    """Yields rule, fields and texts of what tfdist.train takes, and nobody means."""
    fields: tuple[str, ...]
    total, batch = values["total_examples"], values["global_batch_size"]
    if values["strategy"] == "ps" and values["model"] == "resnet20":
        fix = "take cnn or dense, or another strategy"
        received = "resnet20, which has BatchNormalization, with strategy ps"
        yield "CFG015", ("model", "strategy"), received, "a model without it", fix
    if "momentum" in settings and values["optimizer"] != "sgd":
        received = f"momentum with optimizer {values['optimizer']}"
        fix = "take it out, or set optimizer to sgd"
        yield "CFG016", ("momentum", "optimizer"), received, "optimizer sgd", fix
    if total < batch:
        received = f"total_examples of {total} with a global batch of {batch}"
        fix = "raise total_examples: it is in examples, not in passes or steps"
        fields = ("total_examples", "global_batch_size")
        yield "CFG017", fields, received, "a run of a step or more", fix
    every, each = values["backup_every_steps"], total / max(values["checkpoints"], 1)
    if total >= batch and every and every * batch >= each:
        received = f"backup_every_steps of {every} in virtual epochs of {each / batch:.0f} steps"
        fields = ("backup_every_steps", "total_examples", "checkpoints", "global_batch_size")
        yield "CFG018", fields, received, "fewer steps than a virtual epoch has", "lower it"
    split = values["validation_split"]
    if split and split == values["train_split"] and not values["overfit_batches"]:
        fix = "name the split that is kept for it, as in test or train[90%:]"
        fields = ("validation_split", "train_split", "overfit_batches")
        yield "CFG020", fields, f"{split!r} for both splits", "examples of its own", fix
    if values["max_staleness"] is not None and values["strategy"] in WITHOUT_PS:
        received = f"max_staleness of {values['max_staleness']} with strategy {values['strategy']}"
        fix = "take it out, or set strategy to ps"
        yield "CFG023", ("max_staleness", "strategy"), received, "strategy ps", fix
    devices = values["devices_per_worker"]
    if values["strategy"] == "single" and devices > 1 and batch >= devices:
        received = f"devices_per_worker of {devices} with strategy single"
        fields = ("devices_per_worker", "strategy")
        yield "CFG021", fields, received, "1, or strategy mirrored", "set strategy to mirrored"


def configuration(values: Mapping[str, Any]) -> Any:
    """Returns base() with some fields set; TypeError for a value of another type."""
    config = base()
    for name, value in values.items():
        group, _, last = name.rpartition(".")
        (config[group] if group else config)[last] = value
    return config


def _value(settings: Mapping[str, Setting], name: str) -> Any:
    return settings[name].value if name in settings else _DEFAULTS[name]


def _names_of(error: UsageError) -> set[str]:
    """Returns the fields that an error speaks of."""
    said = f"{error.where.removeprefix('config.')} {error.expected}"
    return {name for name in _NAMES if re.search(rf"(?<![\w.]){re.escape(name)}\b", said)}


def _place(error: UsageError, settings: Mapping[str, Setting], place: Place) -> Place:
    first = error.where.removeprefix("config.")
    names = [first, *sorted(_names_of(error) - {first})]
    return next((settings[name].place for name in names if name in settings), place)
