"""Exception types and the exit code of each.

A user's mistake is one line, ``where: received X; expected Y. Fix: Z``, and no traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PEER_MISSING = 75
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143


class TfdistError(Exception):
    """Base of every error that tfdist raises; `exit_code` is what a program ends with."""

    exit_code: int = EXIT_FAILED


class UsageError(TfdistError, ValueError):
    """A mistake in what the user wrote; found before anything is started or overwritten.

    `code` is the rule of `tfdist.ops.lint` that it breaks; empty where it is no rule's.
    """

    exit_code = EXIT_USAGE

    def __init__(
        self, where: str, *, received: object, expected: str, fix: str, code: str = ""
    ) -> None:
        super().__init__(f"{where}: received {received}; expected {expected}. Fix: {fix}")
        self.where = where
        self.received = received
        self.expected = expected
        self.fix = fix
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_usage_error, (self.where, self.received, self.expected, self.fix, self.code))


class StartupTimeout(TfdistError, TimeoutError):
    """A peer did not come within the time given; the message names it. Worth another try."""

    exit_code = EXIT_PEER_MISSING


class PeerLost(TfdistError):
    """A task that was there has gone, and the job cannot go on without it. Worth another try."""

    exit_code = EXIT_PEER_MISSING


class Stopped(SystemExit):
    """`fit` was asked to stop by a signal, has saved what it could, and ends.

    As the end of a program and no error of it, it passes ``except Exception``, and where nobody
    catches it the process ends with the exit code and without a traceback. `str` is the line that
    the chief has logged.
    """

    def __init__(self, signum: int, message: str = "") -> None:
        import signal  # here, as this module is loaded by all that must start fast

        self.signum = int(signum)
        self.exit_code = EXIT_INTERRUPTED if signum == signal.SIGINT else EXIT_STOPPED
        self.message = message or f"stopped by {signal.Signals(signum).name}"
        super().__init__(self.exit_code)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (Stopped, (self.signum, self.message))


def near(name: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the choice closest to `name`, or ``""``."""
    match = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def given_twice(flag: str) -> UsageError:
    """Return the error for a flag given twice, of which the last would silently be taken."""
    return UsageError(flag, received="it twice", expected="one value", fix="give it once")


def _usage_error(where: str, received: object, expected: str, fix: str, code: str) -> UsageError:
    return UsageError(where, received=received, expected=expected, fix=fix, code=code)
