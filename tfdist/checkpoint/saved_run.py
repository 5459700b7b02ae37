"""Checks that a checkpoint holds a run, with the types and shapes that `BackupAndRestore` writes.

Checksums detect damage but not forgery: an attacker can compute them for other content. After these
checks the rest of the package reads the metadata without further checks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.checkpoint.format import Array, Damaged, is_count, is_counts
from tfdist.checkpoint.store import Checkpoint, CheckpointStore, Location

_VARIABLE = re.compile(r"(weights|optimizer|metrics|states)/(0|[1-9]\d{0,8})")
_TYPES = {"seed": int, "stopped": bool, "fingerprint": dict, "variables": dict, "callbacks": dict}
_OF_LATER_VERSIONS = {"configuration": dict, "place": dict, "stages": dict, "seconds": float}


class RunStore(CheckpointStore):
    """Store of a run's checkpoints. A checkpoint with other content counts as damaged."""

    def _read(self, location: Location) -> Checkpoint:
        checkpoint = super()._read(location)
        check_run(checkpoint.meta, checkpoint.arrays)
        _require(checkpoint.meta["step"] == checkpoint.step, "step")
        return checkpoint


def check_run(meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Raise Damaged unless metadata and arrays belong to a run."""
    for name in ("step", "examples"):
        _require(is_count(meta.get(name)), name)
    for name, kind in _TYPES.items():
        _require(type(meta.get(name)) is kind, name)
    for name, kind in _OF_LATER_VERSIONS.items():
        _require(type(meta.get(name, kind())) is kind, name)
    _require(abs(meta["seed"]) < 1 << 63, "seed")
    _check_variables(meta["variables"], arrays)
    for group in meta.get("configuration", {}).values():
        _require(isinstance(group, list), "configuration")
        for settings in group:
            is_one = isinstance(settings, dict) and isinstance(settings.get("class"), str)
            _require(is_one, "configuration")
    logs = meta["fingerprint"].get("logs_before_validation", {})
    _require(isinstance(logs, dict) and all(map(_is_numbers, logs.values())), "fingerprint")
    stages = meta.get("stages", {})
    cuts = stages.get("cuts", {})
    _require(isinstance(cuts, dict), "stages")
    _require(all(map(is_counts, [*cuts.values(), stages.get("cut", [])])), "stages")
    if "cut_of" in stages:  # of tfdist 0.2.0
        cut_of = stages["cut_of"]
        _require(isinstance(cut_of, list) and len(cut_of) == 2 and "cut" in stages, "stages")
    size = stages.get("split_size")  # None: an option sets the size
    _require(size is None or (is_count(size) and size > 0), "stages")


def _check_variables(variables: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Raise Damaged unless each variable has an array, and `weights/0`, ... have no gap."""
    groups = Counter(name.partition("/")[0] for name in variables)
    for name, entry in variables.items():
        match = _VARIABLE.fullmatch(name)
        _require(match is not None and int(match[2]) < groups[match[1]], "variables")
        _require(isinstance(entry, list) and len(entry) == 3, "variables")
        path, shape, dtype = entry
        is_named = isinstance(path, str) and isinstance(dtype, str)
        _require(is_named and is_counts(shape) and name in arrays, "variables")
        # An array of a per-replica variable has an additional first axis of replicas.
        _require(tuple(shape) in (arrays[name].shape, arrays[name].shape[1:]), "variables")
    others = [name for name in arrays if not name.startswith("callbacks/")]
    _require(len(others) == len(variables), "arrays")


def _require(condition: object, name: str) -> None:
    if not condition:
        raise Damaged(f"manifest.json: {name!r} has an invalid value")


def _is_numbers(value: object) -> bool:
    """Return whether a JSON value is a number or an array of numbers."""
    try:
        return isinstance(value, int | float | list) and np.asarray(value, "float64").ndim < 64
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
