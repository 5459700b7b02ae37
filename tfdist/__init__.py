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

    from tfdist import data as data
    from tfdist import errors as errors
    from tfdist import tuning as tuning
    from tfdist.checkpoint.backup import BackupAndRestore as BackupAndRestore
    from tfdist.checkpoint.backup import ModelCheckpoint as ModelCheckpoint
    from tfdist.checkpoint.publish import PublishModel as PublishModel
    from tfdist.checkpoint.warm_start import load_weights as load_weights
    from tfdist.errors import JobFailed as JobFailed
    from tfdist.errors import PeerLost as PeerLost
    from tfdist.errors import StartupTimeout as StartupTimeout
    from tfdist.errors import Stopped as Stopped
    from tfdist.errors import TfdistError as TfdistError
    from tfdist.errors import UsageError as UsageError
    from tfdist.find.batch_size import find_batch_size as find_batch_size
    from tfdist.find.learning_rate import find_learning_rate as find_learning_rate
    from tfdist.launch.spawn import spawn as spawn
    from tfdist.serving.export import export_model as export_model
    from tfdist.strategy import all_gather as all_gather
    from tfdist.strategy import all_reduce as all_reduce
    from tfdist.strategy import barrier as barrier
    from tfdist.strategy import broadcast as broadcast
    from tfdist.strategy import chief_first as chief_first
    from tfdist.strategy import gather as gather
    from tfdist.strategy import is_chief as is_chief
    from tfdist.strategy import make_strategy as make_strategy
    from tfdist.strategy import on_chief as on_chief
    from tfdist.strategy import reduce as reduce
    from tfdist.strategy import run_dir as run_dir
    from tfdist.strategy import scatter as scatter
    from tfdist.strategy.pipeline_setup import PipelineOptions as PipelineOptions
    from tfdist.training.epochs import VirtualEpochs as VirtualEpochs
    from tfdist.training.evaluation import Evaluator as Evaluator
    from tfdist.training.evaluation import evaluate as evaluate
    from tfdist.training.evaluation import predict as predict
    from tfdist.training.fitting import StepLoop as StepLoop
    from tfdist.training.fitting import fit as fit
    from tfdist.training.run_settings import Run as Run

__all__ = sorted(["__version__", *_HOME_OF])


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
