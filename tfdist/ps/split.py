"""Split variable: rows on several parameter servers, a single variable to Keras.

Keras' tapes, optimizers and files do not accept TensorFlow's own `ShardedVariable`, which has no
`handle` and no `numpy`. A split variable here stays a Keras variable. Layers read its whole
value. A step concatenates the parts once, and again only after it has written to them. Files and
checkpoints hold the whole value, so they do not depend on the number of servers. Only an
optimizer's update runs part by part, on the part's server, with that part of gradient and slots.
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
    """Values of split variables that the step being traced has read, by the variable's `id`.

    Attributes:
      graph: Graph of the step.
      firsts: First value read. Tapes identify a variable by this tensor. Later values derive from
        it, so that its gradient includes all reads.
      wholes: Current value in the step's graph, or `None` after a write in a condition. A read in a
        condition then concatenates the parts. A read in the step's graph sets the value again.
    """

    graph: Any
    firsts: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    wholes: dict[int, tf.Tensor | None] = dataclasses.field(default_factory=dict)


class _Thread(threading.local):
    part: int | None = None  # the part that an update sees as the whole variable
    step: _Step | None = None  # the step being traced


_thread = _Thread()


class SplitVariable(tf.__internal__.types.Tensor):
    """Variable made of several variables, each with some of its rows."""

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
        """Tensor by which a gradient tape identifies the variable: its first value in this step."""
        if _thread.part is not None or _thread.step is None:
            return self.read_value()
        return self._first(_thread.step)

    def read_value(self) -> tf.Tensor:
        """Return the whole value, or in an update the value of the part being updated."""
        if _thread.part is not None:
            return tf.convert_to_tensor(self.parts[_thread.part])
        if _thread.step is None:
            return self._put_together()
        first, now = self._first(_thread.step), self._now(_thread.step)
        if self.trainable:
            # A tape accepts any object with a handle as a variable.
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
            # In the step's own graph, even if a loop or a condition reads it first.
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
        """Drop the value that the step has read, before a write."""
        graph = tf.compat.v1.get_default_graph()
        if graph is step.graph:
            step.wholes.pop(id(self), None)
            return
        step.wholes[id(self)] = None
        while graph is not step.graph and id(self) in step.firsts:
            if not isinstance(graph, CondBranchFuncGraph):
                # The second iteration would see the value from before the first.
                raise UsageError(
                    "step",
                    f"a tf.while_loop or tf.function of the step updates {self.name}, which is "
                    "split",
                    fix="use a Python loop, which the step unrolls, or leave out --split_bytes",
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
        """Return the rows of part `number` from a tensor or IndexedSlices of the whole variable."""
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
            f"{self.name} is split over {len(self.parts)} parameter servers",
            fix="save the model with model.save, then load and export it on one device",
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
    """Make the step being traced read each split variable once between two writes."""
    _thread.step = _Step(graph=tf.compat.v1.get_default_graph())
    try:
        yield
    finally:
        _thread.step = None


@contextlib.contextmanager
def standing_for_whole(part: int) -> Iterator[None]:
    """Let an update see part number `part` of each split variable as the whole variable."""
    before, _thread.part = _thread.part, part
    try:
        yield
    finally:
        _thread.part = before


# Optimizers that may update a split variable.
#
# The update of a part sees only its rows of the gradient and of the slots. An optimizer that needs
# other rows too, for example for a norm, would silently compute a different result.


# Optimizers that update each row independently of the other rows.
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
    """Raise UsageError if the optimizer needs whole variables and a variable is split."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    split = [v for v in variables if isinstance(getattr(v, "value", v), SplitVariable)]
    by_rows = tuple(getattr(keras.optimizers, name) for name in _BY_ROWS)
    if not split or type(optimizer) in by_rows:
        return
    raise UsageError(
        "optimizer",
        f"{type(optimizer).__name__} cannot update {split[0].path}, because it is split",
        fix=f"leave out --split_bytes, or use an optimizer of this list: {', '.join(_BY_ROWS)}",
        code="split-variable",
    )
