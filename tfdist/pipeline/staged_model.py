"""One task's view of a compiled model in stages: its stage, losses, metrics and optimizer."""

from __future__ import annotations

import contextlib
import gc
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from tfdist.checkpoint import model_state
from tfdist.errors import require
from tfdist.pipeline.cuts import (
    LayerGraph,
    LossOfOutputs,
    ModelPart,
    chosen_places,
    made_bytes,
    possible_places,
    segments_of,
)
from tfdist.pipeline.schedule import Pass, micro_sizes, most_kept, passes
from tfdist.pipeline.stage import MicroBatch, Stage, Tensors
from tfdist.pipeline.union import (
    bytes_of,
    fill,
    from_owners,
    is_empty,
    owners_of,
    release,
    slots_of,
)
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.strategy.pipeline_setup import cut_key
from tfdist.training import keras_compat
from tfdist.training.feed import rows_of
from tfdist.training.program import is_own
from tfdist.training.resume import require_deterministic

_LOG = logging.getLogger(__name__)
_MICROS_A_STAGE = 4
_MIB = 2**20
_NAME = "_tfdist_stages"
_OWN = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")

FirstBatch = Callable[[], Any] | None
"""Function that returns the first batch without side effects, `None` if no step follows."""


class StagedModel:
    """Whole model, of which this task computes and updates a stage.

    The constructor is a collective. The chief measures layers and loss on the first batch and
    chooses the cuts of all tasks.

    Attributes:
      statistics: Non-trainable float variables that the stage's layers update, such as the
        moving mean of BatchNormalization. Frozen weights are not included.
      is_divided: True while each task holds only the values of its own stage.
      compares: True if the loss compares examples. A batch then forms a single micro-batch.

    Raises:
      UsageError: the model, its loss or its optimizer cannot be trained in stages.
    """

    def __init__(
        self, model: keras.Model, job: Job, *, batch: int, spec: Any, first_batch: FirstBatch
    ) -> None:
        assert job.stages is not None
        self._place = job.stages
        self._model, self._job = model, job
        place, options = self._place, self._place.options
        _require_stages_compute_it(model)
        self.graph = LayerGraph(model)
        self._cut_key = cut_key(self.graph.digest, place.count)
        micros = _MICROS_A_STAGE * place.count * place.pipelines
        self._default_size = max(1, -(-batch // micros))
        self.compares = self._is_loss_known = False
        self.look_at_loss(spec)
        positions = self._positions(batch, first_batch)
        parts = self.graph.cut(positions)
        gc.collect()  # frees the objects made for timing
        part = parts[place.index]
        # The last stage runs a backward pass right after its forward pass.
        turns = part.is_last and options.schedule != "gpipe"
        keep = "nothing" if turns and options.keep != "compiled" else options.keep
        self._optimizer = getattr(model, "optimizer", None)
        self._inner: Any = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        segments = [part]
        if options.keep == "recompute":
            micros = self._micros(batch)
            orders = [self.order(stage, micros=micros) for stage in range(place.count)]
            kept = [most_kept(order) for order in orders]
            segments = segments_of(self.graph, positions, kept=kept)[place.index]
        self.stage = Stage(
            segments,
            keep=keep,
            loss_of=self._loss_of if part.is_last else None,
            scaled=getattr(self._optimizer, "scale_loss", tf.identity),
            micros=lambda: len(self.sizes_of(batch)),
            check=self._require_deterministic,
        )
        layers = part.module._flatten_layers()
        own = [v for layer in layers for v in layer._non_trainable_variables]
        self.statistics = [v for v in own if v.value.dtype.is_floating]
        self._owners = owners_of(model, parts)
        self._made_of, self._chosen = _parts_of(model), self._choices
        self._slots = slots_of(model)
        self.is_divided = False
        self.update = keras_compat.compiled(self._update)
        self._log(part, batch=batch)

    @property
    def is_up_to_date(self) -> bool:
        """Return whether the model's compilation, variables and cuts are unchanged."""
        now = _parts_of(self._model)
        same = len(now) == len(self._made_of) and all(map(operator.is_, now, self._made_of))
        return same and self._chosen == self._choices

    @property
    def _choices(self) -> tuple[Any, ...]:
        chosen = self._place.chosen
        return chosen.cuts.get(self._cut_key), chosen.exact

    @property
    def split_size(self) -> int:
        """Return the maximum examples in a micro-batch: given, measured, or the default."""
        given = self._place.options.split_size
        if isinstance(given, int):
            return given
        if self.compares:
            return sys.maxsize
        return self._place.chosen.split_size or self._default_size

    @property
    def metrics(self) -> list[Any]:
        """Return the variables of the model's metrics, including metrics of all layers."""
        return list(self._model.metrics_variables)

    @property
    def own_metrics(self) -> list[Any]:
        """Return the metric variables that this stage updates."""
        return [v for v in self.metrics if self._owners[id(v)] == self._place.index]

    def look_at_loss(self, spec: Any) -> None:
        """Set `compares` by tracing the loss with the spec of a batch."""
        loss = self._model._compile_loss
        _, targets, weights = keras.utils.unpack_x_y_sample_weight(spec)
        given = isinstance(self._place.options.split_size, int)
        if self._is_loss_known or loss is None or given or targets is None:
            return
        self._is_loss_known = True
        outputs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in self.graph.outputs]

        def traced(outputs: Tensors, targets: Any, weights: Any) -> tf.Tensor:
            trace = keras_compat.bare_trace(tf.shape(outputs[0])[0], batch=outputs)
            with keras_compat.tracing(trace):
                value = loss(targets, self.packed(outputs), sample_weight=weights)
            losses = [each for _, each, *_ in loss._flat_losses]
            self.compares = keras_compat.compares_examples([value], trace, losses)
            return value

        with contextlib.suppress(Exception):  # the loss may need a fixed batch size
            keras_compat.compiled(traced).get_concrete_function(outputs, targets, weights)
        if self.compares and self._job.is_chief:
            _LOG.warning(
                "the loss compares the examples of a batch, so a step is a single micro-batch and "
                "the stages wait for each other. PipelineOptions(split_size=N) compares N at a time"
            )

    def values(self) -> list[np.ndarray]:
        """Return the values of this stage's metrics and statistics, [] without peers."""
        if self._place.peers is None:
            return []
        return [np.asarray(v.value).copy() for v in (*self.own_metrics, *self.statistics)]

    def begin(self) -> None:
        """Copy the chief's weights to all tasks, unless the model is divided. A collective."""
        if self.is_divided or not self._job.has_peers:
            return
        slots = set(map(id, self._slots))
        for variable in self._variables():
            if id(variable) not in slots:
                variable.assign(self._of_chief(variable))

    def divide(self) -> None:
        """Release other stages' variables, and receive this stage's slots. A collective."""
        if self.is_divided or not self._job.has_peers:
            return
        mine, kept = self._place.index, set(map(id, (*self.metrics, *self._slots)))
        others = [v for v in self._variables() if self._owners.get(id(v), mine) != mine]
        release([v for v in others if id(v) not in kept])
        self._take_slots()
        self.is_divided = True

    def gather(self) -> None:
        """Send all weights and metrics to all tasks, and all slots to the chief. A collective."""
        if not self.is_divided:
            self.gather_metrics()
            if self._job.is_chief:  # its checkpoint may precede the first step
                fill([slot for slot in self._slots if is_empty(slot)])
            return
        slots = set(map(id, self._slots))
        shared = [v for v in self._variables() if id(v) not in slots]
        from_owners(self._job, shared, self._owners)
        from_owners(self._job, self._slots, self._owners, chief_only=True)
        self.is_divided = False

    def gather_metrics(self) -> None:
        from_owners(self._job, self.metrics, self._owners)

    def sizes_of(self, rows: int) -> list[int]:
        return micro_sizes(rows, split_size=self.split_size)

    def order(self, stage: int, *, micros: int) -> list[Pass]:
        place = self._place
        return passes(place.options.schedule, stage=stage, stages=place.count, micros=micros)

    def inputs_of(self, x: Any) -> Tensors:
        return list(self.graph.functional._standardize_inputs(x))

    def packed(self, outputs: list[Any]) -> Any:
        return keras.tree.pack_sequence_as(self.graph.functional._outputs_struct, outputs)

    def _variables(self) -> list[Any]:
        return list(model_state.variables_of(self._model).values())

    def _of_chief(self, variable: Any) -> Any:
        value = variable.numpy() if self._job.is_chief else None
        return model_state.from_chief(self._job, value, like=variable)

    def _take_slots(self) -> None:
        """Receive this stage's slots from the chief, or initialize slots that the chief lacks."""
        unmade = broadcast([is_empty(slot) for slot in self._slots])
        for slot, is_new in zip(self._slots, unmade, strict=True):
            value = None if is_new else self._of_chief(slot)
            if self._owners[id(slot)] != self._place.index:
                release([slot])
            elif is_new:
                fill([slot])
            else:
                slot.assign(value)

    def _positions(self, batch: int, first_batch: FirstBatch) -> list[int]:
        """Return the indices of the graph's nodes after which a stage ends."""
        count, cut = self._place.count, self._place.options.cut
        if count == 1:
            return []
        if cut in (None, "auto"):
            return self._chosen_cut(batch, first_batch)
        cut = [cut] if isinstance(cut, str) else list(cut)
        require(
            len(cut) == count - 1,
            "cut",
            f"{count} stages need {count - 1} cuts, but cut names {len(cut)} layers",
            fix="name the last layer of each stage except the last stage, or change --stages",
            code="no-cut",
        )
        return self.graph.behind_layers(cut)

    def _micros(self, batch: int) -> int:
        """Return the maximum micro-batches of a pipeline in a step of `batch` examples."""
        return -(-len(self.sizes_of(batch)) // self._place.pipelines)

    def _chosen_cut(self, batch: int, first_batch: FirstBatch) -> list[int]:
        """Return the chief's automatic cut, or the cut of an earlier start. A collective."""
        chosen, count = self._place.chosen, self._place.count
        if self._cut_key not in chosen.cuts:
            places, positions = possible_places(self.graph, num_stages=count), None
            if self._job.is_chief:
                rows, inputs, loss_of = self._to_time(first_batch, self.sizes_of(batch)[0])
                places = chosen_places(
                    self.graph,
                    places,
                    num_stages=count,
                    rows=rows,
                    micros=self._micros(batch),
                    schedule=self._place.options.schedule,
                    keep=self._place.options.keep,
                    inputs=inputs,
                    loss_of=loss_of,
                )
                positions = chosen.cuts[self._cut_key] = [place.position for place in places]
            chosen.cuts[self._cut_key] = broadcast(positions)
        return chosen.cuts[self._cut_key]

    def _to_time(
        self, first_batch: FirstBatch, rows: int
    ) -> tuple[int, Tensors | None, LossOfOutputs | None]:
        """Return the first micro-batch's rows, inputs and loss for `chosen_places`."""
        if first_batch is None:
            return rows, None, None
        x, *rest = keras.utils.unpack_x_y_sample_weight(first_batch())
        flat = self.inputs_of(x)
        rows = min(rows, int(tf.shape(flat[0])[0]))
        inputs, targets, weights = (rows_of(each, 0, rows) for each in (flat, *rest))
        if self._model._compile_loss is None or not keras.tree.flatten(targets):
            return rows, inputs, None
        one = tf.constant(1.0)
        batch = MicroBatch({}, one, tf.zeros([2], tf.int32), targets, weights)
        return rows, inputs, lambda outputs: self._loss_of(batch, outputs, tf.zeros([]))

    def _loss_of(self, batch: MicroBatch, outputs: Tensors, added: tf.Tensor) -> tf.Tensor:
        """Return the micro-batch's loss, and update the metrics. Runs in a graph."""
        model, y_pred = self._model, self.packed(outputs)
        loss = added
        if model._compile_loss is not None:
            own = model._compile_loss(batch.targets, y_pred, sample_weight=batch.weights)
            loss += tf.cast(own, loss.dtype)
        rows = tf.shape(outputs[0])[0]
        model._loss_tracker.update_state(loss, sample_weight=rows)
        if model._compile_metrics is not None:
            model._compile_metrics.update_state(batch.targets, y_pred, sample_weight=batch.weights)
        return loss

    def clipped(self, gradients: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Return the gradients, clipped by their norm over all stages. A collective.

        The norm includes accumulated gradients. With a loss scale, return NaN gradients if a stage
        has gradients that are not finite, so that the optimizer skips the step.
        """
        inner, skips = self._inner, isinstance(self._optimizer, LossScaleOptimizer)
        clip, steps = inner.global_clipnorm, inner.gradient_accumulation_steps
        held: list[Any] = []
        if clip and steps:
            if (int(inner._iterations) + 1) % steps:
                clip = None  # not the last accumulated step
            else:
                clip *= steps  # the optimizer uses their mean
                places = map(inner._get_variable_index, self.stage.variables)
                held = [inner._accumulated_gradients[place] for place in places]
        if not clip and not skips:
            return gradients
        scale = float(self._model.optimizer.scale_loss(1.0))
        pairs = zip(gradients, held or [0.0] * len(gradients), strict=True)
        own = sum(float(tf.reduce_sum(tf.square(g / scale + h))) for g, h in pairs if g is not None)
        counted = own if self._place.pipeline == 0 else 0.0  # all pipelines have the same sum
        squares = sum_over_tasks(self._job, np.array([counted]), of="squares of gradients")[0]
        if clip and np.isfinite(squares):
            factor = clip / max(np.sqrt(squares), clip)
            for variable in held:
                variable.assign(variable * factor)
        elif skips and not np.isfinite(squares):
            factor = np.nan
        else:
            return gradients
        return [None if g is None else g * tf.cast(factor, g.dtype) for g in gradients]

    def _require_deterministic(self) -> None:
        """Raise UsageError if the run is exact and the traced graph has unseeded random ops."""
        if self._place.chosen.exact:
            require_deterministic(tf.compat.v1.get_default_graph())

    def _update(self, gradients: list[tf.Tensor | None]) -> None:
        inner, mine = self._inner, set(map(id, self.stage.variables))
        kept = [i for i, v in enumerate(inner._trainable_variables) if id(v) in mine]
        own: dict[str, Any] = {"global_clipnorm": None}  # done over all stages
        own["_trainable_variables"] = [inner._trainable_variables[i] for i in kept]
        if inner.gradient_accumulation_steps:  # else the optimizer would zero all stages' sums
            held = enumerate(inner._accumulated_gradients)
            own["_accumulated_gradients"] = [v if i in kept else None for i, v in held]
        if inner.use_ema:
            averages = inner._model_variables_moving_average
            own["_model_variables_moving_average"] = [averages[i] for i in kept]
        before = {name: vars(inner)[name] for name in own}
        vars(inner).update(own)
        try:
            apply = self._model.optimizer.apply_gradients  # as Keras' step does
            pairs = list(zip(gradients, self.stage.variables, strict=True))
            self._job.strategy.run(lambda: apply(pairs))
        finally:
            vars(inner).update(before)
        self._require_deterministic()

    def _log(self, part: ModelPart, *, batch: int) -> None:
        place = self._place
        order = self.order(place.index, micros=self._micros(batch))
        kept = most_kept(order) if place.options.keep != "recompute" else 1
        made = max(made_bytes(segment.part.nodes) for segment in self.stage.segments)
        size = min(self.split_size, batch)
        layers = part.module.layers
        mine = [slot for slot in self._slots if self._owners[id(slot)] == place.index]
        _LOG.info(
            "%s: %d layers, from %s to %s; %d micro-batches of at most %d examples; weights"
            " %.1f MiB, slots %.1f MiB, outputs of its layers about %.1f MiB (of %d micro-batches)",
            *(place.names[place.index], len(layers)),
            *(layers[0].name, layers[-1].name, len(order) // 2, size),
            *(bytes_of(part.module.variables) / _MIB, bytes_of(mine) / _MIB),
            *(made * size * kept / _MIB, kept),
        )


def staged_model(
    model: keras.Model, job: Job, *, batch: int, spec: Any, first_batch: FirstBatch
) -> StagedModel:
    """Return the model in stages. Make it again if the model has changed. A collective."""
    found: StagedModel | None = vars(model).get(_NAME)
    if found is None or not found.is_up_to_date:
        if found is not None and found.is_divided:
            found.gather()
        given = {"batch": batch, "spec": spec, "first_batch": first_batch}
        found = vars(model)[_NAME] = StagedModel(model, job, **given)
    found.look_at_loss(spec)
    return found


def _parts_of(model: keras.Model) -> list[Any]:
    """Return the model's optimizer, loss, variables and trainable flags, and whether its kernels
    are fused.
    """
    compiled = [getattr(model, name, None) for name in ("optimizer", "_compile_loss")]
    trainable = [weight.trainable for weight in model.weights]
    variables = model_state.variables_of(model).values()
    return [*compiled, keras_compat.is_fused(model), *trainable, *variables]


def _require_stages_compute_it(model: keras.Model) -> None:
    own = [name for name in _OWN if is_own(model, name)]
    require(
        not own,
        f"model {model.name!r}",
        f"the model overrides {', '.join(own)}, but in a pipeline no task has all outputs",
        fix="train the model with another strategy",
        code="unsupported",
    )
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        require(
            reduction in ("sum_over_batch_size", "mean", "sum"),
            "loss",
            f"strategy pipeline does not support reduction={reduction!r}",
            fix="leave out reduction, or use 'sum_over_batch_size' or 'sum'",
            code="loss-reduction",
        )
