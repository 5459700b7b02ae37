"""Every workaround for Keras and TensorFlow that the training step needs, in one place.

The replacements are put in place once, by `install`, and do nothing unless the calling thread is
tracing a tfdist step (`tracing`): anything else in the process sees stock Keras. `REPLACEMENTS`
lists them, as `tfdist.ps.keras_compat` does what only a ps job has besides, each with the issue
it works around and the version that ends it.
`tests/integration/test_keras_compat.py` has one test for each that fails on the day Keras no
longer needs it. Seen on Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21; no release ends one of them,
and Keras' code of August 2026, to become 3.16, reads the same in these places.

    trace         what the replacements know about the step that this thread is tracing
    replacement   what a replacement is
    gradients     the gradient hook: gradients are reduced where they enter the optimizer
    reduction     the sum over replicas itself, in few messages, which keeps no graph
    on_servers    what of it is in `tfdist.ps`, for a ps job
    updates       after the gradient hook: each replica updates its own copy of a variable
    at_once       SGD with momentum updates a variable in one operation
    losses        a replica's loss counts by its fraction of the global batch; masks, sums, add_loss
    metrics       means count examples
    moments       synchronized statistics leave out who pads an empty batch fraction
    variables     statistics travel with the gradients; additions in one operation; local values
    randomness    draws come from (seed, step, replica)
    functions     `tf.function` without its warning of tracing often
    installing    puts all of it in place

The heart is the gradient hook: where they enter `Optimizer.apply`, and nowhere else,
they are summed over the replicas. Clipping, finiteness checks, accumulation and decay then see
what one device would see, and every replica does the same update on its own copy.
"""

from __future__ import annotations

from tfdist.training.keras_compat.functions import compiled
from tfdist.training.keras_compat.installing import REPLACEMENTS, install, tracing
from tfdist.training.keras_compat.losses import logs_by_fraction
from tfdist.training.keras_compat.randomness import random_key
from tfdist.training.keras_compat.reduction import all_reduce, sum_over_replicas
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace

__all__ = [
    "REPLACEMENTS",
    "Replacement",
    "StepTrace",
    "all_reduce",
    "compiled",
    "install",
    "logs_by_fraction",
    "random_key",
    "sum_over_replicas",
    "tracing",
]
