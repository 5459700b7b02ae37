"""`tfdist` names and runs every program, and its public names are found on first use."""

import ast
import importlib.machinery
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import tfdist
from tests.processes import python
from tests.refusals import refusal
from tfdist import __main__ as programs
from tfdist import demo, env, serve, top
from tfdist.launch import options


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_overview_names_every_program_and_loads_none(words, capsys):
    assert programs.main(words) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in programs.PROGRAMS)


@pytest.mark.parametrize("words", ["--help", "train --helpfull"])
def test_a_closed_output_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfdist", *words.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_lists_its_flags(name):
    done = python("-m", "tfdist", name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m tfdist.{name}" in done.stdout
    assert len(done.stdout.splitlines()) > 4


def test_user_files_named_like_python_modules_are_not_imported(tmp_path):
    for module in ("secrets", "random", "logging", "difflib", "pathlib"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('a file of the user')")
    for name in ("launch", "tune", "report"):
        done = python("-m", "tfdist", name, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_unknown_program_names_belong_to_the_launcher(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("print('here')")
    (tmp_path / "trains").write_text("print('here')")
    for words in (["--dry_run", "job.py"], ["--workers", "2", "--dry_run", "trains"]):
        assert programs.main(words) == 0
        assert "# worker-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        (programs, ["lauch", "--workers", "2"], "not a program (did you mean 'launch'?)"),
        (programs, ["train.py"], "'train.py' is not a file"),
        (top, ["a", "b"], "tfdist.top: command line: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(program, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(words) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error


@pytest.mark.parametrize(
    ("flags", "variables"),
    [(["--no_such_flag"], {}), ([], {"TFDIST_STRATEGY": "ps"}), ([], {"TF_CONFIG": "{"})],
)
def test_a_training_refuses_flags_and_variables_without_tensorflow(flags, variables):
    program = (
        "import sys; from tfdist import train; code = train.main(sys.argv[1:]);"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = python("-c", program, *flags, env={**os.environ, **variables})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("tfdist.train: "), done.stderr
    assert [*flags, *variables][0].strip("-") in done.stderr, done.stderr


# tfdist env and tfdist demo


def test_the_report_has_versions_machine_and_relevant_variables():
    told = dict(env.report({"TF_CONFIG": '{"task": {}}', "TFDIST_PS": "", "HOME": "/home/me"}))
    assert told["tfdist"] == tfdist.__version__
    assert {"python", "tensorflow", "keras", "numpy", "protobuf", "system"} <= set(told)
    assert told["CPUs"].split()[0].isdecimal()
    assert (told["TF_CONFIG"], told["TFDIST_PS"]) == ('{"task": {}}', "(empty)")
    assert "HOME" not in told


def test_the_report_shows_only_the_name_of_secrets():
    secrets = {
        "TFDIST_API_TOKEN": "hunter2",
        "https_proxy": "http://me:hunter2@proxy:80",
        "KERAS_API_KEY": "hunter2",
        "XLA_AUTH": "hunter2",
        "TF_NOTE": "hf_hunter2hunter2hunter2",
        "KERAS_PW": "hunter2",
        "TF_OPTIONS": '{"token": "hunter2"}',
    }
    told = dict(env.report({**secrets, "AWS_SECRET_ACCESS_KEY": "hunter2"}))
    assert {told[name] for name in secrets} == {"set, not shown"}
    assert "hunter2" not in str(told)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ([], ("ps", 4, 1)),
        (["--workers", "2"], ("ps", 2, 1)),
        (["--strategy", "multiworker", "--workers=3"], ("multiworker", 3, None)),
        (["--config.batch_size=8", "--config.ps=3"], ("ps", 4, 1)),
    ],
)
def test_the_shape_of_the_demo_may_be_given(flags, shape):
    job = options.parse(demo.command(flags))
    assert job is not None
    assert (job.strategy, job.workers, job.ps) == shape
    assert job.program.target == "tfdist.train"


def test_the_demo_without_data_names_the_missing_package(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert demo.main([]) == 2
    assert "pip install 'tfdist[digits]'" in capsys.readouterr().err


# Extras

OPTIONAL = [
    *("grpc", "grpc_health", "httptools", "jinja2", "keras_tuner", "orjson"),
    *("prometheus_client", "ray", "setproctitle", "sklearn", "tensorboard", "tensorflow_datasets"),
    *("tensorflow_serving", "uvicorn", "uvloop"),
]
WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))  # they cannot be imported
import numpy as np
import tfdist
from tfdist import errors, find, launch
from tfdist.launch.__main__ import main
assert main(["--help"]) == 0
import keras
strategy = tfdist.make_strategy("single")
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
tfdist.fit(model, x, y, batch_size=4, verbose=0, callbacks=[tfdist.BackupAndRestore("backup")])
from tfdist.outputs.scalars import ScalarWriter
ScalarWriter("events").write(3, {{"val_loss": 0.5}})
from tfdist.submit.__main__ import main as submit
from tfdist import demo, serve, tune
space = tune.parse(["--config", "x.py", "--max_trials", "1"])
for extra, call in {{
    "tune": lambda: tune._run(space),
    "tune ": lambda: tfdist.tuning.search,
    "tfds": lambda: tfdist.data.tfds.from_tfds("mnist", "train"),
    "digits": lambda: tfdist.data.tfds.from_tfds("tfdist_digits", "train"),
    "serving": lambda: serve._serve(["backup"]),
    "serving ": lambda: tfdist.export_model(model, "served"),
}}.items():
    try:
        call()
    except tfdist.UsageError as error:
        assert error.fix == f"run pip install 'tfdist[{{extra.strip()}}]'", error
    else:
        raise AssertionError(extra)
for extra, program, words in (
    ("submit", submit, ["--to", "kubernetes", "--image", "i", "--dry_run"]),
    ("digits", demo.main, []),
    ("metrics", main, ["--metrics_port", "9464", "--run_dir", "run"]),
    ("ray", main, ["--on", "ray", "-m", "tfdist.train"]),
):
    print(extra, file=sys.stderr, flush=True)
    assert program(words) == 2
"""


def test_tfdist_works_without_extras_and_names_missing_ones(tmp_path):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    (tmp_path / "program.py").write_text(WITHOUT_EXTRAS)
    done = python(tmp_path / "program.py", cwd=tmp_path, env={**environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for extra in ("submit", "digits", "ray"):
        following = lines[lines.index(extra) + 1]
        assert f"pip install 'tfdist[{extra}]'" in following, done.stderr
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (event,) = events.Tensors("validation/loss")
    assert (event.step, float(make_ndarray(event.tensor_proto))) == (3, 0.5)
    assert events.SummaryMetadata("validation/loss").plugin_data.plugin_name == "scalars"


def test_serve_on_ray_without_ray_serve_names_the_extra(monkeypatch, tmp_path):
    partial = types.ModuleType("ray")
    partial.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", partial)
    error = refusal(lambda: serve._serve([str(tmp_path), "--on", "ray"]))
    assert (error.where, error.code) == ("--on ray", "missing-package")
    assert "'tfdist[ray]'" in error.fix


# Public names


def test_a_similar_name_is_suggested():
    with pytest.raises(AttributeError, match=r"no attribute 'brodcast' \(did you mean 'broad"):
        tfdist.brodcast  # noqa: B018
    assert not hasattr(tfdist, "nothing_like_it")


def test_every_public_name_is_found_beside_its_type():
    """mypy reads the imports for types; what is found on first use is the same."""
    assert set(tfdist.__all__) <= set(dir(tfdist))
    tree = ast.parse(Path(tfdist.__file__).read_text())
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {}
    for node in checking.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            is_module = node.module == "tfdist"
            homes[alias.name] = f"tfdist.{alias.name}" if is_module else node.module
    del homes["Any"]
    assert homes == tfdist._HOME_OF
    assert {*homes, "__version__"} == set(tfdist.__all__)
