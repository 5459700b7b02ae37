"""Where a trained model comes from: a `.keras` file, a run directory, or checkpoints."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import keras
import ml_collections
import numpy as np

from tfdist.argument_parser import load_function
from tfdist.checkpoint import CheckpointStore
from tfdist.checkpoint.warm_start import load_model_file, set_weights
from tfdist.errors import UsageError, require
from tfdist.outputs.run_directory import RunDirectory


def read_model(
    source: Path, *, step: int | None = None, best: bool = False, make: str | None = None
) -> tuple[keras.Model, dict[str, Any]]:
    """Return the model of this process alone that `source` holds, and where it comes from.

    Args:
      source: a `.keras` file (read in Keras' safe mode), the run directory of a `tfdist.train`, or
        a directory that `tfdist.BackupAndRestore` wrote.
      step: of the checkpoint; by default the newest one.
      best: take the checkpoint that was marked best.
      make: ``file.py:function``, which returns the model of the checkpoints in an own program, or
        the ``model.json`` that `BackupAndRestore(publish=...)` writes.

    Raises:
      UsageError: there is no such file or checkpoint, or it is another model's.
    """
    if source.suffix == ".keras":
        require(
            source.is_file() and step is None and not best and make is None,
            str(source),
            received="no such file"
            if not source.is_file()
            else "it with --step, --best or --model",
            expected="a file that Keras saved, by itself",
            fix="check the path; --step, --best and --model are for checkpoints",
            code="not-a-source",
        )
        origin = {"file": str(source.absolute()), "saved_at": source.stat().st_mtime}
        return load_model_file(source), origin
    config = RunDirectory(source).read_config() if make is None else None
    directory = _checkpoints_in(source)
    require(
        source.is_dir() and (config is not None or make is not None),
        str(source),
        received="no such directory" if not source.is_dir() else "a directory without config.json",
        expected="a .keras file, a run of tfdist.train, or checkpoints with --model",
        fix="check the path, or say what makes your program's model: --model train.py:make_model",
        code="not-a-source",
    )
    served, trained = (_made_by(make),) * 2 if make is not None else _of_run(config or {})
    store = CheckpointStore(directory)
    if best:
        step = store.best()
        require(
            step is not None,
            f"--best {source}",
            received="no checkpoint that was marked best",
            expected="one, as BackupAndRestore(best=...) marks it",
            fix="leave --best out for the newest one",
            code="no-best",
        )
    checkpoint = store.read(step)
    set_weights(trained, checkpoint, where=str(directory))
    step = int(checkpoint.step)
    origin = {"run": str(source.absolute()), "step": step, "saved_at": store.written_at(step)}
    return served, origin


def newest_in(source: Path, *, best: bool = False) -> str | None:
    """Return what tells a source's newest model, or best, from the one before; None without one."""
    if source.suffix == ".keras":
        with contextlib.suppress(FileNotFoundError):
            return f"{source.stat().st_ino}:{source.stat().st_mtime_ns}"
        return None
    store = CheckpointStore(_checkpoints_in(source))
    step = store.best() if best else store.latest()
    written_at = None if step is None else store.written_at(step)
    return None if written_at is None else f"{step}:{written_at}"


def _checkpoints_in(source: Path) -> Path:
    run = RunDirectory(source)
    return run.checkpoints if run.checkpoints.is_dir() else source


def _made_by(make: str) -> keras.Model:
    """Call the function that ``file.py:function`` names, or make what a JSON file describes."""
    if make.endswith(".json") and Path(make).is_file():
        return keras.models.model_from_json(Path(make).read_text())
    model = load_function(make, functools.partial(_bad_make, make))()
    if not isinstance(model, keras.Model) or not model.built:
        raise _bad_make(make, f"{type(model).__name__} from it")
    return model


def _bad_make(make: str, received: str) -> UsageError:
    return UsageError(
        "--model",
        received=f"{make}: {received}",
        expected="file.py:function, which returns the built keras.Model that was trained",
        fix="name the function that the program makes its model with",
        code="not-a-model",
    )


def _of_run(config: dict[str, Any]) -> tuple[keras.Model, keras.Model]:
    """Return a model that takes pixels as they are stored, and the one in it that was trained."""
    from tfdist.app.recipe import build_model, load_datasets

    read = ml_collections.ConfigDict(config)
    datasets = load_datasets(read)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(read.precision)
    trained = build_model(
        read.model,
        image_shape=datasets.image_shape,
        num_classes=datasets.num_classes,
        dropout=read.dropout,
    )
    keras.config.set_dtype_policy(policy)  # the data of the run are normalised in float32
    images = keras.Input(datasets.image_shape, name="image")
    variance = np.square(np.asarray(read.augmentation.std, np.float64)).tolist()
    mean = list(read.augmentation.mean)
    normalize = keras.layers.Normalization(mean=mean, variance=variance, name="normalize")
    return keras.Model(images, trained(normalize(images)), name=read.model), trained
