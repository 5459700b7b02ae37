"""The launcher with real trees of processes: what it shows, what it ends with, what it leaves."""

import os
import pty
import re
import select
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.multiprocess.jobs import (
    DEADLINE_S,
    DEAF,
    FORK,
    LAUNCH,
    PAUSE,
    STARTS,
    TREE,
    children,
    report,
)
from tests.multiprocess.trainings import ended
from tests.multiprocess.warm import executed, forked
from tests.processes import python
from tfdist.errors import EXIT_USAGE

# what a program sees


@STARTS
def test_a_program_runs_as_python_would_run_it(launch, tmp_path, command):
    (tmp_path / "beside.py").write_text("VALUE = 5")
    job = launch(
        """
        import beside, json, os, pickle, random, sys
        class Point:
            x: int
        assert Point.__annotations__ == {"x": int}
        assert pickle.loads(pickle.dumps(Point)) is Point
        assert sys.modules["__main__"].Point is Point
        assert __name__ == "__main__" and __spec__ is None and __doc__ is None
        assert os.getpid() == os.getsid(0) == os.getpgrp()
        assert os.read(0, 1) == b""
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        print("saw", task["index"], sys.argv[1:], __file__ == os.path.abspath(sys.argv[0]),
              sys.path[0] == os.path.dirname(__file__), beside.VALUE, os.environ["MINE"])
        sys.stdout.reconfigure(encoding="latin-1")
        print("\\xe9")
        """,
        "--workers=2",
        "--run_dir=run",
        command=command,
        args=["--workers", "3", "-x", ""],
        env={"MINE": "mine"},
    )
    assert job.end() == 0
    for index in (0, 1):
        seen = f"saw {index} ['--workers', '3', '-x', ''] True True 5 mine\n"
        assert f"[worker-{index}] {seen}" in job.text
        assert b"\xe9\n" in Path(f"run/logs/attempt-1/worker-{index}.log").read_bytes()


@STARTS
def test_a_module_runs_as_python_would_run_it(launch, tmp_path, command):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text(
        "import sys; print('saw', __name__, __spec__.name, sys.argv[3:], sys.path[0])"
    )
    long = ["x" * 100_000] * 2  # as a pattern of many files is, once a shell has read it
    job = launch("", "-m", "package.tool", *long, command=command)
    assert job.end() == 0
    script = str(tmp_path / "program.py")
    assert f"[worker-0] saw __main__ package.tool ['{script}'] {tmp_path}\n" in job.text


def test_a_programs_own_processes_can_be_spawned(launch, tmp_path):
    """In a directory with a module of a name that Python has too, and the launcher imports."""
    (tmp_path / "secrets.py").write_text("KEY = 5")
    job = launch(
        """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("saw", pool.map(double, [1, 2]))
        """
    )
    assert job.end() == 0
    assert "[worker-0] saw [2, 4]\n" in job.text


def test_forked_tasks_draw_random_numbers_of_their_own(launch):
    source = "import numpy, random; print('drew', random.random(), numpy.random.random())"
    job = launch(source, "--workers=3", command=[w.replace("json", "numpy.random") for w in FORK])
    assert job.end() == 0
    drawn = job.read_until(r"drew (\S+) (\S+)", count=3)
    assert len({number for pair in drawn for number in pair}) == 6


def test_the_traceback_of_a_program_is_unchanged_and_unique(launch, tmp_path):
    mistyped = launch("x =\n")
    assert mistyped.end() == 1
    own = python(tmp_path / "program.py").stderr
    assert "".join(f"[worker-0] {line}\n" for line in own.splitlines()) in mistyped.text
    source = """
    import json, os, signal
    def inner():
        try:
            {}["missing"]
        except KeyError:
            raise ValueError("boom")
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        inner()
    signal.pause()
    """
    job = launch(source, "--workers=2")
    assert job.end() == 1
    env = {**os.environ, "TF_CONFIG": '{"task": {"index": 1}}'}
    own = python(tmp_path / "program.py", env=env).stderr
    assert own.count("\n") > 10
    assert "".join(f"[worker-1] {line}\n" for line in own.splitlines()) in job.text
    assert job.text.count("ValueError: boom\n") == 1
    assert "[launch] worker-1 failed first: ValueError: boom (exit code 1)\n" in job.text


MISTAKE = """
import importlib  # by a statement it would be forked from a process with TensorFlow
UsageError = importlib.import_module("tfdist.errors").UsageError
raise UsageError("--lr", "-1 is too small", fix="write more")
"""


WORDS = "--lr: -1 is too small. Fix: write more"


@STARTS
@pytest.mark.parametrize(
    ("source", "code", "cause"),
    [
        ("import sys; sys.exit('no data')", 1, "no data (exit code 1)"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed by SIGKILL, not by the launcher"),
        (MISTAKE, 2, f"{WORDS} (exit code 2)"),
    ],
)
def test_the_launcher_exits_with_the_code_of_its_task(launch, command, source, code, cause):
    job = launch(source, "--run_dir=run", command=command)
    assert job.end() == code
    shown = cause.replace(WORDS, "see the message above")
    assert f"[launch] worker-0 failed first: {shown}\n" in job.text
    assert job.text.count(WORDS) == (code == 2)
    assert f"[launch] {'resume' if code == 137 else 'after the fix'}: " in job.text
    assert report("run")["attempts"][0]["first_failure"]["cause"] == cause
    assert stat.S_IMODE(os.stat("run/report.json").st_mode) == 0o600
    assert "Traceback" not in job.text


# what is shown and kept


def test_output_is_prefixed_and_kept_whole(launch, tmp_path):
    job = launch(
        r"""
        import os, sys
        os.write(1, b"one\n\xff\xfe 1/2\r2/2\r\n")
        print("err", file=sys.stderr)
        os.write(1, b"no end")
        """,
        "--run_dir=a run",
    )
    assert job.end() == 0
    lines = job.text.splitlines()
    assert lines[0] == f"[launch] run directory {tmp_path}/a run"
    assert lines[2:6] == [f"[worker-0] {text}" for text in ("one", "2/2", "err", "no end")]
    assert [line.split()[:2] for line in lines[6:]] == [
        ["[launch]", word] for word in ("done", "files", "report:")
    ]
    log = Path("a run/logs/attempt-1/worker-0.log").read_bytes()
    assert log == b"one\n\xff\xfe 1/2\r2/2\r\nerr\nno end"


def test_much_output_arrives_whole_and_in_order(launch):
    job = launch("for i in range(100_000): print('line', i)", env={"PYTHONUNBUFFERED": ""})
    assert job.end() == 0
    lines = [line for line in job.text.splitlines() if line.startswith("[worker-0] ")]
    assert lines == [f"[worker-0] line {i}" for i in range(100_000)]


def test_a_terminal_gets_colours(launch):
    source = r"""
    import os
    os.write(1, b"10%\r20%\r")
    os.write(1, b"done\n")
    """
    job = launch(source, "--workers=2", stdout=pty.openpty(), env={"TERM": "xterm"})
    assert job.end() == 0
    lines = re.findall(r"\x1b\[\d+m\[worker-[01]\]\x1b\[0m (.*)\r\n", job.text)
    assert lines == ["done", "done"]


# the end of a job


def test_the_first_failure_ends_all_and_is_named_first(launch):
    source = """
    import json, os, signal, sys
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.write(1, b"ready %d\\n" % os.getpid())
    signal.sigwait({signal.SIGTERM})
    print("a victim's words")
    sys.exit(1)
    """
    job = launch(source, "--workers=3", "--run_dir=run")
    job.ready(3)
    ready = re.findall(r"\[(worker-\d)\] ready (\d+)", job.text)
    (first, pid), (other, _), _ = ready  # in the order in which they are on the screen
    os.kill(int(pid), signal.SIGKILL)
    assert job.end() == 137
    assert f"[launch] {first} failed first: killed by SIGKILL, not by the launcher\n" in job.text
    assert job.text.count(f"ready {pid}\n") == 1
    assert "[launch] its output is in " in job.text
    assert "a victim's words" not in job.text
    assert "a victim's words" in Path(f"run/logs/attempt-1/{other}.log").read_text()
    job.assert_gone(0)


def test_the_last_line_of_a_stopped_job_resumes_it(launch):
    job = launch(PAUSE, "--workers=2", args=("a b",))
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143
    *_, stopped, files, _, last = job.text.splitlines()
    assert stopped.startswith("[launch] stopped after 0:0")
    (run,) = Path("runs").iterdir()
    assert files == f"[launch] files in {run}: logs/, report.json"
    Path("program.py").write_text("import sys; print(sys.argv[1:])")
    again = subprocess.run(
        last.removeprefix("[launch] resume: "), shell=True, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "[worker-1] ['a b']\n" in again.stdout
    assert [attempt["exit_code"] for attempt in report(run)["attempts"]] == [143, 0]


# requests to stop


@STARTS
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_a_signal_reaches_each_task_and_sets_exit_code(launch, command, signum, code):
    """And not what a task has started, such as the readers of its data."""
    source = """
    import os, signal
    wanted = {signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    asked, ask = os.pipe()
    if not (reader := os.fork()):
        os.read(asked, 1)
        os._exit(len(signal.sigpending()))
    os.write(1, b"ready %d\\n" % os.getpid())
    signal.sigwait(wanted)
    os.write(ask, b"x")
    print("saved, and heard by", os.waitpid(reader, 0)[1] >> 8, "readers")
    """
    job = launch(source, "--workers=2", command=command)
    titles = {Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for pid in job.ready(2)}
    assert titles == {"tfdist worker-0 program.py", "tfdist worker-1 program.py"}
    job.signal(signum)
    assert job.end() == code
    assert job.text.count("saved, and heard by 0 readers\n") == 2
    assert "Traceback" not in job.text


def test_ctrl_c_on_a_terminal_reaches_each_task_once(launch):
    source = """
    import os, select, signal
    came, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(wake)
    os.write(1, b"ready %d\\n" % os.getpid())
    os.read(came, 1)
    print("interrupts:", 1 + len(select.select([came], [], [], 0.3)[0]))
    """
    master, slave = pty.openpty()
    job = launch(
        source, "--workers=2", stdout=(master, slave), env={"NO_COLOR": "1"}, own_terminal=True
    )
    job.read_until(r"ready \d+", count=2)
    os.write(master, b"\x03")
    assert job.end() == 130
    assert job.text.count("interrupts: 1") == 2


def test_a_signal_ignored_at_the_start_stays_ignored(launch):
    source = "import os; os.write(1, b'ready %d\\n' % os.getpid()); os.read(os.open('fifo', 0), 1)"
    os.mkfifo("fifo")
    job = launch(source, command=("nohup", *LAUNCH))
    job.ready(1)
    job.signal(signal.SIGHUP)
    os.close(os.open("fifo", os.O_WRONLY))
    assert job.end() == 0


# nothing is left behind


@STARTS
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_launcher(launch, command, signum):
    job = launch(TREE, "--workers=2", "--grace_s=0.5", command=command)
    job.ready(10)
    job.signal(signum)
    job.process.wait(DEADLINE_S)
    job.assert_gone()


@pytest.mark.parametrize("code", [0, 3])
def test_no_process_outlives_its_job(launch, code):
    source = f"""
    import os, signal, subprocess, sys
    for options in ({{"env": {{}}}}, {{"start_new_session": True}}):
        subprocess.Popen([sys.executable, "-c", {DEAF!r}], **options)
    os.open("fifo", os.O_RDONLY)
    os._exit({code})
    """
    os.mkfifo("fifo")
    job = launch(source)
    assert len(job.ready(2)) == len(job.pidfds)
    os.close(os.open("fifo", os.O_WRONLY))
    assert job.end() == code
    job.assert_gone(0)


@STARTS
def test_the_kernel_ends_tasks_of_a_killed_launcher(launch, command):
    job = launch(DEAF, "--workers=2", command=command)
    job.ready(2)
    (guardian,) = (pid for pid, line in children(job.process.pid).items() if "guardian" in line)
    job.signal(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    job.signal(signal.SIGKILL)
    job.assert_gone()


def test_a_job_inside_a_task_ends_with_it(launch, tmp_path):
    (tmp_path / "inner.py").write_text(TREE)
    source = f"""
    import subprocess
    subprocess.run({[*LAUNCH, "--workers=2", str(tmp_path / "inner.py")]!r})
    """
    job = launch(source)
    job.ready(10)
    job.signal(signal.SIGKILL)
    job.assert_gone()


def test_a_signal_to_every_process_lets_tasks_save(launch):
    """As a service manager does, or a scheduler: the tasks would end with the fork server."""
    job = launch(
        """
        import os, signal
        def save(*_):
            os.write(1, b"saved\\n")
            os._exit(143)
        signal.signal(signal.SIGTERM, save)
        os.write(1, b"ready %d\\n" % os.getpid())
        while True:
            signal.pause()
        """,
        "--workers=2",
        "--run_dir=run",
        command=FORK,
    )
    tasks = job.ready(2)
    helpers = children(job.process.pid).items()
    server, guardian = sorted(
        pid for pid, line in helpers if "fork server" in line or "guardian" in line
    )
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        os.kill(server, signum)
        os.kill(guardian, signum)
    for pid in (*tasks, job.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert job.end() == 143
    for index in (0, 1):
        assert "saved\n" in Path(f"run/logs/attempt-1/worker-{index}.log").read_text()
    job.assert_gone()


def test_a_fork_server_that_cannot_import_fails_the_job(launch):
    command = [word.replace("'json'", "'no_such_module'") for word in FORK]
    job = launch(PAUSE, "--run_dir=run", command=command)
    assert job.end() != 0
    assert "the fork server exited" in job.text
    assert (
        "No module named 'no_such_module'" in Path("run/logs/attempt-1/fork-server.log").read_text()
    )


# tasks that train with Keras, and have joined no job

ALONE = """
import os, sys
import keras, numpy as np

how, task = sys.argv[1], os.environ["TF_CONFIG"].count('"index": 1')
if how == "joined":
    import tfdist
    strategy = tfdist.make_strategy()
if how == "own strategy":
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")

class Writes(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        open(f"written-{task}", "w").close()

if how == "fit":
    model.fit(x, y, verbose=0, callbacks=[Writes()])
elif how == "batch":
    model.train_on_batch(x, y)
    Writes().on_train_begin()
elif how == "loop":
    import tensorflow as tf
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables),
                              model.trainable_variables)
    step()
    Writes().on_train_begin()
elif how == "chief":
    import tfdist
    if tfdist.is_chief():
        model.fit(x, y, verbose=0, callbacks=[Writes()])
    model.evaluate(x, y, verbose=0)
else:  # also of a model outside of the strategy that the job has
    model.fit(x, y, verbose=0, callbacks=[Writes()])
print("done", task)
"""


def alone(how, *flags, start=forked):
    """Return the exit code and the output of a job, and how many tasks have written."""
    Path("program.py").write_text(ALONE)
    words = ("--workers=2", *flags, "program.py", how)
    found = ended(Path("run"), *words, timeout_s=DEADLINE_S, start=start)
    return *found, len(list(Path().glob("written-*")))


@pytest.mark.parametrize(("how", "start"), [("fit", executed), ("batch", forked), ("loop", forked)])
def test_a_second_lone_training_task_is_stopped_before_writing(launch, how, start):
    code, said, written = alone(how, start=start)
    assert (code, written) == (EXIT_USAGE, 1), said
    failure = report("run")["attempts"][0]["first_failure"]
    assert re.match(r"(fit|train_on_batch|apply): worker-\d and ", failure["cause"])
    assert "train separate models, as no task called tfdist.make_strategy()" in failure["cause"]
    assert "Fix: add the line strategy = tfdist.make_strategy()" in said
    assert "with strategy.scope()" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("how", "flags", "written"),
    [
        ("fit", ["--independent"], 2),
        ("chief", [], 1),
        ("joined", [], 2),
        ("own strategy", [], 2),
    ],
)
def test_joint_and_chief_only_trainings_are_not_stopped(launch, how, flags, written):
    code, said, found = alone(how, *flags)
    assert (code, found) == (0, written), said


# odd surroundings


def test_a_reader_that_leaves_ends_the_job(launch):
    source = "import os, signal\nwhile True: print('x' * 100)"
    job = launch(source, "--workers=2", "--grace_s=0.5", stderr=subprocess.PIPE)
    job.read_until("xxx")
    os.close(job.fd)
    assert job.process.wait(DEADLINE_S) == 141
    said = job.process.stderr.read().decode()
    assert "the launcher's output was closed: stopping" in said
    assert "Traceback" not in said
    job.process.stderr.close()


def test_a_blocked_reader_stops_printing_but_no_signal(launch):
    source = """
    import os, select, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    data = b"x" * 99 + b"\\n"
    while select.select([], [1], [], 1)[1]:
        os.write(1, data * 10)
    told = os.open("fifo", os.O_WRONLY)
    os.write(told, b"full")
    signal.sigwait({signal.SIGTERM})
    os.write(1, data * 50_000)
    os.write(told, b"saved")
    """
    os.mkfifo("fifo")
    fifo = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    job = launch(source, "--grace_s=30")
    for word, signum in [(b"full", signal.SIGTERM), (b"saved", 0)]:
        assert select.select([fifo], [], [], DEADLINE_S)[0]
        assert os.read(fifo, 100) == word
        job.signal(signum)
    os.close(fifo)
    assert job.process.wait(DEADLINE_S) == 143


def test_a_run_directory_in_use_is_refused(launch):
    job = launch(PAUSE, "--run_dir=run")
    job.ready(1)
    other = launch(PAUSE, "--run_dir=run")
    assert other.end() == 2
    assert "another job is running in" in other.text
    assert other.text.count("\n") == 1
