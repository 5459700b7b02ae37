"""Selection of the best checkpoint by one metric, and models saved whole."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tfdist.errors import UsageError, near
from tfdist.files import one_line_errors, replacing

_LOG = logging.getLogger(__name__)
_LESS = ("loss", "error")
_MORE = ("acc", "auc", "precision", "recall", "f1", "iou", "r2", "similarity")


class Best:
    """Follows one metric of the logs; says when it is better than it ever was.

    Args:
      name: of the metric, as in the logs; None follows nothing.
      mode: "min", "max", or "auto", which goes by the name.

    Raises:
      UsageError: another mode, or "auto" with a name that does not tell.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self._name = name
        self._less = name is None or less_is_better(name, mode, where="BackupAndRestore: mode")
        self._value: float | None = None
        self._improved = False
        self._warned = False

    @property
    def improved(self) -> bool:
        """True between the end of an epoch that was the best so far and the next one's begin."""
        return self._improved

    def epoch_begins(self) -> None:
        """Forget the end of the epoch before."""
        self._improved = False

    def epoch_ends(self, logs: Mapping[str, Any]) -> None:
        """Look at an epoch's logs; raise UsageError where they can never have the metric."""
        if self._name is None or not self._is_in(logs):
            return
        value = float(logs[self._name])
        self._improved = is_better(value, self._value, less=self._less)
        if self._improved:
            self._value = value

    def get_state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to go on, as JSON."""
        return None if self._name is None else {"name": self._name, "value": self._value}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, unless that followed another metric."""
        if state.get("name") == self._name:
            self._value = state["value"]

    def _is_in(self, logs: Mapping[str, Any]) -> bool:
        name = self._name
        if name in logs:
            return True
        assert name is not None
        validated = any(key.startswith("val_") for key in logs)
        if validated or not name.startswith("val_"):
            raise UsageError(
                "BackupAndRestore: best",
                received=f"{name!r}{near(name, logs)}",
                expected=f"one of {', '.join(map(str, logs))}",
                fix="name a metric that fit logs at an epoch's end",
                code="unknown-value",
            )
        if not self._warned:
            _LOG.warning("an epoch without validation has no %s: it is not marked best", name)
            self._warned = True
        return False


def is_better(
    value: float | None, best: float | None, *, less: bool, min_delta: float = 0.0
) -> bool:
    """Return whether a metric beats the best so far by more than `min_delta`.

    None and what is not finite never do; the first value that is finite does.
    """
    if value is None or not math.isfinite(value):
        return False
    return best is None or (best - value if less else value - best) > min_delta


def less_is_better(name: str, mode: str, *, where: str) -> bool:
    """Return which way a metric gets better; UsageError at `where` where nothing tells."""
    less, more = name.endswith(_LESS), any(part in name for part in _MORE)
    if mode == "auto" and less != more:
        return less
    if mode in ("min", "max"):
        return mode == "min"
    raise UsageError(
        where,
        received=f"mode={mode!r} for {name!r}",
        expected='"min" or "max", or "auto" with a name that tells (val_loss, val_accuracy)',
        fix='say mode="min" where less of it is better, else mode="max"',
        code="unknown-direction",
    )


# `ModelCheckpoint`: Keras' own, written by the chief alone and never half.


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """What `keras.callbacks.ModelCheckpoint` does, with the same arguments, under every strategy.

    Only the chief writes. A file appears whole or not at all: it is written beside its place and
    renamed, so that a crash leaves the one before.

    Raises:
      TfdistError: the file cannot be written; one that was there before is untouched.
    """

    def set_model(self, model: keras.Model) -> None:
        """Take the model, seen through a view whose saves are atomic."""
        self._model = _Saving(model)


class _Saving:
    """A model as `ModelCheckpoint` uses it: whatever else is asked for is the model's."""

    def __init__(self, model: keras.Model) -> None:
        self._wrapped = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def save(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save(path, **options))

    def save_weights(self, filepath: str, **options: Any) -> None:
        _whole_or_not(filepath, lambda path: self._wrapped.save_weights(path, **options))


def save_whole(model: keras.Model, filepath: str | os.PathLike[str]) -> None:
    """Save a model as a file that appears whole or not at all; the chief calls it.

    Raises TfdistError where it cannot be written.
    """
    _whole_or_not(os.fspath(filepath), model.save)


def _whole_or_not(filepath: str, write: Any) -> None:
    with (
        one_line_errors(f"model: cannot write {filepath}"),
        replacing(Path(filepath)) as unfinished,
    ):
        write(str(unfinished))
