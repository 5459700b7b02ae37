"""The size of the package and its public surface: a change that grows either must say so here.

An ADR raises a budget and names the feature that pays for it. Lower a budget when a room shrinks.
The surface is in `data/surface.txt`; `python -m tests.unit.test_budgets` prints the current one.
"""

from __future__ import annotations

import ast
import collections
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import tfdist
from tfdist.configs import FIELDS
from tfdist.options import LaunchFlags, names_of
from tfdist.tuning.options import SweepOptions

PACKAGE = Path(tfdist.__file__).parent
SURFACE = Path(__file__).parent / "data" / "surface.txt"
LINES = {
    "basics": 940,  # errors, files, phases, argument_parser, loopback: what every room may import
    "cluster": 1_710,
    "launch": 8_414,
    "strategy": 3_314,
    "data": 2_621,
    "checkpoint": 2_867,
    "training": 8_373,
    "ps, pipeline": 4_865,
    "elastic": 1_909,
    "tuning": 2_916,
    "serving": 3_053,
    "around": 6_766,  # report, outputs, app, find, ops, audit, configs and the programs
}
ROOMS = {
    **dict.fromkeys(
        ("errors", "files", "phases", "argument_parser", "loopback", "renamed"), "basics"
    ),
    **{name: name for name in LINES},
    **dict.fromkeys(("ps", "pipeline"), "ps, pipeline"),
}


def sources() -> Iterator[tuple[str, str]]:
    """Yield the room and the text of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).with_suffix("").parts[0]
        yield ROOMS.get(first, "around"), path.read_text()


def test_no_room_grows_past_its_budget():
    lines = collections.Counter[str]()
    for room, text in sources():
        lines[room] += text.count("\n")
    assert {room: count for room, count in lines.items() if count > LINES[room]} == {}


def surface() -> list[str]:
    """Return public names, flags, config fields, required packages and variables, a line each."""
    lines = [f"name {name}" for name in tfdist.__all__]
    lines += [f"name data.{name}" for name in public_names(PACKAGE / "data" / "__init__.py")]
    lines += [f"launch --{name}" for name in names_of(LaunchFlags)]
    lines += [f"config {name}" for name in FIELDS]
    lines += [f"tune --{name}" for name in names_of(SweepOptions)]
    lines += [f"requires {re.split('[<>=]', line)[0]}" for line in required()]
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        lines += [f"variable {name}" for name in re.findall(r"\bTFDIST_[A-Z_]*[A-Z]\b", text)]
        lines += [f"{path.relative_to(PACKAGE)} {flag}" for flag in flags_in(ast.parse(text))]
    return sorted(set(lines))


def required() -> list[str]:
    """Return the packages that are installed with tfdist."""
    metadata = configparser.ConfigParser()
    metadata.read(PACKAGE.parent / "setup.cfg")
    return metadata["options"]["install_requires"].split()


def public_names(path: Path) -> list[str]:
    """Return `__all__` of a module without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path}: no __all__")


def flags_in(tree: ast.AST) -> Iterator[str]:
    """Yield the flags that a module adds to a parser."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            flag = str(first.value) if isinstance(first, ast.Constant) else ""
            if called in ("add", "add_argument") and flag.startswith("--"):
                yield flag


def test_the_public_surface_is_the_listed_one():
    assert surface() == SURFACE.read_text().splitlines()


if __name__ == "__main__":
    print(*surface(), sep="\n")
