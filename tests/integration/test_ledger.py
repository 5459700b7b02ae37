"""What a run writes down of its examples, against what the model was given."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut
from tests.refusals import refusal
from tfdist.audit.ledger import Tally, merge, pair_hash, prove, read_directory
from tfdist.audit.recorder import Ledger, _pair_hash, with_recorder
from tfdist.data.arrays import ArraySource
from tfdist.data.augment import Compose, RandomCrop
from tfdist.data.draws import example_at_numpy
from tfdist.data.python_indexed import PythonSource
from tfdist.strategy import Job
from tfdist.training import building
from tfdist.training.engines import engine_for
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


def order(header, positions):
    return example_at_numpy(
        positions, num_examples=header.num_examples, seed=header.seed, shuffle=header.shuffle
    )


def fit(model, directory, *, mode="full", data=(X, Y), **options):
    options = {"batch_size": 8, "epochs": 3, "seed": 4, "verbose": 0, **options}
    return tfdist.fit(model, *data, ledger=Ledger(directory, mode=mode), **options)


def proved(directory):
    proof = prove(read_directory(directory), order=order)
    assert proof.proved, proof
    return proof


UNEVEN = {"virtual_epochs": tfdist.VirtualEpochs(total_examples=130, checkpoints=4), "epochs": 1}
FEWER = {"data": (X[:3], Y[:3]), "steps_per_epoch": 3, "epochs": 1}


@pytest.mark.parametrize("mode", ["full", "hash"])
@pytest.mark.parametrize(
    ("replicas", "options", "passes", "epochs"),
    [
        (3, {"data": (PythonSource(list(zip(X, Y, strict=True))),)}, [50, 50, 50], [50, 50, 50]),
        (3, UNEVEN, [50, 50, 30], [32, 33, 32, 33]),  # a pass ends inside a step, one is cut
        (1, FEWER, [3] * 8, [24]),  # than there are in a batch
    ],
)
def test_each_example_of_each_pass_is_recorded_once(
    strategies, tmp_path, mode, replicas, options, passes, epochs
):
    fit(make(strategies[replicas]), tmp_path, mode=mode, **options)
    proof = proved(tmp_path)
    assert [one.seen for one in proof.passes] == passes
    assert [one.seen for one in proof.epochs] == epochs


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
            given.append([copy.numpy() for copy in local])

    fit(model, tmp_path, data=(X, X[:, 0]), epochs=1, callbacks=[Look()])
    before = [np.zeros(EXAMPLES)] * 3
    ledger = merge(read_directory(tmp_path))
    rows = [row for record in ledger.records() for row in record.arrays[0]]
    assert len(rows) == len(given) == 7
    for row, now in zip(rows, given, strict=True):
        for mine, old, new in zip(row, before, now, strict=True):
            assert sorted(np.flatnonzero(new - old)) == sorted(mine[mine >= 0])
        before = now


@pytest.mark.parametrize("kind", ["arrays", "python"])
def test_the_same_examples_augmented_alike_whatever_the_number_of_replicas(
    strategies, tmp_path, kind
):
    images = np.random.RandomState(0).rand(40, 8, 8, 1).astype("float32")
    steps = {}
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
        steps[replicas] = Tally(merge(read_directory(tmp_path / str(replicas))))
        for name in ("counts", "hashes", "content"):
            assert np.array_equal(getattr(steps[1], name), getattr(steps[replicas], name)), name
    # The content is that of the pixels after augmentation: another pass shows them otherwise.
    half = len(steps[1].content) // 2
    assert set(steps[1].content[:half]).isdisjoint(steps[1].content[half:])


def test_a_run_that_goes_on_with_fewer_replicas_is_proved(strategies, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")  # as the launcher sets it
    for replicas, step in ((3, 6), (2, 13), (1, 10**9)):
        keras.backend.clear_session(free_memory=False)
        backup = tfdist.BackupAndRestore(tmp_path / "backup", every_steps=4)
        callbacks = [AtStep(step), backup]
        try:
            fit(make(strategies[replicas]), tmp_path / "ledger", callbacks=callbacks)
        except Cut:
            assert step < 20
    attempts = proved(tmp_path / "ledger").ledger.attempts
    assert [a.header.num_replicas for a in attempts] == [3, 2, 1]
    assert [a.header.threads for a in attempts] == [3, 3, 3]  # with which sums were rounded
    assert [(a.first, a.void_steps) for a in attempts] == [(0, 2), (4, 1), (12, 0)]


def test_without_a_ledger_nothing_of_it_is_in_the_graph(strategies):
    job = Job(strategy=strategies[3], kind="mirrored")
    model = make(strategies[3])
    operations = {}
    for with_ledger in (False, True):
        feed = prepare(X, Y, None, job=job, length=Length(batch_size=8), shuffle=True, seed=1)
        building.build(model, job, feed)
        program = program_of(model, job, "train_step", feed, seed=1)
        if with_ledger:
            program = with_recorder(program, job, mode="full", sink=lambda record: None)
        function = engine_for(job)._compile_block(program)
        bounds = [tf.constant(0, tf.int64), tf.constant(2, tf.int64)]
        graph = function.get_concrete_function(*bounds).graph.as_graph_def()
        nodes = [n.op for f in graph.library.function for n in f.node_def]
        operations[with_ledger] = [op for op in nodes if op.startswith("TensorList")]
    assert operations[True]
    assert not operations[False]


def test_the_hash_in_the_graph_is_that_of_the_proof():
    indices, passes = np.array([0, 1, 5, 2**40]), np.array([0, 3, 3, 2**33])
    in_graph = _pair_hash(tf.constant(indices), tf.constant(passes)).numpy()
    assert in_graph.tolist() == pair_hash(indices, passes).tolist()


def test_a_stream_and_an_unknown_mode_are_refused(strategies, tmp_path):
    data = (tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),)
    line = refusal(lambda: fit(make(strategies[1]), tmp_path, data=data, batch_size=None))
    assert (line.where, line.code) == ("ledger", "unsupported-data")
    assert not list(tmp_path.iterdir())
    assert "did you mean 'full'" in str(refusal(lambda: Ledger(tmp_path, mode="ful")))
