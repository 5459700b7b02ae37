"""`python -m tfdist.launch`. What it needs is imported where Ctrl-C ends it without a traceback."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that the command line asks for and returns its exit code."""
    try:
        from tfdist.launch.command import run

        return run(argv)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
