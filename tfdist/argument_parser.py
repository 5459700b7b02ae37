"""Command lines of tfdist's programs: one line for a mistake, one exit code for each error."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, Stopped, TfdistError, UsageError, near
from tfdist.options import underscored
from tfdist.renamed import instead_of

_EXIT_SIGPIPE = 141


def run_program(name: str, run: Callable[[], int], *, is_report: bool = False) -> int:
    """Run a program and return its exit code, or the exit code of the error that it raises.

    `name` starts each error line once. A program with `is_report` opens no pipes or sockets, so a
    BrokenPipeError means that the reader has closed standard output. Such a program exits without a
    message.
    """
    with contextlib.suppress(OSError):  # a failed flush, after the change
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
    try:
        return run()
    except TfdistError as error:
        print(error if str(error).startswith(name) else f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:  # the chief has logged it
        return stopped.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not is_report:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python flushes the pipe at exit
        return _EXIT_SIGPIPE


def show(name: str, text: str) -> int:
    """Print a program's text and return the exit code, also if the reader closes the output."""

    def run() -> int:
        print(text, flush=True)
        return EXIT_OK

    return run_program(name, run, is_report=True)


@contextlib.contextmanager
def reading_file(flag: str, path: object, *, expected: str) -> Iterator[None]:
    """Raise UsageError if the block cannot read the file of a flag or its content is invalid."""
    try:
        yield
    except (OSError, ValueError, EOFError) as error:
        problem = f"cannot read {path} ({getattr(error, 'strerror', None) or error})"
        raise UsageError(flag, problem, fix=f"pass {expected}", code="no-file") from None


def load_function(text: str, refused: Callable[[str], UsageError]) -> Callable[..., Any]:
    """Return the function ``file.py:function``, or raise `refused(reason)` if it does not exist.

    The file is run as a module. It can import the modules beside it, as a script can.
    """
    import importlib.util  # slow, and --help does not need it

    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location("module_of_a_flag", path) if path else None
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise refused("the Python file does not exist")
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise refused(f"the file has no function {name!r}{near(name, vars(module))}")
    return function


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError`. Flags may have dashes for underscores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values, or raise UsageError with the closest name for an unknown flag."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = [underscored(w) if w.startswith("--") else w for w in words[:end]]
        for word in words[:end]:
            flag, _, value = word.partition("=")
            if value == "--":  # argparse would drop it
                self.error(f"argument {flag}: expected one argument")
        # Without "--", positional words may stand between and after flags.
        parse = self.parse_known_args if "--" in words else self.parse_known_intermixed_args
        values, rest = parse(words, namespace)
        if rest:
            raise self.unknown(rest[0])
        return values

    def unknown(self, word: str) -> UsageError:
        """Return the error for an unknown word, without its value, which may be a secret."""
        name = word.partition("=")[0]
        hint = near(name, self._option_string_actions) if name.startswith("--") else ""
        problem = f"{name!r} is not an argument of {self.prog}{hint}"
        fix = instead_of(name) or "see --help"
        return UsageError("command line", problem, fix=fix, code="unknown-flag")

    def error(self, message: str) -> NoReturn:
        """Raise a message of argparse as a UsageError."""
        match = re.fullmatch(r"argument (\S+): (.*)", message)
        where, problem = match.groups() if match else ("command line", message)
        is_missing = "expected" in problem or "required" in problem
        code = "no-value" if is_missing else "bad-value"
        raise UsageError(where, problem, fix="see --help", code=code)
