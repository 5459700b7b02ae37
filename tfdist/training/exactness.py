"""What stands in the way of resuming a run to the same bits, and `BackupAndRestore(exact=True)`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.checkpoint.backup import BackupAndRestore
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import DRAWING
from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training.inputs import Data

_LOG = logging.getLogger(__name__)
_OPS_SHOWN = 3


def require_exact(backups: Sequence[BackupAndRestore], data: Data, *, job: Job) -> None:
    """Says once that a run resumes by replay; under exact=True it is refused. Every task calls it.

    Raises:
      UsageError: exact=True, and the data are a stream or the job is asynchronous.
    """
    stream = isinstance(data.source, StreamSource | InputFunctionSource)
    if any(backup.exact for backup in backups):
        if job.kind == "ps":
            raise _refused(
                "strategy ps, whose workers take steps at a time of their own",
                expected="a strategy whose steps have one order: single, mirrored, multiworker",
            )
        if stream:
            raise _refused(
                f"{data.source.describe()}, which a resumed run can only read again",
                expected="data by index: arrays, TFRecord files, TFDS, or a sequence",
            )
    elif backups and stream and job.is_chief:
        _LOG.info(
            "%s: a resumed run reads it again up to its step (replay), which gives the same "
            "bits only where the stream gives the same batches",
            data.source.describe(),
        )


def require_deterministic(graph: Any) -> None:
    """Raises UsageError that names the operations of a traced step that draw by themselves.

    Args:
      graph: the `tf.Graph` of a range of steps, with all functions it calls. Python code inside
        (`tf.py_function`) is not looked into.
    """
    found = sorted(set(_drawing(graph.as_graph_def(add_shapes=False))))
    if found:
        more = f", and {len(found) - _OPS_SHOWN} more" if len(found) > _OPS_SHOWN else ""
        raise _refused(
            f"a step that draws from no seed of the run: {', '.join(found[:_OPS_SHOWN])}{more}",
            expected="random draws by Keras' layers, or with a keras.random.SeedGenerator",
        )


def _drawing(graph_def: Any) -> Iterator[str]:
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    for body in bodies:
        for node in body:
            if node.op in DRAWING:
                yield f"{node.op} ({node.name})"


def _refused(received: str, *, expected: str) -> UsageError:
    return UsageError(
        "BackupAndRestore(exact=True)",
        received=received,
        expected=expected,
        fix="change it, or leave exact=True out and resume to a like run, not to the same bits",
    )
