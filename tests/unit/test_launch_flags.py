"""The launcher's command line: its own flags, the program's, and every mistake in one line."""

import errno
import os
import re
import sys

import pytest

from tfdist.launch import job_run
from tfdist.launch.__main__ import main
from tfdist.launch.options import Program, imports_tensorflow, parse
from tfdist.options import LaunchFlags, names_of

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


def test_flags_are_read_from_a_file_of_absl(tmp_path):
    (tmp_path / "flags").write_text("--workers=3\n--verbosity=-1\n")
    options = parse(["--flagfile", str(tmp_path / "flags"), "--max_restarts=1", "train.py"])
    assert options is not None
    assert (options.workers, options.verbosity, options.max_restarts) == (3, -1, 1)
    assert options.program.target == "train.py"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_lists_every_flag(word, capsys):
    assert main(["--workers", "2", word]) == 0
    text = capsys.readouterr().out
    assert [
        name for name in names_of(LaunchFlags) if not re.search(rf"^--(\[no\])?{name}:", text, re.M)
    ] == []


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
    # Of those that name a variable which is read at the import.
    "import os\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\nimport keras\n",
    "import os, keras\nos.environ.update(OMP_NUM_THREADS='1')\n",
    "import os, keras\nos.environ.pop(\n    'CUDA_VISIBLE_DEVICES', None\n)\n",
)


@pytest.mark.parametrize("source", [*SAYS_SO, *DOES_NOT])
def test_the_source_of_a_program_shows_its_tensorflow_import(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for name in ("train.py", "outer/inner/__main__.py", "outer/inner/module.py"):
        (tmp_path / name).write_text(source)
    for target in ("train.py", "-m outer.inner", "-m outer.inner.module"):
        program = Program(target=target.removeprefix("-m "), is_module="-m" in target)
        assert imports_tensorflow(program, search=[str(tmp_path)]) is (source in SAYS_SO)
    assert imports_tensorflow(Program(), search=sys.path)  # the demo


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EAGAIN, "raise the limit of processes"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.EBADF, None),  # no user's mistake
    ],
)
def test_system_limits_are_a_one_line_error(monkeypatch, capsys, number, fix):
    def run_job(options, **_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(job_run, "run_job", run_job)
    if fix is None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            main(["train.py"])
        return
    assert main(["train.py"]) == 1
    text = capsys.readouterr().err
    assert f"{os.strerror(number)}. Fix: {fix}" in text
    assert text.count("\n") == 1
