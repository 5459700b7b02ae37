"""`PublishModel`: export of checkpoints as model versions during the run.

The export is a child process of the chief, `tfdist.export --follow`. It reads the checkpoints of
`BackupAndRestore`, so the training never waits for it, under any strategy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from tfdist.errors import UsageError, require
from tfdist.files import one_line_errors, write_text
from tfdist.strategy.native import require_engine

if TYPE_CHECKING:
    from tfdist.checkpoint.backup import BackupAndRestore

_LOG = logging.getLogger(__name__)
_MODEL = "model.json"
_END_S = 120.0  # timeout of the last export


class PublishModel(keras.callbacks.Callback):
    """Callback that exports the checkpoints of `BackupAndRestore` as model versions for a server.

    A child process of the chief exports each best checkpoint to ``directory/NAME/VERSION`` during
    the run. Without `BackupAndRestore(best=...)`, it exports each new checkpoint.

    Args:
      directory: Model directory of a server, or a URL of fsspec (``gs://bucket/served``).
      model: ``file.py:function`` that returns the built model. Needed for custom classes (default:
        the configuration of the model).

    Raises:
      UsageError: No `BackupAndRestore` is among the callbacks of the `fit`. Another process cannot
        build the model again.
    """

    chief_only = True

    def __init__(self, directory: str | os.PathLike[str], *, model: str | None = None) -> None:
        super().__init__()
        self._directory = os.fspath(directory)
        self._make = model
        self.backup: BackupAndRestore | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the process unless it runs already."""
        require_engine(self)
        if self._process is not None:
            return
        assert self.backup is not None
        self.backup.prepare()  # the model's configuration is beside the checkpoints
        checkpoints = self.backup.store.directory
        words = [str(checkpoints), self._directory, "--follow", "--until_eof"]
        if self.backup.best:
            words.append("--best")
        words += ["--model", self._make or str(_written(self.model, checkpoints))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfdist", "export", *words],
            stdin=subprocess.PIPE,
            stdout=2,
            env=_environ(os.environ),
        )

    def close(self) -> None:
        """Wait for the export of the last checkpoint and for the exit of the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            _LOG.error(
                "publish: the export process exited with code %d (see its output above)", code
            )


def publish_from(backups: Sequence[BackupAndRestore], callbacks: Sequence[Any]) -> None:
    """Let each `PublishModel` export the checkpoints of the first backup."""
    for callback in callbacks:
        if isinstance(callback, PublishModel):
            require(
                backups,
                "PublishModel",
                "no tfdist.BackupAndRestore is among the callbacks",
                fix="add BackupAndRestore: PublishModel exports its checkpoints",
                code="missing-backup",
            )
            callback.backup, backups[0].publisher = backups[0], callback


def _written(model: keras.Model, directory: Path) -> Path:
    """Write the model's configuration to a file for another process. Return the file."""
    for layer in model._flatten_layers():
        # A vocabulary is not a weight. The configuration holds it only if the constructor got it.
        require(
            not hasattr(layer, "get_vocabulary") or layer.get_config().get("vocabulary"),
            "publish",
            f"layer {layer.name} has a vocabulary from adapt, which its configuration does not "
            "contain",
            fix="pass PublishModel(directory, model='file.py:function'). The function must "
            "return this model",
            code="not-a-model",
        )
    with saveable(
        model, where="publish", fix="pass PublishModel(directory, model='file.py:function')"
    ):
        config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    path = directory / _MODEL
    with one_line_errors(f"publish: cannot write {path}"):
        write_text(path, json.dumps(config))
    return path


@contextlib.contextmanager
def saveable(model: keras.Model, *, where: str, fix: str) -> Iterator[None]:
    """Raise UsageError at `where` if Keras cannot save or load the model in the block."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            where,
            f"Keras cannot save and load the model {model.name!r} ({said})",
            fix=fix,
            code="not-saveable",
        ) from error


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process outside the job that uses no GPU."""
    kept = {k: v for k, v in environ.items() if k != "TF_CONFIG" and not k.startswith("TFDIST_")}
    return kept | {"CUDA_VISIBLE_DEVICES": "-1"}
