"""Training under every strategy: `fit`, `evaluate`, `predict`, and the engine below them."""

from __future__ import annotations

from tfdist.training.epochs import EpochPlan, VirtualEpochs
from tfdist.training.evaluation import evaluate, predict
from tfdist.training.fitting import fit

__all__ = ["EpochPlan", "VirtualEpochs", "evaluate", "fit", "predict"]
