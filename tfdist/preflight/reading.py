"""Facts from JSON that another host has sent: of the right types, or not at all."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: type[T], value: object) -> T:
    """Returns the facts in `value`, what is missing having its default.

    Raises:
        ValueError: something is of another type, or has a name that `kind` does not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"no {kind.__name__}")
    hints = typing.get_type_hints(kind)
    if unknown := set(value) - set(hints):
        raise ValueError(f"{kind.__name__} with {sorted(map(str, unknown))[0]}")
    try:
        return kind(**{name: _one(hints[name], item) for name, item in value.items()})
    except TypeError:
        raise ValueError(f"{kind.__name__} without some of its parts") from None


def _one(hint: Any, value: object) -> object:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _one(next(kind for kind in inside if kind is not types.NoneType), value)
    if origin is tuple:
        return _several(inside, value)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast("type[Any]", hint), value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{type(value).__name__} for {hint.__name__}")
    return value


def _several(inside: tuple[Any, ...], value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{type(value).__name__} for a list")
    if inside[-1] is Ellipsis:
        return tuple(_one(inside[0], item) for item in value)
    if len(value) != len(inside):
        raise ValueError(f"{len(value)} parts of {len(inside)}")
    return tuple(_one(kind, item) for kind, item in zip(inside, value, strict=True))
