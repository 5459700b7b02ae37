"""Whether the program that the tasks are to run is there, found out before any is started."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tfdist.errors import UsageError, near
from tfdist.launch.options import DEFAULT_MODULE, Program

_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+(?:tensorflow|keras|tfdist)\b", re.MULTILINE)
_SETS = re.compile(r"""(?:environ\b.*|putenv\(|setenv\()["'](?:TF_|KERAS_|XLA_|OMP_|CUDA_|TF2_)""")


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
        source = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return bool(_IMPORTS.search(source)) and not _SETS.search(source)


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
