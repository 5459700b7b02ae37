"""Jobs from the cells of a notebook, in a real kernel."""

import signal
import time

import nbclient
import nbformat
import pytest
from jupyter_client import KernelManager

from tests.multiprocess.jobs import ROOT
from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "docs" / "examples" / "notebook.ipynb"
DEADLINE_S = 240
LONG = """
import keras, numpy as np, tfdist
class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
def train():
    with tfdist.make_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    backup = tfdist.BackupAndRestore("backup")
    tfdist.fit(model, x, x[:, :1], batch_size=8, epochs=10**6, verbose=0, callbacks=[backup, Say()])
tfdist.spawn(train, workers=2, run_dir="run", grace_s=60)
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path


def texts_of(cell):
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def test_the_notebook_runs_and_shows_its_tasks_output(environment):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=DEADLINE_S, kernel_name="python3")
    client.execute()
    said = [texts_of(cell) for cell in notebook.cells]
    trained = next(text for text in said if "[launch] strategy multiworker: 2 workers" in text)
    assert "[worker-0] loss " in trained
    assert "[worker-1] loss " in trained
    assert any("resumed" in text or "strategy" in text for text in said)
    (failed,) = [text for text in said if "failed first: ValueError: no data" in text]
    assert 'raise ValueError("no data")' in failed.partition("failed first: ValueError")[2]


CELLS = [
    """
import keras, numpy as np, tfdist
def train(x, lr):
    with tfdist.make_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(lr), "mse")
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    assert np.isclose(float(model.optimizer.learning_rate), lr)
    return history
tfdist.spawn(train, np.ones((64, 4), "float32"), lr=0.01, workers=2)
""",
    "train(np.ones((64, 4), 'float32'), 0.02)",
    "tfdist.spawn(train, 1, 2, strategy='multiwork')",
]


def test_a_cell_shows_the_history_and_short_errors(environment):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    options = {"timeout": DEADLINE_S, "kernel_name": "python3", "allow_errors": True}
    nbclient.NotebookClient(notebook, **options).execute()
    spawned, alone, failed = [cell.outputs for cell in notebook.cells]
    for outputs in (spawned, alone):
        (result,) = [o for o in outputs if o.output_type == "execute_result"]
        assert "<td>loss</td>" in result.data["text/html"], outputs
    (error,) = failed
    assert error.traceback == [f"UsageError: {error.evalue}"]
    assert "--strategy" in error.evalue


def test_interrupting_the_kernel_stops_the_job_with_a_save(environment):
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        request = client.execute(LONG)
        said = until(client, request, lambda text: "[worker-0] epoch 2" in text)
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=DEADLINE_S)
        while reply["parent_header"].get("msg_id") != request:
            reply = client.get_shell_msg(timeout=DEADLINE_S)
        said += until(client, request, lambda text: text.endswith("<idle>"))
        assert reply["content"]["ename"] == "KeyboardInterrupt", said
        assert "stopped by SIGINT at step" in said
        assert "state saved" in said
        assert CheckpointStore(environment / "backup").steps()[-1] >= 24
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def until(client, request, true):
    """What a cell has printed until it is `true`; ``<idle>`` at its end."""
    deadline_s = time.monotonic() + DEADLINE_S
    text = ""
    while not true(text):
        message = client.get_iopub_msg(timeout=max(0.1, deadline_s - time.monotonic()))
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            text += "<idle>"
            break
    return text
