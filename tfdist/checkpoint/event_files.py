"""Keras' TensorBoard of a resumed training: what its event files have is not written once more."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


def write_once(board: keras.callbacks.TensorBoard) -> None:
    """Have the callback write only what comes after the last step of each tag in its files."""
    train, validation = (_last_steps(Path(board.log_dir, n)) for n in ("train", "validation"))
    both = {tag: min(train[tag], validation[tag]) for tag in train.keys() & validation.keys()}
    board._summary_module = _OnceOnly({**train, **validation, **both})


def flush(board: keras.callbacks.TensorBoard) -> None:
    """Write what it has kept back, which the steps after a checkpoint will not give again."""
    for writer in getattr(board, "_writers", {}).values():
        writer.flush()


class _OnceOnly:
    """`tf.summary`, of which a step that is there already writes nothing."""

    def __init__(self, last: Mapping[str, int]) -> None:
        self._last = last

    def __getattr__(self, name: str) -> Any:
        function = getattr(tf.summary, name)
        return self._if_new(function) if name in ("scalar", "histogram", "image") else function

    def _if_new(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def write_if_new(name: str, data: Any, *, step: Any, **options: Any) -> Any:
            is_new = int(step) > self._last.get(name, -1)
            return write(name, data, step=step, **options) if is_new else False

        return write_if_new


def _last_steps(directory: Path) -> dict[str, int]:
    """Return the last step of each tag in event files, of which a kill may have cut the last."""
    last: dict[str, int] = {}
    for path in directory.glob("events.out.tfevents.*"):
        try:
            for event in tf.compat.v1.train.summary_iterator(os.fspath(path)):
                for value in event.summary.value:
                    last[value.tag] = max(event.step, last.get(value.tag, -1))
        except tf.errors.DataLossError:
            continue
    return last
