"""Routing of Keras' `fit`, `evaluate`, `predict` and single-batch methods to the engine.

`tfdist.strategy.native` makes every Keras model call `call` in this module. `call` sends models of
the job's scope to the engine, and all other models to Keras.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint.backup import BackupAndRestore, ModelCheckpoint
from tfdist.checkpoint.publish import PublishModel
from tfdist.errors import UsageError
from tfdist.strategy import Job, current_job
from tfdist.strategy.group import require_no_search
from tfdist.strategy.native import KERAS_HUB
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.evaluation import evaluate, predict
from tfdist.training.fitting import fit
from tfdist.training.keras_compat.trace import warn_once
from tfdist.training.run_settings import Run, fit_by, fits_by, is_on_the_way, on_the_way

_ENGINE: dict[str, Callable[..., Any]] = {
    "fit": inspect.unwrap(fit),
    "evaluate": inspect.unwrap(evaluate),
    "predict": inspect.unwrap(predict),
    "test_on_batch": inspect.unwrap(evaluate),
    "predict_on_batch": inspect.unwrap(predict),
}
"""Functions of the engine, unwrapped: they do not call the model's own method."""
_WITHOUT_INDEX = ("torch.utils.data", "grain.", "scipy.sparse")


def call(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a model's `original` method in the engine or in Keras."""
    name, job = original.__name__, current_job()
    explicit = is_on_the_way(model, name)
    of_scope = isinstance(model, keras.Model) and (
        job is not None and getattr(model, "_distribute_strategy", None) is job.strategy
    )
    if not explicit and not of_scope:
        if job is not None and name in ("fit", "train_on_batch"):
            _tell_of_training_alone(job, name)
        return original(model, *args, **kwargs)
    if _stays_in_keras(name, job, kwargs):
        return original(model, *args, **kwargs)
    arguments = _arguments(original, model, args, kwargs)
    by_mlflow = _caller().f_globals.get("__name__", "").startswith("mlflow.")
    if name == "predict" and by_mlflow and job is not None and job.kind.has_several_tasks:
        return _predict_in_this_task(original, model, arguments["x"])
    if not explicit and job is not None and job.kind.is_one_process:
        reason = _reason_for_keras(model, arguments)
        if reason is not None:
            warn_once(f"model.{name} uses Keras' own loop, because of {reason}")
            return original(model, *args, **kwargs)
    if name == "train_on_batch":
        assert job is not None
        has_loop = not job.kind.has_stages and job.shards is None
        own_loop = ", or write your own loop with tfdist.StepLoop" if has_loop else ""
        raise UsageError(
            f"{_place()}: model.{name}",
            f"strategy {job.kind} cannot run a single step",
            fix=f"call model.fit{own_loop}",
            code="unsupported",
        )
    if name.endswith("_on_batch"):
        rows = len(keras.tree.flatten(arguments["x"])[0])
        arguments |= {"batch_size": rows, "verbose": 0}
    if name == "fit" and original.__module__ == KERAS_HUB:
        # MLflow patches `keras.Model.fit`, which the fit of KerasHub calls in Keras' own loop.
        fit_of_keras = super(sys.modules[KERAS_HUB].PipelineModel, model).fit
        with on_the_way(model, name):
            return fit_of_keras(arguments.pop("x", None), **arguments)
    function = fit_by.get() if name == "fit" else None
    if function is None and job is not None and job.kind.has_collectives:
        require_no_search(job)
    with fits_by(None), on_the_way(model if function else None, name), naming_a_lost_server():
        return (function or _ENGINE[name])(model, **arguments)


def _stays_in_keras(name: str, job: Job | None, kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call stays in Keras: the result is the same, or Keras made the call."""
    if "_use_cached_eval_dataset" in kwargs:  # an evaluation inside Keras' own fit
        return True
    if not name.endswith("_on_batch") or job is None or job.kind.has_stages:
        return False
    # Each mirrored replica runs the whole batch: updates are equal, but Keras joins outputs.
    return job.num_replicas == 1 or (name == "train_on_batch" and job.kind.is_one_process)


def _predict_in_this_task(original: Callable[..., Any], model: Any, x: Any) -> Any:
    """Predict the few examples of MLflow in the chief only, for the signature of a logged model."""
    if original.__module__ == KERAS_HUB:
        packed = model.preprocess_samples(keras.tree.map_structure(tf.convert_to_tensor, x))
        x = keras.utils.unpack_x_y_sample_weight(packed)[0]  # some preprocessors make labels
    outputs = model(x, training=False)
    return keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)


def _arguments(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without the model."""
    bound = inspect.signature(original).bind(model, *args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    for name in ("self", "kwargs"):
        arguments.pop(name, None)
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):  # the engine makes its own list
        own = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
        arguments["callbacks"] = [c for c in callbacks.callbacks if not isinstance(c, own)]
    return arguments


def _reason_for_keras(model: keras.Model, arguments: Mapping[str, Any]) -> str | None:
    """Return why Keras' own loop runs a call in one process, or `None` if the engine runs it."""
    callbacks = keras.tree.flatten(arguments.get("callbacks") or [])
    own = Run | BackupAndRestore | ModelCheckpoint | PublishModel
    if any(isinstance(c, own) for c in callbacks):
        return None  # the engine rejects unsupported arguments
    if getattr(model, "run_eagerly", False):
        return "run_eagerly=True"
    if tf.config.functions_run_eagerly():
        return "tf.config.run_functions_eagerly(True)"
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        return "keras.callbacks.BackupAndRestore (tfdist.BackupAndRestore resumes at the step)"
    for data in keras.tree.flatten([arguments.get("x"), arguments.get("validation_data")]):
        modules = [c.__module__ for c in type(data).__mro__]
        foreign = any(name.startswith(_WITHOUT_INDEX) for name in modules)
        if foreign or isinstance(data, Iterator | tf.RaggedTensor | tf.SparseTensor):
            return f"data in a {type(data).__name__}, which has no examples by index"
    return None


def _tell_of_training_alone(job: Job, name: str) -> None:
    if job.config is not None and len(job.config.cluster.tasks()) > 1:
        alone = "only the chief trains it" if job.kind.has_servers else "each task trains its own"
        warn_once(
            f"{_place()}: model.{name} trains a model made outside strategy.scope(), so {alone}. "
            "Fix: make and compile the model inside `with strategy.scope():`"
        )


def _place() -> str:
    """Return the file and line in the user's program that called the method."""
    frame = _caller("keras_tuner", "mlflow")
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _caller(*inside: str) -> types.FrameType:
    """Return the innermost frame outside of Keras, tfdist, KerasHub and the packages `inside`."""
    frame = sys._getframe(1)
    packages = ("keras", "tfdist", "keras_hub", *inside)
    while frame.f_globals.get("__name__", "").partition(".")[0] in packages and frame.f_back:
        frame = frame.f_back
    return frame
