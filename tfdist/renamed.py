"""Names of the previous release and their replacements, for one release."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tfdist.errors import UsageError

RENAMED = {
    "BackupAndRestore(directory=)": "backup_dir=",
    "BackupAndRestore(every=)": 'save_freq="auto"',
    "BackupAndRestore(every_steps=)": "save_freq=, with the number of steps",
    "BackupAndRestore(publish=)": "tfdist.PublishModel(directory), a callback of its own",
    "BackupAndRestore(publish_model=)": "tfdist.PublishModel(directory, model=...)",
    "data.Normalize": "data.Normalization",
    "data.RandomCrop(size=)": "data.RandomCrop(height, width)",
    "data.RandomFlip(horizontal=)": 'data.RandomFlip("horizontal")',
    "data.RandomFlip(vertical=)": 'data.RandomFlip("vertical"), or "horizontal_and_vertical"',
    "data.Rescale": "data.Rescaling",
    "data.load": "data.from_tfds",
    "load_weights(path=)": "filepath=",
}
"""Replacement of each old name or argument, both without the prefix ``tfdist.``."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refuse_renamed(*names: str) -> None:
    """Raise UsageError for the first name in `RENAMED`, with its replacement."""
    for name in names:
        if name in RENAMED:
            raise UsageError(
                f"tfdist.{name}",
                "this name is from an earlier release",
                fix=f"write {RENAMED[name]}",
                code="renamed",
            )


def without_renamed(owner: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator whose function raises UsageError for renamed arguments of `owner`."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            refuse_renamed(*(f"{owner}({name}=)" for name in kwargs))
            return function(*args, **kwargs)

        return call

    return decorate
