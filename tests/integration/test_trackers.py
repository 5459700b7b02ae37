"""Callbacks of trackers: real MLflow and W&B, and one with W&B's calls."""

import dataclasses
import json
import logging
import os
import struct
import sys
import types

import keras
import numpy as np
import pytest

import tfdist
from tests import fake_trackers
from tests.fake_trackers import steps_in_events
from tests.models import noted_ranges
from tfdist.cluster import KINDS, ClusterSpec, JobOptions, Task, TaskConfig, read_environment
from tfdist.strategy import Job, job
from tfdist.training import loop, trackers
from tfdist.training.callbacks import wants_every_batch

pytestmark = pytest.mark.slow

RNG = np.random.RandomState(0)
X = RNG.randn(48, 4).astype("float32")
Y = (X @ RNG.randn(4, 1)).astype("float32")
STEPS, EPOCHS = 12, 3
WORKERS = {"worker": ["a:1", "b:1"]}
SECOND = {"TF_CONFIG": json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 1}})}


class Killed(Exception):
    """What stands for a kill: nothing is saved or closed after it."""


class KillAt(keras.callbacks.Callback):
    """Fails when an epoch has ended, after the callbacks before it."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Killed


def train(strategy, callbacks, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="d")], name="net")
        model.compile(keras.optimizers.SGD(0.05), "mse")
    options = {"batch_size": 4, "epochs": EPOCHS, "verbose": 0, "seed": 1} | options
    return tfdist.fit(model, X, Y, callbacks=callbacks, **options)


@pytest.fixture
def blocks(monkeypatch):
    """The blocks of training steps that the engine is asked to run."""
    return noted_ranges(monkeypatch)


@pytest.fixture
def board(told, monkeypatch):
    """Makes callbacks as W&B's."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    return fake_trackers.board(lambda run, **what: told.append((run, what)))


@pytest.fixture
def told():
    """What a tracker that is not there has been told: the run, and what."""
    return []


def epochs_in(told):
    return [what["epoch"] for _, what in told if "epoch" in what]


def test_a_hook_in_a_derived_tracker_sees_every_batch(board):
    derived = type("Mine", (board,), {"on_train_batch_end": lambda self, batch, logs=None: None})
    derived.__module__ = "mine"
    wrapper = trackers.wrapped(derived())
    assert isinstance(wrapper, trackers.Tracker)
    assert wants_every_batch(wrapper, mode="train")
    for callback in (board(), trackers.wrapped(board())):
        assert not wants_every_batch(callback, mode="train")


def test_a_failing_tracker_is_skipped_with_one_warning(strategies, board, told, caplog):
    def fail(self, batch, logs=None):
        raise ConnectionError("nobody there")

    board.on_train_batch_end = fail
    with caplog.at_level(logging.WARNING):
        history = train(strategies[1], [board()])
    assert len(history.history["loss"]) == EPOCHS
    (warning,) = [r.message for r in caplog.records if r.name == "tfdist.training.trackers"]
    assert warning == (
        "Weights & Biases: cannot write (ConnectionError: nobody there); "
        "the training continues without it"
    )
    assert epochs_in(told) == []


def killed_and_gone_on(blocks, attempt):
    """Has an attempt be killed with its second epoch, and another go on; the ends of blocks."""
    with pytest.raises(Killed):  # that epoch is logged, and its checkpoint is not there
        attempt(KillAt(1))
    ends = [last for _, last in blocks]
    blocks.clear()
    attempt()
    return ends + [last for _, last in blocks if last > ends[-1]]


def test_a_tracker_logs_an_epoch_cut_by_max_time_once_it_is_whole(
    strategies, board, told, tmp_path, monkeypatch
):
    clock = types.SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s))

    class Ticking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.now_s += 1

    for max_time, epochs in (STEPS + 1.5, [0]), (None, [0, 1, 2]):
        callbacks = [board(), tfdist.BackupAndRestore(tmp_path), Ticking()]
        train(strategies[1], callbacks, max_time=max_time)
        assert epochs_in(told) == epochs


def multiples_of_5(ends):
    """The ends of blocks in which there is one."""
    pairs = zip([0, *ends], ends, strict=False)
    return [last for before, last in pairs if last // 5 > before // 5]


@pytest.mark.parametrize("freq", ["epoch", 5])
def test_tensorboard_has_each_step_once_after_a_kill(strategies, tmp_path, blocks, freq):
    training, validation = tmp_path / "logs" / "train", tmp_path / "logs" / "validation"

    def attempt(*more):
        board = keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=freq, histogram_freq=1)
        backup = tfdist.BackupAndRestore(tmp_path / "backup")
        try:
            train(strategies[1], [board, backup, *more], validation_data=(X, Y))
        finally:
            board._close_writers()

    ends = killed_and_gone_on(blocks, attempt)
    assert len(ends) < EPOCHS * STEPS
    if freq == 5:
        multiples = [last // 5 * 5 for last in multiples_of_5(ends)]
        assert set(multiples) <= set(steps_in_events(training, "batch_loss"))
    else:
        assert steps_in_events(training, "d/kernel/histogram") == [0, 1, 2]
        for folder in (training, validation):
            assert steps_in_events(folder, "epoch_loss") == [0, 1, 2]
        assert steps_in_events(validation, "evaluation_loss_vs_iterations") == [12, 24, 36]


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow
    import mlflow.keras

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow
    while mlflow.active_run():
        mlflow.end_run()


def steps_in_mlflow(mlflow, run_id):
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    return sorted(metric.step for metric in history)


@pytest.mark.parametrize("options", [{}, {"log_every_epoch": False, "log_every_n_steps": 5}])
def test_mlflow_has_one_run_with_each_step_once(
    mlflow, strategies, tmp_path, blocks, caplog, options
):
    runs = []

    def attempt(*more):
        if runs:  # that one was killed
            mlflow.flush_async_logging()
            mlflow.end_run("KILLED")
        runs.append(mlflow.start_run().info.run_id)
        lower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        backup = tfdist.BackupAndRestore(tmp_path / "backup")
        board = mlflow.keras.MlflowCallback(**options)
        train(strategies[1], [lower, board, backup, *more], validation_data=(X, Y))

    ends = killed_and_gone_on(blocks, attempt)
    first, second = runs
    assert second != first
    assert mlflow.active_run().info.run_id == first
    assert [run.info.run_id for run in mlflow.MlflowClient().search_runs(["0"])] == [first]
    (line,) = (r.message for r in caplog.records if r.levelno >= logging.WARNING)
    assert line.startswith("resumes at step 12 ")
    steps = steps_in_mlflow(mlflow, first)
    if options:
        assert steps == multiples_of_5(ends)
        assert len(ends) < EPOCHS * STEPS
    else:
        assert steps == list(range(EPOCHS))


PROBE = TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=JobOptions(probe_s=1.0))


@pytest.mark.parametrize("other", [read_environment(SECOND), PROBE], ids=["worker-1", "probe"])
def test_autolog_logs_a_run_of_the_chief_only(mlflow, strategies, monkeypatch, blocks, other):
    """And none in a probe. It keeps the functions that it finds, before the strategy is made."""
    from mlflow.utils import autologging_utils

    def fit():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 1)), np.ones((8, 1)), epochs=2, verbose=0)

    monkeypatch.setattr(autologging_utils, "_AUTOLOGGING_GLOBALLY_DISABLED", False)
    monkeypatch.setattr(job, "_made", [])
    mlflow.tensorflow.autolog(log_models=False)
    try:
        chief = job.remember(Job(strategy=strategies[2], kind=KINDS["mirrored"]))
        with strategies[2].scope():
            fit()
        assert blocks, "the engine trains"
        job.remember(dataclasses.replace(chief, config=other))
        fit()
    finally:
        mlflow.tensorflow.autolog(disable=True)
    (run,) = mlflow.search_runs(output_format="list")
    assert "loss" in run.data.metrics
    assert run.data.params["epochs"] == "2"


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    import wandb.integration.keras

    yield wandb
    wandb.finish()


def logged_offline(directory):
    """What W&B's own files hold, by run: each line of each attempt, in the order of the attempts.

    They are of blocks of 32 KiB, as LevelDB's log, after a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for path in sorted(directory.glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        data, at, whole, lines = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if (left := -at % 32768) and left < 7:
                at += left
            _, size, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 :][:size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record, whole = Record.FromString(whole), b""
                pairs = [("/".join(i.nested_key) or i.key, i) for i in record.history.item]
                lines += (
                    [{key: json.loads(item.value_json) for key, item in pairs}] if pairs else []
                )
        runs.setdefault(path.stem.removeprefix("run-"), []).extend(lines)
    return runs


@pytest.mark.parametrize("freq", ["epoch", "batch", 5])
def test_wandb_resumes_its_run_with_each_step_once(wandb, strategies, tmp_path, blocks, freq):
    begun = []

    def attempt(*more):
        begun.append(wandb.init(project="test", dir=tmp_path).id)
        backup = tfdist.BackupAndRestore(tmp_path / "backup")
        board = wandb.integration.keras.WandbMetricsLogger(log_freq=freq)
        try:
            train(strategies[1], [board, backup, *more])
        finally:
            wandb.finish()
            wandb.teardown()  # when this returns, its files are whole

    ends = killed_and_gone_on(blocks, attempt)
    first, second = begun
    runs = logged_offline(tmp_path / "wandb")
    assert runs.pop(second) == []
    ((run, lines),) = runs.items()
    assert run == first
    assert [line["epoch/epoch"] for line in lines if "epoch/epoch" in line] == [0, 1, 2]
    steps = [line["batch/batch_step"] for line in lines if "batch/batch_step" in line]
    assert len(ends) < EPOCHS * STEPS
    if freq == "batch":
        assert steps == [last - 1 for last in ends]
    if freq == 5:
        assert steps == [last - 1 for last in multiples_of_5(ends)]


def test_a_restart_before_a_checkpoint_logs_no_epoch_twice(strategies, board, told, tmp_path):
    first = board()
    with pytest.raises(Killed):
        train(strategies[1], [first, KillAt(0), tfdist.BackupAndRestore(tmp_path)])
    train(strategies[1], [first, tfdist.BackupAndRestore(tmp_path)])
    assert epochs_in(told) == [0, 1, 2]


@pytest.mark.parametrize(
    "state", [[], *({"run": run, "package": "mlflow"} for run in ("../x", "http://h/", [], 1, ""))]
)
def test_a_malformed_run_id_in_a_checkpoint_is_ignored(monkeypatch, state):
    resumed = []
    monkeypatch.setattr(trackers, "_resume", lambda *args: resumed.append(args))
    monkeypatch.setattr(trackers, "_logged_in_mlflow", lambda *args: {})
    monkeypatch.setattr(trackers, "run_of", lambda *args: "mine")
    tracker = trackers.Tracker(keras.callbacks.Callback(), package="mlflow")
    tracker.resume_run(state)
    assert not resumed
    tracker.resume_run({"run": "0a-b_c", "package": "mlflow"})
    assert [run for *_, run in resumed] == ["0a-b_c"]


@pytest.mark.parametrize("text", ["[]", '{"run": "mine"}', '{"run": "mine", "step": "9"}', None])
def test_an_invalid_journal_of_a_tracker_is_ignored(monkeypatch, tmp_path, text):
    monkeypatch.setattr(trackers, "run_of", lambda *args: "mine")
    path = tmp_path / "tracker-0.json"
    path.write_text(text) if text else os.mkfifo(path)
    tracker = trackers.Tracker(keras.callbacks.Callback(), package="mlflow")
    tracker.keep_journal(path)
    assert tracker._logged == {"step": 0, "epoch": -1}
