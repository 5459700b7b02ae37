"""Print the test files that import a module: `python -m tests.tools.tests_of tfdist/files.py`.

A name that a package re-exports counts as an import of the module that defines it, and so does a
module in a string, such as "-m tfdist.top". A test also counts if it runs a program that imports
the module. If no test does, the tests of the package are printed.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SUITES = ("unit", "integration", "field", "multiprocess")


@functools.cache
def imported_names(path: Path) -> dict[str, str]:
    """Return each name that a file imports from tfdist, and its full name."""
    return {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdist")
        for alias in node.names
    }


@functools.cache
def modules_in(path: Path) -> set[str]:
    """Return the modules of tfdist that a file imports or names, and the packages of these."""
    names = set(re.findall(r"\btfdist(?:\.\w+)+", path.read_text()))
    names |= {*imported_names(path).values()}
    found = set()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = defined_name(name) or name.rpartition(".")[0]
    return found


def defined_name(name: str) -> str | None:
    """Return the full name of something that a package imports from one of its modules."""
    package, _, attribute = name.rpartition(".")
    source = Path(*package.split("."), "__init__.py")
    defined = imported_names(source).get(attribute) if source.exists() else None
    return None if defined == name else defined


def tests_of(module: str) -> Iterator[Path]:
    """Yield the test files that name the module, or run a program that does."""
    programs = {p.stem for p in Path("tests").glob("*/programs/*.py") if module in modules_in(p)}
    names = "|".join(programs) or "(?!)"
    runs = re.compile(rf"programs?[./ ]+(?:import )?({names})\b|\b({names})\.py\b")
    for suite in SUITES:
        for path in sorted(Path("tests", suite).glob("test_*.py")):
            if module in modules_in(path) or runs.search(path.read_text()):
                yield path


def main(source: str) -> int:
    """Print the tests of a source file; return 2 if it is no file of the package."""
    module = ".".join(Path(source).with_suffix("").parts).removesuffix(".__init__")
    if not Path(source).exists() or not module.startswith("tfdist"):
        print(f"{source}: no file of tfdist. Fix: FILE=tfdist/files.py", file=sys.stderr)
        return 2
    while not (found := list(tests_of(module))):
        module = module.rpartition(".")[0]
    print(*found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
