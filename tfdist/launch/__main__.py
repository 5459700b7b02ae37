"""`python -m tfdist.launch`: flags in, exit code out, errors in one line.

What it needs is imported where Ctrl-C ends it without a traceback.
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
    errno.ENOMEM: "give the launcher more memory",
    errno.ENOSPC: "make room",
}
"""What a launcher may run into at any place, which is no bug of its own, and what helps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line asks for; return its exit code."""
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

    options = parse(sys.argv[1:] if argv is None else argv)
    if options is None:
        print(help_text(), flush=True)
        return 0
    from tfdist.launch.fork_server import FORK_SERVER  # not for --help, which is to be fast
    from tfdist.launch.job import run_job

    fd = os.environ.pop(FORK_SERVER, "")  # no launcher in a task has it open
    return run_job(options, environ=dict(os.environ), fork_server=int(fd) if fd else None)


def _open_standard_files() -> None:
    """Open what the caller has closed, so that no log or socket becomes standard output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The directory of the program comes last: its secrets.py, say, is not Python's.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
