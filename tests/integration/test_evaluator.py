"""The evaluator in one process: what `fit` does in it, and what it refuses in a job with one."""

import contextlib
import dataclasses
from concurrent.futures import Future

import keras
import numpy as np
import pytest

import tfdist
from tests.refusals import refused
from tfdist.checkpoint import CheckpointStore
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.outputs.run_directory import Evaluations
from tfdist.strategy import job_of
from tfdist.training import evaluation, fitting, loop

pytestmark = pytest.mark.slow

X = np.linspace(-1, 1, 40, dtype="float32")[:, None]
Y = 3 * X + 1
CLUSTER = ClusterSpec(worker=("a:1", "b:1"), evaluator=("c:1",))
CONFIG = TaskConfig(cluster=CLUSTER, task=Task("evaluator", 0), options=JobOptions())


def model():
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return made


def train(folder, **options):
    made = model()
    options = {"batch_size": 8, "epochs": 4, "seed": 1, "verbose": 0, **options}
    tfdist.fit(made, X, Y, callbacks=[tfdist.BackupAndRestore(folder)], **options)
    return made


@contextlib.contextmanager
def in_evaluator(exit_code=0, watch=None):
    """Has `fit` take this process for the evaluator of a job whose chief has gone."""

    def job_for(made, doing):
        job = dataclasses.replace(job_of(made.distribute_strategy), config=CONFIG)
        assert job.is_evaluator
        assert not job.is_chief
        return job

    with pytest.MonkeyPatch.context() as patched:
        if watch is None:
            watch = Future()
            watch.set_result(exit_code)
        patched.setattr(evaluation, "chief_watch", lambda config, timeout_s: watch)
        patched.setattr(fitting.building, "job_for", job_for)
        yield


def evaluate(folder, *callbacks, exit_code=0, watch=None):
    """Returns the model of an evaluator, and its exit code."""
    made = model()
    callbacks = [tfdist.BackupAndRestore(folder), *callbacks]
    with in_evaluator(exit_code, watch), pytest.raises(SystemExit) as ended:
        tfdist.fit(made, X, Y, batch_size=8, callbacks=callbacks, validation_data=(X, Y))
    return made, ended.value.code


def test_the_last_checkpoint_is_evaluated_written_down_and_kept(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    trained = train(folder)
    expected = trained.evaluate(X, Y, verbose=0, return_dict=True)
    board = keras.callbacks.TensorBoard(tmp_path / "board")
    made, code = evaluate(folder, board)
    assert code == 0
    np.testing.assert_array_equal(made.get_weights()[0], trained.get_weights()[0])
    files = Evaluations(folder)
    (line,) = files.lines()
    assert (line["step"], line["examples"]) == (20, 160)
    assert line["val_loss"] == pytest.approx(expected["loss"])
    assert line["val_mae"] == pytest.approx(expected["mae"])
    best = keras.models.load_model(files.best_file)
    np.testing.assert_array_equal(best.get_weights()[0], trained.get_weights()[0])
    assert list((tmp_path / "board" / "evaluator").iterdir())
    assert not files.is_stop_requested

    assert evaluate(folder)[1] == 0  # started again, it has nothing left to do
    assert len(files.lines()) == 1


def test_a_kill_before_the_line_repeats_the_best_evaluation(tmp_path, monkeypatch):
    def kill(self, lines):
        raise KeyboardInterrupt

    train(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "write", kill)
        with pytest.raises(KeyboardInterrupt):
            evaluate(tmp_path)
    assert Evaluations(tmp_path).best_file.exists()
    evaluate(tmp_path)
    assert len(Evaluations(tmp_path).lines()) == 1


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_an_unreadable_checkpoint_is_not_replaced_by_another_one(tmp_path, monkeypatch, what):
    train(tmp_path)
    if what == "damaged":
        name = CheckpointStore(tmp_path).newest_name()
        (tmp_path / name / "manifest.json").write_text("{")
    else:
        monkeypatch.setattr(CheckpointStore, "newest_name", lambda self: "step-000000099.99")
    assert evaluate(tmp_path)[1] == 0
    assert Evaluations(tmp_path).lines() == []


@pytest.fixture
def in_chief(monkeypatch):
    """Has `fit` take this process for the chief of a job with an evaluator."""
    config = TaskConfig(
        cluster=ClusterSpec(), task=Task("worker", 0), options=JobOptions(evaluator=True)
    )

    def job_for(made, doing):
        return dataclasses.replace(job_of(made.distribute_strategy), config=config)

    monkeypatch.setattr(fitting.building, "job_for", job_for)


def train_as_chief(folder, *callbacks, epochs=4):
    """Returns the model, what looked for a request to stop, and how many epochs the run has."""
    made, looking = model(), tfdist.Evaluator()
    history = tfdist.fit(
        made, X, Y, batch_size=8, epochs=epochs, seed=1, verbose=0, validation_data=(X, Y),
        callbacks=[*callbacks, tfdist.BackupAndRestore(folder, save_freq=3), looking],
    )  # fmt: skip
    return made, looking, len(history.epoch)


def cut_after(step):
    """A callback that ends the program in a step, as a kill does."""

    def end(batch, logs):
        if cut.model.optimizer.iterations.numpy() >= step:
            raise KeyboardInterrupt

    cut = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    return cut


@pytest.mark.parametrize("done", [5, 9], ids=["at an epoch's end", "inside an epoch"])
@pytest.mark.parametrize("by", ["its file", "another task"])
def test_a_resumed_run_stopped_by_evaluation_keeps_its_weights(
    tmp_path, in_chief, monkeypatch, done, by
):
    folder = tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        train_as_chief(folder, cut_after(done + 1))
    assert CheckpointStore(folder).latest() == done
    kernel = CheckpointStore(folder).read().arrays["weights/0"]
    with monkeypatch.context() as patched:
        if by == "its file":
            Evaluations(folder).ask_to_stop({})
        else:  # whose hook has found the file, as this one's has not
            patched.setattr(loop, "any_task", lambda job, value, of: True)
        made, looking, epochs = train_as_chief(folder)
    assert epochs == 1
    assert looking.has_stopped is (by == "its file")
    np.testing.assert_array_equal(made.get_weights()[0], kernel)
    Evaluations(folder).stop_file.unlink(missing_ok=True)
    assert train_as_chief(folder)[2] == 4  # not in the training: it can go on


def test_stopped_runs_stay_stopped_and_finished_runs_can_extend(tmp_path, in_chief):
    files = Evaluations(tmp_path / "ended")
    asking = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: files.ask_to_stop({}))
    made, looking, ended = train_as_chief(tmp_path / "ended", asking)
    assert looking.has_stopped
    assert "val_loss" not in made.history.history  # the evaluator's
    files.stop_file.unlink()
    again, _, epochs = train_as_chief(tmp_path / "ended", epochs=9)
    assert epochs == ended == 1
    np.testing.assert_array_equal(again.get_weights()[0], made.get_weights()[0])

    files = Evaluations(tmp_path / "over")
    train_as_chief(tmp_path / "over", epochs=1)
    files.ask_to_stop({})
    assert train_as_chief(tmp_path / "over", epochs=2)[2] == 1
    files.stop_file.unlink()
    assert train_as_chief(tmp_path / "over", epochs=2)[2] == 2


def refused_in_evaluator(*callbacks, **options):
    with in_evaluator():
        return refused(lambda: tfdist.fit(model(), X, Y, callbacks=callbacks, **options))


def test_callbacks_that_watch_the_training_are_not_refused(tmp_path):
    others = keras.callbacks.EarlyStopping("loss"), tfdist.ModelCheckpoint(tmp_path / "x.keras")
    assert evaluate(tmp_path / "c", *others, exit_code=75)[1] == 75


def test_an_evaluator_without_anything_to_evaluate_is_refused(tmp_path):
    backup = tfdist.BackupAndRestore(tmp_path / "c")
    assert refused_in_evaluator(backup) == ("fit", "missing-backup")
    assert refused_in_evaluator(validation_data=(X, Y)) == ("fit", "missing-backup")
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(7), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    tfdist.fit(other, X, Y, verbose=0, callbacks=[tfdist.BackupAndRestore(tmp_path / "c")])
    where, _ = refused_in_evaluator(backup, validation_data=(X, Y))
    assert where == f"weights in {tmp_path / 'c'}"  # of another model


def test_an_evaluator_callback_without_an_evaluator_task_warns(tmp_path, caplog):
    tfdist.fit(model(), X, Y, verbose=0, callbacks=[tfdist.Evaluator(patience=3)])
    assert "this job has no evaluator: start it with --evaluator" in caplog.text
