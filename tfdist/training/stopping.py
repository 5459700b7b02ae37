"""What a run that is asked to stop says, and what it keeps of an epoch that is not validated yet.

Validation sets the metrics to zero, so that after it has begun a checkpoint cannot say any more how
the training of the epoch went. Its logs are kept beside, and a resumed run validates from the
beginning.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.backup import RunState

NOTHING_LEFT = (
    "the run had come to its end at step %d, and nothing is left to do: checkpoints in %s; "
    "a new run needs another directory"
)
_KEY = "logs_before_validation"


def message(signum: int, *, step: int, saved_step: int | None, has_backup: bool) -> str:
    """The one line that the chief logs and `Stopped` carries."""
    stopped = f"stopped by {signal.Signals(signum).name} at step {step}"
    if not has_backup:
        return f"{stopped}; nothing is saved, as there is no tfdist.BackupAndRestore"
    if saved_step is None:
        return f"{stopped}; there was nothing to save yet"
    if saved_step != step:
        stopped += f", state of step {saved_step} saved"
    else:
        stopped += ", state saved"
    return f"{stopped}; run the same command again to go on"


def kept_logs(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What to put into `RunState.fingerprint` so that `logs_before_validation` finds it."""
    if logs is None:
        return {}
    return {_KEY: {name: np.asarray(value).tolist() for name, value in logs.items()}}


def logs_before_validation(saved: RunState | None) -> dict[str, Any] | None:
    """The logs of an epoch whose validation was broken off, None where none was."""
    logs = None if saved is None else saved.fingerprint.get(_KEY)
    if logs is None:
        return None
    return {n: np.asarray(v) if isinstance(v, list) else v for n, v in logs.items()}


def may_break_off(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether the weights are those of the training in the middle of a validation.

    One who has put others in their place cannot be asked for the very bits back.
    """
    return not any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)


def unfit(model: keras.Model, figures: Mapping[str, Any]) -> str:
    """Why a state is not worth saving, by the figures of its epoch; empty where it is.

    Data to validate on may give a loss that is not finite to the best of weights: then these tell.
    """
    loss = figures.get("loss", 0.0)
    if not np.isfinite(loss):
        return f"the loss is {loss}"
    if np.isfinite(figures.get("val_loss", 0.0)):
        return ""
    weights = [np.asarray(weight) for weight in model.get_weights()]
    return "" if all(np.isfinite(w).all() for w in weights) else "a weight is not finite"
