"""Names of the previous release and their replacements, for one release."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tfdist.errors import UsageError

GONE = {
    "--access_log": "--token, and a proxy that logs requests",
    "--config.backup_every": 'BackupAndRestore(save_freq="auto") in a script',
    "--config.fused_kernels": "tfdist.Run(fused_kernels=True) in a script",
    "--config.gradient_accumulation_steps": "the argument of Keras' optimizers in a script",
    "--config.keep_checkpoints": "BackupAndRestore(keep=) in a script",
    "--config.publish": "tfdist export RUN_DIR DIRECTORY --best --follow, beside the run",
    "--config.sharded_optimizer": "tfdist.Run(sharded_optimizer=True) in a script",
    "--config.tracker": "the callback of MLflow or W&B in a script",
    "--early_stop": "--tuner hyperband, or keras.callbacks.EarlyStopping in the trial",
    "--fork_server": "--start fork",
    "--host_timeout_s": "--startup_timeout_s",
    "--join": "tune --hosts, once",
    "--label": "no flag: each model serves its newest version",
    "--logs": "kubectl logs, or the file of sbatch",
    "--max_queue_mib": "--max_queue, and --max_body_mib for the size of a request",
    "--max_replicas": "a Deployment of tfdist serve, with an autoscaler",
    "--no_pin": "no flag: replicas divide the CPU cores",
    "--node_rank": "launch --hosts a:2,b:2, once",
    "--precision": "model.quantize before the export",
    "--profile_ps": "keras.callbacks.TensorBoard(profile_batch=...)",
    "--reconnect_s": "tune --hosts, once",
    "--rendezvous_port": "launch --hosts a:2,b:2, which needs no port",
    "--rendezvous_token_file": "launch --hosts a:2,b:2, which needs no token",
    "--retrain_best": "tfdist export on the sweep, or tuner.get_best_models() if it has a tuner",
    "--serve": "tune --hosts, once",
    "--spares": "more --replicas, if requests must not wait",
    "--status": "squeue or kubectl get",
    "--versions": "no flag: each model serves its newest version",
    "InExamples": "decay_steps divided by the batch size",
    "LearningRates.plot": "matplotlib, with rates and losses",
    "Ledger": "tests/tools/ledger.py in a checkout",
    "data.ArraySource(memory_limit_bytes=)": "np.load(file, mmap_mode='r') for large arrays",
    "estimate_memory": "tfdist.find_batch_size",
    "export_model(precision=)": "model.quantize before the export",
    "export_model(validation_data=)": "samples=, and evaluate the model before the export",
    "fit(ledger=)": "tests/tools/ledger.py in a checkout",
    "tfdist bench": "python -m benchmarks.load in a checkout",
    "tfdist doctor": "tfdist check",
    "tfdist find": "tfdist.find_learning_rate or tfdist.find_batch_size in a script",
    "tfdist ledger": "tests/tools/ledger.py in a checkout",
    "tfdist lint": "tfdist check",
    "tfdist replay": "tests/tools/ledger.py in a checkout",
    "tuning.HyperModel": "keras_tuner.HyperModel",
    "tuning.search(early_stop=)": "tuner=keras_tuner.Hyperband(...), or EarlyStopping in the fit",
    "tuning.search(join=)": "hosts=, in a single process",
    "tuning.search(reconnect_s=)": "hosts=, in a single process",
    "tuning.search(rendezvous_token_file=)": "hosts=, in a single process",
    "tuning.search(retrain_best=)": "tuner.get_best_models(), or tfdist export on the sweep",
    "tuning.search(serve=)": "hosts=, in a single process",
}
"""Replacement of each removed program, flag, argument and public name, without ``tfdist.``."""

RENAMED = {
    "BackupAndRestore(directory=)": "backup_dir=",
    "BackupAndRestore(every=)": 'save_freq="auto"',
    "BackupAndRestore(every_steps=)": "save_freq=, with the number of steps",
    "BackupAndRestore(publish=)": "tfdist.PublishModel(directory), a callback of its own",
    "BackupAndRestore(publish_model=)": "tfdist.PublishModel(directory, model=...)",
    "data.Normalize": "data.Normalization",
    "data.RandomCrop(size=)": "data.RandomCrop(height, width)",
    "data.RandomFlip(horizontal=)": 'data.RandomFlip("horizontal")',
    "data.RandomFlip(vertical=)": 'data.RandomFlip("vertical"), or "horizontal_and_vertical"',
    "data.Rescale": "data.Rescaling",
    "data.load": "data.from_tfds",
    "load_weights(path=)": "filepath=",
    "make_strategy(kind=)": "strategy=",
}
"""Replacement of each old name or argument, both without the prefix ``tfdist.``."""


def instead_of(name: str) -> str:
    """Return the advice for a removed program, flag, argument or name, "" for another name."""
    return f"use {GONE[name]}" if name in GONE else ""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def refuse_renamed(*names: str) -> None:
    """Raise UsageError for the first renamed or removed name, with its replacement."""
    for name in names:
        if fix := f"write {RENAMED[name]}" if name in RENAMED else instead_of(name):
            raise UsageError(
                f"tfdist.{name}",
                "this name is from an earlier release",
                fix=fix,
                code="renamed",
            )


def without_renamed(owner: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator whose function raises UsageError for old arguments of `owner`."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            refuse_renamed(*(f"{owner}({name}=)" for name in kwargs))
            return function(*args, **kwargs)

        return call

    return decorate
