"""What tasks print: whole in the log, line by line on the screen, never without bound."""

import errno
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.histories import job_state
from tfdist import chatter
from tfdist.cluster import Task
from tfdist.files import write_json
from tfdist.launch import job_run
from tfdist.launch.diagnosis import Failure
from tfdist.launch.ending import closing_lines, resume_command
from tfdist.launch.options import LaunchOptions, Program, parse
from tfdist.launch.run_dir import attempt_entry, earlier_attempts
from tfdist.launch.screen import MAX_LINE_BYTES, Console, JobScreen, LineSplitter, TaskOutput
from tfdist.options import LAUNCHED
from tfdist.outputs.run_directory import RunDirectory

LAUNCH_PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
W0, W1 = Task("worker", 0), Task("worker", 1)


class Reader:
    """A pipe with a console at its other end."""

    def __init__(self, **options):
        self.fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        os.set_blocking(self.write_fd, True)
        self.console = Console(self.write_fd, **options)

    def text(self):
        self.console.write()
        return os.read(self.fd, 1 << 20).decode()

    def close(self):
        os.close(self.fd)
        os.close(self.write_fd)


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.close()


def task_output(console, path, **options):
    return TaskOutput("worker-0", log_path=path / "log", writer=console, **options)


# lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc"], [b"ab"]),
        ([b"a\r\nb\r\n"], [b"a", b"b"]),
        ([b"a\r", b"\nb\n"], [b"a", b"b"]),
        ([b"1/3\r2/3\r3/3\n"], [b"3/3"]),
        ([b"1/3\r", b"2/3\r", b"3/3\r", b"\n"], [b"3/3"]),
        ([b"\r1/3", b"\r2/3", b"\rdone\n"], [b"done"]),
        ([b"\r1/", b"3\n"], [b"1/3"]),
        ([b"\n\n"], [b"", b""]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
    ],
)
def test_lines_are_split_as_a_terminal_shows_them(pieces, lines):
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines


def test_unfinished_lines_are_kept_within_bounded_memory():
    splitter = LineSplitter()
    for step in range(10_000):  # a progress bar without end
        assert splitter.feed(b"step %d " % step + b"#" * 50 + b"\r") == []
    assert len(splitter._rest) < 100
    (last,) = splitter.end()
    assert last.startswith(b"step 9999 ")
    assert splitter.end() == []
    text = b"x" * (MAX_LINE_BYTES - 1)
    pieces = [piece for _ in range(3) for piece in splitter.feed(text)] + splitter.end()
    assert b"".join(pieces) == 3 * text
    assert all(len(piece) <= MAX_LINE_BYTES for piece in pieces)
    pieces = splitter.feed(b"\r" + 2 * text) + splitter.feed(b"\n")
    assert b"".join(pieces) == 2 * text


# one task's output


def test_the_log_is_complete_and_last_lines_skip_chatter(reader, tmp_path):
    output = task_output(reader.console, tmp_path)
    chatter = b"I0000 00:00:1795172313.149165   16599 port.cc:153] oneDNN is on.\n"
    chatter += b"WARNING: All log messages before absl::InitializeLog() is called are written to\n"
    no_gpu = b"E0000 00:00:1.5 3 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: "
    chatter += no_gpu + b"Failed call to cuInit: UNKNOWN ERROR (303)\n"
    own = b"I 2026 mine\nE0000 00:00:1.2  3 real.cc:1] an error\n"
    own += no_gpu + b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver\n"
    output.feed(chatter + own)
    lines = own.decode().splitlines()
    assert reader.text().splitlines() == [f"[worker-0] {line}" for line in lines]
    output.feed(b"".join(b"line %d\n" % i for i in range(50)) + b"\xff\n")
    lines = output.last_lines()
    assert (len(lines), lines[-2], lines[-1]) == (20, "line 49", "\\xff")
    output.close()
    assert (tmp_path / "log").read_bytes().startswith(chatter + own + b"line 0\n")


def test_chatter_is_hidden_without_the_launcher(capfd, monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    with chatter.hidden():
        os.write(2, b"I0000 00:00:1.5 3 port.cc:1] oneDNN is on.\nmine\n")
    assert capfd.readouterr().err == "mine\n"


def test_an_unwritable_log_warns_once_and_the_job_continues(reader, tmp_path):
    (tmp_path / "log").symlink_to("/dev/full")
    output = task_output(reader.console, tmp_path)
    output.feed(b"one\n")
    output.feed(b"two\n")
    text = reader.text()
    assert text.count("log: No space left on device; continuing") == 1
    assert "[worker-0] one\n" in text
    assert "[worker-0] two\n" in text


# the console


def test_a_full_descriptor_is_written_to_later(reader, monkeypatch):
    write, errors = os.write, [BlockingIOError(errno.EAGAIN, "busy")]

    def write_later(fd, data):
        if errors:
            raise errors.pop()
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_later)
    reader.console.line("worker-0", b"x")
    assert reader.text() == "[worker-0] x\n"


# the failure block


def test_remarks_are_written_to_a_separate_standard_error(reader, tmp_path):
    errors = Reader()
    screen = JobScreen(out=reader.console, err=errors.console)
    screen.open(W1, tmp_path / "log").feed(b"Traceback\n")
    screen.show_failure(W1, "exit code 1")
    screen.close()
    assert reader.text() == "[worker-1] Traceback\n"
    assert "[launch]   Traceback\n" in errors.text()
    errors.close()
    screen = JobScreen(out=reader.console, err=reader.console)
    screen.open(W1, tmp_path / "log").feed(b"Traceback\n")
    screen.show_failure(W1, "exit code 1")
    screen.close()
    assert reader.text().endswith(f"exit code 1\n[launch] its output is in {tmp_path}/log\n")


MISTAKE = "--lr: -1 is too small. Fix: write more"


def test_a_mistake_is_shown_once(reader, tmp_path):
    errors = Reader(colour=True)
    for out, err, place in ((errors, errors, "above"), (reader, errors, "below")):
        screen = JobScreen(out=out.console, err=err.console)
        for task in (W0, W1):
            screen.open(task, tmp_path / str(task)).feed(f"{MISTAKE}\n".encode())
        screen.show_failure(W1, f"{MISTAKE} (exit code 2)")
        screen.close()
        text = errors.text()
        assert f"worker-1 failed first: see the message {place} (exit code 2)\n" in text
        assert text.count(MISTAKE) == 1
    assert reader.text() == f"[worker-0] {MISTAKE}\n"
    errors.close()


def test_a_mistake_of_a_task_that_fails_alone_is_shown_once(reader, tmp_path):
    screen = JobScreen(out=reader.console, err=reader.console)
    screen.open(W1, tmp_path / "log").feed(f"{MISTAKE}\n".encode())
    screen.say(f"worker-1 failed: {MISTAKE} (exit code 2); continuing with worker-0")
    screen.close()
    seen = "worker-1 failed: see the message above (exit code 2); continuing with worker-0"
    assert reader.text() == f"[worker-1] {MISTAKE}\n[launch] {seen}\n"


def test_an_unshown_mistake_is_named_by_the_launcher(reader, tmp_path):
    screen = JobScreen(out=reader.console, err=reader.console)
    output = screen.open(W1, tmp_path / "log")
    output.muted = True
    output.feed(f"{MISTAKE}\n".encode())
    screen.show_failure(W1, f"{MISTAKE} (exit code 2)")
    reader.console.pass_on(f"[worker-1] {MISTAKE}".encode())  # late, from another host
    screen.close()
    text = reader.text()
    assert f"[launch] worker-1 failed first: {MISTAKE} (exit code 2)\n" in text
    assert text.count(MISTAKE) == 1


# the last lines


def test_the_closing_lines_name_results_and_resume_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "tfdist.launch", "--workers=2", "x"])
    run, given = tmp_path / "runs" / "a b", ["--workers=2", "my train.py", "--lr", "0.1"]
    (run / "backup").mkdir(parents=True)
    (run / "live.json").touch()
    for step, loss in enumerate((0.5, 0.25, None), 1):
        line = {"step": step, "virtual_epoch": step, "loss": loss, "acc": step / 6}
        RunDirectory(run).append_metrics(line)
    resume = resume_command(parse(["--resume", *given]), run)
    write_json(run / "report.json", {"attempts": [{"first_step_s": 2.5}]})
    failed = closing_lines(run, exit_code=1, seconds=75.4, resume=resume)
    (run / "report.json").unlink()
    assert failed == [
        "failed after 0:01:15 (exit code 1)",
        "metrics at step 3 (end of epoch 3): loss not finite, acc 0.5; best loss 0.25 at step 2",
        "files in 'runs/a b': backup/, metrics.jsonl, report.json",
        "report: tfdist report 'runs/a b'",
        f"resume: {resume}",
    ]
    words = shlex.split(resume)
    assert words == ["python3", "-m", "tfdist.launch", f"--run_dir={run}", *given]
    assert resume_command(parse(given), Path("runs/a b")) == resume
    assert parse(words[3:]) == parse(["--run_dir", str(run), *given])
    assert closing_lines(run, exit_code=0, seconds=0.2, resume="")[0] == "done in 0:00:00"
    assert closing_lines(run, exit_code=143, seconds=1, resume="")[0].startswith("stopped after")


@pytest.mark.parametrize(
    ("exit_code", "attempts", "label"),
    [
        (2, [], "after the fix"),
        (1, [{"first_step_s": None, "first_failure": {"step": None}}], "after the fix"),
        (1, [{"first_step_s": None, "first_failure": {"step": 3}}], "resume"),
        (2, [{"first_step_s": 2.5, "first_failure": None}, {}], "resume"),
        (143, [], "resume"),
        (137, [], "resume"),
    ],
)
def test_only_a_job_with_state_offers_to_resume(tmp_path, exit_code, attempts, label):
    write_json(tmp_path / "report.json", {"attempts": attempts})
    *_, last = closing_lines(tmp_path, exit_code=exit_code, seconds=1, resume="command")
    assert last == f"{label}: command"


@pytest.mark.parametrize(
    "words",
    [
        ["--evaluator", "--ps=1", "--env=A,B", "-m", "package.train", "-x"],
        ["--devices_per_worker=2", "--grace_s=2.5", "--", "--overwrite"],
        ["--stages=2", "--isolate", "--config", "c.py", "--config.seed=1"],
        ["t.py", "--key", "hidden", "--", "a b"],
    ],
)
def test_the_resuming_command_means_the_same_without_its_secrets(words, tmp_path):
    again = resume_command(parse(words), tmp_path)
    assert "hidden" not in again
    options = parse(shlex.split(again.replace("'<secret>'", "hidden"))[3:])
    assert options == replace(parse(words), run_dir=str(tmp_path))


# the report


def test_the_report_names_times_codes_and_first_failure(tmp_path):
    state = job_state([W0, W1, Task("ps", 0)], now_s=0.5)
    state.tasks[W0].record(pid=7, status=-9, started_at_s=0, ended_at_s=2.5)
    state.tasks[W1].record(pid=8, status=1, started_at_s=1, ended_at_s=3, stopped=True)
    failed = {"task": W0, "cause": "killed by SIGKILL", "exit_code": 137}
    state.failure = Failure(**failed, at_s=2.5, step=40, detect_s=0.0214)
    state.lost = [Failure(task=W1, cause="gone", exit_code=1, at_s=2)]
    state.first_step_s = 1.75
    made = attempt_entry(
        state,
        number=1,
        epoch_s=1_800_000_000,
        last_lines={W0: ["x"], W1: ["y"]}.get,
        stacks={W1: ["File x.py, line 3"]},
        hosts={},
    )
    write_json(tmp_path / "report.json", {"exit_code": 137, "attempts": [made]})
    (entry,) = earlier_attempts(tmp_path)
    at = "2027-01-15T08:00:02.500Z"
    assert [(t["task"], t["exit_code"], t["signal"], t["ended_at"]) for t in entry["tasks"]] == [
        ("worker-0", None, "SIGKILL", at),
        ("worker-1", 1, None, "2027-01-15T08:00:03.000Z"),
        ("ps-0", None, None, None),
    ]
    assert entry["first_failure"] == {
        **{"task": "worker-0", "cause": "killed by SIGKILL", "step": 40, "at": at},
        **{"detect_s": 0.021, "last_lines": ["x"], "stacks": {"worker-1": ["File x.py, line 3"]}},
    }
    assert [(f["task"], f["cause"], f["last_lines"]) for f in entry["lost"]] == [
        ("worker-1", "gone", ["y"])
    ]
    times = [entry[name] for name in ("attempt", "detect_s", "first_step_s")]
    assert times == [1, 0.021, 1.25]
    example = re.search(r"```json\n(.*?)```", LAUNCH_PAGE.read_text(), re.DOTALL)[1]
    (documented,) = json.loads(example)["attempts"]
    assert documented.keys() == entry.keys()
    assert documented["tasks"][0].keys() == entry["tasks"][0].keys()
    assert documented["first_failure"].keys() == entry["first_failure"].keys()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempts": 3}', "{}"])
def test_a_damaged_report_does_not_stop_the_next_attempt(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    assert earlier_attempts(tmp_path) == []


def test_output_before_a_launcher_failure_is_written(tmp_path, monkeypatch, capfd):
    def fail(*args, **more):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(job_run.LocalProcesses, "begin_attempt", fail)
    script, run_dir = tmp_path / "program.py", tmp_path / "run"
    script.touch()
    program = Program(target=str(script), is_module=False)
    with pytest.raises(OSError, match="open files"):
        job_run.run_job(
            LaunchOptions(run_dir=str(run_dir), program=program), environ=dict(os.environ)
        )
    assert f"run directory {run_dir}\n" in capfd.readouterr().out
    assert json.loads((run_dir / "report.json").read_text())["exit_code"] == 1
