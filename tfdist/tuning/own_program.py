"""The program that calls `search`: how it was started, to start it again for each trial."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster import read_environment
from tfdist.errors import UsageError
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
