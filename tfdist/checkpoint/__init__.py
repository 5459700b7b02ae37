"""Checkpoints: the store, the callbacks that save and resume, and warm starts.

    format          files of a checkpoint
    store           crash-safe directory of checkpoints
    saved_run       checks that a checkpoint holds a run
    model_state     conversion of a model to arrays and back, digests, and its configuration
    callback_state  state of callbacks as JSON
    backup          callbacks that save and resume a run: `BackupAndRestore`, `ModelCheckpoint`
    remote          copies in buckets and other file systems of fsspec
    publish         export of checkpoints during the run
    warm_start      initial weights from another run

You can read a checkpoint without TensorFlow.
"""

from __future__ import annotations

from tfdist.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
