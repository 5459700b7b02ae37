"""How two descriptions of a search space differ, in words."""

from __future__ import annotations

from typing import Any


def differences(
    before: list[dict[str, Any]], now: list[dict[str, Any]], *, most: int = 3
) -> list[str]:
    """Returns what has changed between two descriptions of a space, a few words for each."""
    old, new = _by_name(before), _by_name(now)
    said = [f"{name} is new" for name in new if name not in old]
    said += [f"{name} is gone" for name in old if name not in new]
    for name in new:
        for key, value in new[name].items() if name in old else ():
            if old[name].get(key) != value:
                said.append(f"{name}.{key}={value!r} (there: {old[name].get(key)!r})")
    if not said and before != now:
        said = ["the order of the hyperparameters"]
    return [*said[:most], f"{len(said) - most} more"] if len(said) > most else said


def _by_name(description: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    named = {}
    for entry in description:
        config = dict(entry["config"])
        conditions = [condition["config"] for condition in config.pop("conditions")]
        scope = "".join(f" if {c['name']} in {c['values']}" for c in conditions)
        named[f"{config.pop('name')}{scope}"] = {"type": entry["class_name"], **config}
    return named
