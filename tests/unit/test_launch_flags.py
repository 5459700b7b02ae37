"""The launcher's command line: its own flags, the program's, and every mistake in one line."""

import errno
import inspect
import os
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

import tfdist
from tests.processes import python
from tests.refusals import refusal, refused
from tfdist.launch import job
from tfdist.launch.__main__ import main
from tfdist.launch.options import (
    FLAGS,
    OF_OTHERS,
    Program,
    check_program,
    imports_tensorflow,
    parse,
)


def test_flags_are_read_with_a_space_an_equals_sign_and_dashes():
    options = parse(
        ["--strategy", "ps", "--workers=4", "--ps", "2", "--startup-timeout-s=30", "--dry-run"]
    )
    assert (options.strategy, options.workers, options.ps) == ("ps", 4, 2)
    assert options.startup_timeout_s == 30
    assert options.dry_run


REST = ("--workers", "9", "--strategy=x", "-m", "--", "--help", "")
OURS = "tfdist.train"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        # What follows the program reaches it untouched.
        (["train.py", *REST], Program(target="train.py", is_module=False, args=REST)),
        (["-m", "package.module", *REST], Program(target="package.module", args=REST)),
        (["--", "x.py", "--a"], Program(target="x.py", is_module=False, args=("--a",))),
        (["--", "-m", "x", "--a"], Program(target="x", args=("--a",))),
        # Without one the rest goes to our own.
        ([], Program(target=OURS)),
        (["--config.steps=10"], Program(target=OURS, args=("--config.steps=10",))),
        (["--config", "x.py", "--lr"], Program(target=OURS, args=("--config", "x.py", "--lr"))),
        (["--config=x.py"], Program(target=OURS, args=("--config=x.py",))),
        (["--", "--overwrite"], Program(target=OURS, args=("--overwrite",))),
        (["--"], Program(target=OURS)),
    ],
)
def test_a_program_and_its_own_flags_follow_the_launchers(words, program):
    options = parse(["--workers", "2", *words])
    assert (options.workers, options.program) == (2, program)


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_asked_for_and_has_every_flag(word, capsys):
    assert main(["--workers", "2", word]) == 0
    text = capsys.readouterr().out
    assert all(f"--{flag.name}" in text for flag in FLAGS)


MISTAKES = {
    ("--workers", "no-value"): ["--workers", "--workers -- train.py", "--workers=--"],
    ("--workers", "not-an-int"): ["--workers=two"],
    ("--max_restarts", "not-an-int"): ["--max_restarts often"],
    ("--grace_s", "not-a-number"): ["--grace_s soon"],
    ("--dry_run", "unknown-value"): ["--dry_run=perhaps"],
    ("--workers", "given-twice"): ["--workers 2 --workers 3"],
    ("--grace_s", "given-twice"): ["--grace-s=2 --grace_s 2"],
    ("--dry_run", "given-twice"): ["--dry_run --dry_run=false"],
    ("--workers", "out-of-range"): ["--workers 0", "--workers=-1", "--workers 1000000"],
    ("--ps", "out-of-range"): ["--strategy ps --ps 0", "--ps 0"],
    ("--min_workers", "out-of-range"): ["--min_workers 3 --ps 1 --workers 2"],
    ("--devices_per_worker", "out-of-range"): ["--devices_per_worker 0"],
    ("--threads_per_task", "out-of-range"): ["--threads_per_task 0"],
    ("--split_bytes", "out-of-range"): ["--split_bytes 0 --ps 2"],
    ("--max_restarts", "out-of-range"): ["--max_restarts -1"],
    ("--grace_s", "out-of-range"): ["--grace_s -1", "--grace_s nan"],
    ("--restart_window_s", "out-of-range"): ["--restart_window_s 0"],
    ("--startup_timeout_s", "out-of-range"): ["--startup_timeout_s 0"],
    ("--hang_timeout_s", "out-of-range"): ["--hang_timeout_s -5", "--hang_timeout_s 1.5"],
    ("--start", "unknown-value"): ["--start spawn"],
    ("--strategy", "unknown-value"): ["--strategy=PS"],
    ("command line", "unknown-flag"): ["--learning_rate=2"],
    ("--ps", "exclusive"): ["--strategy multiworker --ps 1", "--stages=2 --ps=1"],
    ("--workers", "exclusive"): ["--strategy mirrored --workers 2", "--workers 2 --hosts a,b"],
    ("--devices_per_worker", "exclusive"): ["--strategy single --devices_per_worker 2"],
    ("--stages", "out-of-range"): [
        *("--stages=0", "--stages=2 --workers=3"),
        *("--stages=2 --strategy=ps", "--stages=2 --strategy=multiworker"),
    ],
    ("--hosts", "exclusive"): ["--strategy single --hosts a,b", "--hosts a,b --strategy mirrored"],
    ("--min_workers", "no-ps"): ["--min_workers 2"],
    ("--split_bytes", "LCH001"): ["--split_bytes 9"],
    ("--fork_server", "exclusive"): ["--fork_server 3 --isolate", "--fork_server 3 --start exec"],
    ("--keep_fds", "exclusive"): ["--keep_fds 3 --fork_server 4"],
    ("--metrics_port", "exclusive"): ["--metrics_port 9100 --isolate"],
    ("--keep_fds", "out-of-range"): ["--keep_fds 3,x", "--keep_fds 3,"],
    ("-m", "no-value"): ["-m", "-m --workers"],
    ("program", "empty"): ["", " ", "-- "],
    ("--run_dir", "empty"): ["--run_dir= "],
}


@pytest.mark.parametrize(
    ("where", "code", "line"), [(*key, line) for key, lines in MISTAKES.items() for line in lines]
)
def test_a_mistake_is_found(where, code, line):
    words = line.split(" ") if "= " not in line else [line]
    assert refused(lambda: parse(words)) == (where, code)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with programs, none of which is imported."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "jobs/train_big.py", "package/train.py", "outer/inner/train.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')")
    for name, source in {
        "extends": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)",
        "declares": "__import__('pkg_resources').declare_namespace(__name__)",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "code", "meant"),
    [
        ("trian.py", "missing-file", "did you mean 'train.py'?"),
        ("jobs/train_bug.py", "missing-file", "did you mean 'train_big.py'?"),
        ("job/train.py", "missing-file", ""),
        *((name, "no-file", name) for name in ("jobs", "/", "/dev/stdin")),
        ("x" * 300, "no-file", "(File name too long)"),  # or in a directory not to be entered
        ("-m packages.train", "missing-module", "did you mean 'package'?"),
        ("-m package.trian", "missing-module", "did you mean 'train'?"),
        ("-m outer.inner.trian", "missing-module", "did you mean 'train'?"),
        ("-m package.train.deep", "missing-module", ""),
        ("-m package", "no-main", ""),
        ("-m train.py", "missing-module", "leave -m out"),
    ],
)
def test_a_program_that_is_not_there_is_refused_with_the_near_name(folder, target, code, meant):
    error = refusal(lambda: check(target, folder))
    assert (error.where, error.code) == ("program", code)
    assert meant in str(error)


@pytest.mark.parametrize(
    "target",
    ["jobs/train_big.py", "-m package.train", "-m outer.inner.train",
     "-m extends.anything", "-m declares.anything"],
)  # fmt: skip
def test_a_program_is_there_and_is_not_imported(folder, target):
    check(target, folder)


def check(target, folder):
    program = Program(target=target.removeprefix("-m "), is_module=target.startswith("-m "))
    check_program(program, search=[str(folder)])


class EditableFinder:
    """Finds packages outside of the path, as the finder of an editable install does."""

    def __init__(self, **places):
        self.places = places

    def find_spec(self, name, path=None, target=None):
        place = self.places.get(name)
        if place is None:
            return None
        spec = spec_from_file_location(name, place / "__init__.py")
        spec.submodule_search_locations = [str(place)]
        return spec


def test_a_module_that_a_finder_of_an_editable_install_knows_is_there(folder, monkeypatch):
    before = set(sys.modules)
    finder = EditableFinder(mine=folder / "package")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    (folder / "package" / "train.py").write_text("import keras")
    check("-m mine.train", folder / "jobs")
    assert imports_tensorflow(Program(target="mine.train"), search=[str(folder / "jobs")])
    for target, code in (("-m mine.trian", "missing-module"), ("-m mine", "no-main")):
        assert refusal(lambda target=target: check(target, folder / "jobs")).code == code
    assert set(sys.modules) == before


def test_what_python_m_would_run_from_another_directory_is_planned(tmp_path):
    """With tfdist itself where only a finder knows it, as `pip install -e` may leave it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        f"{inspect.getsource(EditableFinder)}\n"
        "from pathlib import Path\n"
        f"place = Path({str(Path(tfdist.__file__).parent)!r})\n"
        "sys.meta_path.insert(0, EditableFinder(tfdist=place))\n"
        "sys.path[:] = [part for part in sys.path if not Path(part, 'tfdist').is_dir()]\n"
    )
    words = ("-m", "tfdist.launch", "--dry_run", "-m", "tfdist.train")
    done = python(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "-m tfdist.train" in done.stdout


SAYS_SO = (
    "import keras\n",
    "from tensorflow import data\n",
    "if True:\n    import tfdist\n",
    "import os\nos.environ['MY_OWN'] = '3'\nimport keras\n",
    "import os, keras\ntask = json.loads(os.environ['TF_CONFIG'])['task']\n",
    "import os, keras\nif os.environ.get('TF_CONFIG') == 'KERAS_':\n    pass\n",
    "import os, keras\nos.environ.update(MY_OWN='TF')\n",
)
DOES_NOT = (
    "import numpy\n",
    "import kerastuner_of_mine\n",
    "# import keras\n",
    '"""\nimport keras\n"""\n',
    "import keras\nthis is no Python\n",
    # Of those that name a variable which is read at the import.
    "import os\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\nimport keras\n",
    "import os, keras\nos.environ.update(OMP_NUM_THREADS='1')\n",
    "import os, keras\nos.environ.pop(\n    'CUDA_VISIBLE_DEVICES', None\n)\n",
)


@pytest.mark.parametrize("source", [*SAYS_SO, *DOES_NOT])
def test_a_program_says_itself_whether_it_imports_tensorflow(folder, source):
    for name in ("train.py", "outer/inner/__main__.py", "outer/inner/module.py"):
        (folder / name).write_text(source)
    for target in ("train.py", "-m outer.inner", "-m outer.inner.module"):
        program = Program(target=target.removeprefix("-m "), is_module="-m" in target)
        assert imports_tensorflow(program, search=[str(folder)]) is (source in SAYS_SO)
    assert imports_tensorflow(Program(), search=sys.path)  # the demo


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EAGAIN, "raise the limit of processes"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.EBADF, None),  # no user's mistake
    ],
)
def test_a_limit_of_the_system_is_one_line(monkeypatch, capsys, number, fix):
    def run_job(options, *, environ):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(job, "run_job", run_job)
    if fix is None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            main(["train.py"])
        return
    assert main(["train.py"]) == 1
    text = capsys.readouterr().err
    assert f"{os.strerror(number)}. Fix: {fix}" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-n", "workers"),
        ("-np", "workers"),
        ("--nproc-per-node=2", "workers"),
        ("--nnodes", "hosts"),
        ("--worker", "workers"),
        ("--devices-per-workers", "devices_per_worker"),
        ("-workers", "workers"),
    ],
)
def test_near_flags_and_those_of_other_launchers_lead_to_ours(theirs, ours):
    assert f"(did you mean --{ours}?)" in str(refusal(lambda: parse([theirs, "2", "train.py"])))
    names = {flag.name for flag in FLAGS}
    assert set(OF_OTHERS.values()) <= names
    assert not names & set(OF_OTHERS)
