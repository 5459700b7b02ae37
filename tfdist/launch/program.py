"""Running a program inside a task's process as ``python program args`` would run it.

Imported by every task before its program, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OURS = {__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}
_INTERRUPTED = 130


def run_program(
    target: str,
    args: Sequence[str],
    *,
    is_module: bool,
    failed: Callable[[int, str], None],
) -> None:
    """Runs `target` as ``__main__``; returns, or raises SystemExit with its exit code.

    `failed` is called with the exit code and the cause as soon as the program has failed:
    ending takes a process with TensorFlow long enough that its peers may end before it.
    """
    try:
        if is_module:
            _run_module(target, args)
        else:
            _run_script(target, args)
    except SystemExit as ended:
        code = _exit_code(ended)
        if code:
            said = isinstance(ended.code, str) or hasattr(ended, "signum")  # tfdist.Stopped
            failed(code, str(ended) if said else f"exit code {code}")
        raise
    except KeyboardInterrupt as interrupt:
        _line(f"KeyboardInterrupt{_where(interrupt.__traceback__)}")
        sys.exit(_INTERRUPTED)
    except BaseException as error:
        sys.exit(_explain(error, failed=failed))


def _run_script(path: str, args: Sequence[str]) -> None:
    sys.argv[:] = [path, *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    main = _fresh_main()
    main.__dict__.update(
        __file__=full, __cached__=None, __loader__=SourceFileLoader("__main__", full)
    )
    with open(full, "rb") as file:
        source = file.read()
    # Not with this file's own `from __future__` imports, which `compile` would hand on.
    exec(compile(source, full, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, args: Sequence[str]) -> None:
    import runpy

    sys.argv[:] = [name, *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what python -m calls


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    return ended.code & 0xFF if isinstance(ended.code, int) else 1


def _explain(error: BaseException, *, failed: Callable[[int, str], None]) -> int:
    """Says what went wrong: a line for a mistake, a traceback for a bug. Returns the exit code."""
    from tfdist.errors import TfdistError

    if isinstance(error, TfdistError):
        failed(error.exit_code, str(error))
        _line(str(error))
        return error.exit_code
    failed(1, f"{type(error).__name__}: {_gist(str(error))}".removesuffix(": "))
    trace = _users_part(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _gist(message: str) -> str:
    """Returns the line of a message that says what happened.

    TensorFlow's begin with "Graph execution error:", and end with what it was and the node's name.
    """
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith("[[")]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[-1]}"
    return lines[0] if lines else ""


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def _where(trace: TracebackType | None) -> str:
    trace = _users_part(trace)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""


def _line(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
