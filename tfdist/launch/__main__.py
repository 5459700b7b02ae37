"""Command line `python -m tfdist.launch`, with an exit code and one-line errors.

Other modules are imported inside `main`, so that Ctrl-C prints no traceback.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_LIMITS = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ETOOMANYREFS: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "give the launcher more memory",
    errno.ENOSPC: "free disk space",
}
"""Errors of the machine that can happen anywhere in the launcher, and their fixes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of the command line and return its exit code."""
    try:
        from tfdist.argument_parser import run_program

        _open_standard_files()
        return run_program("", lambda: _run(argv), is_report=True)
    except KeyboardInterrupt:  # during the import
        return _EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        print(f"tfdist.launch: {error}. Fix: {_LIMITS[error.errno]}", file=sys.stderr)
        return _EXIT_FAILED


def _run(argv: Sequence[str] | None) -> int:
    from tfdist.launch.options import help_text, parse

    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    if options is None:
        print(help_text(full="--helpfull" in words), flush=True)
        return 0
    from tfdist.launch.fork_server import FORK_SERVER  # slow: not for --help
    from tfdist.launch.job_run import run_job

    if options.probe:
        from tfdist.launch.probe import run_probe

        return run_probe(options, environ=dict(os.environ))
    fd = os.environ.pop(FORK_SERVER, "")  # a launcher inside a task does not have it open
    return run_job(options, environ=dict(os.environ), fork_server=int(fd) if fd else None)


def _open_standard_files() -> None:
    """Open closed standard files, so that no log or socket becomes standard output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number, which is `fd`


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Search the working directory last: a secrets.py there must not replace Python's module.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
