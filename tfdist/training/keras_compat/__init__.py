"""Every workaround for Keras and TensorFlow that the training step needs, in one place.

The replacements are put in place once, by `install`, and do nothing unless the calling thread is
tracing a tfdist step (`tracing`): anything else in the process sees stock Keras. `REPLACEMENTS`
has them, with those of `tfdist.ps.keras_compat` in a ps job, each with the issue it works around.
`tests/integration/test_keras_compat.py` has one test for each that fails on the day Keras no
longer needs it. Seen on Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21; no release ends one of them,
and Keras' code of August 2026, to become 3.16, reads the same in these places.

    trace       what a replacement is, and what it knows of the step that this thread is tracing
    gradients   the gradient hook: gradients are reduced where they enter the optimizer
    reduction   the sum over replicas itself, in few messages, which keeps no graph
    sharding    each worker updates its part of each variable, and has slots of that alone
    kernels     sums are made in one order, pools have the gradient of oneDNN's kernel, and where
                `fit` is asked to, normalization, GELU and attention take fewer kernels
    losses      a replica's loss counts by its fraction of the global batch; means count examples
    metrics     results in logs are those of all replicas; a number of the step counts once
    variables   statistics travel with the gradients; additions and updates are one operation each;
                draws come from (seed, step, replica)

The heart is the gradient hook: where they enter `Optimizer.apply`, and nowhere else,
they are summed over the replicas. Clipping, finiteness checks, accumulation and decay then see
what one device would see, and every replica does the same update on its own copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.training.keras_compat import gradients, variables  # noqa: F401  (they register)
from tfdist.training.keras_compat.kernels import (
    adding_in_order,
    compiled,
    fuse,
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
    reduce_statistics,
    sum_over_replicas,
)
from tfdist.training.keras_compat.trace import (
    REPLACEMENTS,
    BatchAxes,
    StepTrace,
    following,
)
from tfdist.training.keras_compat.variables import on_servers, random_key

__all__ = [
    "REPLACEMENTS",
    "BatchAxes",
    "MetricLogs",
    "StepTrace",
    "added_in_part",
    "adding_in_order",
    "compares_examples",
    "compiled",
    "fuse",
    "has_examples",
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
    """Put the replacements in place, each once a process; those of a ps job in one alone."""
    on_servers()  # which adds them
    for replacement in REPLACEMENTS:
        replacement.put_in_place()


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[StepTrace]:
    """Make Keras follow `trace` in this thread; used inside the replica function of a step."""
    install()
    servers = on_servers()
    reading = servers.reading_once() if servers else contextlib.nullcontext()
    with adding_in_order(), following(trace), reading:
        yield trace
        reduce_statistics(trace)
