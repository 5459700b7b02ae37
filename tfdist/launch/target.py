"""Check of the tasks' program before any task is started."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tfdist.errors import UsageError, near
from tfdist.launch.options import DEFAULT_MODULE, Program

_TENSORFLOW = ("tensorflow", "keras", "tfdist")
_ADDS_MODULES = re.compile(rb"__path__|declare_namespace|sys\.modules|meta_path")
_READ_AT_IMPORT = re.compile("(TF|TF2|KERAS|XLA|OMP|CUDA)_")


def check_program(program: Program, *, search: Sequence[str]) -> None:
    """Raise `UsageError`, with the near name, unless the program is there; import nothing.

    `search` is where modules are looked for, as `sys.path` is.
    """
    if program.is_module:
        _check_module(program.target, search=search)
        if program.target == DEFAULT_MODULE:
            _check_configuration(program)
    else:
        _check_script(program.target)


def imports_tensorflow(program: Program, *, search: Sequence[str]) -> bool:
    """Returns whether a program says that it imports TensorFlow, and leaves its settings alone.

    It looks for an import of tensorflow, keras or tfdist in the program's own file. A program that
    sets variables which TensorFlow or Keras read at their import wants to do so before.
    """
    path = file_of_program(program, search=search)
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return False  # the task says it
    return any(map(_imports, nodes)) and not any(map(_sets, nodes))


def _imports(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in _TENSORFLOW for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.split(".")[0] in _TENSORFLOW
    return False


def _sets(node: ast.AST) -> bool:
    """Return whether code changes a variable that matters, or one whose name it does not say."""
    match node:
        case (
            ast.Subscript(value=target, ctx=ast.Store() | ast.Del())
            | ast.AugAssign(target=target)
            | ast.Call(func=ast.Attribute(value=target, attr="setdefault" | "update" | "pop"))
        ) if _is_environ(target):
            inside = node
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv" | "setenv" | "delenv")):
            inside = node
        case _:
            return False
    names = [name for part in ast.walk(inside) if (name := _name_in(part))]
    return not names or any(_READ_AT_IMPORT.match(name) for name in names)


def _name_in(part: ast.AST) -> str | None:
    """Return what may be a variable's name: text, or the keyword of an argument."""
    match part:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            return name
    return None


def _is_environ(target: ast.AST) -> bool:
    return getattr(target, "attr", None) == "environ" or getattr(target, "id", None) == "environ"


def file_of_program(program: Program, *, search: Sequence[str]) -> str:
    """Return the file of a program that is there; empty if it has none."""
    if program.is_module:
        return _file_of(program.target, search=search)
    return program.target


def _file_of(name: str, *, search: Sequence[str]) -> str:
    """Return the file of a module that is there, of a package its ``__main__``."""
    *_, found = _found(name, search=search)
    if found is not None and found.places is not None:
        *_, found = _found(f"{name}.__main__", search=search)
    return "" if found is None else found.file


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    file: str
    """Empty where it has none."""
    places: Sequence[str] | None
    """Where the modules of a package are; None for a module."""


def _found(name: str, *, search: Sequence[str]) -> Iterator[_Module | None]:
    """Yield the packages on the way to a module, and it; None, as the last, for what is missing.

    All that an import would ask is asked, since an editable install may bring a finder of its own,
    and nothing is imported. So what a package makes of itself when it is imported stays unseen.
    """
    places: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        found = _find(".".join(parts[:count]), places, search=search)
        yield found
        if found is None:
            return
        places = found.places or ()  # nothing is inside a module


def _find(name: str, places: Sequence[str] | None, *, search: Sequence[str]) -> _Module | None:
    parent = name.rpartition(".")[0]
    with _present(parent, places):
        for finder in sys.meta_path:
            if finder is BuiltinImporter or not hasattr(finder, "find_spec"):
                continue  # built-in modules cannot be run
            at = search if finder is PathFinder and places is None else places
            spec = finder.find_spec(name, at)
            if spec is not None:
                inside = spec.submodule_search_locations
                file = spec.origin if spec.has_location and spec.origin else ""
                return _Module(file=file, places=None if inside is None else list(inside))
    return None


@contextlib.contextmanager
def _present(package: str, places: Sequence[str] | None) -> Iterator[None]:
    """Have finders see a package as imported: for a namespace inside another one they look."""
    if not package or package in sys.modules:
        yield
        return
    stand_in = ModuleType(package)
    stand_in.__path__ = places  # type: ignore[assignment]  # as the import system reads it
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


def _check_configuration(program: Program) -> None:
    """Raise `UsageError` for what each task of `tfdist.train` would refuse by itself."""
    from tfdist.configs.command_line import parse  # not for other programs: it takes a moment

    parse(program.args)


def _refuse(received: str, expected: str, fix: str, *, code: str) -> NoReturn:
    raise UsageError("program", received=received, expected=expected, fix=fix, code=code)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_absolute() and path.parts[1] in ("dev", "proc"):
        received = f"{target}, which is something else in each process"
        _refuse(received, "a Python script", "write the script to a file", code="no-file")
    if path.is_dir():
        fix = "name the script in it, or use -m for a package"
        _refuse(f"the directory {target}", "a Python script", fix, code="no-file")
    if not path.is_file():
        fix = f"correct the path{_near_file(path)}"
        _refuse(f"{target}, which does not exist", "a Python script", fix, code="missing-file")
    if not os.access(path, os.R_OK):
        fix = f"make it readable: chmod u+r {target}"
        _refuse(target, "a readable script", fix, code="not-readable")


def _near_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        missing = path.parent
        return f" (there is no directory {missing})"
    best = near(path.name, names)
    if not best or path.parent == Path():
        return best
    return best.replace("'", f"'{path.parent}/", 1)


def _check_module(name: str, *, search: Sequence[str]) -> None:
    places: Sequence[str] = search
    package, inside = None, ""
    for part, found in zip(name.split("."), _found(name, search=search), strict=False):
        if found is None:
            if package is None or not _may_have_more(package):
                _refuse_module(name, inside=inside, part=part, places=places)
            return
        package, inside, places = found, f"{inside}.{part}".lstrip("."), found.places or ()
    if package is None or package.places is None or _may_have_more(package):
        return
    *_, main = _found(f"{name}.__main__", search=search)
    if main is None:
        fix = f"name a module in it, or add {name.replace('.', '/')}/__main__.py"
        received = f"-m {name}, a package without __main__"
        _refuse(received, "a module to run", fix, code="no-main")


def _may_have_more(package: _Module) -> bool:
    """Return whether a package says that it adds modules to itself when it is imported."""
    try:
        return bool(_ADDS_MODULES.search(Path(package.file).read_bytes()))
    except OSError:
        return False


def _refuse_module(name: str, *, inside: str, part: str, places: Sequence[str]) -> NoReturn:
    names = {
        entry.stem
        for place in places
        if Path(place or ".").is_dir()
        for entry in Path(place or ".").iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").is_file()
    }
    meant = near(part, names)
    if meant and inside:
        meant = meant.replace("'", f"'{inside}.", 1)
    fix = f"correct the name{meant}"
    if name.endswith(".py"):
        fix = "leave -m out to run a script by its path"
    _refuse(f"-m {name}, which does not exist", "a Python module", fix, code="missing-module")
