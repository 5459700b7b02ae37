"""Programs start fast: what they import. `make lint` holds which room may import which."""

import os

import grimp
import pytest

from tests import forked_python
from tests.processes import python
from tfdist.launch.fork_server import ONE_THREAD

HEAVY = {"tensorflow", "keras", "numpy"}

OF_ANOTHER_JOB = """
import sys
import keras, numpy as np
import tfdist
strategy = tfdist.make_strategy("mirrored", devices_per_worker=2)
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"])
tfdist.fit(model, x, y, batch_size=4, validation_data=(x, y), verbose=0)
tfdist.evaluate(model, x, y, batch_size=4, verbose=0)
tfdist.predict(model, x, batch_size=4, verbose=0)
loaded = [name for name in sys.modules if name.startswith("tfdist.ps")]
assert not loaded, loaded
"""


def test_other_jobs_load_no_ps_modules():
    done = forked_python.run(
        "-c", OF_ANOTHER_JOB, timeout=120, env={**os.environ, **forked_python.ENVIRON}
    )
    assert done.returncode == 0, done.stderr


WITHOUT_LINUX = """
import sys, types
import filelock, keras, keras_tuner, ml_collections, multiprocessing, os, psutil, rich.table, signal
import numpy as np

# Libraries keep this system's calls. tfdist, imported below, has only those of Windows.
for library in [each for each in sys.modules.values() if each is not sys.modules["__main__"]]:
    for module in (os, signal):
        if vars(library).get(module.__name__) is module:
            vars(library)[module.__name__] = types.SimpleNamespace(**vars(module))
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pty", "pwd", "resource", "termios")))
for module, names in {
    os: "P_ALL WNOHANG fork forkpty fchmod fchown chown geteuid getegid getgid getloadavg getpgid"
    " getuid killpg memfd_create mkfifo nice pidfd_open pipe2 posix_fadvise pread pwrite"
    " register_at_fork sched_getaffinity sched_setaffinity sendfile set_blocking setsid statvfs"
    " sysconf uname waitid O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_PATH",
    signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2"
    " pthread_kill pthread_sigmask setitimer sigtimedwait sigwait sigwaitinfo",
}.items():
    for name in names.split():
        delattr(module, name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("tfdist"), arguments

sys.addaudithook(refuse)
import tfdist
from tfdist.__main__ import main

strategy = tfdist.make_strategy("mirrored", devices_per_worker=2)
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

def build(hp):
    with strategy.scope():
        units = hp.Int("units", 1, 4)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
        model.compile("adam", "mse")
    return model

model = build(keras_tuner.HyperParameters())
model.fit(x, y, batch_size=4, verbose=0, callbacks=[tfdist.BackupAndRestore("backup")])
model.evaluate(x, y, verbose=0)
model.predict(x, verbose=0)
tuner = keras_tuner.RandomSearch(build, "val_loss", max_trials=2, directory="tuner")
tuner.search(x, y, batch_size=4, validation_data=(x, y), verbose=0)
assert tuner.get_best_hyperparameters()
assert main(["env"]) == 0
for program in ("launch", "tune", "submit", "check", "demo"):
    assert main([program]) == 2
for load in (
    lambda: tfdist.spawn,
    lambda: tfdist.find_batch_size,
    lambda: tfdist.tuning.search,
):
    try:
        load()
    except ImportError as error:
        assert "need Linux. Fix: " in str(error)
    else:
        raise AssertionError(load)
"""


def test_one_process_trains_and_searches_without_linux(tmp_path):
    done = python(
        *("-c", WITHOUT_LINUX),
        cwd=tmp_path,
        env={**os.environ, **forked_python.ENVIRON},
    )
    assert done.returncode == 0, done.stderr
    assert "\njobs:                 this system cannot start" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "need Linux" in line]
    assert [line.split(":")[0] for line in lines] == [
        f"tfdist {program}" for program in ("launch", "tune", "submit", "check", "demo")
    ]


BEGINS_WITHOUT = {
    "rooms": (
        "import tfdist.launch.job_run, tfdist.launch.spawn, tfdist.outputs, tfdist.report.__main__,"
        " tfdist.configs, tfdist.top, tfdist.find.batch_size, tfdist.serve,"
        " tfdist.serving.front, tfdist.serving.supervisor, tfdist.serving.replica; tfdist.spawn",
        {*HEAVY, "cloudpickle"},
    ),
    "tfdist": ("import tfdist; tfdist.errors.near", {*HEAVY, "rich", "tfdist.launch"}),
    "store": ("import tfdist.checkpoint.store", {"tensorflow", "keras"}),
    "launch": ("import tfdist.launch.job_run", {"absl", "psutil", "importlib.metadata"}),
    "launch --help": (
        "from tfdist.launch.__main__ import main; main(['--help'])",
        {*HEAVY, "ml_collections", "psutil", "tfdist.launch.plan", "subprocess"},
    ),
    "submit": (
        "from tfdist.submit.__main__ import main; main(['--to', 'slurm', '--dry_run', 'a.py'])",
        HEAVY,
    ),
    "tune": (
        "from tfdist.tuning import chief, options, results, sweep; import tfdist.tune",
        {"keras_tuner", "keras", "tensorflow", "tfdist.training"},
    ),
}


@pytest.mark.parametrize(("program", "unwanted"), BEGINS_WITHOUT.values(), ids=BEGINS_WITHOUT)
def test_programs_start_without_unneeded_imports(program, unwanted):
    program += f"\nimport sys; loaded = {unwanted} & set(sys.modules); assert not loaded, loaded"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_modules_of_a_fork_server_start_no_thread():
    code = "import tensorflow, keras, pandas, os; print(os.listdir('/proc/self/task'))"
    threads = python("-c", code, env={**os.environ, **ONE_THREAD}).stdout
    assert threads.count("'") == 2, threads


def test_modules_have_no_import_cycles():
    """Imports inside functions count, those for types do not."""
    graph = grimp.build_graph("tfdist", exclude_type_checking_imports=True, cache_dir=None)
    pairs = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    assert len(pairs) > 500
    assert [(a, b) for a, b in pairs if a != b and graph.find_shortest_chain(b, a)] == []
