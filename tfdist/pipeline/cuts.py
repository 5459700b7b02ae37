"""Cuts of a functional or Sequential model into stages that share its layers and weights.

Where it can be cut, where a step is fastest by the measured times of its parts, and how a stage
that computes twice is divided once more, to need less memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tfdist.errors import UsageError, named, require, require_one_of
from tfdist.pipeline.schedule import (
    Pass,
    Timeline,
    balanced,
    passes,
    require_enough,
    runs,
    timeline,
)
from tfdist.training import keras_compat

_LOG = logging.getLogger(__name__)
_ROUNDS = 3
_MOST_TENSORS = 2
_MOST_SEGMENTS = 8
_PLACES_A_STAGE = 8
_LEADS = (0.0, 0.5, 1.0)

MOST_DRAWS = 2**30
"""Numbers of draws from there on are those of no seed generator."""
LossOfOutputs = Callable[[list[tf.Tensor]], tf.Tensor]
"""Scalar loss of the model's flat outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CutPoint:
    """A place behind the node of an index, where the model can be cut, and what crosses it."""

    position: int
    name: str  # of the layer before it
    num_tensors: int
    example_bytes: int  # there and back; an unknown length counts 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelPart:
    """One stage of a model.

    Attributes:
      module: takes a flat list, `received` and then `inputs`; returns a flat list of what it makes.
        Its layers are the model's own.
      received: symbolic tensors that come from the stage before.
      inputs: which of the model's inputs this stage reads by itself, by their index.
      sent: symbolic tensors that go to the stage after; of the last stage the model's outputs.
      sources: of each tensor of `sent`, its place in the list of `received`, `inputs` and what
        `module` makes: some only pass through.
      nodes: Keras' nodes of its layers' calls.
      draws: numbers of the draws of the model's seed generators, by their `id`: no two have the
        same, and they do not go by the cut.
    """

    index: int
    is_last: bool
    module: keras.Model
    received: tuple[Any, ...]
    inputs: tuple[int, ...]
    sent: tuple[Any, ...]
    sources: tuple[int, ...]
    nodes: tuple[Any, ...]
    draws: Mapping[int, range]

    @property
    def work(self) -> str:
        """Return what tells its layers, but for their names, and shapes from those of another."""
        return repr([self.index == 0, *map(_work, self.nodes)])


class LayerGraph:
    """Calls of layers of a built model, each after those that it depends on.

    Attributes:
      functional: what holds its graph; the model itself, or what a Sequential has inside. Layers of
        models inside the model are in place of those.
      nodes: Keras' nodes; a layer that is used twice has two.

    Raises:
      UsageError: the model has no graph of layers, or a layer that keeps state across examples.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        functional = _graph_inside(model)
        if functional is None:
            state = "not built" if isinstance(model, keras.Sequential) else "with its own call"
            raise UsageError(
                f"model {model.name!r}",
                received=f"a {type(model).__name__} {state}",
                expected="a functional model, or a Sequential whose input has a shape",
                fix="make it of keras.Input and layers, or train it under another strategy",
                code="no-layer-graph",
            )
        functional, self._inside = _in_place(functional)
        by_depth = functional._nodes_by_depth  # `operations` loses the calls of a layer used twice
        nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        self.nodes: list[Any] = [node for node in nodes if not node.is_input]
        self._inputs = [node for node in nodes if node.is_input]
        self.functional = functional
        self.inputs: list[Any] = list(functional.inputs)
        self.outputs: list[Any] = list(functional.outputs)
        self._users: dict[int, list[int]] = {}  # nodes that use each variable, by its `id`
        for i, node in enumerate(self.nodes):
            for variable in _variables(node.operation):
                self._users.setdefault(id(variable), []).append(i)
        self._made_by = {id(t): i for i, n in enumerate(self.nodes) for t in n.output_tensors}
        layers = [layer for node in self.nodes for layer in _layers_of(node.operation)]
        generators = dict.fromkeys(
            id(g) for layer in layers for g in getattr(layer, "_seed_generators", ())
        )
        self._draws = {
            key: range(first, MOST_DRAWS, len(generators))
            for first, key in enumerate(generators, 1)
        }
        stateful = [layer.name for layer in layers if getattr(layer, "stateful", False)]
        require(
            not stateful,
            f"layer {next(iter(stateful), '')!r}",
            received="stateful=True under strategy pipeline",
            expected="layers that keep no state from one batch to the next",
            fix="leave stateful out, or train under another strategy",
            code="stateful-layer",
        )

    @property
    def digest(self) -> str:
        """What tells the model's layers, shapes and trainable weights from those of another."""
        calls = [
            [type(node.operation).__name__, [t.shape for t in node.output_tensors]]
            + [variable.trainable for variable in _variables(node.operation)]
            for node in self.nodes
        ]
        return hashlib.sha256(repr(calls).encode()).hexdigest()[:16]

    def places(self) -> list[CutPoint]:
        """Return the places of cuts, in order, the first of those that the same tensors cross."""
        found: list[CutPoint] = []
        before: set[int] = set()
        for position in range(len(self.nodes) - 1):
            tensors = self.crossing(position)
            ids = {id(t) for t in tensors}
            if ids == before or not self._may_be_cut(position, tensors):
                continue
            before = ids
            found.append(
                CutPoint(
                    position=position,
                    name=self.nodes[position].operation.name,
                    num_tensors=len(tensors),
                    example_bytes=sum(map(_example_bytes, tensors)),
                )
            )
        return found

    def widest_share(self) -> str:
        """Return which layers, far from each other, share a variable; empty if none do."""
        users = self._users
        key = max(users, key=lambda key: users[key][-1] - users[key][0], default=None)
        if key is None or users[key][0] == users[key][-1]:
            return ""
        nodes = [self.nodes[i] for i in users[key]]
        path = next(v.path for v in _variables(nodes[0].operation) if id(v) == key)
        names = dict.fromkeys(repr(node.operation.name) for node in nodes)
        if len(names) == 1:
            return f"layer {named(names)} is called {len(nodes)} times with {path!r}"
        return f"layers {named(names)} share {path!r} and must be in one stage"

    def behind_layers(self, names: Sequence[str]) -> list[int]:
        """Return the positions of cuts behind the (last) call of each named layer.

        Behind the last layer of a model inside the model, if that is named.
        """
        last = {
            name: i
            for i, node in enumerate(self.nodes)
            for name in (*self._models_around(node), node.operation.name)
        }
        for name in names:
            fix = "name the last layer of each stage but the last one"
            require_one_of("cut", name, last, fix=fix, code="unknown-layer")
        return sorted(last[name] for name in names)

    def crossing(self, position: int) -> list[Any]:
        """Return the tensors made up to a node and used after it."""
        needed = {id(t): t for node in self.nodes[position + 1 :] for t in node.input_tensors}
        needed.update((id(t), t) for t in self.outputs)
        made_by = self._made_by
        return [t for key, t in needed.items() if made_by.get(key, len(self.nodes)) <= position]

    def cut(self, positions: Sequence[int]) -> list[ModelPart]:
        """Return the stages between cuts behind these nodes, in order.

        Raises:
          UsageError: a cut is at none of the `places`, or a stage has no weights.
        """
        for position in positions:
            if not self._may_be_cut(position, self.crossing(position)):
                name = self.nodes[position].operation.name
                raise UsageError(
                    "cut",
                    received=f"a cut behind {name!r}, which divides layers that share weights or"
                    " calls of one layer, or which a ragged or sparse tensor crosses",
                    expected=f"a cut behind {named(repr(place.name) for place in self.places())}",
                    fix="name one of these layers",
                    code="no-place",
                )
        stages = runs(positions, len(self.nodes))
        empty = [k for k, run in enumerate(stages) if not self.is_trainable(run)]
        require(
            not empty,
            "cut",
            received=f"stage {next(iter(empty), 0)} of {len(stages)}, without trainable weights",
            expected="layers with weights in each stage",
            fix="cut elsewhere, or ask for fewer stages",
            code="empty-stage",
        )
        return self.divided(positions)

    def divided(self, positions: Sequence[int]) -> list[ModelPart]:
        """Return the parts as `cut` does, without a look at their weights."""
        crossing = [self.crossing(position) for position in positions]
        received, sent = [[], *crossing], [*crossing, self.outputs]
        with _graph_kept([*self.nodes, *self._inputs]):
            return [
                self._part(k, self.nodes[run], received=received[k], sent=sent[k])
                for k, run in enumerate(runs(positions, len(self.nodes)))
            ]

    def _part(
        self, k: int, mine: Sequence[Any], *, received: list[Any], sent: list[Any]
    ) -> ModelPart:
        used = {id(t) for t in [t for node in mine for t in node.input_tensors] + sent}
        inputs = tuple(i for i, t in enumerate(self.inputs) if id(t) in used)
        given = [*received, *(self.inputs[i] for i in inputs)]
        # One that only passes through has no place in a model: Keras cannot clone such a graph.
        made = {id(t): t for t in sent if not any(t is g for g in given)}
        places = {id(t): i for i, t in enumerate([*given, *made.values()])}
        return ModelPart(
            index=k,
            is_last=sent is self.outputs,
            module=keras.Model(
                one_or_list(given),
                one_or_list(list(made.values())),
                name=f"{self.model.name}_stage{k}",
            ),
            received=tuple(received),
            inputs=inputs,
            sent=tuple(sent),
            sources=tuple(places[id(t)] for t in sent),
            nodes=tuple(mine),
            draws=self._draws,
        )

    def is_trainable(self, run: slice) -> bool:
        """Return whether a run of nodes has trainable weights."""
        return any(v.trainable for n in self.nodes[run] for v in _variables(n.operation))

    def _may_be_cut(self, position: int, tensors: Sequence[Any]) -> bool:
        """Return whether these tensors may cross a cut behind a node.

        Keras would take the second call of a layer that made one of them for the input that stands
        for the tensor (`clone_graph_nodes`).
        """
        makers = {id(t._keras_history.operation) for t in tensors}
        behind = {id(node.operation) for node in self.nodes[position + 1 :]}
        divided = any(users[0] <= position < users[-1] for users in self._users.values())
        is_dense = not any(t.sparse or t.ragged for t in tensors)
        return is_dense and not divided and not makers & behind

    def _models_around(self, node: Any) -> tuple[str, ...]:
        """Return the names of the models inside the model that a call is in, outermost first."""
        return self._inside.get(id(node.output_tensors[0]), ())


def made_bytes(nodes: Sequence[Any]) -> int:
    """Return the bytes of one example that calls of layers make."""
    return sum(_bytes(tensor) for node in nodes for tensor in node.output_tensors)


def has_mask(tensor: Any) -> bool:
    return getattr(tensor, "_keras_mask", None) is not None


def _graph_inside(operation: Any) -> Any:
    """Return what holds the graph of layers that a model's call computes, None without one."""
    if getattr(type(operation), "call", None) is keras.Sequential.call:
        return getattr(operation, "_functional", None)
    has_graph = getattr(type(operation), "call", None) is Functional.call
    return operation if has_graph and hasattr(operation, "_nodes_by_depth") else None


def _in_place(functional: Any) -> tuple[Any, dict[int, tuple[str, ...]]]:
    """Return a graph in which models inside the model are the calls of their layers.

    And the names of the models that a call was in, outermost first, by the `id` of its outputs.
    """
    inside: dict[int, tuple[str, ...]] = {}

    def run(graph: Any, given: list[Any], around: tuple[str, ...]) -> Any:
        def placed(operation: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                inner = _graph_inside(operation)
                flat = None if inner is None else _inputs_of_call(inner, args, kwargs)
                if flat is not None:
                    return run(inner, flat, (*around, operation.name))
                # Without what Keras has added, so that it adds the masks that there are in place.
                made = operation(*args, **{k: v for k, v in kwargs.items() if _says_more(k, v)})
                inside.update((id(t), around) for t in keras.tree.flatten(made))
                return made

            return call

        return graph._run_through_graph(given, operation_fn=placed)

    if not any(map(_graph_inside, functional.operations)):
        return functional, inside
    outputs = run(functional, functional.inputs, ())
    try:
        return Functional(functional._inputs_struct, outputs, name=functional.name), inside
    except ValueError:  # two layers of one name, which no graph of Keras' may have
        return functional, {}


@contextlib.contextmanager
def _graph_kept(nodes: Sequence[Any]) -> Iterator[None]:
    """Undo the changes that `keras.Model` makes to a graph that it copies a part of.

    Keras adds nodes to the layers, and points the history of an `Input` that the part reads to such
    a node (`clone_graph_nodes`). The model that owns the graph could not be saved then.
    """
    histories = [(tensor, tensor._keras_history) for node in nodes for tensor in node.outputs]
    operations = {id(node.operation): node.operation for node in nodes}.values()
    lists = [
        getattr(op, name) for op in operations for name in ("_inbound_nodes", "_outbound_nodes")
    ]
    sizes = list(map(len, lists))
    try:
        yield
    finally:
        for tensor, history in histories:
            tensor._keras_history = history
        for nodes_of_one, size in zip(lists, sizes, strict=True):
            del nodes_of_one[size:]


def _says_more(name: str, value: Any) -> bool:
    """Return whether an argument of a call says more than whether it trains, and without a mask."""
    leaves = keras.tree.flatten([value])
    return name != "training" and not ("mask" in name and leaves.count(None) == len(leaves))


def _inputs_of_call(inner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the flat inputs of a call of a model, None where the call does more than take them."""
    flat = keras.tree.flatten(list(args))
    plain = len(args) == 1 and not any(_says_more(k, v) for k, v in kwargs.items())
    plain = plain and len(flat) == len(inner.inputs)
    keys = [sorted(x) if isinstance(x, dict) else None for x in (*args, inner._inputs_struct)]
    if not plain or keys[0] != keys[1]:
        return None
    pairs = zip(flat, inner.inputs, strict=True)
    same = all(x.dtype == y.dtype and len(x.shape) == len(y.shape) for x, y in pairs)
    return flat if same else None


def _variables(operation: Any) -> list[Any]:
    return list(getattr(operation, "variables", ()))


def _work(node: Any) -> tuple[Any, ...]:
    config = {"name": node.operation.name}
    with contextlib.suppress(Exception):  # a layer without a config is like no other
        config = dict(node.operation.get_config(), name=None)
    shapes = [t.shape for t in (*node.input_tensors, *node.output_tensors)]
    return type(node.operation).__name__, config, shapes


def _layers_of(operation: Any) -> list[Any]:
    inner = getattr(operation, "_flatten_layers", lambda **_: ())
    return [operation, *inner(include_self=False)]


def _example_bytes(tensor: Any) -> int:
    return _bytes(tensor) * (2 if "float" in tensor.dtype else 1)  # integers have no gradient


def _bytes(tensor: Any) -> int:
    """Return the bytes of one example; an unknown length counts 1."""
    return math.prod(size or 1 for size in tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size


def one_or_list(tensors: list[Any]) -> Any:
    """Return the only one, or the list: a list of one warns at each call of a model."""
    return tensors[0] if len(tensors) == 1 else tensors


# Cut by the measured times of a model's parts.


def possible_places(graph: LayerGraph, *, num_stages: int) -> list[CutPoint]:
    """Return the places that are looked at: those that one tensor crosses, or two if they are few.

    Raises:
      UsageError: the model has fewer of them than cuts.
    """
    every = graph.places()
    places = [place for place in every if place.num_tensors <= _MOST_TENSORS]
    with_weights = _with_weights(graph, places)
    reason, fix = "", "ask for fewer stages"
    if shared := graph.widest_share():
        reason, fix = f": {shared}", f"give each layer its own weights, or {fix}"
    elif wide := [repr(place.name) for place in every if place.num_tensors > _MOST_TENSORS]:
        reason = f": more than {_MOST_TENSORS} tensors cross behind {named(wide, most=3)}"
        fix = f"name the places with PipelineOptions(cut=[...]), or {fix}"
    elif not all(with_weights):
        reason = ", each with trainable weights on both sides"
    require_enough(with_weights, stages=num_stages, reason=reason, fix=fix)
    narrow = [place for place in places if place.num_tensors == 1]
    is_enough = sum(_with_weights(graph, narrow)) > _PLACES_A_STAGE * num_stages
    return narrow if is_enough else places


def chosen_places(
    graph: LayerGraph,
    places: Sequence[CutPoint],
    *,
    num_stages: int,
    rows: int,
    micros: int,
    schedule: str = "1f1b",
    keep: str = "tape",
    inputs: Sequence[Any] | None = None,
    loss_of: LossOfOutputs | None = None,
    counted: bool = False,
) -> list[CutPoint]:
    """Return where to cut so that a step is as fast as it can be, and log it.

    Under 1F1B the first stages wait less than the last ones at the start and at the end of a step,
    and have more to do for that. Weights stay as they are.

    Args:
      graph: of the model.
      places: to choose from.
      num_stages: to make.
      rows: examples of a micro-batch, at which the parts are timed.
      micros: micro-batches of a step.
      schedule: of their passes.
      keep: ``recompute`` to need less memory for it, and look less closely.
      inputs: flat inputs of the model, so many rows of a batch; by default zeros and noise.
      loss_of: of so many rows of flat outputs, computed in the last stage; by default no time.
      counted: go by the operations of the parts, which are always the same, and not by their time.
    """
    positions = [place.position for place in places]
    trainable = _with_weights(graph, places)
    orders = [
        passes(schedule, stage=stage, stages=num_stages, micros=micros)
        for stage in range(num_stages)
    ]
    flat = [_example(tensor, rows) for tensor in graph.inputs] if inputs is None else list(inputs)
    parts = _computed(graph, positions, flat)
    # There and back, as gradients of what is floating.
    weights = [
        sum(t.shape.num_elements() * t.dtype.size * (1 + t.dtype.is_floating) for t in received)
        for received in (part.received for part in parts[1:])
    ]
    seconds = _seconds(parts, rows, loss_of, counted=counted)
    chosen, _ = _fastest_cut(seconds, weights, trainable, orders, micros)
    # Parts have ends that a stage has not, which take time: the more, the larger their tensors are.
    # `recompute` is there to need less than the activations of a whole stage.
    if not counted and keep != "recompute":
        stages = _computed(graph, [positions[i] for i in chosen], flat)
        whole = _seconds(stages, rows, loss_of, counted=False)
        for run, measured in zip(runs(chosen, len(seconds)), whole, strict=True):
            factor = measured / sum(seconds[run])
            seconds[run] = [factor * each for each in seconds[run]]
    chosen, step = _fastest_cut(seconds, weights, trainable, orders, micros)
    _LOG.info(
        "cut behind %s: %s %s for a micro-batch of %d%s; of %d the stages wait %.0f %%",
        ", ".join(places[i].name for i in chosen),
        " + ".join(f"{sum(seconds[run]):.4g}" for run in runs(chosen, len(seconds))),
        *("operations" if counted else "s", rows),
        *("" if loss_of is None else " with its loss", micros, 100 * step.bubble),
    )
    return [places[i] for i in chosen]


def _fastest_cut(
    seconds: Sequence[float],
    crossing_bytes: Sequence[int],
    trainable: Sequence[bool],
    orders: Sequence[Sequence[Pass]],
    micros: int,
) -> tuple[tuple[int, ...], Timeline]:
    """Return at which of the places a step is the fastest, and how it goes then."""
    found = []
    for share in _LEADS:
        lead = share / micros
        cut = balanced(seconds, crossing_bytes, stages=len(orders), trainable=trainable, lead=lead)
        each = [sum(seconds[run]) for run in runs(cut, len(seconds))]
        found.append((cut, timeline(orders, forward_s=each, backward_s=[2 * s for s in each])))
    return min(found, key=lambda one: one[1].makespan_s)


def _with_weights(graph: LayerGraph, places: Sequence[CutPoint]) -> list[bool]:
    """Return whether each run of layers between two places has trainable weights."""
    bounds = [0, *(place.position + 1 for place in places), len(graph.nodes)]
    return [graph.is_trainable(slice(*ends)) for ends in itertools.pairwise(bounds)]


class _Computed(NamedTuple):
    """A part of the model, and the tensors of a batch that it is given and makes."""

    part: ModelPart
    given: list[Any]
    made: list[Any]

    @property
    def received(self) -> list[tf.Tensor]:
        return self.given[: len(self.part.received)]

    @property
    def work(self) -> Any:
        """Return what tells its passes from those of another."""
        return self.part.work, self.part.is_last, repr([tuple(t.shape) for t in self.given])


def _computed(
    graph: LayerGraph, positions: Sequence[int], inputs: Sequence[Any]
) -> list[_Computed]:
    """Return the parts between the positions; each takes what the parts before have made."""
    found: list[_Computed] = []
    values: dict[int, Any] = {}
    for part in graph.divided(positions):
        given = [values[id(t)] for t in part.received] + [inputs[i] for i in part.inputs]
        with keras.StatelessScope():  # nothing that changes is kept
            made = keras.tree.flatten(part.module(one_or_list(given), training=False))
        for tensor in made:
            with contextlib.suppress(AttributeError):  # a part that is timed gets no masks
                del tensor._keras_mask
        values = {id(t): [*given, *made][i] for t, i in zip(part.sent, part.sources, strict=True)}
        found.append(_Computed(part, given, made))
    return found


def _seconds(
    parts: Sequence[_Computed], rows: int, loss_of: LossOfOutputs | None, *, counted: bool
) -> list[float]:
    """Return the seconds of each part, forward and backward, or its work if that is counted.

    Those that compute the same, as the blocks of a transformer do, are timed once.
    """
    passes_of = {
        each.work: _both_passes(each, rows, loss_of if each.part.is_last else None)
        for each in parts
    }
    if counted:
        work = {}
        for each in parts:
            both, given = passes_of[each.work]
            steps = max((t.shape[1] or 1 for t in each.given if len(t.shape) > 1), default=1)
            work[each.work] = 1.0 + _work_in(both.get_concrete_function(*given).graph, steps)
        return [work[each.work] for each in parts]
    for both, given in passes_of.values():  # compiles
        both(*given)
    # In turn, as a machine has moments in which all take longer.
    rounds = [{each: _timed(*call) for each, call in passes_of.items()} for _ in range(_ROUNDS)]
    return [min(seconds[each.work] for seconds in rounds) for each in parts]


def _timed(both: Callable[..., Any], given: Sequence[Any]) -> float:
    start = time.perf_counter()
    both(*given)
    return time.perf_counter() - start


def _both_passes(
    computed: _Computed, rows: int, loss_of: LossOfOutputs | None
) -> tuple[Any, tuple[Any, ...]]:
    """Return the compiled function of both passes of a part, and its arguments."""
    part, given, made = computed
    module, count = part.module, len(part.received)
    floats = [i for i, t in enumerate(made) if t.dtype.is_floating]

    @keras_compat.compiled
    def both(given: list[tf.Tensor], gradients: list[tf.Tensor] | None) -> list[tf.Tensor]:
        received = [x for x in given[:count] if x.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():  # nothing that changes is kept
            tape.watch(received)
            # With it layers compute as they do in the stages.
            trace = bare_trace(rows, fused=keras_compat.is_fused(module))
            with keras_compat.tracing(trace):
                outputs = tf.nest.flatten(module(one_or_list(given), training=True))
                if loss_of is None:
                    outputs = [outputs[i] for i in floats]
                else:
                    outputs = [loss_of([[*given, *outputs][i] for i in part.sources])]
        values = [variable.value for variable in module.trainable_variables]
        sources = [*values, *received] if outputs else []  # there may be integers alone
        found = tape.gradient(outputs, sources, output_gradients=gradients)
        return [*outputs, *(tf.convert_to_tensor(g) for g in found if g is not None)]

    ends = [_noise(made[i].shape, made[i].dtype) for i in floats] if loss_of is None else None
    return both, (given, ends)


def _work_in(graph: Any, steps: int) -> int:
    """Return about how many multiplications and other operations on numbers a graph has.

    The body of a loop counts `steps` times.
    """
    total = 0
    for operation in graph.get_operations():
        total += _work_of(operation)
        if "body" in operation.node_def.attr:
            body = graph._get_function(operation.node_def.attr["body"].func.name).graph
            total += steps * _work_in(body, steps)
    return total


def _work_of(operation: tf.Operation) -> int:
    """Return the numbers that an operation makes, each by what it sums over."""
    shapes = [tuple(t.shape) if t.shape.rank is not None else () for t in operation.inputs]
    made = sum(t.shape.num_elements() or 0 for t in operation.outputs)
    kind, summed = operation.type, 1
    if kind == "MatMul":
        summed = shapes[0][0 if operation.get_attr("transpose_a") else 1]
    elif kind.startswith("BatchMatMul"):
        summed = shapes[0][-2 if operation.get_attr("adj_x") else -1]
    elif kind == "Einsum":
        given, _, out = operation.get_attr("equation").decode().partition("->")
        sizes = dict(zip(given.replace(",", ""), itertools.chain(*shapes), strict=False))
        summed = math.prod(size or 1 for label, size in sizes.items() if label not in out)
    elif "Conv" in kind and len(shapes) > 1:
        of_filter = kind.endswith("Filter")  # gradients take as long as the convolution
        kernel = tuple(operation.outputs[0].shape) if of_filter else shapes[1]
        made = math.prod(size or 1 for size in shapes[2]) if "Backprop" in kind else made
        summed = math.prod(size or 1 for size in kernel[: 2 if "Depthwise" in kind else -1])
    return made * (summed or 1)


def bare_trace(examples: Any, **more: Any) -> keras_compat.StepTrace:
    """Return the trace of a step that is only looked at."""
    key = tf.zeros([2], tf.int32)
    return keras_compat.StepTrace(
        num_replicas=1, share=1.0, examples=examples, random_key=key, **more
    )


def _example(tensor: Any, rows: int) -> tf.Tensor:
    shape = [rows, *(size or 1 for size in tensor.shape[1:])]
    if tf.as_dtype(tensor.dtype).is_floating:
        return _noise(shape, tensor.dtype)
    return tf.zeros(shape, tensor.dtype)


def _noise(shape: Any, dtype: Any) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed=[0, 0], dtype=dtype)


# Segments of stages that compute their layers' outputs again, so that few are there at once.


def segments_of(
    graph: LayerGraph, positions: Sequence[int], *, kept: Sequence[int]
) -> list[list[ModelPart]]:
    """Return the segments of each stage, with which it needs the least memory.

    It holds the inputs of its segments, of as many micro-batches as each stage has `kept`, and what
    the layers of one segment make.
    """
    stages = zip(runs(positions, len(graph.nodes)), kept, strict=True)
    inner = [_inner(graph, run, most) for run, most in stages]
    parts = iter(graph.divided(sorted([*positions, *itertools.chain(*inner)])))
    return [list(itertools.islice(parts, len(cuts) + 1)) for cuts in inner]


def _inner(graph: LayerGraph, run: slice, kept: int) -> list[int]:
    last = run.stop - 1
    places = [
        place
        for place in graph.places()
        if run.start <= place.position < last and place.num_tensors <= _MOST_TENSORS
    ]
    ends = [run.start, *(place.position + 1 for place in places), run.stop]
    made = [made_bytes(graph.nodes[low:high]) for low, high in itertools.pairwise(ends)]
    crossing = [place.example_bytes for place in places]
    found = []
    for count in range(1, min(_MOST_SEGMENTS, len(made)) + 1):
        cut = balanced(made, crossing, stages=count)
        largest = max(sum(made[run]) for run in runs(cut, len(made)))
        held = kept * sum(crossing[i] for i in cut) // 2  # they count there and back
        found.append((largest + held, cut))
    return [places[i].position for i in min(found)[1]]
