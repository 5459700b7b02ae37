"""State of callbacks as JSON: a small protocol, and adapters for the callbacks of Keras.

To save the state of your own callback, define ``get_state() -> JSON`` and ``set_state(state)``.
"""

from __future__ import annotations

import collections
import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.errors import UsageError, require
from tfdist.files import replacing

# The saved attributes of each class. The value is an example that shows the attribute's type.
_COUNT, _METRIC, _TEXT = 0, 0.0, ""
_ATTRIBUTES: dict[type, dict[str, Any]] = {
    keras.callbacks.EarlyStopping: {
        **{"monitor": _TEXT, "wait": _COUNT, "best": _METRIC},
        **{"best_epoch": _COUNT, "stopped_epoch": _COUNT},
    },
    keras.callbacks.ReduceLROnPlateau: {
        **{"monitor": _TEXT, "wait": _COUNT, "best": _METRIC, "cooldown_counter": _COUNT}
    },
    keras.callbacks.ModelCheckpoint: {
        **{"monitor": _TEXT, "best": _METRIC},
        **{"_batches_seen_since_last_saving": _COUNT, "_last_batch_seen": _METRIC},
    },
    keras.callbacks.OrbaxCheckpoint: {
        **{"monitor": _TEXT, "best": _METRIC, "_total_batches_seen": _COUNT},
        **{"_batches_seen_since_last_saving": _COUNT, "_last_batch_seen": _METRIC},
    },
    keras.callbacks.History: {"history": {}, "epoch": [_COUNT]},
    keras.callbacks.TensorBoard: {**{"_global_train_batch": _COUNT, "_global_test_batch": _COUNT}},
    keras.callbacks.SwapEMAWeights: {"_ema_weights_in_model": False},
    keras.callbacks.CSVLogger: {"keys": [_TEXT]},  # its columns, known after the first epoch
}


def get_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of callbacks by name: the class name and a number, like "History-0".

    The states are copies: callbacks may change during the write of a checkpoint. Callbacks without
    a state are left out. Raises UsageError for a state that JSON cannot hold.
    """
    states = {}
    for name, callback in with_names(callbacks):
        try:
            state = json.loads(json.dumps(_get(callback), default=_as_json))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name.partition('-')[0]}.get_state",
                f"JSON cannot hold the state ({error})",
                fix="return only numbers, strings, lists, arrays, and dicts with these values",
                code="not-saveable",
            ) from error
        if state is not None:
            states[name] = state
    return states


def set_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restore the state of each callback. Call it after `on_train_begin`, which resets the state.

    If a callback of Keras now monitors another metric, its state is not restored. For callbacks of
    Keras, only the attributes that `get_states` saves are set: a checkpoint may be untrusted.
    Raises UsageError for values of other types.
    """
    for name, callback in with_names(callbacks):
        if states.get(name) is not None and hasattr(callback, "set_state"):
            callback.set_state(states[name])
            continue
        state = _saved(name, callback, states)
        if state and ("monitor" not in state or state["monitor"] == callback.monitor):
            for attribute, value in state.items():
                setattr(callback, attribute, value)
            _set_direction(callback)
            if isinstance(callback, keras.callbacks.History):
                logged = callback.history.items()
                callback.history = {name: list(map(_as_array, values)) for name, values in logged}


def _saved(name: str, callback: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved attributes of a callback of Keras, empty for other callbacks."""
    state, known = states.get(name), _attributes_of(callback)
    if state is None or not known:
        return {}
    wrong = [state] if not isinstance(state, dict) else []
    wrong += [n for n in known if n in state and not _fits(state[n], known[n])] if not wrong else []
    require(
        not wrong,
        f"checkpoint: state of {name.partition('-')[0]}",
        f"the saved state has a value of a wrong type: {wrong[:1]!r:.80}",
        fix="use an intact checkpoint, or another directory",
        code="damaged",
    )
    return {attribute: state[attribute] for attribute in known if attribute in state}


def _attributes_of(callback: Any) -> dict[str, Any]:
    return next((known for kind, known in _ATTRIBUTES.items() if isinstance(callback, kind)), {})


def _fits(value: Any, like: Any) -> bool:
    """Return whether a JSON value has the type of the example `like`."""
    if isinstance(like, list):
        return value is None or (isinstance(value, list) and all(_fits(v, like[0]) for v in value))
    if isinstance(like, dict):
        return isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
    if isinstance(like, float):
        return value is None or type(value) in (int, float)
    return type(value) is type(like)


def _as_array(value: Any) -> Any:
    """Return a list of numbers as an array, and any other value unchanged."""
    if not isinstance(value, list):
        return value
    try:
        return np.asarray(value, "float32")
    except (TypeError, ValueError):
        return value


def _set_direction(callback: Any) -> None:
    """Set the better direction of the metric in a callback that saves models within epochs.

    Keras sets it at the end of the first epoch. If a best value is restored before, Keras fails.
    """
    savers = keras.callbacks.ModelCheckpoint | keras.callbacks.OrbaxCheckpoint
    if not isinstance(callback, savers) or callback.monitor_op is not None:
        return
    if callback.save_freq != "epoch" and callback.save_best_only and callback.best is not None:
        callback._set_monitor_op()


def best_weights(callbacks: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the best weights that EarlyStopping keeps, as arrays by name."""
    return {
        f"callbacks/{name}/{i}": np.array(weight)
        for name, callback in with_names(callbacks)
        if isinstance(callback, keras.callbacks.EarlyStopping)
        for i, weight in enumerate(callback.best_weights or [])
    }


def set_best_weights(callbacks: Sequence[Any], arrays: Mapping[str, Any]) -> None:
    """Restore the best weights of EarlyStopping. Raise UsageError for weights of another model."""
    for name, callback in with_names(callbacks):
        kept: list[Any] = []
        while (key := f"callbacks/{name}/{len(kept)}") in arrays:
            kept.append(arrays[key])
        if kept and isinstance(callback, keras.callbacks.EarlyStopping):
            shapes = [tuple(weight.shape) for weight in callback.model.weights]
            require(
                type(callback) is not keras.callbacks.EarlyStopping
                or [array.shape for array in kept] == shapes,
                "checkpoint: best weights of EarlyStopping",
                "the saved weights do not have the shapes of the model's weights",
                fix="use an intact checkpoint, or another directory",
                code="damaged",
            )
            callback.best_weights = kept


def with_names(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the callbacks with their names in a checkpoint: class name and number."""
    count: collections.Counter[str] = collections.Counter()
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        named.append((f"{kind}-{count[kind]}", callback))
        count[kind] += 1
    return named


def prepare_to_resume(callbacks: Sequence[Any], *, epoch: int) -> None:
    """Remove the lines from `epoch` on from CSV logs: the resumed run writes them again.

    Call it before `on_train_begin`. TensorBoard logs stay: TensorBoard shows a step's last event.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            is_mine = epoch or not callback.append  # append at epoch 0 keeps another run's lines
            if is_mine and os.path.exists(callback.filename):  # a log at a URL keeps all lines
                _cut(callback.filename, separator=callback.sep, epoch=epoch)
            callback.append = True


def _get(callback: Any) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    if isinstance(callback, keras.callbacks.TensorBoard):
        # A resumed run does not repeat the buffered events, so write them now.
        for writer in getattr(callback, "_writers", {}).values():
            writer.flush()
    names = _attributes_of(callback)
    return {n: getattr(callback, n) for n in names if hasattr(callback, n)} or None


def _as_json(value: Any) -> Any:
    """Convert arrays, tensors and variables to JSON values."""
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    raise TypeError(type(value).__name__)


def _cut(path: str, *, separator: str, epoch: int) -> None:
    """Remove the last lines of a CSV log from `epoch` on. Earlier lines may be another run's."""
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file, delimiter=separator) if row]
    while len(rows) > 1 and _epoch_of(rows[-1]) >= epoch:
        rows.pop()
    with replacing(Path(path)) as unfinished, open(unfinished, "w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)


def _epoch_of(row: Sequence[str]) -> float:
    """Return the epoch of a CSV line, or infinity if a power failure left no number."""
    try:
        return float(row[0])
    except ValueError:
        return math.inf
