"""A room imports the rooms to its left, and those that promise it load no TensorFlow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tfdist"
MAY_IMPORT = {
    "errors": set[str](),
    "files": {"errors"},  # imported by all
    "argument_parser": {"errors"},
    "cluster": {"errors"},
    "rendezvous": {"errors", "cluster"},
    "launch": {"errors", "cluster", "configs", "rendezvous"},
    "schedulers": {"errors", "cluster"},
    "configs": {"errors"},
    "lint": {"errors", "argument_parser", "cluster", "configs", "launch"},
    "preflight": {"errors", "cluster", "rendezvous", "launch", "lint"},
    "tuning": {
        *("errors", "configs", "outputs", "cluster", "rendezvous", "launch", "strategy"),
        *("checkpoint", "training", "argument_parser"),
    },
    "outputs": {"errors"},
    "strategy": {"errors", "cluster"},
    "data": {"errors", "cluster", "strategy"},
    "checkpoint": {"errors", "cluster", "strategy", "data"},
    "training": {"errors", "cluster", "strategy", "data", "checkpoint", "configs", "outputs"},
}
WITHOUT_TENSORFLOW = (
    *("errors", "files", "cluster", "rendezvous", "launch", "preflight"),
    *("schedulers", "configs", "outputs", "lint"),
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
                yield node.lineno, [*name.split("."), ""][1]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_room_imports_only_the_rooms_to_its_left(path: Path) -> None:
    room = room_of(path)
    if room not in MAY_IMPORT:  # tfdist itself and the programs
        return
    allowed = MAY_IMPORT[room] | {room} | ({"files"} if room != "errors" else set())
    for line, imported in imported_rooms(path):
        assert imported in allowed, f"{path}:{line}: {room} imports {imported or 'tfdist'}"


def test_every_room_is_in_the_law() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", WITHOUT_TENSORFLOW)
def test_these_rooms_load_neither_tensorflow_nor_keras(room: str) -> None:
    # `__main__` runs a program, and so is not imported; it is in the law above.
    names = [dotted(p) for p in MODULES if room_of(p) == room and p.name != "__main__.py"]
    heavy = {"tensorflow", "keras"} | (
        {"numpy"} if room not in ("configs", "outputs", "lint") else set()
    )
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}];"
        f"loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_launcher_loads_nothing_that_only_jobs_on_several_hosts_need() -> None:
    program = "import sys, tfdist.launch.job; assert 'importlib.metadata' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
