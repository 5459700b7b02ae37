"""What `tfdist.spawn` refuses before anything is started, and what it makes of a job's answers."""

import functools
import io
import json
import linecache
import pickle
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfdist
from tests import refusals
from tfdist.errors import JobFailed
from tfdist.launch import spawn as spawning
from tfdist.launch.guardian import MARK

LOCK = threading.Lock()
RUN = spawning._run


def by_value(source):
    """A function as a notebook's cell would define it."""
    cell = {"__name__": "__main__", "LOCK": LOCK}
    exec(source, cell)
    return cell["fn"]


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(spawning, "_run", lambda *_, **__: pytest.fail("a job was started"))
    yield
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path_factory):
    """Return the directory of a job's answers."""
    folder = tmp_path_factory.mktemp("spawned")
    (folder / "answers").mkdir()
    return folder


def refusal(fn, *args, **options):
    return refusals.refusal(lambda: tfdist.spawn(fn, *args, **options))


@pytest.mark.parametrize(
    ("source", "args"), [("def fn(): return LOCK", ()), ("def fn(a, b): pass", (1, LOCK))]
)
def test_no_job_starts_if_the_function_cannot_be_pickled(source, args):
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        tfdist.spawn(by_value(source), *args)


def test_a_spawn_within_a_task_is_refused(monkeypatch):
    monkeypatch.setenv(MARK, "0123")
    assert refusal(len).code == "nested-launcher"


def test_other_keywords_are_arguments_of_the_function():
    def fn(x, rate, workers=1, *, ps=0):
        pass

    assert spawning._keywords(fn, (1,), {"rate": 0.1, "max_restarts": 2}) == {"rate": 0.1}
    assert spawning._keywords(fn, (1, 0.1, 3), {"workers": 2}) == {}
    assert spawning._keywords(functools.partial(fn, workers=3), (1, 2), {"workers": 2}) == {}
    assert spawning._keywords(lambda **more: 0, (), {"a": 1, "run_dir": "run"}) == {"a": 1}
    assert refusal(fn, 1, rate=0.1, workers=2).code == "exclusive"
    assert refusal(fn, 1, rate=0.1, ps=1).code == "exclusive"
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_restart'"):
        tfdist.spawn(fn, 1, rate=0.1, max_restart=3)


def test_keywords_become_flags():
    def flags(strategy, workers=None, ps=0, **more):
        return spawning._flags(strategy, workers, ps, more)

    assert flags("multiworker") == ["--strategy=multiworker", "--workers=2"]
    assert flags("single", evaluator=False) == ["--strategy=single"]
    assert flags("ps", 4, 2, evaluator=True, max_restarts=0) == [
        "--strategy=ps", "--workers=4", "--ps=2", "--evaluator=True", "--max_restarts=0",
    ]  # fmt: skip


def test_the_last_whole_answer_of_each_task_is_read(folder):
    def answer(task, attempt, size):
        spawning._answer(folder, record := {"task": task, "attempt": attempt, "value": bytes(size)})
        return record

    answer("worker-0", 1, 10)
    records = [answer("worker-0", 1, 300_000), answer("worker-1", 1, 0), answer("worker-0", 2, 1)]
    (folder / "answers" / "2-worker-1.part").write_bytes(b"half")  # the task is killed
    assert spawning._answers(folder) == records


def test_the_result_is_of_the_chief_that_an_elastic_job_has_then(folder, monkeypatch):
    (folder / "function").write_bytes(spawning._pickled(len, ["ab"], {}))
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    cluster, task = {"worker": ["a:1", "a:2"]}, {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    job = SimpleNamespace(is_chief=False)
    module = SimpleNamespace(current_job=lambda: job)
    monkeypatch.setitem(sys.modules, "tfdist.strategy.job", module)
    spawning.serve([str(folder)])
    assert spawning._answers(folder) == []
    job.is_chief = True
    spawning.serve([str(folder)])
    (answer,) = spawning._answers(folder)
    assert (answer["task"], pickle.loads(answer["value"])) == ("worker-1", 2)


def test_a_killed_task_is_described_by_its_last_lines():
    failure = {"task": "ps-0", "cause": "killed by SIGKILL", "last_lines": ["a", "b"]}
    error = spawning._failed(137, failure, [], [])
    assert str(error) == "ps-0 failed first: killed by SIGKILL\n\na\nb"
    assert (error.exit_code, error.traceback, error.__cause__) == (137, "", None)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.task, copy.exit_code) == (str(error), "ps-0", 137)


def test_failures_are_reported_if_sigchld_is_ignored(tmp_path_factory, monkeypatch):
    """The kernel gives such a program no exit code, and Python 0 for it."""
    run_dir = tmp_path_factory.mktemp("run")

    def run(flags):
        entry = {"exit_code": 3, "first_failure": None}
        (run_dir / "report.json").write_text(json.dumps({"attempts": [entry]}))
        return 0, False, ["said"]

    monkeypatch.setattr(spawning, "_run", run)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(JobFailed, match="exit code 3: said"):
            spawning.spawn(len, "x", strategy="single", run_dir=str(run_dir))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_answers_of_attempts_that_failed_do_not_count(tmp_path_factory, monkeypatch):
    run_dir = tmp_path_factory.mktemp("run")
    error = {"kind": "error", "task": "worker-0", "attempt": 1, "traceback": "of 1", "value": None}
    result = {"kind": "result", "task": "worker-1", "attempt": 1, "value": pickle.dumps("of 1")}
    last = {"attempt": 2, "first_failure": {"task": "worker-0", "cause": "killed by SIGKILL"}}

    def ended_with(code):
        def run(flags):
            for answer in (error, result):
                spawning._answer(Path(flags[-1]), answer)
            (run_dir / "report.json").write_text(json.dumps({"attempts": [{"attempt": 1}, last]}))
            return code, False, []

        (run_dir / "report.json").unlink(missing_ok=True)
        monkeypatch.setattr(spawning, "_run", run)
        return spawning.spawn(len, "x", strategy="single", run_dir=str(run_dir))

    assert ended_with(0) is None
    with pytest.raises(JobFailed, match="killed by SIGKILL") as raised:
        ended_with(137)
    assert raised.value.traceback == ""


def test_unencodable_output_does_not_end_the_job(monkeypatch):
    """As in a locale of Latin-1, where tasks print bytes that are no UTF-8."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)
    text = r"printf '\342\226\210 \303\274 \374'; kill -9 $$"
    monkeypatch.setattr(spawning, "bound_command", lambda command: ["sh", "-c", text])
    assert RUN([]) == (137, False, ["\u2588 \xfc \ufffd"])
    assert output.buffer.getvalue() == b"\\u2588 \xfc \\ufffd"


def test_source_lines_of_cells_are_sent_with_calls(monkeypatch):
    cells = {"<cell>": (3, None, ["a\n"], "<cell>"), "/x.py": (3, 1.0, ["b\n"], "/x.py")}
    monkeypatch.setattr(linecache, "cache", cells)
    given = pickle.loads(spawning._pickled(by_value("def fn(): return 1"), (), {}))
    assert given["cells"] == {"<cell>": ["a\n"]}
    assert given["path"] == sys.path
    fn, args, keywords = pickle.loads(given["call"])
    assert (fn(), args, keywords) == (1, (), {})
