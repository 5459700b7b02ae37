"""Placement of layers on the devices of this process, by layer path.

`PlacedStrategy` is a `tf.distribute.OneDeviceStrategy`. If a pattern matches a layer, the layer's
variables, slots, forward pass, backward pass and updates are on the pattern's device. TensorFlow
copies tensors between devices.

A pattern may have several devices. Then each device computes a part of the layer's batch. The first
device has the variables, gathers the results and sums the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.ops.operation import Operation
from tensorflow.python.distribute import one_device_strategy

from tfdist.errors import UsageError, near, require, require_one_of
from tfdist.strategy.devices import logical_devices

Placement = Mapping[str, str | Sequence[str]]
"""Map from regular expressions over layer paths to a device or a list of devices."""

_GRADIENTS = "gradient_tape/"


class _Place(NamedTuple):
    """Devices of a layer that is being called, and of its inner layers."""

    layer: Any
    pattern: str
    devices: tuple[str, ...]
    divided: Any = None  # the layer, while a part of its batch is computed


class PlacedStrategy(tf.distribute.OneDeviceStrategy):
    """Strategy of one replica with its layers on several devices.

    Args:
      device: Device of layers that no pattern matches.
      placement: Map from regular expressions over layer paths to a device or a list of devices. A
        layer uses the first pattern that matches its path. An unmatched inner layer uses its outer
        layer's devices.

    Raises:
      UsageError: a device does not exist. Or the call of a layer on several devices updates a
        variable, adds a loss, or returns a result without a batch axis.
      re.error: a pattern is not a regular expression.
    """

    def __init__(self, device: str, placement: Placement) -> None:
        placed = {pattern: _devices(pattern, names) for pattern, names in placement.items()}
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
                code="unknown-value",
            )


class _PlacedExtended(one_device_strategy.OneDeviceExtended):
    """Implementation of `PlacedStrategy`."""

    def __init__(
        self, strategy: PlacedStrategy, device: str, placed: Mapping[str, tuple[str, ...]]
    ) -> None:
        super().__init__(strategy, device)
        self._placed = placed
        self._within: list[_Place] = []
        self._scopes: weakref.WeakKeyDictionary[tf.Graph, dict[str, str]] = (
            weakref.WeakKeyDictionary()
        )

    def pattern_of(self, path: str) -> str | None:
        """Return the first pattern that matches a layer's path."""
        return next((pattern for pattern in self._placed if re.search(pattern, path)), None)

    @contextlib.contextmanager
    def in_layer(
        self, scope: contextlib.AbstractContextManager[Any], layer: keras.layers.Layer
    ) -> Iterator[None]:
        """Enter a layer's name scope, and its first device, if any."""
        pattern = self.pattern_of(_path(layer))
        if pattern is None:
            with scope:
                yield
            return
        place = _Place(layer, pattern, self._placed[pattern])
        for outer in self._within:
            if outer.pattern == pattern:
                place = outer._replace(layer=None)  # the outer layer has divided the batch
        with self._on(place, scope):
            yield

    @contextlib.contextmanager
    def _on(self, place: _Place, scope: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Enter a name scope on the first device of a place."""
        device = place.devices[0]
        self._within.append(place)
        try:
            with scope, tf.device(device):
                if not tf.executing_eagerly():
                    graph = tf.compat.v1.get_default_graph()
                    self._scopes.setdefault(graph, {})[graph.get_name_scope()] = device
                yield
        finally:
            self._within.pop()

    def call(
        self, call: Callable[..., Any], layer: keras.layers.Layer, args: Any, kwargs: Any
    ) -> Any:
        """Call a layer. Each of several devices computes a part of the batch."""
        place = self._within[-1] if self._within else None
        if place is None or place.layer is not layer or len(place.devices) < 2:
            return call(layer, *args, **kwargs)
        given = filter(tf.is_tensor, keras.tree.flatten((args, kwargs)))
        tensors = [tensor for tensor in given if tensor.shape.rank != 0]
        if not tensors or backend.in_stateless_scope():  # shapes are inferred
            return call(layer, *args, **kwargs)
        _require_not_stateful(layer)
        sizes = _sizes(tensors[0], len(place.devices))
        split = {id(tensor): _split(tensor, sizes) for tensor in tensors}

        def arguments(number: int) -> Any:
            return keras.tree.map_structure(
                lambda value: split[id(value)][number] if id(value) in split else value,
                (args, kwargs),
            )

        context = layer._get_call_context()
        inherited, losses, results = dict(vars(context)), _num_losses(layer), []
        for number, device in enumerate(place.devices[: len(sizes)]):
            part = _Place(None, place.pattern, (device,), divided=layer)
            with self._on(part, tf.name_scope(f"part_{number}")):
                own_args, own_kwargs = arguments(number)
                context.__dict__ = dict(inherited)  # an inner layer may have set `training`
                results.append(call(layer, *own_args, **own_kwargs))
        if _num_losses(layer) > losses:
            raise _refusal(layer, "it adds a loss in its call")
        return keras.tree.map_structure(lambda *parts: _gathered(layer, parts, sizes), *results)

    def require_no_part(self, variable: keras.Variable) -> None:
        """Raise UsageError if a part of a batch updates a variable, except the seed of draws."""
        for place in self._within:
            if place.divided is not None and variable.name != "seed_generator_state":
                raise _refusal(place.divided, f"its call updates the variable {variable.path!r}")

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None or not self._within:
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        with tf.device(self._within[-1].devices[0]):
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
    original, call = keras.layers.Layer._open_name_scope, Operation.__call__
    assign = keras.Variable.assign

    @functools.wraps(original)
    def open_name_scope(self: keras.layers.Layer) -> Any:
        scope, extended = original(self), tf.distribute.get_strategy().extended
        return extended.in_layer(scope, self) if isinstance(extended, _PlacedExtended) else scope

    @functools.wraps(call)
    def call_on_devices(self: Operation, *args: Any, **kwargs: Any) -> Any:
        extended = tf.distribute.get_strategy().extended
        if not isinstance(extended, _PlacedExtended):
            return call(self, *args, **kwargs)
        return extended.call(call, self, args, kwargs)

    @functools.wraps(assign)
    def assign_to_whole(self: keras.Variable, value: Any) -> Any:
        extended = tf.distribute.get_strategy().extended
        if isinstance(extended, _PlacedExtended):
            extended.require_no_part(self)
        return assign(self, value)

    keras.layers.Layer._open_name_scope = open_name_scope
    Operation.__call__ = call_on_devices
    keras.Variable.assign = assign_to_whole


# Parts of a batch on several devices.


def _sizes(tensor: tf.Tensor, parts: int) -> list[Any]:
    """Return the sizes of the parts of a batch, the largest first, without empty parts."""
    known = tensor.shape[0]
    batch = tf.shape(tensor)[0] if known is None else known
    sizes = [(batch + parts - 1 - number) // parts for number in range(parts)]
    return sizes if known is None else [size for size in sizes if size] or [0]


def _split(tensor: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """Return the parts of a tensor, with their parts of the mask of Keras."""
    parts, mask = tf.split(tensor, sizes), backend.get_keras_mask(tensor)
    if mask is not None:
        for part, part_of_mask in zip(parts, tf.split(mask, sizes), strict=True):
            backend.set_keras_mask(part, part_of_mask)
    return parts


def _require_not_stateful(layer: keras.layers.Layer) -> None:
    for inner in layer._flatten_layers():
        if getattr(inner, "stateful", False):
            kind = type(inner).__name__
            raise _refusal(layer, f"its {kind} {inner.name!r} has a state for the whole batch")
    for variable in layer.trainable_variables:
        if variable.overwrite_with_gradient:  # the gradient is the new value, and parts are summed
            raise _refusal(layer, f"the parts would have different float8 scales {variable.path!r}")


def _num_losses(layer: keras.layers.Layer) -> int:
    return sum(len(inner._get_own_losses()) for inner in layer._flatten_layers())


def _gathered(layer: keras.layers.Layer, parts: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the results of all parts as one tensor, with the mask of Keras."""
    if not tf.is_tensor(parts[0]):
        return parts[0]
    for part, size in zip(parts, sizes, strict=True):
        error = _refusal(layer, f"its result {list(part.shape)} has no batch axis")
        if part.shape.rank == 0 or (isinstance(size, int) and part.shape[0] not in (None, size)):
            raise error
        if tf.is_tensor(size):
            tf.debugging.assert_equal(tf.shape(part)[0], size, str(error))
    result = tf.concat(parts, 0)
    masks = [backend.get_keras_mask(part) for part in parts]
    if all(mask is not None for mask in masks):
        backend.set_keras_mask(result, tf.concat(masks, 0))
    return result


def _refusal(layer: keras.layers.Layer, problem: str) -> UsageError:
    return UsageError(
        "placement",
        f"layer {layer.name!r} cannot divide its batch over several devices, because {problem}",
        fix=f"place {layer.name!r} on one device, or only its inner layers on several devices",
        code="unsupported",
    )


def _path(layer: Any) -> str:
    """Return a layer's path. The layer's own `path` is set only after build."""
    return "/".join(filter(None, (layer._parent_path, layer.name)))


def _devices(pattern: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return TensorFlow's names of existing devices. ``CPU`` means the first CPU."""
    re.compile(pattern)
    where = f"placement[{pattern!r}]"
    names = [names] if isinstance(names, str) else list(names)
    require(bool(names), where, "the list is empty", fix="list devices", code="devices")
    found = []
    for name in names:
        short = name.upper().removeprefix("/").removeprefix("DEVICE:")
        require_one_of(
            where,
            short if ":" in short else f"{short}:0",
            logical_devices("CPU") + logical_devices("GPU"),
            fix="use an existing device, or split the CPU before make_strategy with "
            "tf.config.set_logical_device_configuration",
            code="devices",
        )
        found.append(f"/{short}")
    return tuple(found)
