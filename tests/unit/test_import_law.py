"""A room imports those of its row of the table in docs/architecture.md, which is the law."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked_python
from tests.processes import python

PACKAGE = Path(__file__).parents[2] / "tfdist"
TABLE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
READ_FLAGS = {"launch", "configs", "tuning", "report", "serving", "find"}
MAY_IMPORT = {"errors": set[str](), "phases": set[str]()}
MAY_IMPORT |= {name: {"errors"} for name in ("files", "argument_parser", "ops")}
for _name, _imports in re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", TABLE, re.MULTILINE):
    MAY_IMPORT[_name] = {"errors", "files", "phases", *re.findall(r"`([\w.]+)`", _imports)}
    MAY_IMPORT[_name] |= {"ops", "argument_parser"} if _name.startswith("ops.") else set()
    MAY_IMPORT[_name] |= {"argument_parser"} if _name in READ_FLAGS else set()
# Inside functions alone, in a job of strategy ps; and for types.
WHERE_ASKED_FOR = {
    "strategy": {"ps"},
    "training": {"ps", "pipeline"},
    "app": {"ps"},
    "serving": {"app"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return room_named(dotted(path))


def room_named(module: str) -> str:
    """The room of a module; those of `tfdist.ops` are rooms of their own."""
    _, *parts = [*module.split("."), "", ""]
    return f"ops.{parts[1]}" if f"ops.{parts[1]}" in MAY_IMPORT else parts[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_once(path: Path) -> set[int]:
    """The lines of the imports that are made when the file is imported."""
    body = ast.parse(path.read_text()).body
    return {node.lineno for node in body if isinstance(node, ast.Import | ast.ImportFrom)}


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of tfdist in the file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [node.module or ""]
            if names == ["tfdist"]:
                names = [f"tfdist.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "tfdist":
                yield node.lineno, room_named(name)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_room_imports_only_those_of_its_row(path):
    room = room_of(path)
    if room not in MAY_IMPORT:  # tfdist itself and the programs
        return
    allowed, later = MAY_IMPORT[room] | {room}, WHERE_ASKED_FOR.get(room, set[str]())
    for line, imported in imported_rooms(path):
        if imported in later and line not in at_once(path):
            continue
        assert imported in allowed, f"{path}:{line}: {room} imports {imported or 'tfdist'}"


def test_every_room_is_in_the_law():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert len(rooms) > 15
    assert rooms <= set(MAY_IMPORT)


HEAVY = {"tensorflow", "keras", "numpy"}


@pytest.mark.parametrize(
    ("rooms", "unwanted"),
    [
        ("errors files cluster launch ops ops.doctor ops.submit", HEAVY),
        ("configs outputs report ops.lint", {"tensorflow", "keras"}),
    ],
)
def test_these_rooms_load_no_tensorflow(rooms, unwanted):
    # `__main__` runs a program, and so is not imported; it is in the law above.
    modules = [p for p in MODULES if room_of(p) in rooms.split() and p.name != "__main__.py"]
    assert_begins_without(f"import {', '.join(map(dotted, modules))}", unwanted)


def assert_begins_without(program: str, unwanted: set[str]) -> None:
    program += f"\nimport sys; loaded = {unwanted} & set(sys.modules); assert not loaded, loaded"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


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


def test_a_job_that_is_not_ps_loads_none_of_its_modules():
    done = forked_python.run(
        "-c", OF_ANOTHER_JOB, timeout=120, env={**os.environ, **forked_python.ENVIRON}
    )
    assert done.returncode == 0, done.stderr


BEGINS_WITHOUT = {
    "tfdist": (
        "import tfdist, tfdist.outputs, tfdist.configs; tfdist.errors.near",
        {*HEAVY, "rich"},
    ),
    "find": ("import tfdist.find.__main__, tfdist.find.batch_size", HEAVY),
    "store": ("import tfdist.checkpoint.store", {"tensorflow", "keras"}),
    "lint": ("from tfdist.lint import main; main(['--environ'])", {*HEAVY, "yaml"}),
    "serve": (
        "import tfdist.serve, tfdist.serving.front, tfdist.serving.supervisor,"
        " tfdist.serving.replica",
        HEAVY,
    ),
    "launch": ("import tfdist.launch.job", {"absl", "psutil", "importlib.metadata"}),
    "launch --help": (
        "from tfdist.launch.__main__ import main; main(['--help'])",
        {*HEAVY, "absl", "psutil", "tfdist.launch.plan", "subprocess"},
    ),
    "--version": (
        "from tfdist.__main__ import main; main(['--version'])",
        {*HEAVY, "tfdist.launch"},
    ),
    "env": ("from tfdist.env import main; main([])", HEAVY),
    "submit": (
        "import tfdist.submit; tfdist.submit.main(['--to', 'slurm', '--dry_run', 'a.py'])",
        HEAVY,
    ),
    "spawn": ("import tfdist; tfdist.spawn", {*HEAVY, "cloudpickle"}),
    "tune": (
        "from tfdist.tuning import chief, options, results, sweep; import tfdist.tune",
        {"keras_tuner", "keras", "tensorflow"},
    ),
    "search": ("import tfdist.tuning; tfdist.tuning.search", {"tfdist.training"}),
}


@pytest.mark.parametrize(("program", "unwanted"), BEGINS_WITHOUT.values(), ids=BEGINS_WITHOUT)
def test_a_program_begins_without(program, unwanted):
    assert_begins_without(program, unwanted)
