"""Distributed training for Keras 3: one program under the strategies of `tf.distribute`.

The public names are resolved on first use (PEP 562), so ``import tfdist`` loads no TensorFlow.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing would add a seventh to the start time of a task

__version__ = "0.3.0"

_HOME_OF = {
    "make_strategy": "tfdist.strategy",
    "is_chief": "tfdist.strategy",
    "all_gather": "tfdist.strategy",
    "all_reduce": "tfdist.strategy",
    "barrier": "tfdist.strategy",
    "broadcast": "tfdist.strategy",
    "chief_first": "tfdist.strategy",
    "gather": "tfdist.strategy",
    "reduce": "tfdist.strategy",
    "scatter": "tfdist.strategy",
    "on_chief": "tfdist.strategy",
    "run_dir": "tfdist.strategy",
    "fit": "tfdist.training.fitting",
    "evaluate": "tfdist.training.evaluation",
    "predict": "tfdist.training.evaluation",
    "StepLoop": "tfdist.training.fitting",
    "Run": "tfdist.training.run_settings",
    "VirtualEpochs": "tfdist.training.epochs",
    "BackupAndRestore": "tfdist.checkpoint.backup",
    "Evaluator": "tfdist.training.evaluation",
    "ModelCheckpoint": "tfdist.checkpoint.backup",
    "PublishModel": "tfdist.checkpoint.publish",
    "load_weights": "tfdist.checkpoint.warm_start",
    "TfdistError": "tfdist.errors",
    "UsageError": "tfdist.errors",
    "StartupTimeout": "tfdist.errors",
    "PeerLost": "tfdist.errors",
    "Stopped": "tfdist.errors",
    "JobFailed": "tfdist.errors",
    "export_model": "tfdist.serving.export",
    "spawn": "tfdist.launch.spawn",
    "find_batch_size": "tfdist.find.batch_size",
    "find_learning_rate": "tfdist.find.learning_rate",
    "data": "tfdist.data",
    "errors": "tfdist.errors",
    "PipelineOptions": "tfdist.strategy.pipeline_setup",
    "tuning": "tfdist.tuning",
}

if TYPE_CHECKING:
    from typing import Any

    from tfdist import data, errors, tuning
    from tfdist.checkpoint.backup import BackupAndRestore, ModelCheckpoint
    from tfdist.checkpoint.publish import PublishModel
    from tfdist.checkpoint.warm_start import load_weights
    from tfdist.errors import (
        JobFailed,
        PeerLost,
        StartupTimeout,
        Stopped,
        TfdistError,
        UsageError,
    )
    from tfdist.find.batch_size import find_batch_size
    from tfdist.find.learning_rate import find_learning_rate
    from tfdist.launch.spawn import spawn
    from tfdist.serving.export import export_model
    from tfdist.strategy import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        chief_first,
        gather,
        is_chief,
        make_strategy,
        on_chief,
        reduce,
        run_dir,
        scatter,
    )
    from tfdist.strategy.pipeline_setup import PipelineOptions
    from tfdist.training.epochs import VirtualEpochs
    from tfdist.training.evaluation import Evaluator, evaluate, predict
    from tfdist.training.fitting import StepLoop, fit
    from tfdist.training.run_settings import Run

__all__ = [
    "BackupAndRestore",
    "Evaluator",
    "JobFailed",
    "ModelCheckpoint",
    "PeerLost",
    "PipelineOptions",
    "PublishModel",
    "Run",
    "StartupTimeout",
    "StepLoop",
    "Stopped",
    "TfdistError",
    "UsageError",
    "VirtualEpochs",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "chief_first",
    "data",
    "errors",
    "evaluate",
    "export_model",
    "find_batch_size",
    "find_learning_rate",
    "fit",
    "gather",
    "is_chief",
    "load_weights",
    "make_strategy",
    "on_chief",
    "predict",
    "reduce",
    "run_dir",
    "scatter",
    "spawn",
    "tuning",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        from tfdist.errors import near
        from tfdist.renamed import instead_of

        advice = f". Fix: {known}" if (known := instead_of(name)) else near(name, _HOME_OF)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    if name == "export_model":
        from tfdist.errors import require_packages

        require_packages("tfdist.export_model", "tensorflow_serving", extra="serving")
    from tfdist import chatter

    with chatter.hidden():  # this may import TensorFlow
        module = importlib.import_module(home)
    value = module if home == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF} - {"TYPE_CHECKING", "importlib", "annotations"})
