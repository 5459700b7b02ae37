"""Check that the tasks of one job do not each train a separate model with Keras.

A program that calls `model.fit` without `tfdist.make_strategy` trains one whole model in each task,
and all tasks write the same files. So in a job of several tasks, this module wraps Keras' training
methods. Any task with a strategy may train. Without a strategy only the first task may train. The
next task raises UsageError before it writes a file.

`tfdist.launch.task` loads this module when a program imports Keras.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfdist.errors import UsageError

_is_training = False


def watch(module: ModuleType, owner: str, names: tuple[str, ...], *, task: str, claim: str) -> None:
    """Wrap the methods `names` of the class `owner`, in a new module of Keras, with the check.

    `claim` is the path of the file that lists the job's tasks that train separate models.
    """
    kind = getattr(module, owner)
    for name in names:
        setattr(kind, name, _asking(getattr(kind, name), task=task, claim=claim))


def _asking(original: Callable[..., Any], *, task: str, claim: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_training and not _has_joined():
            _begin(task, claim, name=original.__qualname__.rpartition(".")[2])
        return original(*args, **kwargs)

    return call


def _has_joined() -> bool:
    """Return whether `make_strategy` made a strategy, or TensorFlow is connected to other tasks.

    Return True for other backends of Keras.
    """
    job = sys.modules.get("tfdist.strategy.job")
    eager = sys.modules.get("tensorflow.python.eager.context")
    if eager is None or (job is not None and job.current_job() is not None):
        return True
    servers = ("_server_def", "_collective_ops_server_def")
    return any(getattr(eager.context(), name, None) is not None for name in servers)


def _begin(task: str, claim: str, *, name: str) -> None:
    """Record that this task trains a separate model, or raise UsageError if another task does."""
    global _is_training
    try:
        with open(claim, "a+") as file:  # appends are atomic
            file.write(f"{task}\n")
            file.flush()
            file.seek(0)
            first = file.readline().strip()
    except OSError:  # a full disk
        first = task
    if first != task:
        raise UsageError(
            name,
            f"{task} and {first} train separate models, as no task called tfdist.make_strategy()",
            fix="add the line strategy = tfdist.make_strategy(), and create and compile the model "
            "in a block with strategy.scope(). To train a separate model in each task, pass "
            "--independent",
            code="independent-trainings",
        )
    _is_training = True
