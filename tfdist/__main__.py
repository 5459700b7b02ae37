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
    "demo": "train a CNN on the digits with 4 workers and 1 parameter server, here",
    "launch": "start a job: its processes on this machine, or this host's of a job on several",
    "train": "train an image classifier that a config file describes",
    "tune": "search for hyperparameters; every trial is a job",
    "export": "check a trained model and publish it as a version to serve",
    "serve": "serve exported models by REST and gRPC, in replicas",
    "submit": "give a job to Slurm or Kubernetes",
    "check": "find mistakes in a job's settings, files and hosts before it starts",
    "report": "write what a run or a sweep has left as one HTML file",
    "top": "show the tasks of a job while it runs",
    "env": "print what to paste into an issue: versions, machine, environment",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word names and return its exit code."""
    from pathlib import Path

    from tfdist import __version__
    from tfdist.argument_parser import run_program
    from tfdist.errors import UsageError, near

    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "--version"):
        text = f"tfdist {__version__}" if first == "--version" else _overview()
        return run_program("tfdist", lambda: _show(text), is_report=True)
    if first in PROGRAMS:
        return _run(first, words[1:])
    meant = near(first, PROGRAMS) if first.isidentifier() and not Path(first).exists() else ""
    if meant:
        error = UsageError(
            "tfdist",
            received=f"{first!r}{meant}",
            expected=f"a program ({', '.join(PROGRAMS)}), or a script or flags for the launcher",
            fix="correct the name, or see tfdist --help",
        )
        print(error, file=sys.stderr)
        return error.exit_code
    return _run("launch", words)


def _show(text: str) -> int:
    print(text, flush=True)
    return 0


def _run(name: str, words: list[str]) -> int:
    import importlib

    module = importlib.import_module(f"tfdist.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"tfdist.{name}.__main__")
    code: int = module.main(words)
    return code


def _overview() -> str:
    lines = [
        "usage: tfdist PROGRAM [flags]",
        "       tfdist [flags of launch] script.py [the script's own flags]",
        "",
        *(f"  {name:<8} {about}" for name, about in PROGRAMS.items()),
        "",
        "tfdist PROGRAM is python -m tfdist.PROGRAM; each has --help. tfdist --version tells it.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The user's secrets.py, for example, must not shadow Python's module.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
