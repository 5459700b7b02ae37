"""Check of the tasks' program before any task is started."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import NoReturn

from tfdist.errors import UsageError, near
from tfdist.launch.options import DEFAULT_MODULE, Program

_TENSORFLOW = ("tensorflow", "keras", "tfdist")
_READ_AT_IMPORT = re.compile("(TF|TF2|KERAS|XLA|OMP|CUDA)_(?!CONFIG$)[A-Z0-9_]+")
_ADDS_MODULES = re.compile(rb"__path__|declare_namespace|sys\.modules|meta_path")


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
    """Return whether a program's own file imports tensorflow, keras or tfdist.

    One that names a variable which these read at their import may set it, and has to do so before:
    of such a program it returns False.
    """
    path = file_of_program(program, search=search)
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return False  # the task says it
    return any(map(_imports, nodes)) and not any(map(_names_a_variable, nodes))


def _imports(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in _TENSORFLOW for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.split(".")[0] in _TENSORFLOW
    return False


def _names_a_variable(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            return _READ_AT_IMPORT.fullmatch(name) is not None
    return False


def file_of_program(program: Program, *, search: Sequence[str]) -> str:
    """Return the file of a program that is there, of a package its ``__main__``; "" if none."""
    if not program.is_module:
        return program.target
    *_, spec = _specs(program.target, search=search)
    if spec.submodule_search_locations is not None:
        *_, spec = _specs(f"{program.target}.__main__", search=search)
    return spec.origin if spec.has_location and spec.origin else ""


def _specs(name: str, *, search: Sequence[str]) -> list[ModuleSpec]:
    """Return the specs of the packages on the way to a module, and its own if it is there.

    All finders that an import would ask are asked, since an editable install may bring one of its
    own, and nothing is imported. So what a package makes of itself at its import stays unseen.
    """
    specs: list[ModuleSpec] = []
    places, parts = search, name.split(".")
    for depth, part in enumerate(parts, 1):
        for finder in sys.meta_path:
            if finder is BuiltinImporter or not hasattr(finder, "find_spec"):
                continue  # built-in modules cannot be run
            if finder is PathFinder:  # for a name with dots it would look at the package itself
                spec = finder.find_spec(part, places)
            else:
                spec = finder.find_spec(".".join(parts[:depth]), places if specs else None)
            if spec is not None:
                break
        else:
            break
        specs.append(spec)
        places = list(spec.submodule_search_locations or ())  # nothing is inside a module
    return specs


def _check_configuration(program: Program) -> None:
    """Raise `UsageError` for what each task of `tfdist.train` would refuse by itself."""
    from tfdist.configs.command_line import parse  # not for other programs: it takes a moment

    parse(program.args)


def _refuse(received: str, expected: str, fix: str, *, code: str) -> NoReturn:
    raise UsageError("program", received=received, expected=expected, fix=fix, code=code)


def _check_script(target: str) -> None:
    path = Path(target)
    # What is in /dev or /proc is something else in each process.
    if path.is_dir() or path.parts[:2] in (("/", "dev"), ("/", "proc")):
        fix = "write the script to a file, or use -m for a package"
        _refuse(f"{target}, which is no file", "a Python script", fix, code="no-file")
    if not path.is_file():
        meant = near(path.name, [entry.name for entry in path.parent.glob("*")])
        received = f"{target}, which does not exist{meant}"
        _refuse(received, "a Python script", "correct the path", code="missing-file")
    if not os.access(path, os.R_OK):
        fix = f"make it readable: chmod u+r {target}"
        _refuse(target, "a readable script", fix, code="not-readable")


def _check_module(name: str, *, search: Sequence[str]) -> None:
    parts, specs = name.split("."), _specs(name, search=search)
    if specs and _adds_modules(specs[-1]):
        return
    if len(specs) < len(parts):
        places = specs[-1].submodule_search_locations or () if specs else search
        entries = [entry for place in places for entry in Path(place or ".").glob("*")]
        names = {entry.stem for entry in entries if entry.suffix in ("", ".py")}
        received = f"-m {name}, which does not exist{near(parts[len(specs)], names)}"
        is_script = name.endswith(".py")
        fix = "leave -m out to run a script by its path" if is_script else "correct the name"
        _refuse(received, "a Python module", fix, code="missing-module")
    if specs[-1].submodule_search_locations is None:
        return
    if len(_specs(f"{name}.__main__", search=search)) == len(parts):
        fix = f"name a module in it, or add {name.replace('.', '/')}/__main__.py"
        received = f"-m {name}, a package without __main__"
        _refuse(received, "a module to run", fix, code="no-main")


def _adds_modules(package: ModuleSpec) -> bool:
    """Return whether a package says that it adds modules to itself when it is imported."""
    if package.submodule_search_locations is None or not package.has_location:
        return False
    try:
        return bool(_ADDS_MODULES.search(Path(package.origin or "").read_bytes()))
    except OSError:
        return False
