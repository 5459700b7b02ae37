"""Training under every strategy: `fit`, `evaluate`, `predict`, and the engine below them."""

from __future__ import annotations

from tfdist.training.epochs import EpochPlan, VirtualEpochs
from tfdist.training.evaluation import evaluate, predict
from tfdist.training.fitting import fit
from tfdist.training.schedule import InExamples
from tfdist.training.steps import StepLoop

__all__ = [
    "EpochPlan",
    "InExamples",
    "StepLoop",
    "VirtualEpochs",
    "evaluate",
    "fit",
    "predict",
]
