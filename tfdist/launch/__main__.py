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

_EXIT_INTERRUPTED = 130
_EXIT_SIGPIPE = 141
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
        return _run(argv)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    from tfdist.errors import EXIT_FAILED, TfdistError
    from tfdist.launch.options import help_text, parse

    _open_standard_files()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options is None:
            from tfdist.launch.screen import show

            show(help_text())
            return 0
        from tfdist.launch.job import run_job  # not for --help, which is to be there at once

        return run_job(options, environ=dict(os.environ))
    except TfdistError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # nobody reads the plan or the help to its end
        return _EXIT_SIGPIPE
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        print(f"tfdist.launch: {error}. Fix: {_LIMITS[error.errno]}", file=sys.stderr)
        return EXIT_FAILED


def _open_standard_files() -> None:
    """Open what the caller has closed, so that no log or socket becomes standard output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


if __name__ == "__main__":
    sys.exit(main())
