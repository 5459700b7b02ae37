"""Feeds and traced programs that a model keeps for its next `fit` on the same data.

With them, a script that calls `fit` for each epoch traces only once. The seed is a variable of the
programs, so the next `fit` returns the same results as with a new trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategy import Job
from tfdist.training.blocks import BlockRunner
from tfdist.training.building import compiled_parts
from tfdist.training.loop import RunPlan
from tfdist.training.run_settings import Run
from tfdist.training.task_agreement import digest_of

_NAME = "_tfdist_kept"
_MOST_BYTES = 2**24
"""Larger data are not compared: an epoch over them takes longer than a trace."""


def key_of(model: keras.Model, job: Job, run: Run, data: Any, *others: Any) -> Sequence[Any] | None:
    """Return everything a program depends on, or `None` if the program of this fit is not kept."""
    settings = dataclasses.replace(run, seed=None)
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    arrays = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    if repr(settings) != repr(Run()) or not arrays:
        return None
    if sum(leaf.nbytes for leaf in leaves) > _MOST_BYTES:
        return None
    structure = repr(keras.tree.map_structure(lambda leaf: leaf is None, data))
    variables = [(id(v), v.trainable) for v in (*model.variables, *model.metrics_variables)]
    return [digest_of(leaves), structure, *compiled_parts(model), variables, job.strategy, *others]


def kept_of(model: keras.Model, key: Sequence[Any] | None) -> tuple[RunPlan, BlockRunner] | None:
    """Return what the last `fit` has kept if its key is the same, else `None`."""
    last_key, kept = vars(model).get(_NAME, (None, None))
    return kept if key is not None and last_key == key else None


def keep(model: keras.Model, key: Sequence[Any] | None, plan: RunPlan, blocks: BlockRunner) -> None:
    """Keep the plan and programs of a finished `fit` for the next `fit`."""
    if key is not None and isinstance(blocks.program.seed, tf.Variable):
        kept = key, (dataclasses.replace(plan, callbacks=None), blocks)
        object.__setattr__(model, _NAME, kept)  # hide it from Keras, which tracks layers
