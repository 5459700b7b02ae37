"""What a run consumes of its examples, against what the model was given."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut
from tests.tools.ledger import Ledger, differences, prove, read, seen_by_pass
from tfdist.cluster import KINDS
from tfdist.data.arrays import ArraySource
from tfdist.data.augment import Compose, RandomCrop
from tfdist.data.python_indexed import PythonSource
from tfdist.strategy import Job
from tfdist.training import building
from tfdist.training.engines import SynchronousEngine
from tfdist.training.inputs import Length, prepare
from tfdist.training.program import program_of

EXAMPLES = 50
X = np.arange(EXAMPLES, dtype="float32")[:, None]
Y = np.zeros(EXAMPLES, "float32")


class Seen(keras.metrics.Metric):
    """Counts how often the model was given each example, by its own number."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(EXAMPLES,), name="counts", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(numbers, EXAMPLES), 0))

    def result(self):
        return tf.reduce_sum(self.counts)


def make(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    return model


def fit(model, directory, *, data=(X, Y), callbacks=(), **options):
    options = {"batch_size": 8, "epochs": 3, "seed": 4, "verbose": 0, **options}
    return tfdist.fit(model, *data, callbacks=[Ledger(directory), *callbacks], **options)


UNEVEN = {"virtual_epochs": tfdist.VirtualEpochs(total_examples=130, checkpoints=4), "epochs": 1}
FEWER = {"data": (X[:3], Y[:3]), "steps_per_epoch": 3, "epochs": 1}


@pytest.mark.parametrize(
    ("replicas", "options", "passes"),
    [
        (3, {"data": (PythonSource(list(zip(X, Y, strict=True))),)}, [50, 50, 50]),
        (3, UNEVEN, [50, 50, 30]),  # a pass ends inside a step, one is cut
        (1, FEWER, [3] * 8),  # than there are in a batch
    ],
)
def test_each_example_of_each_pass_is_consumed_once(
    strategies, tmp_path, replicas, options, passes
):
    fit(make(strategies[replicas]), tmp_path, **options)
    assert prove(tmp_path) == []
    assert seen_by_pass(tmp_path) == passes


def test_what_is_recorded_is_what_the_model_was_given(strategies, tmp_path):
    """The targets are the examples' own numbers: the step itself says which it had."""
    with strategies[3].scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[Seen()])
    given = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            metric = next(m for m in model.metrics if m.name == "compile_metrics").metrics[0]
            local = strategies[3].experimental_local_results(metric.counts.value)
            given.append(sum(copy.numpy() for copy in local))

    fit(model, tmp_path, data=(X, X[:, 0]), epochs=1, callbacks=[Look()])
    steps = read(tmp_path).steps
    assert len(steps) == len(given) == 7
    before = np.zeros(EXAMPLES)
    for step, now in enumerate(given):
        assert np.flatnonzero(now - before).tolist() == [index for _, index in steps[step][0]]
        before = now


def test_a_record_that_is_missing_changed_or_doubled_is_found(strategies, tmp_path):
    fit(make(strategies[1]), tmp_path / "run")
    (path,) = (tmp_path / "run").iterdir()
    head, *lines = path.read_text().splitlines()
    for changed, problem in (
        ([*lines[:-1], lines[-1].replace('"passes": [[[2', '"passes": [[[1')], "missed"),
        ([*lines[:-1], lines[-1].replace('"begun": 1', '"begun": 2')], "begun 2 times"),
        (lines[1:], "no record of step"),
    ):
        assert changed != lines
        path.write_text("\n".join([head, *changed]) + "\n")
        assert any(problem in line for line in prove(tmp_path / "run"))


@pytest.mark.parametrize("kind", ["arrays", "python"])
def test_the_same_examples_augmented_alike_whatever_the_number_of_replicas(
    strategies, tmp_path, kind
):
    images = np.random.RandomState(0).rand(40, 8, 8, 1).astype("float32")
    for replicas in (1, 2, 3):
        transform = Compose([RandomCrop(padding=2)])
        if kind == "arrays":
            source = ArraySource(images, Y[:40], transform=transform)
        else:
            source = PythonSource(list(zip(images, Y[:40], strict=True)), transform=transform)
        with strategies[replicas].scope():
            layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        fit(model, tmp_path / str(replicas), data=(source,), epochs=2)
        assert differences(tmp_path / "1", tmp_path / str(replicas)) == ([], [])
    # The content is that of the pixels after augmentation: another pass shows them otherwise.
    content = [known[1] for _, known in sorted(read(tmp_path / "1").steps.items())]
    assert len(set(content)) == len(content) == 10


def test_a_run_that_goes_on_with_fewer_replicas_is_proved(strategies, tmp_path):
    for replicas, step in ((3, 6), (2, 13), (1, 10**9)):
        keras.backend.clear_session(free_memory=False)
        backup = tfdist.BackupAndRestore(tmp_path / "backup", save_freq=4)
        try:
            fit(make(strategies[replicas]), tmp_path / "ledger", callbacks=[AtStep(step), backup])
        except Cut:
            assert step < 20
    assert prove(tmp_path / "ledger") == []
    assert read(tmp_path / "ledger").attempts == [0, 4, 12]


def test_without_an_observer_nothing_of_it_is_in_the_graph(strategies, tmp_path):
    job = Job(strategy=strategies[3], kind=KINDS["mirrored"])
    model = make(strategies[3])
    operations = {}
    for is_observed in (False, True):
        feed = prepare(X, Y, None, job=job, length=Length(batch_size=8), shuffle=True, seed=1)
        building.build(model, job, feed)
        program = program_of(model, job, "train_step", feed, seed=1)
        if is_observed:
            program = dataclasses.replace(
                program, observers=[Ledger(tmp_path).observe(program, job)]
            )
        function = SynchronousEngine(job)._compile_block(program)
        bounds = [tf.constant(0, tf.int64), tf.constant(2, tf.int64)]
        graph = function.get_concrete_function(*bounds).graph.as_graph_def()
        nodes = [n.op for f in graph.library.function for n in f.node_def]
        operations[is_observed] = [op for op in nodes if op.startswith("TensorList")]
    assert operations[True]
    assert not operations[False]
