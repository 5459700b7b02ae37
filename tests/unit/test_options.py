"""Each option is written once, in `tfdist/options.py`, and the other modules derive from it."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
from pathlib import Path

import pytest

import tfdist
from tests.refusals import refusal
from tfdist.launch.options import split
from tfdist.options import (
    JobOptions,
    JobSettings,
    LaunchFlags,
    TrainFlags,
    flags_of,
    names_of,
    option,
    read,
    table,
    underscored,
)
from tfdist.tuning.options import SweepOptions

PACKAGE = Path(tfdist.__file__).parent
FLAGS = {name for of in (LaunchFlags, TrainFlags) for name in names_of(of)}
DECLARES = ("add", "collect", "add_argument", "DEFINE_string", "DEFINE_integer", "DEFINE_bool")
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}


def texts(nodes):
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_each_variable_is_named_once():
    """Python runs launch/guardian.py by its path, so it has its own name of the job's mark."""
    places = collections.defaultdict(list)
    for path, tree in TREES.items():
        for text in texts(ast.walk(tree)):
            if re.fullmatch("_?TFDIST_[A-Z_]*", text):
                places[text].append(path)
    assert places.pop("_TFDIST_JOB") == ["launch/guardian.py", "options.py"]
    assert places.pop("_TFDIST_FORK_SERVER") == ["launch/fork_server.py"]
    assert len(places.pop("TFDIST_")) > 0  # the prefix
    assert {name: found for name, found in places.items() if found != ["options.py"]} == {}
    assert {one.variable for one in table(JobSettings).values() if one.variable} < {*places}


def test_no_other_module_has_a_table_of_flags():
    """The keys of a sweep's journal are not flags of the launcher."""
    tables = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names = texts(getattr(node, "elts", []) or getattr(node, "keys", []) or [])
            if isinstance(node, ast.ClassDef):
                names = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
            if len({name.removeprefix("--") for name in names} & FLAGS) > 4:
                tables.append((path, node.lineno))
    assert {path for path, _ in tables} == {"options.py"}


def test_a_flag_of_the_table_is_declared_nowhere_else():
    """These three programs have a flag of the same name with another meaning."""
    flags = {f"--{name}" for of in (SweepOptions, LaunchFlags, TrainFlags) for name in names_of(of)}
    found = {
        (path, name)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(DECLARES)
        for name in texts(node.args[:1])
        if name in flags
    }
    other = {("export.py", "--best"), ("serve.py", "--on"), ("submit/command_line.py", "--env")}
    assert found == other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    count: int = option(1, "a number", least=1, most=9)
    kind_of: str = option("a", "a choice", choices=("a", "b"))
    is_on: bool = option(False, "a switch")
    share: float | None = option(None, "a share", above=0, below=1)
    hidden: int = option(0)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--kind-of=b", "--count", "2"], {"kind_of": "b", "count": 2}),
        (["--count=2", "--count=3"], {"count": 3}),
        (["--is-on"], {"is_on": True}),
        (["--is_on=false"], {"is_on": False}),
        (["--no-is-on"], {"is_on": False}),
        (["--nois_on"], {"is_on": False}),
    ],
)
def test_flags_are_read_with_dashes_and_the_last_counts(words, values):
    made = flags_of(Flags)
    takes_value = {name: not made[name].boolean for name in made}
    ours, rest = split([*words, "train.py", "--kind-of=x"], takes_value=takes_value)
    assert (read(made, ours), rest) == (values, ["train.py", "--kind-of=x"])


@pytest.mark.parametrize(
    ("word", "where", "code"),
    [
        ("--count=0", "--count", "bad-value"),
        ("--count=many", "--count", "bad-value"),
        ("--count", "--count", "no-value"),
        ("--kind_of=c", "--kind_of", "bad-value"),
        ("--is_on=maybe", "--is_on", "bad-value"),
        ("--nois_on=3", "command line", "command-line"),
        ("--token=hunter2", "command line", "unknown-flag"),
        ("--hidden=1", "command line", "unknown-flag"),
        ("-", "command line", "unknown-flag"),
    ],
)
def test_a_wrong_flag_is_an_error_without_its_value(word, where, code):
    error = refusal(lambda: read(flags_of(Flags), [word]))
    assert (error.where, error.code) == (where, code)
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("count", 3, ""),
        ("count", 10, "out of range (1 or more; 9 or less)"),
        ("count", True, "is not a whole number"),
        ("share", None, ""),
        ("share", 1, "out of range (more than 0; less than 1)"),
        ("share", float("nan"), "out of range"),
        ("kind_of", "B", "is not one of a, b"),
        ("kind_of", ["a"], "is not one of a, b"),
        ("is_on", 1, "is not true or false"),
    ],
)
def test_values_from_python_use_the_same_table(name, value, says):
    fault = table(Flags)[name].fault(value)
    assert says in fault
    assert bool(fault) == bool(says)


def test_only_the_name_of_a_flag_is_translated():
    assert underscored("--run-dir=a-b") == "--run_dir=a-b"
    assert underscored("-h") == "--help"
    assert underscored("--dry-run") == "--dry_run"


@pytest.mark.parametrize("given", ["gs://bucket/run", "gs:/bucket/run"])
def test_a_run_directory_at_a_url_is_refused(given):
    problem = f"{given!r} is a URL, and the directory must be local (callbacks accept URLs)"
    assert refusal(lambda: JobOptions(run_dir=given)).problem == problem
    assert JobOptions(run_dir="/mnt/gs:/bucket").run_dir
    assert Path(given) == Path("gs:/bucket/run")  # a Path has no second slash
