"""An export is served as it is: the program, its real replicas, and the clients of others."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

import tfdist
from benchmarks import load
from tests import forked_python
from tests.multiprocess.test_serve import DEADLINE_S, Service, wait_until_healthy

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).random((3, 4)).astype("float32")


MAKE = """
import keras

def make():
    inputs = keras.Input((4,), name="features")
    model = keras.Model(inputs, keras.layers.Dense(2, name="scores")(inputs), name="m")
    model.compile("sgd", "mse")
    return model
"""


def own_model() -> keras.Model:
    """What the function in `MAKE` returns."""
    scope: dict[str, Any] = {}
    exec(MAKE, scope)
    model: keras.Model = scope["make"]()
    return model


def export(directory: Path, seed: int) -> np.ndarray:
    """Export a version with weights of a seed; return its answers to `X`."""
    keras.utils.set_random_seed(seed)
    model = own_model()
    tfdist.export_model(model, directory)
    return np.asarray(tfdist.predict(model, X, batch_size=4, verbose=0))


@contextlib.contextmanager
def service(directory: Path, log: Path) -> Iterator[Service]:
    """Run the program with one replica until the block ends."""
    words = ["tfdist.serve", str(directory), "--replicas=1"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--rest_port=0", "--grpc_port=0"],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://(\S+):(\d+)/v1/models, gRPC (\S+)", line)
            assert found, line + log.read_text()
            running = Service(process, (found[1], int(found[2])), found[3], log)
            running.wait_for("m: serving version 1")
            wait_until_healthy(running)
            yield running
        finally:
            process.kill()


def train(model: keras.Model, backup: Path, epochs: int, *more: Any) -> None:
    callbacks = [*more, tfdist.BackupAndRestore(backup, best="loss")]
    target = np.ones((3, 2), "float32")
    tfdist.fit(model, X, target, epochs=epochs, callbacks=callbacks, batch_size=3, verbose=0)


def test_an_export_and_then_the_next_one_is_served(tmp_path):
    first = export(tmp_path / "served", seed=1)
    with service(tmp_path / "served", tmp_path / "log") as running:
        status, answer = running.predict(X.tolist())
        assert status == 200, answer
        np.testing.assert_allclose(answer["predictions"], first, atol=1e-6)
        digits = [len(str(abs(value))) for row in answer["predictions"] for value in row]
        assert max(digits) <= 12, answer  # of a float32, not of the double next to it
        second = export(tmp_path / "served", seed=2)
        running.wait_for("m: serving version 2")
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "m"
        request.inputs["features"].CopyFrom(tf.make_tensor_proto(X))
        with grpc.insecure_channel(running.grpc) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            response = stub.Predict(request, timeout=DEADLINE_S)
        assert response.model_spec.version.value == 2
        found = tf.make_ndarray(response.outputs["scores"])
        np.testing.assert_allclose(found, second, atol=1e-6)
        url = "http://{}:{}/v1/models/m".format(*running.rest)
        words = [url, "--grpc", running.grpc, "--seconds", "0.5", "--warm_up_s", "0"]
        assert load.main(words) == 0, "a request made from the signature is answered"
        running.process.terminate()
        assert running.process.wait(DEADLINE_S) == 0
        assert not re.findall("deprecat|replaced", running.said(), re.IGNORECASE)


def test_a_running_training_is_published(tmp_path):
    (tmp_path / "program.py").write_text(MAKE)
    model = own_model()
    words = [str(tmp_path / "backup"), str(tmp_path / "served"), "--best", "--follow"]
    command = ["-m", "tfdist.export", *words, "--model", f"{tmp_path}/program.py:make"]
    reads, writes = os.pipe()
    follows = forked_python.Program(*command, stdout=writes)
    os.close(writes)
    with os.fdopen(reads) as said:
        try:
            train(model, tmp_path / "backup", 1)
            assert said.readline().strip() == str(tmp_path / "served" / "m" / "1")
            with service(tmp_path / "served", tmp_path / "log") as running:
                train(model, tmp_path / "backup", 2)
                running.wait_for("m: serving version 2")
                wait_until_healthy(running)
                found = running.predict(X.tolist())[1]["predictions"]
                np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=1e-6)
            follows.send_signal(signal.SIGTERM)
            assert follows.wait(DEADLINE_S) == 0
        finally:
            follows.kill()


def test_a_run_publishes_its_best_checkpoints_by_itself(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('not the module of Python')")
    monkeypatch.chdir(tmp_path)
    model = own_model()

    def steps_after(epochs: int) -> list[int]:
        """Train to so many epochs; return the steps of all versions."""
        train(model, tmp_path / "backup", epochs, tfdist.PublishModel(tmp_path / "served"))
        manifests = sorted((tmp_path / "served" / "m").glob("[0-9]/manifest.json"))
        return [json.loads(file.read_text())["step"] for file in manifests]

    assert steps_after(1) == [1]
    steps = steps_after(3)
    assert (steps[0], steps[-1], len(set(steps))) == (1, 3, len(steps))
    served = tf.saved_model.load(tmp_path / "served" / "m" / str(len(steps)))
    found = served.signatures["serving_default"](features=tf.constant(X))["scores"]
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=1e-6)
