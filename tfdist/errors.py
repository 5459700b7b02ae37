"""Exception types and the exit code of each.

A user's mistake prints one line, ``where: problem. Fix: action``, without a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import numbers
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PEER_MISSING = 75
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143


class TfdistError(Exception):
    """Base class of tfdist's errors. `exit_code` is the exit code of the program."""

    exit_code: int = EXIT_FAILED
    # AutoGraph and the calls of Keras' layers would raise an error of another class.
    ag_pass_through = _keras_call_info_injected = True

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of the traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(TfdistError, ValueError):
    """A user's mistake. Most are found before any process starts or any file is overwritten.

    `code` names the cause in a few words, such as ``"unknown-value"``, and stays stable. Tests and
    programs compare `where` and `code`. The message is for the reader: `problem` is a sentence
    without its full stop, and contains the received value if that helps.
    """

    exit_code = EXIT_USAGE

    def __init__(self, where: str, problem: str, *, fix: str, code: str = "") -> None:
        super().__init__(f"{where}: {problem}. Fix: {fix}")
        self.where = where
        self.problem = problem
        self.fix = fix
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        names = ("problem", "fix", "code")
        return functools.partial(UsageError, self.where, **{n: getattr(self, n) for n in names}), ()


class StartupTimeout(TfdistError, TimeoutError):
    """A peer did not connect within the timeout. The message names it. Retrying may help."""

    exit_code = EXIT_PEER_MISSING


class PeerLost(TfdistError):
    """The connection to a task was lost and the job cannot continue. Retrying may help."""

    exit_code = EXIT_PEER_MISSING


class JobFailed(TfdistError):
    """A job of `tfdist.spawn` failed. The message names the first task that failed and its error.

    `exit_code` is the exit code of the job. `task` is the first task that failed, such as
    ``"worker-1"``, or "" if no task was started. `traceback` is the text of its traceback, or "".
    If the task's exception can be pickled, it is the `__cause__`.
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
    """`fit` received a signal that requests a stop, and has saved its state if possible.

    It is a SystemExit, so ``except Exception`` does not catch it. If no code catches it, the
    process exits with `exit_code` and without a traceback. `str` returns the line that the chief
    logged.
    """

    def __init__(self, signum: int, message: str = "") -> None:
        import signal  # imported here to keep the start of all programs fast

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
    """Return a comma-separated list of at most `most` names and the number of further names."""
    names = [str(thing) for thing in things]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def require(condition: object, where: str, problem: str, *, fix: str, code: str = "") -> None:
    """Raise UsageError unless `condition` holds. Use it if the texts are cheap to build."""
    if not condition:
        raise UsageError(where, problem, fix=fix, code=code)


def require_int(
    where: str, value: object, *, least: int | None = None, fix: str = "", code: str = "not-an-int"
) -> int:
    """Return an int (also NumPy's, but no bool) of at least `least`, or raise UsageError."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = operator.index(value)
        if least is None or number >= least:
            return number
    bound = "" if least is None else f" of at least {least}"
    raise UsageError(
        where,
        f"{value!r} is not a whole number{bound}",
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
) -> float:
    """Return `value` as a finite float greater than `above` and at least `least`."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an int too large for a float
            number = math.inf
        within = (above is None or number > above) and (least is None or number >= least)
        if math.isfinite(number) and within:
            return number
    bounds = [f"above {above:g}"] if above is not None else []
    bounds += [f"of at least {least:g}"] if least is not None else []
    raise UsageError(
        where,
        " ".join([f"{value!r} is not a finite number", *([f"of {unit}"] if unit else []), *bounds]),
        fix=fix or ("pass a number in this range" if bounds else "pass a finite number"),
        code="not-a-number",
    )


def require_one_of(
    where: str, value: object, choices: Iterable[str], *, fix: str = "", code: str = "unknown-value"
) -> str:
    """Return `value` if it is in `choices`, else raise UsageError with the closest choice."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    listed = named(names, most=30)
    raise UsageError(
        where,
        f"{value!r} is unknown{near(str(value), names)}",
        fix=f"{fix} (choices: {listed})" if fix else f"choose from {listed}",
        code=code,
    )


def require_packages(where: str, *names: str, extra: str, more: str = "") -> None:
    """Raise UsageError unless packages are installed: an extra of tfdist's, and `more`."""
    import importlib.util  # imported here to keep the start of all programs fast

    missing = ", ".join(name for name in names if importlib.util.find_spec(name) is None)
    fix = f"run pip install 'tfdist[{extra}]' {more}".rstrip()
    require(not missing, where, f"cannot import {missing}", fix=fix, code="missing-package")


@contextlib.contextmanager
def opening_port(flag: str, address: object) -> Iterator[None]:
    """Raise UsageError for the flag of an address if the block cannot listen on that address."""
    try:
        yield
    except (OSError, OverflowError) as error:
        reason, _, _ = f"{getattr(error, 'strerror', None) or error}".partition(" (while ")
        raise UsageError(
            flag,
            f"cannot listen on {address}: {reason}",
            fix="choose a free port and an address of this host, or stop the process on that port",
            code="port-taken",
        ) from None


def mutually_exclusive(given: Mapping[str, object], *, fix: str = "") -> None:
    """Raise UsageError if more than one of the names has a value (not `None`, False or "")."""
    names = [name for name, value in given.items() if value not in (None, False, "")]
    if len(names) > 1:
        raise UsageError(
            names[0],
            f"{' and '.join(names)} exclude each other",
            fix=fix or "keep only one of the names",
            code="exclusive",
        )


def end_mistakes_in_one_line() -> None:
    """Print an uncaught `TfdistError` as one line, and exit with the exit code of the error.

    A scheduler sees only the exit code of a program, so `make_strategy`, `run_dir` and callbacks
    call this function. The previous hook handles other errors.
    """
    before = sys.excepthook
    if getattr(before, "tells_mistakes", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TfdistError):
            before(kind, error, trace)
            return
        print(f"tfdist: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)  # Python accepts SystemExit from its hook

    hook.tells_mistakes = True  # type: ignore[attr-defined]
    sys.excepthook = hook
