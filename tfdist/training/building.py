"""Creation of a model's variables inside the strategy's scope, and checks against the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec

from tfdist.checkpoint.model_state import all_optimizers
from tfdist.errors import UsageError, require
from tfdist.strategy import Job, current_job, job_of
from tfdist.strategy.layer_devices import PlacedStrategy
from tfdist.strategy.ring import Members
from tfdist.training import keras_compat
from tfdist.training.feed import Feed
from tfdist.training.keras_compat import sharding
from tfdist.training.keras_compat.trace import warn_once
from tfdist.training.program import engine_class, inlined_functions, is_own, trace_of

Slots = Literal["whole", "parts", "none"]


def job_for(model: keras.Model, *, doing: str) -> Job:
    """Return the job of `model`. Raise UsageError for a model from another scope."""
    if not isinstance(model, keras.Model):
        kind = type(model)
        raise UsageError(
            f"tfdist.{doing}",
            f"the model is a {kind.__module__}.{kind.__qualname__}, not a keras.Model of Keras 3",
            fix=f"call tfdist.{doing}(model, ...) with a model that is made with `import keras`",
            code="not-a-model",
        )
    require_compiled_functions(doing=doing)
    current, made = current_job(), model._distribute_strategy
    around = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and around is not model.distribute_strategy:
        raise UsageError(
            f"tfdist.{doing}",
            "the call is in the scope of another strategy than the model's strategy",
            fix=f"call tfdist.{doing} after the `with` block",
            code="another-scope",
        )
    if current is None:
        return job_of(model.distribute_strategy)
    if made is current.strategy:
        return current
    if made is None and current.kind.has_one_replica and not _is_placed(current):
        return Job(strategy=model.distribute_strategy, kind=current.kind, config=current.config)
    where = "outside strategy.scope()" if made is None else "in the scope of another strategy"
    raise UsageError(
        f"tfdist.{doing}",
        f"the model was made {where}, not in the scope of this job's {current.kind} strategy",
        fix="make and compile the model inside `with strategy.scope():`",
        code="another-scope",
    )


def _is_placed(job: Job) -> bool:
    return isinstance(job.strategy, PlacedStrategy)


def require_compiled_functions(*, doing: str, model: keras.Model | None = None) -> None:
    """Raise UsageError if `tf.function` or the model runs eagerly: steps must be compiled."""
    eagerly = {
        "tf.config.run_functions_eagerly(True)": tf.config.functions_run_eagerly(),
        "compile(run_eagerly=True)": getattr(model, "run_eagerly", False),
    }
    for name, is_set in eagerly.items():
        require(
            not is_set,
            f"tfdist.{doing}",
            f"{name} is set, but tfdist compiles its steps",
            fix="set it to False. To debug a step, use strategy single with model.fit, or tf.print",
            code="unsupported",
        )


def require_compiled(model: keras.Model, *, doing: str) -> None:
    """Raise Keras' error for a model that is not compiled, UsageError if it runs eagerly."""
    model._assert_compile_called(doing)
    require_compiled_functions(doing=doing, model=model)


def build(model: keras.Model, job: Job, feed: Feed, *, slots: Slots = "whole") -> None:
    """Create all variables of model, metrics, loss and optimizer inside the scope.

    Uses the specs of a batch, or the first batch if specs are not enough. `slots` selects the
    optimizer's slots: all, only this worker's part, or none. Every task must call this, because
    creating a variable is a collective under multiworker.
    """
    _require_targets(model, feed.batch_spec)
    _require_optimizer_of_scope(model, job)
    _require_variables_of_scope(model, job)
    _require_one_state(model, job)
    optimizer = model.optimizer
    new = not model.built or (optimizer is not None and not optimizer.built)
    with job.strategy.scope(), _making(slots, optimizer, job):
        if _has_call(model):
            _build_by_a_call(model, feed)
        else:
            _build_by_its_step(model, feed)
            _require_built_parts(model)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        if slots != "none" and job.stages is None and not job.kind.has_servers:
            _build_other_optimizers(model, job, feed)
    model._post_build()
    _require_variables_of_scope(model, job)
    _require_one_scale(model, job)
    if _is_placed(job):
        job.strategy.require_placed(model)
    if new and slots != "none":
        engine_class(job).log_built(model, job)


def _making(slots: Slots, optimizer: Any, job: Job) -> AbstractContextManager[None]:
    if slots == "parts":
        return sharding.building_in_parts(optimizer, job)
    if slots == "none" and optimizer is not None and not optimizer.built:
        return sharding.building_by(optimizer, lambda variables: None)
    return nullcontext() if optimizer is None else engine_class(job).creating_slots(optimizer, job)


def build_to_predict(model: keras.Model, job: Job, feed: Feed) -> None:
    """Create all variables of the model inside the scope, also if it is not compiled."""
    _require_one_state(model, job)
    if not _has_call(model):
        _require_built_parts(model)
    elif not all(layer.built for layer in model._flatten_layers()):
        with job.strategy.scope():
            try:
                _called(model, tf.nest.map_structure(_symbolic, feed.batch_spec))
            except Exception as error:  # this error says more than the second attempt's error
                try:
                    _called(model, feed.first_batch())
                except Exception:
                    raise error from None


def _build_by_a_call(model: keras.Model, feed: Feed) -> None:
    """Build model, metrics and loss with a symbolic call that computes nothing.

    Keras makes a symbolic call only under a strategy, with dense symbols of unknown batch size. If
    the model rejects them, its own step may accept them or the first batch.
    """
    batch = tf.nest.map_structure(_symbolic, feed.batch_spec)
    if not all(layer.built for layer in model._flatten_layers()):
        with contextlib.suppress(Exception):  # layers that use other replicas fail here
            _called(model, batch, training=True)  # also builds layers used only in training
        # The optimizer must know layers that only the step calls. The first trace may fail.
        step = model.train_step
        is_unbuilt = is_own(model, "train_step") and not _has_built_layers(model)
        if is_unbuilt and not (_runs(step, batch) or _runs(step, batch)):
            first = feed.first_batch()
            _ = _runs(step, first) or _runs(step, first)
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:  # this error says more than the second attempt's error
        _build_by_its_step(model, feed)
        if not _has_built_layers(model) or (not _has_own_step(model) and _has_unbuilt_parts(model)):
            raise error from None


def _build_by_its_step(model: keras.Model, feed: Feed) -> None:
    """Build layers and metrics by tracing the model's own steps, without updates.

    The first trace may fail at the gradient of a variable that it has created. The second works.
    """
    symbols = tf.nest.map_structure(_symbolic, feed.batch_spec)
    for step in (model.train_step, model.test_step):
        if _has_unbuilt_parts(model) and not _runs(step, symbols) and _has_unbuilt_parts(model):
            _runs(step, feed.first_batch())


def _build_other_optimizers(model: keras.Model, job: Job, feed: Feed) -> None:
    """Build the optimizers of the model's own step, such as a GAN's, for the variables they update.

    A step on several replicas cannot create variables, and a checkpoint restores only built slots.
    """
    if all(optimizer.built for optimizer in all_optimizers(model)):
        return
    rows = feed.plan.global_batch_size
    for other, variables in trace_of(model.train_step, job, feed, rows=rows).unbuilt:
        if not other.built:
            other.build(variables)


def _has_unbuilt_parts(model: keras.Model) -> bool:
    parts = [model._compile_metrics]
    if not _has_own_step(model) or len(keras.tree.flatten(model.loss)) > 1:
        parts.append(model._compile_loss)
    is_built = all(part is None or part.built for part in parts)
    return not (is_built and _has_built_layers(model))


def _has_built_layers(model: keras.Model) -> bool:
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def _has_own_step(model: keras.Model) -> bool:
    return any(is_own(model, step) for step in ("train_step", "test_step"))


def _runs(step: Callable[[Any], Any], batch: Any) -> bool:
    """Return whether a trace of the step, without its updates, raises no error."""

    def traced(batch: Any) -> Any:
        trace = keras_compat.bare_trace(1, updates=False)
        with keras_compat.tracing(trace), inlined_functions():
            return step(batch)

    try:
        compute_output_spec(traced, batch)
    except Exception:  # the caller checks which layers the trace has built
        return False
    return True


def _called(model: keras.Model, batch: Any, *, training: bool = False) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return compute_output_spec(model, x, training=training)


def _has_call(model: keras.Model) -> bool:
    return type(model).call is not keras.Model.call


def _require_targets(model: keras.Model, batch_spec: Any) -> None:
    """Raise UsageError if Keras' own loss needs targets and the data have none."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch_spec)
    own = ("train_step", "test_step", "compute_loss")
    stock = not any(is_own(model, method) for method in own)
    if y is None and stock and model._compile_loss is not None:
        raise UsageError(
            "y",
            "the model is compiled with a loss, but the data have no targets",
            fix="pass y, validation_data=(x, y), or a dataset of (x, y)",
            code="no-data",
        )


def _require_optimizer_of_scope(model: keras.Model, job: Job) -> None:
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for one in (inner, optimizer, *getattr(inner, "optimizers", ())):
        if getattr(one, "_distribution_strategy", job.strategy) is not job.strategy:
            raise UsageError(
                "optimizer",
                f"{type(one).__name__} was made outside the strategy's scope",
                fix="make the optimizer, and call model.compile, inside `with strategy.scope():`",
                code="another-scope",
            )


def build_in_parts(optimizer: Any, variables: Sequence[Any], job: Job) -> None:
    """Build an optimizer on this worker's part of the variables, or on all with one worker.

    A collective. Raises UsageError as `shards`.
    """
    sharded = shards(optimizer, variables, job)
    with job.strategy.scope(), _making("parts" if sharded else "whole", optimizer, job):
        optimizer.build(list(variables))


def shards(optimizer: Any, variables: Sequence[Any], job: Job, *, callbacks: Any = None) -> bool:
    """Return whether several workers divide the optimizer's state.

    Raises:
      UsageError: the strategy, the optimizer or a callback needs the full state.
    """
    divides = job.kind.divides_variables
    if job.num_replicas == 1 and not divides:
        warn_once("fit: sharded_optimizer has no effect with one worker")
        return False
    if divides or job.ring is None or isinstance(job.ring, Members):
        why = "already divides the optimizer" if divides else "has no ring of workers here"
        raise sharding.not_sharded(f"strategy {job.kind} {why}")
    if any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in keras.tree.flatten(callbacks)):
        raise sharding.not_sharded("SwapEMAWeights needs whole averages in each worker")
    sharding.require_by_element(optimizer, variables)
    return True


def _require_variables_of_scope(model: keras.Model, job: Job) -> None:
    """Raise UsageError for a variable created outside the strategy's scope.

    Replicas would race on it, and no parameter server would hold it.
    """
    if not job.is_replicated:
        return
    for variable in (*model.variables, *model.metrics_variables):
        if not engine_class(job).is_of_scope(variable.value, job):
            raise UsageError(
                "model",
                f"{variable.path} was made outside the strategy's scope",
                fix="make layers and metrics, and build them, inside `with strategy.scope():`",
                code="another-scope",
            )


def _require_one_scale(model: keras.Model, job: Job) -> None:
    """Reject variables that are overwritten with their gradient: parts of a batch sum these."""
    is_whole = job.num_replicas == 1 and not job.kind.has_stages
    for variable in () if is_whole else model.trainable_variables:
        if variable.overwrite_with_gradient:
            raise UsageError(
                "model",
                f"replicas and micro-batches cannot combine the float8 scales {variable.path}",
                fix="use strategy single, or leave out quantize('float8')",
                code="unsupported",
            )


def compiled_parts(model: keras.Model) -> tuple[Any, Any]:
    """Return two objects of a model. Each `compile` call replaces at least one of them."""
    return getattr(model, "optimizer", None), getattr(model, "_loss_tracker", None)


def require_as_compiled(model: keras.Model, before: tuple[Any, Any]) -> None:
    """Raise UsageError if a callback has compiled the model or replaced its optimizer.

    The traced step would continue with the old parts.
    """
    if any(one is not other for one, other in zip(compiled_parts(model), before, strict=True)):
        raise UsageError(
            "callbacks",
            "a callback compiled the model or replaced its optimizer during fit",
            fix="call fit again after each change (a callback may set learning_rate)",
            code="unsupported",
        )


def _require_built_parts(model: keras.Model) -> None:
    for layer in model._flatten_layers(include_self=False):
        if not layer.built:
            raise UsageError(
                "model",
                f"the model has no `call`, and its layer {layer.name} is not built",
                fix="build the layer inside `with strategy.scope():`, with build(shape) or a first "
                "call",
                code="not-built",
            )


def _require_one_state(model: keras.Model, job: Job) -> None:
    """Reject stateful RNNs if replicas or ps workers split the batches."""
    if not job.is_replicated:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UsageError(
                "model",
                f"strategy {job.kind} splits batches, but the stateful layer {layer.name} needs "
                "whole batches in their order",
                fix="use strategy single, or make the layer with stateful=False",
                code="unsupported",
            )


def _symbolic(spec: tf.TensorSpec | None) -> keras.KerasTensor | None:
    if spec is None:
        return None
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def use_averages(model: keras.Model) -> None:
    """Replace the trained weights by their averages (`use_ema`).

    Keras pairs weights and averages by position. The averages have the order of the weights for
    which the optimizer was built, and some of these weights may be frozen now.
    """
    optimizer, trained = model.optimizer, {id(v) for v in model.trainable_weights}
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    averaged = inner._trainable_variables if inner.use_ema and inner.built else []
    if not any(id(v) in trained for v in averaged):
        averaged = model.trainable_weights
    frozen = [(v, v.numpy()) for v in averaged if id(v) not in trained]
    optimizer.finalize_variable_values(averaged)
    for variable, value in frozen:
        variable.assign(value)
