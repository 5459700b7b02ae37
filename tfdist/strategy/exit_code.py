"""Exit hook: a user's error ends the program with one line and its exit code."""

from __future__ import annotations

import sys
from types import TracebackType

from tfdist.errors import TfdistError


def end_mistakes_in_one_line() -> None:
    """Have an uncaught `TfdistError` printed as one line, and its exit code be the process's.

    TF_CONFIG and the exit code are all that a scheduler and a program know of each other, so this
    holds for every program that has made a strategy. Other errors go on to the hook from before.
    """
    before = sys.excepthook
    if getattr(before, "tells_mistakes", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TfdistError):
            before(kind, error, trace)
            return
        print(f"tfdist: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)  # which Python takes from its hook as from a program

    hook.tells_mistakes = True  # type: ignore[attr-defined]
    sys.excepthook = hook
