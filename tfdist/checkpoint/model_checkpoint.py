"""`ModelCheckpoint`: Keras' own, written by the chief alone and never half."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from tfdist.files import one_line_errors, replacing


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
