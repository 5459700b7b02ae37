"""Each replacement of `keras_compat`: stock Keras and TensorFlow still need it, and keep it out.

A test here fails on the day its replacement can go. They run after `install`, outside any tfdist
step, where stock behaviour must be what it was.
"""

import contextlib
import functools
import json
import logging
import math
import operator
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common.masking import set_keras_mask
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss
from keras.src.models.model import Trainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.trainers.compile_utils import CompileMetrics
from tensorflow.python.distribute import parameter_server_strategy_v2
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

import tfdist
from tests.models import difference
from tests.processes import python
from tfdist.ps import keras_compat as ps_compat
from tfdist.strategy.job import convert_variables_to_numbers
from tfdist.training import keras_compat
from tfdist.training.keras_compat.trace import nn

RNG = np.random.RandomState(0)
X = RNG.randn(8, 4).astype("float32")
Y = (RNG.randn(8, 1) * 3).astype("float32")
Y[7] *= 20


SHOWN: list[str] = []


def shows(*targets):
    """The replacements whose fault a test shows: stock Keras and TensorFlow still have it."""
    SHOWN.extend(targets)

    def telling(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:
                names = kwargs.get("target", ", ".join(targets))
                error.add_note(
                    f"If stock passes: {names} is no longer needed from Keras {keras.__version__}, "
                    f"TensorFlow {tf.__version__}. Set `until` of the replacement"
                )
                raise

        return run

    return telling


@pytest.fixture(autouse=True)
def installed():
    keras_compat.install()
    convert_variables_to_numbers()


def make_model(strategy, optimizer, layers=()):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(X, Y))
    return model


def stock_steps(strategy, model, cuts, *, steps=3, x=X, y=Y):
    """Keras' own train_step on each replica, as Keras' own fit would run it."""
    bounds = list(zip([0, *cuts], [*cuts, len(x)], strict=True))

    def part(array):
        def of(context):
            first, last = bounds[context.replica_id_in_sync_group]
            return tf.constant(array[first:last])

        return strategy.experimental_distribute_values_from_function(of)

    @tf.function
    def step(*data):
        strategy.run(lambda *mine: model.train_step(mine), args=data)

    data = part(x), part(y)
    for _ in range(steps):
        step(*data)
    return model


def per_replica(strategy, function):
    outputs = tf.function(lambda: strategy.run(function))()
    return [np.asarray(out) for out in strategy.experimental_local_results(outputs)]


@shows("SeedGenerator.next")
def test_stock_replicas_drop_the_same_units(strategies):
    with strategies[2].scope():
        layer = keras.layers.Dropout(0.5)
    ones = tf.ones([64])
    masks = per_replica(strategies[2], lambda: layer(ones, training=True))
    np.testing.assert_array_equal(*masks)


@shows("keras.src.random.seed_generator.global_seed_generator")
def test_stock_replicas_share_no_generator(strategies):
    found = [seed_generator.global_seed_generator()]
    strategies[2].run(lambda: found.append(threading.get_ident()) or None)
    threads = set(found[1:])
    assert len(threads) == 2  # each replica is traced in a thread of its own
    other = []
    thread = threading.Thread(target=lambda: other.append(seed_generator.global_seed_generator()))
    thread.start()
    thread.join()
    assert other[0] is not found[0]


@shows("keras.src.losses.loss.scale_loss_for_distribution")
def test_stock_losses_count_replicas_and_not_examples(strategies):
    sgd = functools.partial(keras.optimizers.SGD, 0.01)
    one, even, uneven = (
        stock_steps(strategies[n], make_model(strategies[n], sgd), cuts)
        for n, cuts in ((1, []), (2, [4]), (2, [6]))
    )
    assert difference(one, even) < 1e-6
    assert difference(one, uneven) > 1e-2


def trace(**options):
    key = tf.zeros([2], tf.int32)
    return keras_compat.StepTrace(
        **{"num_replicas": 1, "share": 1.0, "examples": 1, "random_key": key, **options}
    )


def step_of(*, traced, **options):
    """A step of tfdist's, or none: as stock."""
    return keras_compat.tracing(trace(**options)) if traced else contextlib.nullcontext()


def kinds_of(function, *arguments):
    """The operations that a function is made of."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return [operation.type for operation in graph.get_operations()]


def part_of_a_replica(values):
    """What one of two replicas has of values that are divided among them."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.stack(tf.split(tf.constant(values), 2))[replica]


def masked_loss(loss, mask):
    predicted = part_of_a_replica([[1.0], [2.0], [3.0], [4.0]])
    set_keras_mask(predicted, part_of_a_replica(mask))
    return loss(tf.zeros([2, 1]), predicted)


def one_number(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_true - y_pred))


def reduced():
    pairs = [(tf.ones([]), "the variable")]
    return TFOptimizer._all_reduce_sum_gradients(None, pairs)[0][0]


OF_TWO_REPLICAS = {
    # The number of replicas is undone, and not the share.
    "keras.src.losses.loss.unscale_loss_for_distribution": (
        lambda: keras_loss.unscale_loss_for_distribution(tf.ones([])),
        [2.0, 2.0],
    ),
    # Parts by the number of replicas.
    "tensorflow._api.v2.nn.compute_average_loss": (
        lambda: tf.nn.compute_average_loss(tf.ones([4])),
        [0.5, 0.5],
    ),
    "tensorflow._api.v2.nn.scale_regularization_loss": (
        lambda: tf.nn.scale_regularization_loss(tf.ones([4])),
        [2.0, 2.0],
    ),
    # By a replica's own unmasked entries, and not 1 / 3 and 7 / 3 of 8 / 3.
    "keras.src.losses.loss.apply_mask": (
        lambda: masked_loss(keras.losses.MeanAbsoluteError(), [True, False, True, True]),
        [0.5, 1.75],
    ),
    # One without an unmasked entry leaves its number out: not 0.75 and 1.75 of 2.5.
    "keras.src.losses.loss.reduce_weighted_values": (
        lambda: masked_loss(
            keras.src.losses.LossFunctionWrapper(one_number), [False, False, True, True]
        ),
        [0.0, 1.75],
    ),
    # Sums of vectors by the number of replicas, and not the sums, which are 4.
    f"{Trainer.__name__}._aggregate_additional_loss": (
        lambda: keras.Sequential()._aggregate_additional_loss(tf.ones([4])),
        [2.0, 2.0],
    ),
    "TFOptimizer._all_reduce_sum_gradients": (reduced, [2.0, 2.0]),
}


@shows(*OF_TWO_REPLICAS)
@pytest.mark.parametrize("target", OF_TWO_REPLICAS)
def test_stock_replicas_compute_other_values(strategies, target):
    compute, values = OF_TWO_REPLICAS[target]
    assert per_replica(strategies[2], compute) == values


@shows("keras.src.losses.loss.reduce_values")
def test_stock_sums_ignore_the_batch_fraction(strategies):
    """What the tape weights by the share, as it weights means, would not be the sum."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    ones, zeros = tf.ones([4, 1]), tf.zeros([4, 1])

    def sum_of(*, traced):
        with step_of(traced=traced, num_replicas=2, share=0.5):
            return loss(ones, zeros)

    for traced, each in ((False, 4.0), (True, 8.0)):
        assert per_replica(strategies[2], lambda traced=traced: sum_of(traced=traced)) == [each] * 2


@shows("GradientTape.gradient")
def test_stock_tapes_sum_losses_instead_of_averaging():
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        losses = weight * tf.ones([4])
    assert float(tape.gradient(losses, weight)) == 4.0


@shows("Layer.add_loss", "Layer._get_own_losses", "Layer._clear_losses")
def test_stock_replicas_share_the_losses_of_a_layer(strategies):
    """The second replica calls the layer while the first one waits for it, before it reads."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(x)
            tf.distribute.get_replica_context().all_reduce("SUM", x)
            return x

    def added(*, traced):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with step_of(traced=traced):
            layer(tf.cast(replica, tf.float32))
            (loss,) = layer.losses
            layer._clear_losses()
            assert not layer.losses
        return loss

    layer = Adds()
    with pytest.raises(ValueError, match="not enough values"):
        per_replica(strategies[2], functools.partial(added, traced=False))
    assert per_replica(strategies[2], functools.partial(added, traced=True)) == [0.0, 1.0]


@shows("CompileLoss.call", "Mean.update_state")
def test_stock_losses_of_several_outputs_are_means_over_batches():
    x = keras.Input((4,))
    model = keras.Model(x, {name: keras.layers.Dense(1, name=name)(x) for name in "ab"})
    model.compile(loss="mse")
    y = {"a": Y, "b": Y}
    whole = model.evaluate(X, y, batch_size=8, verbose=0, return_dict=True)
    batches = model.evaluate(X, y, batch_size=7, verbose=0, return_dict=True)
    assert batches["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert abs(batches["a_loss"] / whole["a_loss"] - 1) > 0.1


@shows("CompileMetrics.build")
def test_stock_replicas_make_metrics_of_compile_of_their_own(strategies):
    def built(*, traced):
        metrics = CompileMetrics(["mae"], None)

        def in_replica():
            with step_of(traced=traced):
                metrics.build(tf.ones([2, 1]), tf.ones([2, 1]))

        strategies[2].run(in_replica)

    not_built = "metrics: the metrics of compile are not built"
    for traced, error in ((False, "only supports singleton tf.Variables"), (True, not_built)):
        with pytest.raises(ValueError, match=error):
            tf.function(functools.partial(built, traced=traced), autograph=False)()


@shows("Metric.__getattribute__", "Sum.update_state")
def test_stock_metrics_are_separate_in_each_replica(strategies):
    with strategies[2].scope():
        total = keras.metrics.Sum()

    def step():
        total.update_state(tf.ones([]))
        return total.result()

    assert per_replica(strategies[2], step) == [1.0, 1.0]
    assert float(total.result()) == 2.0


@shows("BaseOptimizer.apply")
def test_stock_clips_before_it_reduces(strategies):
    clipped = functools.partial(keras.optimizers.SGD, 0.1, global_clipnorm=1.0)
    one = stock_steps(strategies[1], make_model(strategies[1], clipped), [])
    two = stock_steps(strategies[2], make_model(strategies[2], clipped), [4])
    assert difference(one, two) > 1e-2


@shows("LossScaleOptimizer.apply", "LossScaleOptimizer._tf_apply")
def test_stock_loss_scaling_checks_only_the_first_replica(strategies):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))

    y = np.ones((2, 1), "float32")
    y[1] = 3e38
    model = make_model(strategies[2], scaled)
    weights = stock_steps(strategies[2], model, [1], steps=1, x=X[:2], y=y).get_weights()
    assert not np.isfinite(weights[0]).all()


def stepping(optimizer, weight, *, traced):
    """A function that applies a gradient to a weight, in a step of tfdist's or as stock."""
    optimizer.build([weight])

    @tf.function(autograph=False)
    def step(gradient):
        with step_of(traced=traced):
            optimizer.apply([gradient])

    return step


def unscaled_after_another_worker_changed_the_scale(*, traced):
    """The size of an update by a gradient of 1, as two workers on one ps may make it."""
    weight = keras.Variable(0.0)
    inner = keras.optimizers.SGD(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build([weight])

    @tf.function
    def step():
        with step_of(traced=traced):
            gradient = optimizer.scale_loss(tf.ones([]))
            with tf.control_dependencies([optimizer.dynamic_scale._value.assign(16.0)]):
                gradient = tf.identity(gradient)
            optimizer.apply([gradient])

    step()
    return -float(weight.numpy())


def scale_after_the_step_of_another(*, traced):
    """A loss scale that is to grow at the third step, to which others may have counted."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=3
    )
    step = stepping(optimizer, keras.Variable(0.0), traced=traced)
    optimizer.step_counter.assign(3)
    step(tf.ones([]))
    return float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy())


OF_OTHER_WORKERS = {
    "LossScaleOptimizer.scale_loss": (unscaled_after_another_worker_changed_the_scale, 0.5, 1.0),
    "LossScaleOptimizer._stateful_handle_finite_grads": (
        scale_after_the_step_of_another,
        (8.0, 4),
        (16.0, 0),
    ),
}


@shows(*OF_OTHER_WORKERS)
@pytest.mark.parametrize("target", OF_OTHER_WORKERS)
def test_stock_loss_scaling_ignores_other_workers(target):
    compute, stock, mine = OF_OTHER_WORKERS[target]
    assert (compute(traced=False), compute(traced=True)) == (stock, mine)


UPDATES = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
}


def updated(optimizer, *, traced):
    """A weight and its optimizer's variables after some updates, and how many operations write."""
    weight = keras.Variable(np.random.RandomState(1).randn(7).astype("float32"))
    step = stepping(optimizer, weight, traced=traced)
    for seed in range(5):
        step(tf.constant(np.random.RandomState(seed).randn(7), tf.float32))
    graph = step.get_concrete_function(tf.zeros([7])).graph
    writes = [op for op in graph.get_operations() if op.type.startswith(("Assign", "ResourceApp"))]
    return [v.numpy() for v in (weight, *optimizer.variables)], len(writes)


@shows("SGD.update_step")
@pytest.mark.parametrize("optimizer", list(UPDATES))
def test_stock_updates_write_each_variable_separately(optimizer):
    stock, writes = updated(UPDATES[optimizer](), traced=False)
    assert writes == len(stock) - 1  # all but the learning rate
    mine, writes = updated(UPDATES[optimizer](), traced=True)
    assert writes == 2
    np.testing.assert_equal(mine, stock)


LATER = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.0, 1.0])
FIRST = {
    "_update_model_variables_moving_average": (
        0.01,  # the average is 0, and 0.99 of the new one
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
        1.0,
    ),
    "_get_current_learning_rate": (
        1.0,  # by the learning rate of the first step, which is 0
        lambda: keras.optimizers.SGD(LATER, weight_decay=0.5),
        0.5,
    ),
}


def after_step_26_came_first(optimizer):
    """A weight of 1 whose gradient is 0, after an update that is the first on its server."""
    weight = keras.Variable(1.0)
    optimizer.build([weight])

    @tf.function(autograph=False)
    def step():
        counts = ps_compat.UpdateCounts(tf.constant([25], tf.int64))
        counts.follow(optimizer.iterations)
        with keras_compat.tracing(trace(counts=counts)):
            optimizer.apply([tf.zeros([])])

    step()
    return float(weight.numpy())


@shows(
    "BaseOptimizer._update_model_variables_moving_average",
    "BaseOptimizer._get_current_learning_rate",
)
@pytest.mark.parametrize("method", list(FIRST))
def test_stock_optimizers_share_one_step_count(method, monkeypatch):
    monkeypatch.setattr(ps_compat, "server_of", lambda variable: 0)
    stock, optimizer, mine = FIRST[method]
    assert after_step_26_came_first(optimizer()) == pytest.approx(mine)
    monkeypatch.setattr(BaseOptimizer, method, getattr(BaseOptimizer, method).__wrapped__)
    assert after_step_26_came_first(optimizer()) == pytest.approx(stock)


@shows("Variable.constraint")
def test_stock_constraints_run_on_the_worker(monkeypatch):
    monkeypatch.setattr(ps_compat, "server_of", lambda variable: 0)
    for traced, device in ((False, ""), (True, "CPU:1")):
        with tf.device("/CPU:1"):
            weight = keras.Variable(np.ones((3, 2), "float32"))
        weight.constraint = keras.constraints.MaxNorm(1.0)
        step = stepping(keras.optimizers.SGD(0.1), weight, traced=traced)
        step(tf.zeros([3, 2]))
        np.testing.assert_allclose(np.linalg.norm(weight.numpy(), axis=0), [1.0, 1.0], rtol=1e-5)
        graph = step.get_concrete_function(tf.zeros([3, 2])).graph
        where = [op.device[-5:] for op in graph.get_operations() if op.type == "Sqrt"]
        assert where == [device]


@shows("Muon._apply_weight_decay")
def test_stock_muon_writes_values_read_by_the_step(monkeypatch):
    monkeypatch.setattr(ps_compat, "server_of", lambda variable: 0)
    results = []
    for traced in (False, True):
        weight = keras.Variable(np.ones((3, 2), "float32"))
        step = stepping(keras.optimizers.Muon(0.1, weight_decay=0.5), weight, traced=traced)
        step(tf.ones([3, 2]))
        graph = step.get_concrete_function(tf.ones([3, 2])).graph
        assert ("AssignVariableOp" in {op.type for op in graph.get_operations()}) is not traced
        results.append(weight.numpy())
    np.testing.assert_equal(*results)


class Interrupted(keras.optimizers.SGD):
    """While it updates, another worker adds 5 to the gradients."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self._accumulated_gradients[0]._value.assign_add(5.0)


def written_by(graph, name):
    """The operations of a branch that write; of conditions in it, where they hold."""
    found, branch = [], graph._get_function(name).graph
    for op in branch.get_operations():
        if op.type in ("If", "StatelessIf"):
            found += written_by(branch, op.get_attr("then_branch").name)
        elif op.type.startswith("Assign"):
            found.append(op.type)
    return found


def accumulated(*, traced):
    """A weight and the gradients that are left after two steps; operations that write a sum."""
    weight, optimizer = keras.Variable(0.0), Interrupted(1.0, gradient_accumulation_steps=2)
    step = stepping(optimizer, weight, traced=traced)
    for _ in range(2):
        step(tf.constant(1.0))
    graph = step.get_concrete_function(tf.constant(1.0)).graph
    (condition,) = [op for op in graph.get_operations() if op.type == "If"]
    writes = written_by(graph, condition.get_attr("else_branch").name)
    return weight.numpy(), optimizer._accumulated_gradients[0].numpy(), writes


@shows(
    "BaseOptimizer._backend_apply_gradients",
    "BaseOptimizer._backend_reset_gradient_accumulators",
    "TFOptimizer._backend_increment_gradient_accumulators",
)
def test_stock_gradient_sums_lose_concurrent_additions(monkeypatch):
    monkeypatch.setattr(ps_compat, "server_of", lambda variable: 0)
    assert accumulated(traced=False) == (-1.0, 0.0, ["AssignVariableOp"])
    assert accumulated(traced=True) == (-1.0, 5.0, ["AssignAddVariableOp"])


def test_a_non_finite_gradient_sum_starts_again(monkeypatch):
    """As clipping makes an update of it, and the run goes on."""
    monkeypatch.setattr(ps_compat, "server_of", lambda variable: 0)
    weight = keras.Variable([0.0, 0.0])
    optimizer = keras.optimizers.SGD(1.0, clipvalue=1.0, gradient_accumulation_steps=2)
    step = stepping(optimizer, weight, traced=True)
    for gradient in ([np.inf, 0.5], [0.0, 0.5], [0.5, 0.5], [0.5, 0.5]):
        step(tf.constant(gradient))
    np.testing.assert_array_equal(weight.numpy(), [-1.5, -1.0])
    np.testing.assert_array_equal(optimizer._accumulated_gradients[0].numpy(), [0.0, 0.0])


@shows("MirroredExtended._use_merge_call", "CollectiveAllReduceExtended._use_merge_call")
def test_stock_accumulation_fails_under_a_strategy(strategies):
    model = make_model(
        strategies[2], lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    )
    with pytest.raises(RuntimeError, match="merge_call"):
        stock_steps(strategies[2], model, [4])


def kept_gradients():
    return {name for name in gradient_registry.list() if name.startswith("CustomGradient")}


def test_stock_sums_keep_their_graph(strategies):
    def total():
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))

    before = kept_gradients()
    per_replica(strategies[2], total)
    assert kept_gradients() > before


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_fit_keeps_no_graph(strategies, replicas):
    class OwnLogs(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "one": tf.ones([])}

    with strategies[replicas].scope():
        model = OwnLogs([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    before = kept_gradients()
    tfdist.fit(model, X, Y, batch_size=4, verbose=0)
    tfdist.evaluate(model, X, Y, batch_size=4, verbose=0)
    assert kept_gradients() == before


@shows(f"{nn.__name__}._compute_moments_sync")
def test_stock_synchronized_statistics_count_padding_examples(strategies):
    def mean(*, traced):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with step_of(traced=traced, num_replicas=2, examples=1 - replica):
            mine = tf.ones([1, 1]) * (3.0 + tf.cast(replica, tf.float32))
            found, _ = nn._compute_moments_sync(mine, [0], False)
        return found[0]

    stock = functools.partial(mean, traced=False)
    assert per_replica(strategies[2], stock) == [3.5, 3.5]
    assert per_replica(strategies[2], functools.partial(mean, traced=True)) == [3.0, 3.0]


@shows("Variable._direct_assign")
def test_stock_statistics_drift_apart(strategies):
    sgd = functools.partial(keras.optimizers.SGD, 0.001)
    model = make_model(strategies[2], sgd, [keras.layers.BatchNormalization()])
    stock_steps(strategies[2], model, [4])
    copies = strategies[2].experimental_local_results(model.layers[0].moving_mean.value)
    assert np.abs(copies[0].numpy() - copies[1].numpy()).max() > 1e-3


@shows(
    "BatchNormalization.call",
    "LayerNormalization.call",
    f"{nn.__name__}.gelu",
    "EinsumDense.call",
    f"{nn.__name__}._dot_product_attention_xla",
)
@pytest.mark.parametrize(
    ("layer", "shape", "kinds"),
    [
        (
            functools.partial(keras.layers.BatchNormalization(), training=True),
            [2, 3, 3, 1],
            {"Mean", "Rsqrt"},
        ),
        (keras.layers.LayerNormalization(), [2, 3], {"Mean", "Rsqrt"}),
        (keras.layers.Activation("gelu"), [2, 3], {"Erfc"}),
        (keras.layers.EinsumDense("abc,cd->abd", (None, 6)), [2, 3, 4], {"BatchMatMulV2"}),
        (lambda x: keras.ops.dot_product_attention(x, x, x), [2, 3, 2, 4], {"Einsum"}),
    ],
    ids=["batches", "layers", "gelu", "product", "attention"],
)
def test_stock_layers_have_no_fused_kernel(layer, shape, kinds):
    found = kinds_of(layer, tf.ones(shape))
    assert kinds <= set(found)
    assert not any(kind.startswith("FusedBatchNorm") for kind in found)


@shows("Dense.call")
def test_stock_adds_the_bias_to_a_reshaped_product():
    dense = tf.function(keras.layers.Dense(6), autograph=False)
    graph = dense.get_concrete_function(tf.ones([2, 3, 4])).graph
    (added,) = (one for one in graph.get_operations() if one.type == "BiasAdd")
    assert added.inputs[0].op.type in ("BatchMatMulV2", "Reshape")  # as in Keras 3.14 and 3.15


@shows("Variable.assign_add", "Variable.assign_sub")
@pytest.mark.parametrize("name", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [[2], [], [None]])  # the last as of tf.math.bincount
def test_stock_adds_in_three_operations(name, shape):
    variable = keras.Variable([1.0, 2.0])
    for traced in (False, True):

        def add(value, traced=traced):
            with step_of(traced=traced):
                getattr(variable, name)(value)

        kinds = kinds_of(add, tf.TensorSpec(shape))
        assert ({"ReadVariableOp", "AssignVariableOp"} <= set(kinds)) is not traced


@shows("Variable.value")
def test_stock_keeps_all_variables_to_a_step_or_none():
    """Metrics stay with a worker's step while weights go to the ps: StatelessScope takes both."""
    metric, weight = keras.Variable(1.0), keras.Variable(1.0)
    with StatelessScope(state_mapping=[(metric, tf.constant(5.0))]) as scope:
        assert float(metric.value) == 5.0
        weight.assign(7.0)
    assert float(weight.numpy()) == 1.0
    assert scope.get_current_value(weight) is not None
    assert float(metric.value) == 1.0


@shows("tensorflow.python.distribute.values._on_write_update_replica")
def test_stock_replica_writes_fail_inside_a_condition(strategies):
    with strategies[2].scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def write():
        tf.cond(tf.constant(1) > 0, lambda: variable.assign_add(1.0), lambda: variable.read_value())
        return tf.zeros([])

    with pytest.raises(RuntimeError, match="merge_call"):
        per_replica(strategies[2], write)


@shows("StrategyExtendedV1._use_merge_call")
def test_stock_updates_use_merge_call(strategies):
    assert strategies[2].extended._use_merge_call()
    ps = parameter_server_strategy_v2.ParameterServerStrategyV2Extended
    assert ps._use_merge_call(object.__new__(ps))


def test_stock_warns_of_functions_traced_on_purpose(caplog):
    def made(how):
        def traced_again_and_again(x):
            return x + 1

        return how(traced_again_and_again)

    tf.get_logger().propagate = True
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        for _ in range(12):
            made(keras_compat.compiled)(tf.zeros([]))
        assert "retracing" not in caplog.text
        for _ in range(12):
            made(tf.function)(tf.zeros([]))
        assert "retracing" in caplog.text


def sums(compiled, add):
    """1 + 1e8 - 1e8, where nothing else holds the terms, and where the function returns two."""

    def summed(x, *, held):
        terms = [tf.exp(x), tf.exp(x) * 1e8, tf.exp(x) * -1e8]
        return add(terms), *terms[: 2 * held]

    zero = tf.zeros([1])
    return [float(compiled(functools.partial(summed, held=held))(zero)[0][0]) for held in (0, 1)]


def by_addn(terms):
    return tf.raw_ops.AddN(inputs=terms)


@shows("tensorflow.python.ops.gen_math_ops.add_n")
def test_stock_sums_start_with_values_not_used_elsewhere():
    """By the time they are made, which goes by the threads; here by what the function returns."""
    assert sums(tf.function, by_addn) == sums(tf.function, sum) == [0.0, 1.0]


@pytest.mark.parametrize(("add", "total"), [(tf.add_n, 1.0), (sum, 0.0)], ids=["add_n", "sum"])
def test_a_sum_follows_the_order_of_its_terms(add, total):
    """As Python adds, and of add_n from the last to the first."""
    assert sums(keras_compat.compiled, add) == [total, total]


def gradient_of_a_pool(*, traced):
    """Return the graph that computes it, as a definition."""

    def gradient(images):
        with step_of(traced=traced), tf.GradientTape() as tape:
            tape.watch(images)
            pooled = keras.layers.MaxPooling2D()(images)
            return tape.gradient(pooled, images)

    made = tf.function(gradient, autograph=False).get_concrete_function(tf.ones([1, 4, 4, 1]))
    return made.graph.as_graph_def()


@shows("tensorflow.python.ops.gen_nn_ops.max_pool_grad")
def test_a_pool_is_recomputed_beside_its_gradient(monkeypatch):
    """oneDNN's kernel for the gradient needs both in one graph, and a loop may part them."""
    monkeypatch.setattr(keras_compat.kernels, "_has_pool", lambda dtype: True)
    kinds = [node.op for node in gradient_of_a_pool(traced=False).node]
    assert {"MaxPool", "MaxPoolGrad"} <= set(kinds)
    graph = gradient_of_a_pool(traced=True)
    assert "MaxPoolGrad" not in [node.op for node in graph.node]
    (apart,) = graph.library.function
    assert apart.attr["_noinline"].b
    (gradient,) = [node for node in apart.node_def if node.op == "MaxPoolGrad"]
    (pool,) = [node for node in apart.node_def if node.op == "MaxPool"]
    assert gradient.input[0] == pool.input[0]
    assert gradient.input[1].startswith(f"{pool.name}:")


def test_every_replacement_has_a_test_and_an_issue():
    targets = [replacement.target for replacement in keras_compat.REPLACEMENTS]
    assert sorted(targets) == sorted(SHOWN)
    where = r"https://github\.com/(keras-team/keras|tensorflow/tensorflow)/(issues/\d+$|blob/v)"
    for replacement in keras_compat.REPLACEMENTS:
        assert re.match(where, replacement.issue), replacement.target


# What stock Keras computes in a process that never heard of tfdist, and in this one.

REFERENCE = """
import hashlib
import keras, numpy as np, tensorflow as tf

def digest(variables):
    total = hashlib.sha256()
    for variable in variables:
        for copy in getattr(variable.value, "_values", [variable.value]):
            total.update(np.ascontiguousarray(copy.numpy()).tobytes())
    return total.hexdigest()

def make():
    x = keras.Input((4,))
    h = keras.layers.Dense(8, activation="relu")(x)
    h = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(h))
    h = keras.layers.GaussianNoise(0.1)(h)
    outputs = {name: keras.layers.Dense(1, name=name)(h) for name in "ab"}
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=0.5), "mse", metrics={"a": "mae"})
    return model

def reference(strategy):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    rng = np.random.RandomState(0)
    x, y = rng.randn(30, 4).astype("f"), rng.randn(30, 1).astype("f")
    model = make()
    history = model.fit(x, {"a": y, "b": y}, batch_size=8, epochs=2, verbose=0)
    values = model.evaluate(x, {"a": y, "b": y}, batch_size=8, verbose=0)
    found = {"fit": digest(model.variables + model.optimizer.variables),
             "history": repr(history.history), "evaluate": repr(values)}
    with strategy.scope():
        model = make()
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, {"a": y, "b": y}))
    data = tf.constant(x[:8]), {"a": tf.constant(y[:8]), "b": tf.constant(y[:8])}
    step = tf.function(lambda: strategy.run(model.train_step, args=(data,)))
    for _ in range(3):
        step()
    found["mirrored"] = digest(model.variables + model.optimizer.variables)
    return found
"""

FRESH = """
import json, sys, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
found = reference(strategy)
assert not any(name.split(".")[0] == "tfdist" for name in sys.modules)
print(json.dumps(found))
"""


def test_outside_a_step_stock_keras_computes_the_same_bits(strategies):
    ran = python("-c", REFERENCE + FRESH)
    assert ran.returncode == 0, ran.stderr
    namespace = {}
    exec(REFERENCE, namespace)
    tfdist.fit(namespace["make"](), X, {"a": Y, "b": Y}, batch_size=4, verbose=0)
    assert namespace["reference"](strategies[2]) == json.loads(ran.stdout)


def test_a_step_does_not_affect_other_threads():
    generator = keras.random.SeedGenerator(3)
    seen = []
    with keras_compat.tracing(trace()):
        thread = threading.Thread(target=lambda: seen.append(generator.next().numpy().tolist()))
        thread.start()
        thread.join()
        assert generator.next().numpy().tolist() != [3, 1]
    assert seen == [[3, 0]]
    assert generator.state.numpy().tolist() == [3, 1]


def test_a_failed_step_restores_stock_keras():
    with pytest.raises(LookupError), keras_compat.tracing(trace()):
        raise LookupError
    generator = keras.random.SeedGenerator(3)
    assert [generator.next().numpy().tolist() for _ in range(2)] == [[3, 0], [3, 1]]


def test_keras_fit_continues_a_model_trained_by_tfdist(strategies):
    for strategy in (None, strategies[1]):
        model = make_model(strategy or tf.distribute.get_strategy(), lambda: keras.optimizers.SGD())
        tfdist.fit(model, X, Y, batch_size=4, verbose=0)
        model.fit(X, Y, batch_size=4, verbose=0)
        tfdist.fit(model, X, Y, batch_size=4, verbose=0)
        assert model.optimizer.iterations.numpy() == 6


NUMBERS = {
    "int": int,
    "float": float,
    "complex": complex,
    "%": lambda variable: operator.mod("%d %.3f", (variable, variable)),
    "format": "{:.3e}".format,
    "math": lambda variable: (math.floor(variable), math.isfinite(variable), math.log(variable)),
    "numpy": lambda variable: float(np.asarray(variable)),
    "text": lambda variable: re.sub("path=[^,]*", "", f"{variable}"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_a_variable_of_several_replicas_converts_to_a_number(strategies, dtype):
    def made(replicas):
        with strategies[replicas].scope():
            return keras.Variable(1.25, dtype=dtype, trainable=False)

    one, several = made(1), made(2)
    assert isinstance(several.value, DistributedVariable)
    for name, number in NUMBERS.items():
        assert number(several) == number(one), name
    with strategies[2].scope():
        vector = keras.Variable([1.0, 2.0])
    for number in (int, float, "{:.3f}".format):
        with pytest.raises(TypeError):
            number(vector)


def test_stock_variables_of_several_replicas_cannot_become_numbers():
    """`convert_variables_to_numbers` has added these methods: TensorFlow has none of its own."""
    for name in ("__complex__", "__float__", "__int__"):
        assert getattr(DistributedVariable, name) is getattr(BaseResourceVariable, name)
    assert keras.Variable.__format__.__module__.startswith("tfdist.")


def test_stock_functions_leave_the_calling_thread():
    threads = []

    def note(value):
        threads.append(threading.get_ident())
        return value

    def doubled(value):
        return [tf.ensure_shape(tf.numpy_function(note, [value], tf.float32), [3]) * 2.0]

    one = tf.constant([1.0, 2.0, 3.0])
    traced = keras_compat.compiled(doubled).get_concrete_function(one)
    (stock,), (ours,) = traced(one), keras_compat.inline(traced)(one)
    np.testing.assert_array_equal(ours, stock)
    assert [thread == threading.get_ident() for thread in threads] == [False, True]
