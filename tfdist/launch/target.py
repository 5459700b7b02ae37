"""Whether the program that the tasks are to run is there, found out before any is started."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tfdist.errors import UsageError, near
from tfdist.launch.options import DEFAULT_MODULE, Program

_TENSORFLOW = ("tensorflow", "keras", "tfdist")
_READ_AT_IMPORT = re.compile("(TF|TF2|KERAS|XLA|OMP|CUDA)_")


def check_program(program: Program, *, search: Sequence[str]) -> None:
    """Raises `UsageError`, with the near name, unless the program is there; imports nothing.

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
    """Returns whether code changes a variable that matters, or one whose name it does not say."""
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
    """Returns what may be a variable's name: text, or the keyword of an argument."""
    match part:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            return name
    return None


def _is_environ(target: ast.AST) -> bool:
    return getattr(target, "attr", None) == "environ" or getattr(target, "id", None) == "environ"


def file_of_program(program: Program, *, search: Sequence[str]) -> str:
    """Returns the file of a program that is there; empty if it has none."""
    if program.is_module:
        return _file_of(program.target, search=search)
    return program.target


def _file_of(name: str, *, search: Sequence[str]) -> str:
    """Returns the file of a module that is there, of a package its ``__main__``."""
    places: Sequence[str] | None = search
    origin = ""
    for part in (*name.split("."), "__main__"):
        if places is None:
            break
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            break
        origin, places = spec.origin or "", spec.submodule_search_locations
    return origin


def _check_configuration(program: Program) -> None:
    """Raises `UsageError` for what each task of `tfdist.train` would refuse by itself."""
    from tfdist.configs.command_line import parse  # not for other programs: it takes a moment

    parse(program.args)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_absolute() and path.parts[1] in ("dev", "proc"):
        fix = "write the script to a file"
        received = f"{target}, which is something else in each process"
        raise UsageError("program", received=received, expected="a Python script", fix=fix)
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_file():
        fix = f"make it readable: chmod u+r {target}"
        raise UsageError("program", received=target, expected="a readable script", fix=fix)
    if path.is_dir():
        fix = "name the script in it, or use -m for a package"
        received = f"the directory {target}"
        raise UsageError("program", received=received, expected="a Python script", fix=fix)
    fix = f"correct the path{_near_file(path)}"
    received = f"{target}, which does not exist"
    raise UsageError("program", received=received, expected="a Python script", fix=fix)


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
    places: Sequence[str] | None = search
    found: list[str] = []
    for part in name.split("."):
        full = ".".join([*found, part])
        spec = PathFinder.find_spec(full, places) if places is not None else None
        if spec is None:
            raise _no_module(name, inside=".".join(found), part=part, places=places or ())
        found.append(part)
        places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec(f"{name}.__main__", places) is None:
        fix = f"name a module in it, or add {name.replace('.', '/')}/__main__.py"
        received = f"-m {name}, a package without __main__"
        raise UsageError("program", received=received, expected="a module to run", fix=fix)


def _no_module(name: str, *, inside: str, part: str, places: Sequence[str]) -> UsageError:
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
    received = f"-m {name}, which does not exist"
    return UsageError("program", received=received, expected="a Python module", fix=fix)
