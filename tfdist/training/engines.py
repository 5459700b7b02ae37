"""Engines, which run step blocks under each strategy.

`SynchronousEngine` serves single, mirrored and multiworker. Other packages have the other engines.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
)
from tensorflow.python.distribute import values_util

from tfdist.data.python_indexed import PythonSource
from tfdist.data.source import GraphSource
from tfdist.errors import PeerLost, UsageError
from tfdist.strategy import Job, current_job
from tfdist.strategy.group import naming_lost_peer, rows_of_all_tasks
from tfdist.training.feed import Part
from tfdist.training.keras_compat import compiled, sum_over_replicas
from tfdist.training.program import (
    Engine,
    StepProgram,
    as_number,
    engine_class,
    find_batch_axes,
    run_replica,
)
from tfdist.training.resume import require_deterministic
from tfdist.training.task_agreement import require_same_batches

_GATHER = "CollectiveGatherV2"


class SynchronousEngine(Engine):
    """Runs a step block in one compiled call, on all replicas of the group together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blocks: dict[StepProgram, tuple[Any, bool]] = {}  # block function, replicas gather
        self._steps: dict[StepProgram, Callable[..., Any]] = {}

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``. A collective: every task makes the same call."""
        if program not in self._blocks:
            self._blocks[program] = self._traced_block(program, first, last)
        function, gathers = self._blocks[program]
        logs: dict[str, tf.Tensor] = {}
        for start, end in _calls(program, first, last) if gathers else [(first, last)]:
            with naming_lost_peer(self._job):
                logs, rows = function(*_arguments(program, start, end))
            self._advance(program, start, end)
            for observer, noted in zip(program.observers, rows, strict=True):
                observer.write(start, end, noted)
        return {name: as_number(value) for name, value in logs.items()}

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, complete on every task. A collective."""
        function = self._steps.get(program)
        if function is None:
            function = self._steps[program] = self._compile_step(program)
        for step in range(first, last):
            arguments = [tf.constant(step, tf.int64)]
            if not program.feed.direct:
                arguments.append(program.feed.iterator(step))
            with naming_lost_peer(self._job):
                locals_ = function(*arguments)
            self._advance(program, step, step + 1)
            yield self._gathered(locals_)

    def _advance(self, program: StepProgram, first: int, last: int) -> None:
        """Record the progress in a feed that reads ahead, and compare the tasks' batches."""
        if not program.feed.direct:
            program.feed.advanced_to(last)
            require_same_batches(self._job, program.feed, first, last)

    def _traced_block(self, program: StepProgram, first: int, last: int) -> tuple[Any, bool]:
        """Return a program's block function, and whether replicas gather tensors in a step.

        Raises UsageError if an exact program draws random numbers without the run's seed.
        """
        function, several = self._compile_block(program), self._job.num_replicas > 1
        if not several and not program.exact:
            return function, False
        arguments = _arguments(program, first, last)
        graph = function.get_concrete_function(*arguments).graph
        if program.batch_axes.are_wanted:
            find_batch_axes(program, self._job)
            function = self._compile_block(program)
            graph = function.get_concrete_function(*arguments).graph
        if program.exact:
            require_deterministic(graph)
        if not several or not program.training:
            return function, False
        functions = graph.as_graph_def().library.function
        return function, any(n.op == _GATHER for f in functions for n in f.node_def)

    def _compile_block(self, program: StepProgram) -> Any:
        @compiled
        def run_block(first: tf.Tensor, last: tf.Tensor, iterator: Any = None) -> Any:
            _draw_apart(self._job)
            values: list[dict[str, tf.Tensor]] = []

            observers = program.observers
            rows = [observer.rows(last - first) for observer in observers]

            def body(step: tf.Tensor, kept: tf.Tensor, *rows: Any) -> tuple[Any, ...]:
                parts = _parts(program, step, iterator)
                at = step - first
                rows = tuple(o.noted(r, at, parts) for o, r in zip(observers, rows, strict=True))
                outputs = self._step(program, step, parts)
                if program.keep_logs:
                    values[:] = [
                        {name: tf.convert_to_tensor(logs[name]) for name in sorted(logs)}
                        for logs in outputs
                    ]
                    kept = tf.raw_ops.OptionalFromValue(components=tf.nest.flatten(values))
                return step + 1, kept, *rows

            # The outputs' types are unknown before the trace, so the loop carries a variant.
            _, kept, *rows = tf.while_loop(
                lambda step, *_: step < last,
                body,
                [first, tf.raw_ops.OptionalNone(), *rows],
                parallel_iterations=1,
            )
            logs = self._reduced_logs(_unpacked(kept, values)) if values else {}
            return logs, [[row.stack() for row in noted] for noted in rows]

        return run_block

    def _compile_step(self, program: StepProgram) -> Callable[..., Any]:
        @compiled
        def run_step(step: tf.Tensor, iterator: Any = None) -> Any:
            _draw_apart(self._job)
            parts = _parts(program, step, iterator)
            outputs = self._step(program, step, parts)
            if not program.feed.may_be_empty:
                return outputs
            return [
                keras.tree.map_structure(partial(without_substitute, count=part.count), output)
                for output, part in zip(outputs, parts, strict=True)
            ]

        return run_step

    def _step(self, program: StepProgram, step: tf.Tensor, parts: list[Part]) -> list[Any]:
        """Run one step on this task's replicas and return each replica's outputs."""
        strategy, outputs = self._job.strategy, {}

        def in_replica() -> None:
            local = values_util.get_current_replica_id_as_int() or 0
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            outputs[local] = run_replica(
                program,
                parts[local],
                step=step,
                replica=replica,
                num_replicas=self._job.num_replicas,
            )

        strategy.run(in_replica)
        return [outputs[local] for local in sorted(outputs)]

    def _reduced_logs(self, values: list[dict[str, tf.Tensor]]) -> Any:
        """Sum the last step's logs over all replicas, so that every task gets the same logs."""
        replicas, strategy = self._job.num_replicas, self._job.strategy

        def in_replica() -> Any:
            local = values_util.get_current_replica_id_as_int() or 0
            # Copy to the replica's device: a collective runs on the device of its value.
            mine = {n: tf.identity(tf.cast(v, tf.float32)) for n, v in values[local].items()}
            if replicas == 1:
                return mine
            # Prefer the ring: its next sum detects a worker that runs other steps.
            return dict(zip(mine, sum_over_replicas(list(mine.values())), strict=True))

        reduced = strategy.run(in_replica)
        return {n: strategy.experimental_local_results(v)[0] for n, v in reduced.items()}

    def _gathered(self, parts: list[Any]) -> Any:
        """Join the replicas' outputs of one step, in the order of the examples."""
        flat = [list(map(convert_to_np_if_not_ragged, keras.tree.flatten(part))) for part in parts]
        whole = [joined(columns) for columns in zip(*flat, strict=True)]
        if self._job.has_peers:
            of = "a step's outputs"
            whole = [rows_of_all_tasks(self._job, r, rank=r.ndim, of=of) for r in whole]
        return keras.tree.pack_sequence_as(parts[0], whole)


def _calls(program: StepProgram, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Split a block into calls, so that gathered tensors keep their shape within each call.

    Sparse gradients are gathered, and a gather accepts only one shape per call ("Shape mismatch
    in the collective instance"). The size of batches by index changes at the end of an epoch.
    The size of ready-made batches may change at every step.
    """
    by_index = isinstance(program.feed.source, GraphSource | PythonSource)
    start = first
    for step in range(first + 1, last):
        sizes = {len(program.feed.plan.span(s)) for s in (step - 1, step)}
        if len(sizes) > 1 or not by_index:
            yield start, step
            start = step
    yield start, last


def _draw_apart(job: Job) -> None:
    """Make `tf.random` draw different numbers in each task, even if all tasks set one seed."""
    graph = tf.compat.v1.get_default_graph()
    if graph.seed is not None:
        graph.seed += job.task_index


def _arguments(program: StepProgram, first: int, last: int) -> list[Any]:
    bounds = [tf.constant(first, tf.int64), tf.constant(last, tf.int64)]
    return bounds if program.feed.direct else [*bounds, program.feed.iterator(first)]


def _parts(program: StepProgram, step: tf.Tensor, iterator: Any) -> list[Part]:
    if iterator is None:
        return list(program.feed.at(step))
    return list(iterator.get_next())


def _unpacked(kept: tf.Tensor, like: Any) -> Any:
    """Return the tensors of an optional that was created from `like`."""
    flat = tf.nest.flatten(like)
    tensors = tf.raw_ops.OptionalGetValue(
        optional=kept,
        output_types=[t.dtype for t in flat],
        output_shapes=[t.shape for t in flat],
    )
    return tf.nest.pack_sequence_as(like, tensors)


def joined(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts as an array (ragged if their shapes differ, as in Keras).

    Numbers are stacked. Ragged or sparse rows stay ragged or sparse.
    """
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, tf.RaggedTensor) for part in parts):
        return tf.concat(parts, axis=0)
    arrays = all(isinstance(part, np.ndarray) for part in parts)
    if arrays and len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    tensors = [part if tf.is_tensor(part) else tf.convert_to_tensor(part) for part in parts]
    return convert_to_np_if_not_ragged(potentially_ragged_concat(tensors))


def without_substitute(rows: Any, *, count: tf.Tensor) -> Any:
    """Remove the padding example of an empty batch fraction. In graph."""
    return rows[: tf.cast(count > 0, tf.int64) * tf.int64.max]


@contextlib.contextmanager
def naming_a_lost_server() -> Iterator[None]:
    """Raise PeerLost with the name of a lost ps in place of TensorFlow's error.

    Errors occur while a model is built, a learning rate or metric is read, or a checkpoint is
    saved. Raise UsageError if a worker lacks an operation: it imports no module after
    `make_strategy()`. Use it as a context manager or as a decorator.
    """
    try:
        yield
    except tf.errors.OpError as error:
        missing = re.search(r"Op type not registered '(\w+)'", str(error))
        if missing:
            raise UsageError(
                "data under the ps strategy",
                f"the workers have no operation {missing[1]}",
                fix="import its package (such as keras_hub) before tfdist.make_strategy()",
                code="missing-operation",
            ) from error
        job = current_job()
        lost = engine_class(job).lost_task(error, job) if job is not None else ""
        if not lost:
            raise
        raise PeerLost(f"lost {lost}: it does not answer") from error
