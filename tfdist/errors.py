"""Exception types and the exit code of each.

A user's mistake is one line, ``where: received X; expected Y. Fix: Z``, and no traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PEER_MISSING = 75
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143


class TfdistError(Exception):
    """Base of every error that tfdist raises; `exit_code` is that of the program."""

    exit_code: int = EXIT_FAILED


class UsageError(TfdistError, ValueError):
    """A mistake in what the user wrote; found before anything is started or overwritten.

    `code` names the cause and stays when the wording changes: the rule that is
    broken (``"TFC016"``), else a few words in lower case (``"unknown-value"``). `where` and `code`
    are what tests and programs compare; the line is for the reader.
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
        parts = {name: getattr(self, name) for name in ("received", "expected", "fix", "code")}
        return functools.partial(UsageError, self.where, **parts), ()


class StartupTimeout(TfdistError, TimeoutError):
    """A peer did not come within the time given; the message names it. Worth another try."""

    exit_code = EXIT_PEER_MISSING


class PeerLost(TfdistError):
    """A task that was there has gone, and the job cannot go on without it. Worth another try."""

    exit_code = EXIT_PEER_MISSING


class JobFailed(TfdistError):
    """A job of `tfdist.spawn` has failed; the message says which task failed first, and of what.

    `exit_code` is the job's, `task` the first failure's, such as ``"worker-1"``, "" where the job
    did not come to have tasks; `traceback` is the text of its traceback, "" where it has none. The
    exception itself is the `__cause__`, where it can be sent to another process.
    """

    def __init__(
        self, message: str, *, exit_code: int = EXIT_FAILED, task: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.task = task
        self.traceback = traceback

    def __reduce__(self) -> tuple[object, ...]:
        parts = {name: getattr(self, name) for name in ("exit_code", "task", "traceback")}
        return functools.partial(JobFailed, str(self), **parts), ()


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


def named(things: Iterable[object], *, most: int = 8) -> str:
    """Return tasks, say, as a list for a person, the first ones only where there are many."""
    names = [str(thing) for thing in things]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def given_twice(flag: str) -> UsageError:
    """Return the error for a flag given twice, of which the last would silently be taken."""
    return UsageError(
        flag, received="it twice", expected="one value", fix="give it once", code="given-twice"
    )


def require(
    condition: object, where: str, *, received: object, expected: str, fix: str, code: str
) -> None:
    """Raise the error unless `condition` holds; for texts that cost nothing to build."""
    if not condition:
        raise UsageError(where, received=received, expected=expected, fix=fix, code=code)


def require_int(
    where: str, value: object, *, least: int | None = None, fix: str = "", code: str = "not-an-int"
) -> int:
    """Return `value` as an int: Python's or NumPy's, no bool, and of at least `least`."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = operator.index(value)
        if least is None or number >= least:
            return number
    bound = "" if least is None else f" of at least {least}"
    raise UsageError(
        where,
        received=repr(value),
        expected=f"a whole number{bound}",
        fix=fix or f"pass an int, such as {1 if least is None else max(least, 1)}",
        code=code,
    )


def require_number(
    where: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    unit: str = "",
    fix: str = "",
    code: str = "not-a-number",
) -> float:
    """Return `value` as a finite float that is more than `above` and at least `least`."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # of a whole number that no float holds
            number = math.inf
        within = (above is None or number > above) and (least is None or number >= least)
        if math.isfinite(number) and within:
            return number
    bounds = [f"above {above:g}"] if above is not None else []
    bounds += [f"of at least {least:g}"] if least is not None else []
    raise UsageError(
        where,
        received=repr(value),
        expected=" ".join(["a number", *([f"of {unit}"] if unit else []), *bounds]),
        fix=fix or "pass such a number",
        code=code,
    )


def require_one_of(
    where: str, value: object, choices: Iterable[str], *, fix: str = "", code: str = "unknown-value"
) -> str:
    """Return `value` if it is one of `choices`; the error names the one that is nearest."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    raise UsageError(
        where,
        received=f"{value!r}{near(str(value), names)}",
        expected=f"one of {', '.join(names)}",
        fix=fix or "name one of them",
        code=code,
    )


def require_packages(where: str, *names: str, extra: str) -> None:
    """Raise an error unless the packages of an extra of tfdist are installed."""
    import importlib.util  # here, as this module is loaded by all that must start fast

    missing = [name for name in names if importlib.util.find_spec(name) is None]
    require(
        not missing,
        where,
        received=f"an environment without {', '.join(missing)}",
        expected=f"the packages of the extra {extra!r}",
        fix=f"pip install 'tfdist[{extra}]'",
        code="missing-package",
    )


@contextlib.contextmanager
def opening_port(flag: str, address: object) -> Iterator[None]:
    """Raise UsageError, of the flag that gives an address, where the block cannot listen there."""
    try:
        yield
    except (OSError, OverflowError) as error:
        reason, _, _ = f"{getattr(error, 'strerror', None) or error}".partition(" (while ")
        raise UsageError(
            flag,
            received=f"{address} ({reason})",
            expected="an address and a free port of this machine",
            fix="end what listens there, or give another one",
            code="port-taken",
        ) from None


def mutually_exclusive(given: Mapping[str, object], *, fix: str = "") -> None:
    """Raise an error if more than one of `given` is set; None, False and "" are not.

    Args:
        given: The values by the names that the user wrote, such as ``{"--join": options.join}``.
        fix: What to do instead; by default to leave out all but one.
    """
    names = [name for name, value in given.items() if value not in (None, False, "")]
    if len(names) > 1:
        raise UsageError(
            names[0],
            received=f"{' and '.join(names)} together",
            expected="one of them",
            fix=fix or "leave out all but one",
            code="exclusive",
        )
