"""Split variable: rows on several parameter servers, one variable to Keras.

TensorFlow's own `ShardedVariable` is not what Keras' tapes, optimizers and files take for a
variable (it has no `handle`, no `numpy`). Here a Keras variable stays one: in layers it is its
whole value, which a step puts together of its parts once, and again only after it has written to
them; in files and checkpoints too, so that they do not depend on the number of servers. Only an
optimizer's update is done part by part, each where the part is, with its rows of the gradient and
of the slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from tfdist.errors import UsageError


@dataclasses.dataclass(kw_only=True, slots=True)
class _Step:
    """What a step being traced has read of split variables, by their `id`.

    Attributes:
      graph: the step's own.
      firsts: the value that was read first. It is what tapes know a variable by: a later one is
        derived from it, so that a gradient by it counts all that was read.
      wholes: the value now, in the step's own graph; None for what a condition has changed, which
        is read where it is asked for until the step's own graph asks.
    """

    graph: Any
    firsts: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    wholes: dict[int, tf.Tensor | None] = dataclasses.field(default_factory=dict)


class _Thread(threading.local):
    part: int | None = None  # that stands for the whole in an update
    step: _Step | None = None  # that is being traced


_thread = _Thread()


class SplitVariable(tf.__internal__.types.Tensor):
    """The rows of a variable, in parts that are variables."""

    def __init__(self, parts: Sequence[Any], *, name: str) -> None:
        first = parts[0]
        self.parts = tuple(parts)
        self.rows = tuple(int(part.shape[0]) for part in parts)
        self._shape = tf.TensorShape([sum(self.rows), *first.shape[1:]])
        self._name = name
        self.trainable = first.trainable
        self.synchronization = first.synchronization
        self.aggregation = first.aggregation
        self.constraint = None
        self._unique_id = f"split_{first._unique_id}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def shape(self) -> Any:
        return self._shape if _thread.part is None else self.parts[_thread.part].shape

    @property
    def device(self) -> str:
        return "" if _thread.part is None else self.parts[_thread.part].device

    @property
    def handle(self) -> tf.Tensor:
        """What a gradient tape knows the variable by: its first value in this step."""
        if _thread.part is not None or _thread.step is None:
            return self.read_value()
        return self._first(_thread.step)

    def read_value(self) -> tf.Tensor:
        """Return the whole value; in an update, the value of the part that is updated."""
        if _thread.part is not None:
            return tf.convert_to_tensor(self.parts[_thread.part])
        if _thread.step is None:
            return self._put_together()
        first, now = self._first(_thread.step), self._now(_thread.step)
        if self.trainable:
            # A tape takes anything that has a handle for a variable.
            pywrap_tfe.TFE_Py_TapeVariableAccessed(types.SimpleNamespace(handle=first))
        return first if now is first else tf.grad_pass_through(lambda _: now)(first)

    value = read_value

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.concatenate([part.numpy() for part in self.parts])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), dtype=dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype=dtype, name=name)

    def _put_together(self) -> tf.Tensor:
        return tf.concat([tf.convert_to_tensor(part) for part in self.parts], 0)

    def _first(self, step: _Step) -> tf.Tensor:
        if id(self) not in step.firsts:
            # Of the step's own graph, also where a loop or a condition is the first to read it.
            with step.graph.as_default():
                step.firsts[id(self)] = self._put_together()
            step.wholes.setdefault(id(self), step.firsts[id(self)])
        return step.firsts[id(self)]

    def _now(self, step: _Step) -> tf.Tensor:
        whole = step.wholes.get(id(self))
        if whole is not None:
            return whole
        in_step = tf.compat.v1.get_default_graph() is step.graph
        if id(self) in step.wholes and not in_step:
            return self._put_together()
        with step.graph.as_default():
            step.wholes[id(self)] = whole = self._put_together()
        return whole

    def _forget(self, step: _Step) -> None:
        """What was read is not the value any more: it is about to be written."""
        graph = tf.compat.v1.get_default_graph()
        if graph is step.graph:
            step.wholes.pop(id(self), None)
            return
        step.wholes[id(self)] = None
        while graph is not step.graph and id(self) in step.firsts:
            if not isinstance(graph, CondBranchFuncGraph):
                # It would read in its second turn what the step has read before its first.
                raise UsageError(
                    "step",
                    received=f"{self.name}, which is in parts, updated in a tf.while_loop or"
                    " tf.function",
                    expected="updates in the step itself, or in a tf.cond of it",
                    fix="use a Python loop, which the step unrolls, or leave --split_bytes out",
                    code="split-variable",
                )
            graph = graph.outer_graph

    def _write(self, name: str, value: Any) -> None:
        if _thread.step is not None:
            self._forget(_thread.step)
        if _thread.part is not None:
            getattr(self.parts[_thread.part], name)(value)
            return
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value, self.dtype)
        for number, part in enumerate(self.parts):
            getattr(part, name)(self.rows_of(value, number))

    def rows_of(self, value: Any, number: int) -> Any:
        """Return the rows of a tensor or of slices of the whole that belong to a part."""
        start = sum(self.rows[:number])
        end = start + self.rows[number]
        if not isinstance(value, tf.IndexedSlices):
            return value[start:end]
        mine = (value.indices >= start) & (value.indices < end)
        return tf.IndexedSlices(
            tf.boolean_mask(value.values, mine),
            tf.boolean_mask(value.indices, mine) - start,
            tf.shape(self.parts[number]),
        )

    def _serialize_to_tensors(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "tf.train.Checkpoint or model.export",
            received=f"{self.name}, which is in parts on {len(self.parts)} parameter servers",
            expected="variables that are whole",
            fix="save the model by model.save, load it on one device and export that",
            code="split-variable",
        )

    _export_to_saved_model_graph = _serialize_to_tensors

    def __repr__(self) -> str:
        return f"<SplitVariable {self.name} {tuple(self.shape)} in rows of {self.rows}>"


def _operator(name: str) -> Any:
    def operate(self: SplitVariable, *others: Any) -> Any:
        return getattr(tf.Tensor, name)(self.read_value(), *others)

    return operate


def _writer(name: str) -> Any:
    def write(self: SplitVariable, value: Any, **options: Any) -> None:
        self._write(name, value)

    return write


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(SplitVariable, _name, _operator(_name))
for _name in ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub"):
    setattr(SplitVariable, _name, _writer(_name))


def parts_of(variable: Any) -> tuple[Any, ...]:
    return variable.parts if isinstance(variable, SplitVariable) else (variable,)


@contextlib.contextmanager
def reading_once() -> Iterator[None]:
    """While a step is traced: what it reads of a split variable is read once between two writes."""
    _thread.step = _Step(graph=tf.compat.v1.get_default_graph())
    try:
        yield
    finally:
        _thread.step = None


@contextlib.contextmanager
def standing_for_whole(part: int) -> Iterator[None]:
    """Every split variable is its part of this number; for what is done row by row."""
    before, _thread.part = _thread.part, part
    try:
        yield
    finally:
        _thread.part = before


# Which optimizers may update a variable that is in parts.
#
# A part of it is updated with its rows of the gradient and of the slots alone. Nothing would tell
# that an optimizer which needs other rows too, for a norm as an example, came to another result.


# Whose update of a row needs no other row of the same variable.
_BY_ROWS = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
)


def require_by_rows(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError for an optimizer that needs one of the variables whole."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    split = [v for v in variables if isinstance(getattr(v, "value", v), SplitVariable)]
    by_rows = tuple(getattr(keras.optimizers, name) for name in _BY_ROWS)
    if not split or type(optimizer) in by_rows:
        return
    raise UsageError(
        "optimizer",
        received=f"{type(optimizer).__name__} for {split[0].path}, which is in parts",
        expected=f"one whose update goes row by row: {', '.join(_BY_ROWS)}",
        fix="leave --split_bytes out",
        code="unsupported-optimizer",
    )
