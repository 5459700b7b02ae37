"""The program that calls `search`: how it was started, to start it again for each trial."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import read_environment
from tfdist.errors import UsageError, near
from tfdist.launch.options import Program


def own_program(main: Any, args: Sequence[str]) -> Program:
    """Returns how the program whose main module this is was started, to start it again.

    Raises UsageError in an interactive session, which cannot be run again.
    """
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return Program(target=spec.name.removesuffix(".__main__"), args=tuple(args))
    if file is None:
        raise UsageError(
            "tfdist.tuning.search",
            received="a call from an interactive session or a notebook",
            expected="a program: each trial runs it again",
            fix="put it into a file; in one process, use tuner.search with tuning.HyperModel",
        )
    return Program(target=os.path.abspath(file), is_module=False, args=tuple(args))


def imports_of(source: str) -> list[str]:
    """Returns the modules that a program imports at its top, as far as they are installed ones.

    Its own, beside it, are left out: each trial is to import these itself.
    """
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name for name in dict.fromkeys(names) if _is_installed(sys.modules.get(name))]


def _is_installed(module: Any) -> bool:
    parts = Path(getattr(module, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


def require_known(
    given: Iterable[str], *, own: Iterable[str], fit: Callable[[], Iterable[str]]
) -> None:
    """Raises UsageError for an argument that is neither fit's nor search's but almost so.

    Others may be those of a hypermodel's own fit.
    """
    own = list(own)
    for name in given:
        if (meant := near(name, own)) and name not in fit():
            raise UsageError(
                f"search(..., {name}=...)",
                received=f"{name}{meant}",
                expected="an argument of search or of fit",
                fix="correct the name",
            )


def require_alone(environ: Mapping[str, str]) -> None:
    """Raises UsageError in one of several tasks, each of which would search."""
    config = read_environment(environ)
    if config is not None and len(config.cluster.tasks()) > 1:
        raise UsageError(
            "tfdist.tuning.search",
            received=f"a call in a {config.cluster.kind} job of several tasks",
            expected="one process, which starts a job for each trial",
            fix="start the program by itself, and name the strategy in search(strategy=...)",
        )
