"""A compiled model in stages, as one task has it: its stage, losses, metrics and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import state
from tfdist.errors import UsageError, require
from tfdist.pipeline.cuts import LayerGraph, Part
from tfdist.pipeline.schedule import micro_sizes
from tfdist.pipeline.stage import MicroBatch, Stage, Tensors
from tfdist.pipeline.timing import chosen_places
from tfdist.pipeline.union import owners_of
from tfdist.strategy import Job, broadcast
from tfdist.training import keras_compat
from tfdist.training.program import is_own

_LOG = logging.getLogger(__name__)
_MICROS_A_STAGE = 4
_OWN = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


class StagedModel:
    """The whole model, of which this task computes and updates one stage.

    Making one is a collective: all tasks start from the chief's values, and cut where it says.

    Args:
      model: built and compiled; the same in every task.
      job: of strategy pipeline.
      batch: examples of a step.

    Attributes:
      graph: of the model's layers.
      stage: of this task.
      owners: which stage updates each variable.
      split_size: examples of a micro-batch at the most.
      global_clipnorm: of the optimizer; None for none.

    Raises:
      UsageError: the model, its loss or its optimizer cannot be trained in stages.
    """

    def __init__(self, model: keras.Model, job: Job, *, batch: int) -> None:
        assert job.stages is not None
        place, options = job.stages, job.stages.options
        self._model = model
        _require_stages_compute_it(model)
        self.graph = LayerGraph(model)
        most = max(1, -(-batch // (_MICROS_A_STAGE * place.count)))
        self.split_size = most if options.split_size is None else options.split_size
        parts = self._parts(job, rows=micro_sizes(batch, split_size=self.split_size)[0])
        part = parts[place.index]
        # The last stage turns round at once, and keeps one micro-batch only.
        keep = "tape" if part.is_last and options.schedule != "gpipe" else options.keep
        self.stage = Stage(part, keep=keep, loss_of=self._loss_of if part.is_last else None)
        self.owners = owners_of(model, parts)
        for variable in self.variables() if job.has_peers else ():
            value = variable.numpy() if job.is_chief else None
            variable.assign(state.from_chief(job, value, like=variable))
        optimizer = getattr(model, "optimizer", None)
        self.global_clipnorm: float | None = getattr(optimizer, "global_clipnorm", None)
        self._strategy = job.strategy
        self.update = keras_compat.compiled(self._update)
        self._log(parts, place.index)

    def variables(self) -> list[Any]:
        """Return all variables of the run's state: weights, optimizer and metrics."""
        return list(state.variables_of(self._model).values())

    def inputs_of(self, x: Any) -> Tensors:
        """Return the model's flat inputs, in the order of its graph."""
        flat: Tensors = self.graph.functional._standardize_inputs(x)
        return flat

    def packed(self, outputs: list[Any]) -> Any:
        """Return flat outputs in the structure that the model returns."""
        return keras.tree.pack_sequence_as(self.graph.functional._outputs_struct, outputs)

    def _parts(self, job: Job, *, rows: int) -> list[Part]:
        assert job.stages is not None
        count, cut = job.stages.count, job.stages.options.cut
        graph = self.graph
        if count == 1:
            return graph.cut(graph.behind([]), num_stages=1)
        if isinstance(cut, Mapping):
            return graph.cut(graph.by_patterns(cut), num_stages=count)
        if cut is not None:
            require(
                len(cut) == count - 1,
                "cut",
                received=f"{len(cut)} layers for {count} stages",
                expected=f"{count - 1}, the last of each stage but the last one",
                fix="name so many, or change --stages",
                code="wrong-number",
            )
            return graph.cut(graph.behind_layers(list(cut)), num_stages=count)
        positions = None
        if job.is_chief:
            places = chosen_places(graph, num_stages=count, rows=rows)
            positions = [place.position for place in places]
        return graph.cut(graph.behind(broadcast(positions)), num_stages=count)

    def _loss_of(self, batch: MicroBatch, outputs: Tensors, added: tf.Tensor) -> tf.Tensor:
        """Return the micro-batch's loss, and take it into the metrics; in graph."""
        model, y_pred = self._model, self.packed(outputs)
        loss = added
        if model._compile_loss is not None:
            loss += model._compile_loss(batch.targets, y_pred, sample_weight=batch.weights)
        rows = tf.shape(outputs[0])[0]
        model._loss_tracker.update_state(loss, sample_weight=rows)
        if model._compile_metrics is not None:
            model._compile_metrics.update_state(batch.targets, y_pred, sample_weight=batch.weights)
        return loss

    def _update(self, gradients: list[tf.Tensor | None]) -> None:
        optimizer = self._model.optimizer
        clip, optimizer.global_clipnorm = optimizer.global_clipnorm, None  # done over all stages
        try:
            self._strategy.run(lambda: optimizer.apply(gradients, self.stage.variables))
        finally:
            optimizer.global_clipnorm = clip

    def _log(self, parts: list[Part], index: int) -> None:
        mine = parts[index].module
        _LOG.info(
            "stage %d of %d: %d layers, %d weights, from %s to %s; micro-batches of %d examples",
            *(index, len(parts), len(mine.layers), mine.count_params()),
            *(mine.layers[0].name, mine.layers[-1].name, self.split_size),
        )


def _require_stages_compute_it(model: keras.Model) -> None:
    """Raise UsageError for what needs the whole model in one place."""
    own = [name for name in _OWN if is_own(model, name)]
    require(
        not own,
        f"model {model.name!r}",
        received=f"{', '.join(own)} of its own under strategy pipeline",
        expected="Keras' own, as no task has the whole model's outputs",
        fix="train it under another strategy",
        code="own-step",
    )
    if isinstance(getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "optimizer",
            received="a LossScaleOptimizer under strategy pipeline",
            expected="an optimizer without a loss scale",
            fix="use dtype policy bfloat16 or float32",
            code="loss-scale",
        )
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        require(
            reduction in ("sum_over_batch_size", "mean"),
            "loss",
            received=f"reduction={reduction!r} under strategy pipeline",
            expected="a mean over the examples, which micro-batches add up to by their shares",
            fix="leave the reduction out",
            code="loss-reduction",
        )
