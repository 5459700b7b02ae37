"""`model.fit` and its like of a model made in the job's scope: the engine, as `tfdist.fit`."""

import functools
import itertools
import json
import os
import types

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tfdist
from tests import forked_python
from tests.models import around, noted_ranges
from tests.refusals import refusal, refused
from tfdist.cluster import KINDS, ClusterSpec, JobOptions, Task, TaskConfig, read_environment
from tfdist.options import TRIAL
from tfdist.outputs.run_directory import RunDirectory
from tfdist.strategy import Job, job
from tfdist.training import kept, loop, metrics_file, routing
from tfdist.training.engines import SynchronousEngine
from tfdist.training.keras_compat.trace import warn_once

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.integers(0, 3, 40)


def compiled(kind=keras.Sequential, rate=0.3, **options):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((6,)), keras.layers.Dropout(rate), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
    return model


class InScope:
    def __init__(self, strategy, kind):
        self.strategy = job.remember(Job(strategy=strategy, kind=KINDS[kind])).strategy

    def __call__(self, kind=keras.Sequential, **options):
        with self.strategy.scope():
            return compiled(kind, **options)


@pytest.fixture(params=["single", "mirrored"])
def make(request, strategies, monkeypatch):
    """Makes models in the scope of the job's strategy."""
    monkeypatch.setattr(job, "_made", [])
    return InScope(strategies[1 if request.param == "single" else 2], request.param)


@pytest.fixture
def blocks(monkeypatch):
    """The blocks of steps that the engine is asked to run."""
    return noted_ranges(monkeypatch)


class Judges(keras.callbacks.Callback):
    """Evaluates and predicts by Keras' methods while a fit runs."""

    def on_train_begin(self, logs=None):
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.model.evaluate(X, Y, batch_size=7, verbose=0))
        self.found.append(float(self.model.predict(X, batch_size=7, verbose=0).sum()))


def test_both_fits_train_to_the_same_bits(make, tmp_path):
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "validation_data": (X[:9], Y[:9])}
    judges = Judges(), Judges()
    theirs, ours = make(), make()
    found = theirs.fit(X, Y, callbacks=[judges[0], tfdist.Run(seed=3)], **options)
    wanted = tfdist.fit(ours, X, Y, callbacks=[judges[1]], seed=3, **options)
    assert found.history == wanted.history
    assert judges[0].found == judges[1].found
    assert theirs.evaluate(X, Y, verbose=0) == tfdist.evaluate(ours, X, Y, verbose=0)
    np.testing.assert_array_equal(theirs.predict(X), tfdist.predict(ours, X))
    for one, other in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with make.strategy.scope():
        clone = keras.models.clone_model(theirs)
        clone.compile("sgd", loss=theirs.loss, metrics=["accuracy"])
    clone.set_weights(theirs.get_weights())
    assert clone.evaluate(X, Y, verbose=0) == theirs.evaluate(X, Y, verbose=0)


class CallsKeras(keras.Sequential):
    calls = 0

    def fit(self, x, y, **options):
        self.calls += 1
        return super().fit(x / 2, y, **options)


class CallsTfdist(keras.Sequential):
    calls = 0

    def fit(self, x, y, **options):
        self.calls += 1
        return tfdist.fit(self, x / 2, y, **options)


def test_a_fit_of_the_models_own_is_called_once(make, blocks):
    weights = []
    for kind in (CallsKeras, CallsTfdist):
        for call in (
            lambda model: model.fit,
            lambda model: lambda *a, **k: tfdist.fit(model, *a, **k),
        ):
            model = make(kind)
            blocks.clear()
            call(model)(X, Y, batch_size=20, verbose=0, callbacks=[tfdist.Run(seed=1)])
            assert (model.calls, sum(last - first for first, last in blocks)) == (1, 2)
            weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    assert all((one == weights[0]).all() for one in weights)


def endless():
    while True:
        yield X[:10], Y[:10]


EAGER = {"run_eagerly": True}
BY_KERAS = {
    "run_eagerly": (EAGER, lambda path: {"x": X, "y": Y}),
    "generator": ({}, lambda path: {"x": endless(), "steps_per_epoch": 2}),
    "validation by a generator": (
        {},
        lambda path: {"x": X, "y": Y, "validation_data": endless(), "validation_steps": 1},
    ),
    "BackupAndRestore of Keras": (
        {},
        lambda path: {"x": X, "y": Y, "callbacks": [keras.callbacks.BackupAndRestore(path / "b")]},
    ),
}


@pytest.mark.parametrize("name", BY_KERAS)
def test_training_by_the_loop_of_keras_warns_once(make, blocks, caplog, tmp_path, name):
    options, data = BY_KERAS[name]
    model = make(**options)
    warn_once.cache_clear()
    for _ in range(2):
        history = model.fit(**data(tmp_path), epochs=1, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
    assert blocks == []
    assert sum("uses Keras' own loop, because of" in r.message for r in caplog.records) == 1


def test_one_batch_calls_equal_one_device(make):
    model, other = make(rate=0.0), compiled(rate=0.0)
    assert model.train_on_batch(X[:4], Y[:4]) == other.train_on_batch(X[:4], Y[:4])
    for name, data in (("test_on_batch", (X[:4], Y[:4])), ("predict_on_batch", (X[:4],))):
        for one in (model, other):
            one.reset_metrics()  # as these calls do since Keras 3.15
        found, wanted = (getattr(one, name)(*data) for one in (model, other))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def ours_beside_keras(path):
    return [
        tfdist.Run(seed=1),
        tfdist.BackupAndRestore(path / "b"),
        tfdist.ModelCheckpoint(path / "m.keras"),
        tfdist.PublishModel(path / "served"),
    ]


def test_callbacks_of_tfdist_are_refused_if_keras_trains(make, tmp_path):
    outside = compiled()
    for callback in ours_beside_keras(tmp_path):
        error = refusal(lambda c=callback: outside.fit(X, Y, verbose=0, callbacks=[c]))
        assert error.code == "another-scope"
        assert "strategy = tfdist.make_strategy()" in str(error)
        assert "`with strategy.scope():`" in str(error)
    outside.fit(X, Y, verbose=0)
    assert list(tmp_path.iterdir()) == []


OUTSIDE = """
import keras, numpy as np, tfdist
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0, callbacks=[tfdist.Run(seed=1)])
"""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (OUTSIDE, "tfdist.Run: Keras' own fit trains this model"),
        ("import tfdist; tfdist.run_dir()", "run_dir: this process has no run directory"),
    ],
)
def test_a_program_without_make_strategy_ends_in_one_line(program, says):
    ran = forked_python.run("-c", program, timeout=120, env=os.environ | forked_python.ENVIRON)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False)
    assert f"tfdist: {says}" in ran.stderr


def test_settings_of_a_run_are_given_once(make):
    one, other = tfdist.Run(seed=1), tfdist.Run(seed=2)
    model = make()
    for call in (
        lambda: model.fit(X, Y, callbacks=[one, other]),
        lambda: tfdist.fit(model, X, Y, callbacks=[one], seed=1),
    ):
        assert refused(call) == ("callbacks", "exclusive")


def test_an_eager_model_with_run_settings_is_refused(make):
    model = make(run_eagerly=True)
    call = lambda: model.fit(X, Y, callbacks=[tfdist.Run(seed=1)])  # noqa: E731
    assert refused(call) == ("tfdist.fit", "unsupported")


@pytest.mark.parametrize(
    ("kind", "chief", "says"),
    [("multiworker", "worker", "each task trains its own"), ("ps", "chief", "only the chief")],
)
def test_a_model_outside_the_scope_warns_in_large_jobs(
    kind, chief, says, strategies, monkeypatch, caplog
):
    others = {"chief": ["c:1"], "ps": ["d:1"]} if kind == "ps" else {}
    cluster = {"worker": ["a:1", "b:1"], **others}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": chief, "index": 0}})}
    monkeypatch.setattr(job, "_made", [])
    config = read_environment(environ)
    job.remember(Job(strategy=strategies[1], kind=KINDS[kind], config=config))
    warn_once.cache_clear()
    compiled().fit(X, Y, verbose=0)
    (line,) = [r.message for r in caplog.records if "outside strategy.scope()" in r.message]
    assert "test_model_fit.py:" in line
    assert says in line


def test_a_single_step_of_a_pipeline_is_refused(strategies, monkeypatch):
    monkeypatch.setattr(job, "_made", [])
    model = InScope(strategies[1], "pipeline")()
    error = refusal(lambda: model.train_on_batch(X[:4], Y[:4]))
    assert (error.code, error.fix) == ("unsupported", "call model.fit")


def test_a_fit_for_each_epoch_traces_once(make, monkeypatch):
    """Its examples come in another order each time, and a change of anything traces anew."""
    traces = []
    compile_block = SynchronousEngine._compile_block

    def noting(self, program):
        traces.append(program.training)
        return compile_block(self, program)

    monkeypatch.setattr(SynchronousEngine, "_compile_block", noting)
    options = {"batch_size": 16, "verbose": 0, "validation_data": (X[:9], Y[:9])}
    model, seen = make(), []

    def fit(**more):
        traces.clear()
        history = model.fit(X.copy(), Y, **options | more)
        assert sorted(history.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        seen.append(weights.tolist())
        return sum(traces)

    first = model.get_weights()
    assert fit() > 0
    model.set_weights(first)
    model.optimizer.iterations.assign(0)
    assert fit() == 0
    assert seen[0] != seen[1], "another order, other draws"
    assert fit(epochs=2) > 0
    assert fit() > 0
    assert fit() == 0
    X[0] += 1
    assert fit() > 0
    X[0] -= 1
    model.layers[-1].trainable = False
    before = model.layers[-1].get_weights()
    fit()
    np.testing.assert_array_equal(model.layers[-1].get_weights()[0], before[0])


def test_a_kept_program_computes_like_a_new_one(make):
    found = []
    for keeps in (True, False):
        model = make()
        for seed in (1, 2, 1):
            run = tfdist.Run(seed=seed)
            history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[run])
            if not keeps:
                delattr(model, kept._NAME)
        found.append((history.history, [w.tolist() for w in model.get_weights()]))
    assert found[0] == found[1]


def test_sparse_and_ragged_arrays_use_the_keras_loop(strategies, monkeypatch, blocks):
    monkeypatch.setattr(job, "_made", [])
    model = InScope(strategies[1], "single")()
    history = model.fit(scipy.sparse.csr_matrix(X), Y, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert blocks == []
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert "RaggedTensor" in routing._reason_for_keras(model, {"x": {"a": X, "b": ragged}})
    assert routing._reason_for_keras(model, {"x": X, "validation_data": (X, Y)}) is None


def test_a_fast_development_run_writes_no_files(make, blocks, tmp_path):
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, logs))

        def on_test_batch_end(self, batch, logs=None):
            seen.append(batch)

    callbacks = [
        Looks(),
        tfdist.BackupAndRestore(tmp_path / "backup"),
        tfdist.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.EarlyStopping("val_loss"),
    ]
    options = {"batch_size": 10, "validation_data": (X, Y), "validation_freq": 3, "verbose": 0}
    options |= {"epochs": 7, "initial_epoch": 5, "callbacks": callbacks}
    model = make()
    model.fit(X, Y, **{**options, "callbacks": [tfdist.Run(fast_dev_run=2), *callbacks]})
    assert seen[:2] == [0, 1]
    assert seen[2][0] == 0
    assert "val_loss" in seen[2][1]
    assert sum(last - first for first, last in blocks) == 2
    tfdist.fit(model, X, Y, fast_dev_run=True, **options)
    assert sum(last - first for first, last in blocks) == 3
    assert list(tmp_path.iterdir()) == []
    wrong = refused(lambda: tfdist.fit(model, X, Y, fast_dev_run=-1))
    assert wrong == ("fast_dev_run", "not-an-int")


# The run directory: `metrics.jsonl` of every fit in it.


def in_run_dir(strategies, monkeypatch, run_dir, **more):
    """A model of a job that has a run directory."""
    monkeypatch.setattr(job, "_made", [])
    monkeypatch.setattr(metrics_file, "_fits", itertools.count(1))
    options = JobOptions(run_dir=str(run_dir), **more)
    config = TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)
    kind = KINDS["mirrored"]
    strategy = job.remember(Job(strategy=strategies[2], kind=kind, config=config)).strategy
    with strategy.scope():
        return compiled()


def steps_of(run_dir):
    return [line["step"] for line in RunDirectory(run_dir).read_metrics()]


def test_a_fit_per_epoch_continues_the_step_numbers(strategies, monkeypatch, tmp_path):
    model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
    for epoch in range(3):
        model.fit(X, Y, batch_size=10, epochs=epoch + 1, initial_epoch=epoch, verbose=0)
    model.fit(X, Y, batch_size=20, epochs=1, verbose=0)
    lines = RunDirectory(tmp_path / "run").read_metrics()
    assert [(line["step"], line["virtual_epoch"]) for line in lines] == [
        *((4, 1), (8, 2), (12, 3), (14, 4))
    ]
    assert lines[0]["learning_rate"] == pytest.approx(0.01)
    # The program starts again, and resumes no fit.
    in_run_dir(strategies, monkeypatch, tmp_path / "run").fit(X, Y, batch_size=20, verbose=0)
    assert steps_of(tmp_path / "run") == [2]


def test_a_model_with_several_learning_rates_has_lines(strategies, monkeypatch, tmp_path):
    model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
    with strategies[2].scope():
        model.compile(around(keras.optimizers.SGD()), model.loss)
    model.fit(X, Y, batch_size=20, epochs=2, verbose=0)
    assert steps_of(tmp_path / "run") == [2, 4]


def test_a_run_cut_by_max_time_has_one_line_for_each_epoch(strategies, monkeypatch, tmp_path):
    clock = types.SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s))

    class Ticking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.now_s += 1

    for max_time, steps in (2.5, [3]), (6.5, [4, 7]), (None, [4, 8]):  # an epoch has 4 steps
        model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
        callbacks = [tfdist.BackupAndRestore(tmp_path / "backup"), Ticking()]
        options = {"epochs": 2, "max_time": max_time, "callbacks": callbacks}
        tfdist.fit(model, X, Y, batch_size=10, verbose=0, seed=1, **options)
        assert steps_of(tmp_path / "run") == steps


def test_a_custom_metrics_callback_replaces_the_default_writer(strategies, monkeypatch, tmp_path):
    class Own(keras.callbacks.Callback):
        writes_metrics = True

    model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
    model.fit(X, Y, batch_size=10, verbose=0, callbacks=Own())
    tfdist.fit(model, X, Y, batch_size=10, verbose=0, fast_dev_run=True)
    assert steps_of(tmp_path / "run") == []


def test_other_fits_of_a_trials_program_write_no_metrics(strategies, monkeypatch, tmp_path):
    """When the trial resumed, they replaced the lines of its first epochs."""
    monkeypatch.setenv(TRIAL, "{}")
    model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
    model.fit(X, Y, batch_size=10, verbose=0)
    assert steps_of(tmp_path / "run") == []
    with routing.fits_by(tfdist.fit):  # as in `run_trial`, where `tfdist.fit` may train
        tfdist.fit(model, X, Y, batch_size=10, verbose=0)
    assert steps_of(tmp_path / "run") != []


def test_a_probe_skips_the_first_block_and_ends(strategies, monkeypatch, tmp_path):
    seconds, validated = itertools.count(), []
    made = functools.partial(metrics_file.Probe, clock=lambda: float(next(seconds)))
    monkeypatch.setattr(metrics_file, "Probe", made)
    model = in_run_dir(strategies, monkeypatch, tmp_path / "run", probe_s=7)
    validates = keras.callbacks.LambdaCallback()
    validates.on_test_batch_end = lambda batch, logs=None: validated.append(batch)
    callbacks = [
        validates,
        tfdist.BackupAndRestore(tmp_path / "backup"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
    ]
    options = {"batch_size": 10, "validation_data": (X, Y), "verbose": 0}
    with pytest.raises(SystemExit) as ended:
        model.fit(X, Y, epochs=99, callbacks=callbacks, **options)
    assert ended.value.code == 0
    lines = RunDirectory(tmp_path / "run").read_metrics()
    assert [line["seconds"] for line in lines] == [*range(8)]  # a second for each block
    counts = [line["examples"] for line in lines]
    assert counts[0] == 0
    assert all(10 <= after - before <= 40 for before, after in itertools.pairwise(counts))
    assert set(validated) == {0}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_that_cannot_be_written_is_one_warning(strategies, monkeypatch, tmp_path, warnings):
    (tmp_path / "run").write_text("")
    model = in_run_dir(strategies, monkeypatch, tmp_path / "run")
    assert model.fit(X, Y, batch_size=10, epochs=3, verbose=0).epoch == [0, 1, 2]
    (said,) = warnings()
    assert "metrics.jsonl: not written" in said
