"""``tfdist PROGRAM ...``, as ``python -m tfdist``: the programs of tfdist under one name.

If the first word names no program, the launcher reads the whole command line. For example,
``tfdist --workers 2 train.py`` is ``tfdist launch --workers 2 train.py``.

Functions import their modules, because `main` runs after the user's directory has moved to the end
of `sys.path`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAMS = {
    "demo": "train a CNN on the digits with 4 workers and 1 parameter server",
    "launch": "start a job on this machine or on several hosts",
    "train": "train an image classifier from a config file",
    "tune": "search for hyperparameters, with a job for each trial",
    "export": "export a trained model for model servers",
    "serve": "serve exported models by REST and gRPC",
    "submit": "submit a job to Slurm or Kubernetes",
    "check": "find mistakes in a job's settings, files and hosts before it starts",
    "report": "write a report of runs and sweeps as one HTML file",
    "top": "show the tasks of a job while it runs",
    "workers": "change the number of workers of a running elastic job",
    "env": "print versions, machine and environment for an issue",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word names and return its exit code."""
    from pathlib import Path

    from tfdist import __version__
    from tfdist.argument_parser import show
    from tfdist.errors import UsageError, near
    from tfdist.renamed import instead_of

    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "--version"):
        text = f"tfdist {__version__}" if first == "--version" else _overview()
        return show("tfdist", text)
    if first in PROGRAMS:
        return _run(first, words[1:])
    if advice := instead_of(f"tfdist {first}") if not Path(first).exists() else "":
        error = UsageError("tfdist", f"the program {first!r} was removed", fix=advice)
        print(error, file=sys.stderr)
        return error.exit_code
    meant = near(first, PROGRAMS) if first.isidentifier() and not Path(first).exists() else ""
    if meant:
        error = UsageError(
            "tfdist",
            f"{first!r} is not a program{meant}",
            fix=f"use one of {', '.join(PROGRAMS)}, or pass a script or flags of launch",
        )
        print(error, file=sys.stderr)
        return error.exit_code
    return _run("launch", words)


def _run(name: str, words: list[str]) -> int:
    import importlib

    try:
        module = importlib.import_module(f"tfdist.{name}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"tfdist.{name}.__main__")
        code: int = module.main(words)
    except ImportError as error:
        if error.name != "tfdist.launch":  # which needs Linux
            raise
        print(f"tfdist {name}: {error}", file=sys.stderr)
        return 2
    return code


def _overview() -> str:
    lines = [
        "usage: tfdist PROGRAM [flags]",
        "       tfdist [flags of launch] script.py [the script's own flags]",
        "",
        *(f"  {name:<8} {about}" for name, about in PROGRAMS.items()),
        "",
        "tfdist PROGRAM is python -m tfdist.PROGRAM. Each program has --help.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The user's secrets.py, for example, must not shadow Python's module.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
