"""Publishing a run's checkpoints as versions while it goes on: `tfdist.export --follow` beside it.

The process is the chief's child. It reads what `BackupAndRestore` has written, so the training does
not wait for it, whatever its strategy is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import keras

from tfdist.errors import UsageError, require
from tfdist.files import one_line_errors, write_text

_LOG = logging.getLogger(__name__)
_MODEL = "model.json"
_END_S = 120.0  # for the last export


class Publisher:
    """The process that publishes; in the chief.

    Args:
      directory: of the models that a server serves; a version is ``directory/NAME/VERSION``.
      make: ``file.py:function``, which makes the model; by default it is written down as it is.
      run: the run directory of a ``tfdist.train``, which says what the model is.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        make: str | None = None,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._make = make
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model: keras.Model, checkpoints: Path, *, best: bool) -> None:
        """Start the process, unless it runs; it follows the best checkpoint, or the newest.

        Raises UsageError where another process could not make the model again.
        """
        if self._process is not None:
            return
        words = [str(self._run or checkpoints), str(self._directory), "--follow", "--until_eof"]
        if best:
            words.append("--best")
        if self._run is None:
            words += ["--model", self._make or str(_written(model, checkpoints))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.export", *words],
            stdin=subprocess.PIPE,
            stdout=2,
            env=_environ(os.environ),
        )

    def close(self) -> None:
        """Have the last checkpoint published too, and wait for it."""
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
            _LOG.error("publish: ended with exit code %d; see its lines above", code)


def _written(model: keras.Model, directory: Path) -> Path:
    """Write down what the model is made of, for another process; return the file."""
    for layer in model._flatten_layers():
        # A learned vocabulary is no weight: Keras has it in the configuration if it was given.
        require(
            not hasattr(layer, "get_vocabulary") or layer.get_config()["vocabulary"] is not None,
            "publish",
            received=f"a model with a vocabulary that {layer.name} has learned by adapt",
            expected="a vocabulary that is given to the layer",
            fix="pass publish_model='file.py:function', which returns the model as it is here",
            code="not-a-model",
        )
    with saveable(model, where="publish", fix="pass publish_model='file.py:function'"):
        config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    path = directory / _MODEL
    with one_line_errors(f"publish: cannot write {path}"):
        write_text(path, json.dumps(config))
    return path


@contextlib.contextmanager
def saveable(model: keras.Model, *, where: str, fix: str) -> Iterator[None]:
    """Raise UsageError, of `where`, for a model that Keras cannot save, or load again, within."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            where,
            received=f"model {model.name!r} ({said})",
            expected="one that Keras can save and load again",
            fix=fix,
            code="not-saveable",
        ) from error


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no task of the job and uses no GPU."""
    kept = {k: v for k, v in environ.items() if k != "TF_CONFIG" and not k.startswith("TFDIST_")}
    return kept | {"CUDA_VISIBLE_DEVICES": "-1"}
