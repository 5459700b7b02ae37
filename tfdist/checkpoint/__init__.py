"""Checkpoints: the store, the callbacks that save and resume, and warm starts.

    format          the files of one checkpoint
    store           the directory of checkpoints, readable after a crash at any moment
    saved_run       whether a checkpoint holds a run, whoever wrote it
    state           a model as arrays and back, its digests, and the configuration it belongs to
    callback_state  the state of callbacks as JSON
    backup          `BackupAndRestore`, which saves a run and resumes it; `ModelCheckpoint`; the
                    best checkpoint and the interval between two
    publish         export of a run's checkpoints as it goes on
    warm_start      weights of another run to begin with

Reading a checkpoint needs no TensorFlow.
"""

from __future__ import annotations

from tfdist.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
