"""Checkpoints: the store, the callbacks that save and resume, and warm starts.

    format          the files of one checkpoint
    store           the directory of checkpoints, readable after a crash at any moment
    state           a model as arrays and back, its digests, and the configuration it belongs to
    callback_state  the state of callbacks as JSON
    backup          `BackupAndRestore`, which saves a run and resumes it, at what interval
    best            the best metric so far; `ModelCheckpoint`, and a model saved whole
    warm_start      weights of another run to begin with

Reading a checkpoint needs no TensorFlow; the callbacks load it when they are named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist.checkpoint.store import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from tfdist.checkpoint.backup import BackupAndRestore
    from tfdist.checkpoint.best import ModelCheckpoint
    from tfdist.checkpoint.warm_start import load_weights

_LAZY = {
    "BackupAndRestore": "backup",
    "ModelCheckpoint": "model_checkpoint",
    "load_weights": "warm_start",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"tfdist.checkpoint.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BackupAndRestore", "Checkpoint", "CheckpointStore", "ModelCheckpoint", "load_weights"]
