"""Finders with TensorFlow: the range test leaves no trace, children try."""

import functools
import itertools
import math
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import classifier
from tests.refusals import refused
from tfdist.errors import Stopped
from tfdist.find.learning_rate import has_diverged, read, smoothed

pytestmark = pytest.mark.slow

RNG = np.random.RandomState(0)
X = RNG.randn(96, 6).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


def make(strategy, *, rate=0.05, optimizer=keras.optimizers.SGD, **options):
    made = functools.partial(optimizer, rate, **options)
    return classifier(strategy, made, inputs=6, rate=0.3, classes=2)


def bits(model, strategy):
    """Every copy of every variable."""
    variables = [*model.weights, *model.optimizer.variables, *model.metrics_variables]
    local = strategy.experimental_local_results
    return [copy.numpy().tobytes() for v in variables for copy in local(v.value)]


@pytest.fixture(params=[1, 2])
def strategy(request, strategies):
    return strategies[request.param]


def test_finding_a_rate_leaves_the_model_unchanged(strategy):
    model = make(strategy, momentum=0.9)
    tfdist.fit(model, X, Y, batch_size=16, verbose=0, seed=3)
    before, optimizer = bits(model, strategy), model.optimizer
    found = tfdist.find_learning_rate(model, X, Y, 16, lowest=1e-4, highest=100.0, steps=40)
    assert bits(model, strategy) == before
    assert model.optimizer is optimizer
    assert len(found.rates) == len(found.losses)
    factors = [b / a for a, b in itertools.pairwise(found.rates)]
    assert found.rates[0] == pytest.approx(1e-4)
    assert factors == pytest.approx([(100.0 / 1e-4) ** (1 / 39)] * len(factors))
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 10.0


def without_draws(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    return model


def test_losses_equal_a_training_on_any_number_of_replicas(strategies):
    found = [
        tfdist.find_learning_rate(
            without_draws(strategies[replicas]), X, Y, 16, lowest=1e-2, highest=1.0, steps=10
        )
        for replicas in (1, 2)
    ]
    np.testing.assert_allclose(found[0].losses, found[1].losses, rtol=1e-4)
    losses = []

    class Each(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = found[0].rates[batch]

        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

    model = without_draws(strategies[1])
    tfdist.fit(model, X, Y, 16, steps_per_epoch=10, verbose=0, seed=0, callbacks=[Each()])
    means = np.cumsum(found[0].losses) / np.arange(1, 11)  # Keras' logs are the epoch's mean so far
    np.testing.assert_allclose(losses, means, rtol=1e-4)


def test_finding_a_rate_restores_the_schedule(strategy):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    model = make(strategy, rate=schedule)
    tfdist.find_learning_rate(model, X, Y, 16, steps=10)
    assert model.optimizer._learning_rate is schedule
    assert int(model.optimizer.iterations.numpy()) == 0
    tfdist.fit(model, X, Y, batch_size=16, verbose=0)


def test_a_loss_that_diverges_ends_the_test(strategies):
    model = make(strategies[1], momentum=0.9)
    before = [w.tobytes() for w in model.get_weights()]
    found = tfdist.find_learning_rate(model, 1e3 * X, Y, 16, highest=1e9, steps=40)
    assert found.diverged
    assert len(found.losses) < 40
    assert [w.tobytes() for w in model.get_weights()] == before


class Broken(Exception):
    pass


@pytest.mark.usefixtures("at_a_terminal")
def test_an_error_leaves_no_trace(strategy, monkeypatch):
    """Nor does Ctrl-C, which comes between two steps."""
    from tfdist.training.blocks import BlockRunner

    model = make(strategy, optimizer=keras.optimizers.Adam)
    tfdist.fit(model, X, Y, batch_size=16, verbose=0, seed=3)
    before, metrics = bits(model, strategy), BlockRunner.metrics

    def breaks():
        raise Broken

    for breaks_off, ends in (
        (breaks, pytest.raises(Broken)),
        (
            lambda: signal.raise_signal(signal.SIGINT),
            pytest.raises(Stopped, match="is restored"),
        ),
    ):

        def at_step_10(self, logs, break_off=breaks_off):
            if self.model.optimizer.iterations.numpy() == 10:
                break_off()
            return metrics(self, logs)

        monkeypatch.setattr(BlockRunner, "metrics", at_step_10)
        with ends as ended:
            tfdist.find_learning_rate(model, X, Y, 16, steps=50)
        assert bits(model, strategy) == before
    assert ended.value.code == 130


def test_invalid_arguments_are_refused(strategies):
    model = make(strategies[1])

    def find(**options):
        return refused(lambda: tfdist.find_learning_rate(model, X, Y, 16, **options))

    assert find(steps=3) == ("steps", "not-an-int")
    assert find(lowest=0.0) == ("lowest", "not-a-number")
    assert find(lowest=1.0, highest=0.1) == ("highest", "not-a-number")
    assert find(diverges_at=1.0) == ("diverges_at", "not-a-number")
    assert find(smoothing=1.0) == find(smoothing=1.5) == ("smoothing", "not-a-number")
    found = tfdist.find_learning_rate(without_draws(strategies[1]), X * np.nan, Y, 16, steps=10)
    assert (found.suggestion, found.diverged) == (None, True)


def test_a_child_without_memory_leaves_the_parent_running(strategies, monkeypatch):
    from tfdist.find import batch_size

    monkeypatch.setattr(batch_size, "available_bytes", lambda: 100 << 20)  # less than TensorFlow
    with pytest.raises(tfdist.TfdistError, match="a batch of 1 does not fit into 90 MiB"):
        tfdist.find_batch_size(make(strategies[1]), X, Y, first=1)


def test_a_file_in_the_working_directory_replaces_no_module(strategies, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('not the module of Python')")
    monkeypatch.chdir(tmp_path)
    found = tfdist.find_batch_size(make(strategies[1]), X, Y, first=8, most=8, steps=1)
    assert found.per_replica == 8


# The learning rate that the losses suggest.


RATES = np.geomspace(1e-6, 1.0, 61).tolist()


def losses_of_a_usual_test() -> list[float]:
    """Flat, then falling fastest at 1e-3, lowest at 1e-1, then rising."""
    return [
        2.0 - 1.5 / (1 + math.exp(-4 * (math.log10(r) + 3))) + max(0.0, math.log10(r) + 1) ** 2
        for r in RATES
    ]


@pytest.mark.parametrize("shape", [[None, None], None])
def test_a_batch_size_for_examples_of_unknown_size_is_refused(strategies, shape):
    spec = tf.TensorSpec(shape), tf.TensorSpec([None], tf.int32)
    data = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
    found = refused(lambda: tfdist.find_batch_size(make(strategies[1]), data))
    assert found == ("find_batch_size", "unsupported-data")


def test_the_suggested_rate_has_the_steepest_loss():
    assert smoothed([3.0] * 5, smoothing=0.9) == pytest.approx([3.0] * 5)
    found = read(RATES, losses_of_a_usual_test(), smoothing=0.0)
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    assert found.lowest == pytest.approx(1e-1, rel=0.6)
    assert found.suggestion == found.steepest
    assert not found.diverged


def test_suggested_rates_are_at_most_a_tenth_of_best():
    losses = [2.0] * 40 + [2.0 - 0.1 * n * n for n in range(1, 5)] + [9.0] * 17
    assert read(RATES, losses, smoothing=0.0).suggestion == pytest.approx(RATES[43] / 10)


def test_a_loss_that_never_falls_has_no_suggestion():
    found = read(RATES, [1.0 + n for n in range(61)], smoothing=0.0)
    assert (found.suggestion, found.steepest) == (None, None)
    assert "never fell" in str(found)
    for losses in ([math.nan], [2.0, math.nan]):
        assert "the loss became nan" in str(read(RATES, losses, smoothing=0.0))


@pytest.mark.parametrize("last", [math.nan, math.inf, 9.0])
def test_a_loss_far_above_its_lowest_has_diverged(last):
    losses = [2.0, 1.5, 1.0, last]
    assert has_diverged(losses, smoothing=0.0, diverges_at=4.0)
    assert not has_diverged(losses[:-1], smoothing=0.0, diverges_at=4.0)
    found = read(RATES, losses, smoothing=0.0)
    assert found.diverged
    assert found.rates == tuple(RATES[:4])


def test_a_negative_loss_that_falls_has_not_diverged():
    assert not has_diverged([-1.0, -2.0, -3.0], smoothing=0.0, diverges_at=4.0)
    assert has_diverged([-1.0, 5.0], smoothing=0.0, diverges_at=4.0)
