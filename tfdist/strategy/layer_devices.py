"""Placement of layers on the devices of this process, by layer path.

`PlacedStrategy` is a `tf.distribute.OneDeviceStrategy`. If a pattern matches a layer, the layer's
variables, slots, forward pass, backward pass and updates are on the pattern's device. TensorFlow
copies tensors between devices.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import one_device_strategy

from tfdist.errors import near, require, require_one_of
from tfdist.strategy.devices import logical_devices

_GRADIENTS = "gradient_tape/"


class PlacedStrategy(tf.distribute.OneDeviceStrategy):
    """Strategy of one replica with its layers on several devices.

    Args:
      device: Device of layers that no pattern matches.
      placement: Map from regular expressions over layer paths to devices. A layer uses the first
        pattern that matches its path. An unmatched inner layer uses its outer layer's device.

    Raises:
      UsageError: a device does not exist.
      re.error: a pattern is not a regular expression.
    """

    def __init__(self, device: str, placement: Mapping[str, str]) -> None:
        placed = {pattern: _device(pattern, name) for pattern, name in placement.items()}
        tf.distribute.Strategy.__init__(self, _PlacedExtended(self, device, placed))
        self.placement = dict(placement)
        _follow_layers()

    def require_placed(self, model: keras.Model) -> None:
        """Raise UsageError if a pattern is not used by any layer of the model."""
        paths = [_path(layer) for layer in model._flatten_layers(include_self=False)]
        names = [*paths, *(path.rpartition("/")[2] for path in paths)]
        used = {self.extended.pattern_of(path) for path in paths}
        for pattern in self.placement:
            require(
                pattern in used,
                "placement",
                f"no layer uses the pattern {pattern!r}{near(pattern, names)}",
                fix="correct the pattern, or put it before a more general pattern",
                code="unknown-layer",
            )


class _PlacedExtended(one_device_strategy.OneDeviceExtended):
    """Implementation of `PlacedStrategy`."""

    def __init__(self, strategy: PlacedStrategy, device: str, placed: Mapping[str, str]) -> None:
        super().__init__(strategy, device)
        self._placed = placed
        self._within: list[str] = []
        self._scopes: weakref.WeakKeyDictionary[tf.Graph, dict[str, str]] = (
            weakref.WeakKeyDictionary()
        )

    def pattern_of(self, path: str) -> str | None:
        """Return the first pattern that matches a layer's path."""
        return next((pattern for pattern in self._placed if re.search(pattern, path)), None)

    @contextlib.contextmanager
    def in_layer(self, scope: contextlib.AbstractContextManager[Any], path: str) -> Iterator[None]:
        """Enter a layer's name scope, and its device, if any."""
        pattern = self.pattern_of(path)
        if pattern is None:
            with scope:
                yield
            return
        device = self._placed[pattern]
        self._within.append(device)
        try:
            with scope, tf.device(device):
                if not tf.executing_eagerly():
                    graph = tf.compat.v1.get_default_graph()
                    self._scopes.setdefault(graph, {})[graph.get_name_scope()] = device
                yield
        finally:
            self._within.pop()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None or not self._within:
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        with tf.device(self._within[-1]):
            return next_creator(**kwargs)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return super()._call_for_each_replica(fn, args, kwargs)

        def on_devices(*args: Any, **kwargs: Any) -> Any:
            with tf.compat.v1.get_default_graph().device(lambda op: self._device_of(op)):
                return fn(*args, **kwargs)

        return super()._call_for_each_replica(on_devices, args, kwargs)

    def _update_non_slot(
        self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        device = getattr(colocate_with, "device", self._device)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.device(device):
                return fn(*args, **kwargs)

        return super()._update_non_slot(colocate_with, on_device, args, kwargs, group)

    def _device_of(self, operation: tf.Operation) -> str:
        """Return the device of an operation. A gradient uses the device of its layer.

        A tape names a gradient after the name scope of the forward pass, and sets no device.
        The graph of a loop or a branch is inside the graph of the step.
        """
        graph, name = operation.graph, operation.name
        while not operation.device and graph is not None:
            if name.startswith(_GRADIENTS) and (device := self._of_scope(graph, name)):
                return device
            graph = getattr(graph, "outer_graph", None)
            name = graph.get_name_scope() + "/" if graph is not None else ""
        return str(operation.device)

    def _of_scope(self, graph: tf.Graph, name: str) -> str | None:
        scopes, scope = self._scopes.get(graph, {}), name.removeprefix(_GRADIENTS)
        while scope and scope not in scopes:
            scope = scope.rpartition("/")[0]
        return scopes.get(scope)


@functools.cache
def _follow_layers() -> None:
    """Patch Keras' layers once a process, so that they use the placement of their strategy."""
    original = keras.layers.Layer._open_name_scope

    @functools.wraps(original)
    def open_name_scope(self: keras.layers.Layer) -> Any:
        scope, extended = original(self), tf.distribute.get_strategy().extended
        if not isinstance(extended, _PlacedExtended):
            return scope
        return extended.in_layer(scope, _path(self))

    keras.layers.Layer._open_name_scope = open_name_scope


def _path(layer: Any) -> str:
    """Return a layer's path. The layer's own `path` is set only after build."""
    return "/".join(filter(None, (layer._parent_path, layer.name)))


def _device(pattern: str, name: str) -> str:
    """Return TensorFlow's name of an existing device. ``CPU`` means the first CPU."""
    re.compile(pattern)
    short = name.upper().removeprefix("/").removeprefix("DEVICE:")
    require_one_of(
        f"placement[{pattern!r}]",
        short if ":" in short else f"{short}:0",
        logical_devices("CPU") + logical_devices("GPU"),
        fix="use an existing device, or split the CPU before make_strategy with "
        "tf.config.set_logical_device_configuration",
        code="devices",
    )
    return f"/{short}"
