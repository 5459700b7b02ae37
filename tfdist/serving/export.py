"""Export of a model to a SavedModel: checked first, then published atomically.

`read_model` reads the model from a `.keras` file, a run directory or checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import keyword
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from google.protobuf import text_format

from tfdist.argument_parser import load_function
from tfdist.checkpoint.model_state import weights_sha256
from tfdist.checkpoint.publish import saveable
from tfdist.checkpoint.remote import files_in, is_remote, local_directory, opened, put, reading_from
from tfdist.checkpoint.saved_run import RunStore
from tfdist.checkpoint.warm_start import load_model_file, loading, set_weights
from tfdist.errors import TfdistError, UsageError, require, require_int
from tfdist.files import FileLock, fsync, one_line_errors, write_json, write_text
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import JOURNAL, TRIALS, best_trial
from tfdist.renamed import without_renamed
from tfdist.serving.model_versions import find_models
from tfdist.serving.protocol import version_number
from tfdist.strategy import broadcast, job_of
from tfdist.training import keras_compat
from tfdist.training.evaluation import predict

_LOG = logging.getLogger(__name__)
SIGNATURE = "serving_default"
MANIFEST = "manifest.json"
_TOLERANCE = 1e-6
_ROUNDING = 1e-3  # tolerance between batched and single examples (float16 sums vary in order)
_SMALL = 1e-2  # tolerance for outputs below 0.1, as a fraction of the largest output
_ALONE = 8  # maximum number of samples to check one at a time
_EXAMPLES = 2
_FREE_LENGTH = 16  # size of a drawn example in a dimension of unknown size
_WORDS = 8  # words in the first drawn text, doubled for each further text
_UNNAMED = re.compile(r"(keras_tensor|input_layer)(_\d+)?")  # Keras' default names
_OTHERS_S = 600.0  # longest wait for another export into the directory


@without_renamed("export_model")
def export_model(
    model: keras.Model,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: int | None = None,
    samples: Any = None,
    origin: Mapping[str, Any] | None = None,
) -> Path | str:
    """Export a model to ``directory/name/version``, the layout that model servers read.

    The SavedModel computes the same outputs as `tfdist.predict`: random layers are off, and batches
    can have any size. Inputs and outputs keep their names. Before it publishes the model, the
    function calls the signature twice and requires bit-identical outputs. It also compares them
    with `tfdist.predict` on `samples` (tolerance: 1e-6, relative for outputs above 1). Every task
    of a job must call this function, outside of ``strategy.scope()``. The chief writes the files.

    Args:
      model: Built model of any strategy.
      directory: Export directory, created if missing, or a URL of fsspec (``gs://bucket/served``).
      name: Name of the model (default: ``model.name``).
      version: Integer from 1 to 2**63 - 1 (default: newest existing version plus one).
      samples: Arrays ``[examples, ...]`` in the structure of the model's inputs, for the check and
        the server's warm-up (default: random). Required for a subclassed model.
      origin: Origin of the weights, such as run and step, for the manifest.

    Returns:
      The version directory (or its URL) with the SavedModel, a warm-up request and
      ``manifest.json``. In a directory, the export also writes TensorFlow Serving's
      ``models.config`` for all its models.

    Raises:
      UsageError: The model is not built, Keras cannot save it, or the version already exists.
      TfdistError: The exported model's outputs differ from the model's outputs, the directory
        cannot be written, or another export into it takes more than ten minutes.
    """
    job = job_of(model.distribute_strategy)
    nest = _inputs_of(model, samples)
    is_drawn = samples is None
    samples = _drawn(nest) if is_drawn else samples
    arrays = list(map(np.asarray, keras.tree.flatten(samples)))
    is_varied = any((array[1:] != array[:1]).any() for array in arrays)
    apart = samples if is_varied else _drawn(nest, apart=True)
    batch_size = max(_count(samples), job.num_replicas)
    try:
        wanted = predict(model, samples, batch_size=batch_size, verbose=0)
    except Exception as error:
        if is_drawn:
            error.add_note(
                "export_model used random examples. Fix: pass samples=..., a few real examples"
            )
        raise
    path = ""
    if job.is_chief:
        url, name = os.fspath(directory).rstrip("/"), name or model.name
        remote = is_remote(url)
        directory = local_directory(url) if remote else Path(directory)
        if remote:
            version = _version_at(f"{url}/{name}", version)
            shutil.rmtree(directory / name / str(version), ignore_errors=True)  # a failed upload
        with (
            one_line_errors(f"export: cannot write to {directory}"),
            _publishing(directory, name, version) as (target, unfinished),
        ):
            export = _write(model if job.kind.has_one_replica else _copy(model), nest, unfinished)
            manifest = {
                "version": int(target.name),
                "name": name,
                "tfdist": sys.modules["tfdist"].__version__,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            }
            manifest |= _checked(export, samples, wanted, apart=apart)
            manifest |= {"weights_sha256": weights_sha256(model), **(origin or {})}
            _write_warm_up(unfinished, name, export.named(samples))
            write_json(unfinished / MANIFEST, manifest)
        path = str(target)
        if remote:
            path = f"{url}/{name}/{target.name}"
            _upload(target, path)
        _LOG.info("%s: exported and checked", path)
    path = broadcast(path)
    return path if is_remote(path) else Path(path)


def _version_at(url: str, version: int | None) -> int:
    with reading_from(url):
        found = {path.partition("/")[0] for path in files_in(*opened(url))}
    return _new_version(version, found, where=url)


def _upload(target: Path, url: str) -> None:
    """Upload a version and keep only its manifest on this machine."""
    try:
        put(target, url, last=("saved_model.pb", MANIFEST))  # servers look for these files
    except Exception as error:  # each file system has its own types of errors
        raise TfdistError(
            f"{url} cannot be written ({error}); the version is in {target}"
        ) from error
    for path in target.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MANIFEST:
            path.unlink()


@dataclasses.dataclass(frozen=True, slots=True)
class _Export:
    """Exported signature, with its inputs and outputs in the order of their structures."""

    signature: Any
    inputs: Sequence[tf.TensorSpec]
    outputs: Sequence[str]

    def named(self, x: Any) -> dict[str, tf.Tensor]:
        if isinstance(x, Mapping) and x.keys() == {spec.name for spec in self.inputs}:
            x = [x[spec.name] for spec in self.inputs]  # Keras accepts a dict for a list of inputs
        flat = zip(self.inputs, map(np.asarray, keras.tree.flatten(x)), strict=True)
        return {spec.name: tf.cast(tf.constant(a), spec.dtype) for spec, a in flat}

    def answers(self, x: Any) -> dict[str, np.ndarray]:
        with keras_compat.adding_in_order():  # the check compares bits
            answer = self.signature(**self.named(x))
        return {name: answer[name].numpy() for name in self.outputs}


def _checked(export: _Export, samples: Any, wanted: Any, *, apart: Any) -> dict[str, Any]:
    """Check a signature with two calls. Return the manifest's description of inputs and outputs.

    The examples in `apart` differ and show whether each answer depends only on its own example.
    Raises TfdistError if the two calls differ from each other or from the `wanted` outputs.
    """
    first, again = (export.answers(samples) for _ in range(2))
    for name, value in first.items():
        if not np.array_equal(value, again[name], equal_nan=value.dtype.kind == "f"):
            raise TfdistError(
                f"export: output {name!r} differs between two calls with the same input, so "
                "it is not published. Fix: use no random numbers and no state if training=False"
            )
    _require_equal(first, wanted)
    by_example = _is_by_example(export, apart)
    if not by_example:
        _LOG.warning(
            "export: an example's outputs depend on its batch, or the check needs samples=... with "
            "different examples. tfdist.serve will compute each request separately. If "
            "you use TensorFlow Serving, start it without --enable_batching"
        )
    return {
        "by_example": by_example,
        "inputs": {s.name: [s.dtype.name, list(s.shape)] for s in export.inputs},
        "outputs": {n: [v.dtype.name, [None, *v.shape[1:]]] for n, v in first.items()},
    }


def _is_by_example(export: _Export, samples: Any) -> bool:
    """Return whether single samples get the same answers as in a batch, up to rounding.

    Return False if the model rejects the samples, which can happen with drawn samples.
    """
    arrays = [np.asarray(array) for array in keras.tree.flatten(samples)]
    try:
        together = export.answers(samples)
        for at in range(min(_count(samples), _ALONE)):
            one = [array[at : at + 1] for array in arrays]
            alone = export.answers(keras.tree.pack_sequence_as(samples, one))
            for name, value in alone.items():
                like = np.atleast_1d(together[name])[at : at + 1]
                largest = _largest(together[name])
                most = min(_ROUNDING * max(1.0, largest), _SMALL * largest)
                if value.shape != like.shape or not _gap(value, like) <= most:
                    return False
    except tf.errors.OpError:
        return False
    return True


def _inputs_of(model: keras.Model, samples: Any) -> Any:
    """Return the structure of a model's inputs, with a named `tf.TensorSpec` for each input."""
    nest = getattr(model, "_inputs_struct", None)  # only a functional model has it
    if nest is None and isinstance(model, keras.Sequential) and model.built:
        nest = model.inputs[0]
    if nest is None and (samples is None or not model.built):
        raise UsageError(
            "export_model",
            f"the inputs of the subclassed or unbuilt model {model.name!r} are unknown",
            fix="train it, and pass samples=..., a few examples in the structure of its inputs",
            code="no-samples",
        )
    has_names = nest is not None and not isinstance(nest, dict)
    nest = keras.tree.map_structure(np.asarray, samples) if nest is None else nest
    flat = keras.tree.flatten_with_path(nest)

    def name_of(at: int) -> str:
        path, tensor = flat[at]
        if has_names and _UNNAMED.fullmatch(tensor.name):
            return "inputs" if len(flat) == 1 else f"inputs_{at}"
        return str(tensor.name) if has_names else "_".join(map(str, path)) or "inputs"

    specs = [_spec(tensor, name_of(at)) for at, (_, tensor) in enumerate(flat)]
    names = [spec.name for spec in specs]
    wrong = [name for name in names if keyword.iskeyword(name) or re.match("_|self$", name)]
    require(
        len({*names}) == len(names) and not wrong,
        "export_model",
        f"the input names {', '.join(names)} are not valid in a signature",
        fix="rename them: unique, a letter or digit first, not self or a Python keyword",
        code="not-a-name",
    )
    return keras.tree.pack_sequence_as(nest, specs)


def _spec(tensor: Any, name: str) -> tf.TensorSpec:
    is_text = getattr(tensor.dtype, "kind", "f") in "OSU"  # only samples have a NumPy dtype
    dtype = tf.as_dtype("string" if is_text else keras.backend.standardize_dtype(tensor.dtype))
    return tf.TensorSpec([None, *tensor.shape[1:]], dtype, name=re.sub("[^A-Za-z0-9_]", "_", name))


def _drawn(nest: Any, *, apart: bool = False) -> Any:
    """Return drawn examples: floats in [0, 1), integer zeros, or empty strings.

    With `apart`, integers are 0 and 1, and strings have different lengths.
    """
    rng = np.random.default_rng(0)

    def draw(spec: tf.TensorSpec) -> np.ndarray:
        shape = [_EXAMPLES, *(n or _FREE_LENGTH for n in spec.shape[1:])]
        if spec.dtype.is_floating:
            return rng.random(shape).astype(spec.dtype.as_numpy_dtype)
        values = np.arange(_EXAMPLES) * apart
        if spec.dtype == tf.string:
            values = np.array(["a " * (_WORDS << n) * apart for n in range(_EXAMPLES)])
        else:
            values = values.astype(spec.dtype.as_numpy_dtype)
        return np.array(np.broadcast_to(values.reshape(-1, *[1] * (len(shape) - 1)), shape))

    return keras.tree.map_structure(draw, nest)


def _count(x: Any) -> int:
    return len(keras.tree.flatten(x)[0])


def _gap(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference of finite numbers. For other types, return 0 or 1."""
    if wanted.dtype.kind not in "fiu":
        return float((found != wanted).any())
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        gaps = np.where(np.isfinite(wanted), np.abs(found.astype(float) - wanted), 0.0)
    return float(np.max(gaps, initial=0.0))


def _largest(array: np.ndarray) -> float:
    """Return the largest absolute value of finite numbers, or 1 for other types."""
    if array.dtype.kind not in "fiu":
        return 1.0
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))


def _require_equal(found: Mapping[str, np.ndarray], wanted: Any) -> None:
    flat = [np.asarray(a) for a in keras.tree.flatten(wanted)]
    flat = [a.astype(np.float32) if a.dtype == tf.bfloat16 else a for a in flat]
    shapes, others = [value.shape for value in found.values()], [like.shape for like in flat]
    if shapes != others:
        raise TfdistError(
            f"export: outputs have the shapes {shapes}, but tfdist.predict returns {others}, so "
            "the model is not published. Fix: move its predict_step into its call"
        )
    for (name, value), like in zip(found.items(), flat, strict=True):
        gap, most = _gap(value, like), _TOLERANCE * max(1.0, _largest(like))
        if not gap <= most:
            raise TfdistError(
                f"export: output {name!r} differs from tfdist.predict by {gap:.3g} (limit: "
                f"{most:.3g}), so the model is not published. Fix: move its predict_step into its "
                "call, and make its layers depend only on their inputs"
            )


def _copy(model: keras.Model) -> keras.Model:
    classes = {type(layer).__name__: type(layer) for layer in [model, *model._flatten_layers()]}
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        fix = "implement get_config in the model's classes"
        with (
            saveable(model, where="export_model", fix=fix),
            keras.saving.custom_object_scope(classes),
        ):
            model.save(path)
            # Safe mode is off because the line above wrote the file.
            return keras.models.load_model(path, compile=False, safe_mode=False)


def _write(model: keras.Model, nest: Any, directory: Path) -> _Export:
    """Write a SavedModel with the inputs in the structure `nest`."""
    flat: list[tf.TensorSpec] = keras.tree.flatten(nest)
    names: list[str] = []

    def serve(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        outputs = model(keras.tree.pack_sequence_as(nest, list(inputs)), training=False)
        named = _by_name(model, outputs)
        names[:] = named
        return named

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(SIGNATURE, serve, input_signature=flat)
    archive.write_out(str(directory), verbose=False)
    signature = tf.saved_model.load(str(directory)).signatures[SIGNATURE]
    return _Export(signature, flat, names)


def _by_name(model: keras.Model, outputs: Any) -> dict[str, tf.Tensor]:
    """Return outputs by name: from dict keys, otherwise from the layers, otherwise numbered."""
    paths = keras.tree.flatten_with_path(outputs)
    functional = getattr(model, "_functional", None) or model  # a Sequential has `_functional`
    names = list(getattr(functional, "output_names", None) or [])
    if isinstance(outputs, dict):
        names = ["_".join(map(str, path)) for path, _ in paths]
    if len(set(names)) != len(paths):
        names = [f"output_{i}" for i in range(len(paths))]
    named = {n: v for n, (_, v) in zip(names, paths, strict=True)}
    for name, value in named.items():
        require(
            isinstance(value, tf.Tensor),
            "export_model",
            f"output {name!r} is a {type(value).__name__}, not a dense tensor",
            fix="make the model return a dense tensor, or remove this output",
            code="not-dense",
        )
    halves = (tf.float16, tf.bfloat16)  # clients cannot decode bfloat16, JSON has no bfloat16 NaN
    return {n: tf.cast(v, tf.float32) if v.dtype in halves else v for n, v in named.items()}


def _write_warm_up(directory: Path, name: str, request: Mapping[str, tf.Tensor]) -> None:
    """Write the warm-up request that TensorFlow Serving runs before it serves a version."""
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

    predict_request = predict_pb2.PredictRequest()
    predict_request.model_spec.name = name
    predict_request.model_spec.signature_name = SIGNATURE
    for key, value in request.items():
        predict_request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    log = prediction_log_pb2.PredictionLog(
        predict_log=prediction_log_pb2.PredictLog(request=predict_request)
    )
    extra = directory / "assets.extra"
    extra.mkdir()
    with tf.io.TFRecordWriter(str(extra / "tf_serving_warmup_requests")) as writer:
        writer.write(log.SerializeToString())


@contextlib.contextmanager
def _publishing(directory: Path, name: str, version: int | None) -> Iterator[tuple[Path, Path]]:
    """Yield the path of a new version, and the temporary directory to write.

    If the block raises no error, the temporary directory is renamed to the version. Servers read
    only directories with numbers as names. A lock excludes other exports. Raises OSError.
    """
    require(
        re.fullmatch(r"[\w.-]+", name) and not name.startswith("."),
        "name",
        f"{name!r} is not a valid name for the server's URLs",
        fix="pass name=... with only letters, digits, dots, dashes and underscores, no dot first",
        code="not-a-name",
    )
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock") as lock:
        with contextlib.suppress(OSError):  # the file system may not support locks
            lock.acquire(within_s=_OTHERS_S)
        target = home / str(_new_version(version, os.listdir(home), where=home))
        unfinished = target.with_name(f".partial-{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield target, unfinished
            for path in [*unfinished.rglob("*"), unfinished]:
                fsync(path)
            os.rename(unfinished, target)
            fsync(home)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _write_config(directory)


def _new_version(version: int | None, names: Iterable[str], *, where: object) -> int:
    """Return the next version, or the given one. Raise UsageError if it exists in `names`."""
    there = {version_number(name) or 0 for name in names}
    if version is None:
        return max(there, default=0) + 1
    require_int("version", version, least=1)
    require(
        version not in there,
        "version",
        f"version {version} already exists in {where}",
        fix="leave version out to write the next version",
        code="exists",
    )
    return version


def _write_config(directory: Path) -> None:
    """Write the list of models for TensorFlow Serving. Its image has the models in /models."""
    from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

    config = ModelServerConfig()
    for name in find_models(directory):
        options = {"name": name, "base_path": f"/models/{name}", "model_platform": "tensorflow"}
        config.model_config_list.config.add(**options)
    write_text(directory / "models.config", text_format.MessageToString(config))


# Sources of a trained model: a `.keras` file, a run directory, or checkpoints.


def read_model(
    source: Path, *, step: int | None = None, best: bool = False, make: str | None = None
) -> tuple[keras.Model, dict[str, Any]]:
    """Return the model in `source`, without a strategy, and the origin of its weights.

    The source is a `.keras` file (read in Keras' safe mode), a run directory of `tfdist.train`, a
    directory written by `tfdist.BackupAndRestore`, or a sweep of `tfdist.tune` (the best checkpoint
    of its best trial). `make` is a ``file.py:function`` that returns the checkpoints' model, or the
    ``model.json`` of `PublishModel`. Raises UsageError if the file or checkpoint is missing or
    belongs to another model.
    """
    if (source / JOURNAL).is_file():
        source = _best_run(source)
        if step is None:
            best = RunStore(_checkpoints_in(source)).best() is not None
    if source.suffix == ".keras":
        problem = "--step, --best and --model need checkpoints, not a .keras file"
        require(
            source.is_file() and (step, best, make) == (None, False, None),
            str(source),
            problem if source.is_file() else "the file does not exist",
            fix="check the path, and use --step, --best and --model only if it has checkpoints",
            code="no-model",
        )
        origin = {"file": str(source.absolute()), "saved_at": source.stat().st_mtime}
        return load_model_file(source), origin
    config = RunDirectory(source).read_config() if make is None else None
    directory = _checkpoints_in(source)
    problem = "the directory has no config.json, which describes the model"
    require(
        source.is_dir() and (config is not None or make is not None),
        str(source),
        problem if source.is_dir() else "no such directory or .keras file",
        fix="check the path, or pass the function of your model: --model train.py:make_model",
        code="no-model",
    )
    served, trained = (_made_by(make),) * 2 if make is not None else _of_run(config or {})
    store = RunStore(directory)
    if best:
        step = store.best()
        require(
            step is not None,
            f"--best {source}",
            "the run has no best checkpoint",
            fix="leave --best out to export the newest, or train with BackupAndRestore(best=...)",
            code="no-best",
        )
    checkpoint = store.read(step)
    set_weights(trained, checkpoint, where=str(directory))
    step = int(checkpoint.step)
    origin = {"run": str(source.absolute()), "step": step, "saved_at": store.written_at(step)}
    return served, origin


def newest_in(source: Path, *, best: bool = False) -> str | None:
    """Return an identifier of a source's newest (or best) model, or `None` if there is no model."""
    if source.suffix == ".keras":
        with contextlib.suppress(FileNotFoundError):
            return f"{source.stat().st_ino}:{source.stat().st_mtime_ns}"
        return None
    store = RunStore(_checkpoints_in(source))
    step = store.best() if best else store.latest()
    written_at = None if step is None else store.written_at(step)
    return None if written_at is None else f"{step}:{written_at}"


def _best_run(sweep: Path) -> Path:
    """Return the run directory of a sweep's best trial.

    Raises UsageError for a trial of a Python program: its checkpoint is of its last epoch.
    """
    _, trial = best_trial(sweep, where=str(sweep))
    run = RunDirectory(sweep / TRIALS / trial.run)
    require(
        run.config_file.exists(),
        str(sweep),
        f"a Python program has made the model of trial {trial.id}",
        fix="in this program, pass tuner.get_best_models()[0] to tfdist.export_model",
        code="no-model",
    )
    return run.path


def _checkpoints_in(source: Path) -> Path:
    run = RunDirectory(source)
    return run.checkpoints if run.checkpoints.is_dir() else source


def _made_by(make: str) -> keras.Model:
    """Return the model from a ``file.py:function`` or from a JSON description."""
    if make.endswith(".json") and Path(make).is_file():
        with loading(make):
            model = keras.models.model_from_json(Path(make).read_text())
    else:
        model = load_function(make, functools.partial(_bad_make, make))()
    if not isinstance(model, keras.Model) or not model.built:
        raise _bad_make(make, f"a {type(model).__name__} is not a built keras.Model")
    return model


def _bad_make(make: str, problem: str) -> UsageError:
    return UsageError(
        "--model",
        f"{make}: {problem}",
        fix="pass FILE.py:FUNCTION, a function that returns the trained model's architecture",
        code="not-a-model",
    )


def _of_run(config: dict[str, Any]) -> tuple[keras.Model, keras.Model]:
    """Return a model that takes stored pixel values, and the trained model inside it."""
    import ml_collections

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
    keras.config.set_dtype_policy(policy)  # the run normalized its data in float32
    images = keras.Input(datasets.image_shape, name="image")
    variance = np.square(np.asarray(read.augmentation.std, np.float64)).tolist()
    mean = list(read.augmentation.mean)
    normalize = keras.layers.Normalization(mean=mean, variance=variance, name="normalize")
    return keras.Model(images, trained(normalize(images)), name=read.model), trained
