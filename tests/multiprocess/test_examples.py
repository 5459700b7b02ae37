"""The scripts of docs/examples do what docs/start.md says of them."""

import contextlib
import http.server
import io
import json
import shlex
import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest

from tests import forked_python
from tests.multiprocess.jobs import ROOT
from tests.multiprocess.trainings import launch
from tests.unit.test_docs import _FENCE
from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"
EPOCH_STEPS = 24
DEADLINE_S = 240


def test_every_command_of_the_first_tutorial_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    commands = [
        shlex.split(line)
        for _, language, block in _FENCE.findall((ROOT / "docs" / "start.md").read_text())
        for line in block.splitlines() * (not language)
    ]
    assert len(commands) == 5
    for number, words in enumerate(commands):
        words += ["--epochs", "5" if "--epochs" in words else "4"]  # for 22, and for 20
        if words[1:3] == ["-m", "tfdist.launch"]:
            launch(tmp_path / f"job-{number}", *words[3:], timeout_s=DEADLINE_S)
        else:
            done = forked_python.run(*words[1:], timeout=DEADLINE_S)
            assert done.returncode == 0, done.stdout + done.stderr
    steps = {}
    for name in ("single", "mirrored", "multiworker", "ps"):
        model = keras.saving.load_model(tmp_path / "runs" / name / "model.keras")
        assert model.count_params() > 0
        steps[name] = CheckpointStore(tmp_path / "runs" / name / "backup").steps()[-1]
    done = 4 * EPOCH_STEPS
    assert steps == {"single": done, "mirrored": done, "multiworker": 5 * EPOCH_STEPS, "ps": done}


def test_two_models_train_in_a_custom_step(tmp_path):
    saved = tmp_path / "generator.keras"
    flags = ("--strategy", "multiworker", "--workers", "2", str(EXAMPLES / "gan.py"))
    said = launch(
        tmp_path / "run", *flags, "--steps", "4", "--save", str(saved), timeout_s=DEADLINE_S
    )
    assert "step 4: critic" in said
    assert saved.exists()


def test_the_search_runs_its_trials_and_can_be_shown(tmp_path):
    def run(*words):
        done = forked_python.run(*words, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    search = str(EXAMPLES / "search.py")
    said = run(search, "--max_trials", "1", "--epochs", "1", "--dir", str(tmp_path))
    assert "'learning_rate': " in said
    shown = run("-m", "tfdist.tune", "--show", str(tmp_path / "search-sweep"))
    assert "units" in shown


@contextlib.contextmanager
def web(data: bytes) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve `data` at every path. Yield the URL, and a list of the requests with their texts."""
    seen: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append((f"{self.command} {self.path}", json.loads(body)["text"] if body else ""))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def test_two_workers_download_once_and_notify_slack_once(tmp_path, monkeypatch):
    file = io.BytesIO()
    np.savez(file, x=np.ones((64, 4), "float32"), y=np.ones(64, "float32"))
    program = (str(EXAMPLES / "slack.py"), "--epochs", "2", "--dir", str(tmp_path / "data"))
    job = ("--strategy", "multiworker", "--workers", "2", *program)
    with web(file.getvalue()) as (url, seen):
        monkeypatch.setenv("SLACK_WEBHOOK_URL", f"{url}/hook")
        launch(tmp_path / "run", *job, f"{url}/data", timeout_s=DEADLINE_S)
        requests = [request for request, _ in seen]
        assert requests == ["GET /data", "POST /hook", "POST /hook"]
        assert [text.split(": loss")[0] for _, text in seen[1:]] == ["epoch 1", "epoch 2"]
    # Nothing answers any more: the job uses the file and goes on without Slack.
    said = launch(tmp_path / "again", *job, f"{url}/data", timeout_s=DEADLINE_S)
    assert said.count("Slack: ") == 2
