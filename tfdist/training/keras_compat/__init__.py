"""All workarounds for Keras and TensorFlow that the training step needs.

`install` applies the replacements once. They are active only while the calling thread traces a
tfdist step (`tracing`), so all other code in the process sees stock Keras. `REPLACEMENTS` lists
them with their issues. In a ps job, `tfdist.ps.keras_compat` adds more. Each entry has a test in
`tests/integration/test_keras_compat.py` that fails when Keras no longer needs the replacement.
`Replacement.until` then names the release, and `install` leaves the replacement out.

    trace       definition of a replacement, and the state of the step that this thread is tracing
    gradients   gradient hook: reduces gradients when they enter the optimizer
    reduction   sum over replicas, in few messages, without keeping a graph
    sharding    each worker updates its part of each variable, and has slots only for that part
    kernels     fixed order of sums, oneDNN's kernel for gradients of pools, and an option of `fit`
                for fewer kernels in normalization, GELU and attention
    losses      weights a replica's loss by its batch fraction, and means by numbers of examples
    metrics     results in logs cover all replicas. A scalar from the step counts once
    variables   reduces statistics with the gradients. Additions and updates are one operation each.
                Random draws depend only on (seed, step, replica)

The central part is the gradient hook. `Optimizer.apply` sums the gradients over the replicas
before any other work. Clipping, finiteness checks, accumulation and decay then see the same
gradients as on one device. Each replica applies the same update to its own copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.training.keras_compat import gradients, variables  # noqa: F401  (they register)
from tfdist.training.keras_compat.kernels import (
    adding_in_order,
    compiled,
    fuse,
    inline,
    is_fused,
    pools_again,
)
from tfdist.training.keras_compat.losses import (
    added_in_part,
    compares_examples,
    has_examples,
    logs_by_fraction,
    warn_of_parts,
)
from tfdist.training.keras_compat.metrics import MetricLogs
from tfdist.training.keras_compat.reduction import (
    call_to_peer,
    reduce_statistics,
    sum_over_replicas,
)
from tfdist.training.keras_compat.trace import (
    CONTEXTS,
    REPLACEMENTS,
    BatchAxes,
    StepTrace,
    bare_trace,
    following,
)
from tfdist.training.keras_compat.variables import random_key

__all__ = [
    "REPLACEMENTS",
    "BatchAxes",
    "MetricLogs",
    "StepTrace",
    "added_in_part",
    "adding_in_order",
    "bare_trace",
    "call_to_peer",
    "compares_examples",
    "compiled",
    "fuse",
    "has_examples",
    "inline",
    "install",
    "is_fused",
    "logs_by_fraction",
    "pools_again",
    "random_key",
    "sum_over_replicas",
    "tracing",
    "warn_of_parts",
]


def install() -> None:
    """Install the replacements that this Keras needs, of all imported modules, once per process."""
    for replacement in REPLACEMENTS:
        if replacement.is_needed:
            replacement.put_in_place()


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[StepTrace]:
    """Make Keras use `trace` in this thread. For the replica function of a step."""
    install()
    with contextlib.ExitStack() as around:
        for context in (adding_in_order(), following(trace), *(make() for make in CONTEXTS)):
            around.enter_context(context)
        yield trace
        reduce_statistics(trace)
