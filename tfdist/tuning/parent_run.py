"""One run of a tracker above those of a sweep's trials, by variables that MLflow and W&B read."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tfdist.training import trackers

FILE_NAME = "mlflow-run"
"""In the sweep's directory: the id of its run in MLflow."""

_LOG = logging.getLogger(__name__)


def variables_of_trials(
    packages: Collection[str], sweep_dir: Path, *, begun: Mapping[str, Any]
) -> Mapping[str, str]:
    """Return what makes the runs that trials begin children of one, also in a sweep that goes on.

    Args:
      packages: the trackers that the trials log to, of which ``mlflow`` and ``wandb`` can.
      sweep_dir: of the sweep.
      begun: the first line of its journal.
    """
    variables = {}
    if "wandb" in packages:
        digest = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()
        variables["WANDB_RUN_GROUP"] = f"{sweep_dir.name}-{digest[:8]}"
    if "mlflow" in packages:
        try:
            tags = {"mlflow.parentRunId": _begun_in_mlflow(sweep_dir)}
            variables["MLFLOW_RUN_CONTEXT"] = json.dumps(tags)
        except Exception as error:
            trackers.warn("MLflow: the sweep has no run of its own", error)
    return variables


def _begun_in_mlflow(sweep_dir: Path) -> str:
    """Return the run that the sweep has begun with: the active one, or a new one."""
    mlflow: Any = importlib.import_module("mlflow")
    file = sweep_dir / FILE_NAME
    if file.exists():
        run = file.read_text()
        trackers.resume_in_mlflow(run)
        return run
    begun = mlflow.active_run() or mlflow.start_run(run_name=sweep_dir.name)
    file.write_text(begun.info.run_id)
    return str(begun.info.run_id)
