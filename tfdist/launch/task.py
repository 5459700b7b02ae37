"""Process of a task: runs its program as ``python program args`` would.

Imported by every task before its program, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from tfdist.launch import heartbeat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OURS = {
    __file__,
    f"{__file__[: -len('task.py')]}spawn.py",
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
}
_INTERRUPTED = 130
_MAX_CAUSE_CHARS = 500  # so that a note, escapes and all, is written to the pipe in one piece


def main(argv: Sequence[str]) -> None:
    """Run a program: task name, title, descriptor for notes, script or module, target, args."""
    task, title, notes_fd, kind, target, *args = argv
    os.set_inheritable(int(notes_fd), False)
    run_task(
        target, args, is_module=kind == "module", task=task, title=title, notes_fd=int(notes_fd)
    )


def run_task(
    target: str, args: Sequence[str], *, is_module: bool, task: str, title: str, notes_fd: int
) -> None:
    """Run a program as the task's, and tell the launcher on `notes_fd` how it gets on."""
    set_title(title)
    failed = note_to(notes_fd, task=task)
    heartbeat.print_stacks_on_request()
    heartbeat.start(notes_fd, task=task)
    run_program(target, args, is_module=is_module, failed=failed)


def note_to(notes_fd: int, *, task: str) -> Callable[[int, str], None]:
    """Return a function that tells the launcher when, how and why a program failed.

    Where the program has forked, its children end by the same way: they tell nothing.
    """
    pid = os.getpid()

    def failed(exit_code: int, cause: str) -> None:
        if os.getpid() != pid:
            return
        import json
        import time

        note = {
            "task": task,
            "at": time.monotonic(),
            "exit_code": exit_code,
            "cause": cause.partition("\n")[0][:_MAX_CAUSE_CHARS],
            "step": heartbeat.steps_done(),
        }
        try:
            line = json.dumps(note, ensure_ascii=False).encode(errors="backslashreplace")
            os.write(notes_fd, line + b"\n")
        except OSError:  # the launcher is gone or does not listen: nobody to tell
            return

    return failed


def set_title(title: str) -> None:
    """Names this process for ``ps`` and ``top`` where setproctitle is installed.

    Only the package's compiled part is loaded: its Python part costs more than the rest of
    the start. SPT_NOENV keeps the environment in /proc, by which the launcher knows its own.
    """
    from importlib.machinery import ExtensionFileLoader, PathFinder
    from importlib.util import module_from_spec

    package = PathFinder.find_spec("setproctitle")
    places = package.submodule_search_locations if package else None
    spec = PathFinder.find_spec("_setproctitle", places) if places else None
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return
    kept = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.setproctitle(title)
    except ImportError:
        return
    finally:
        if kept is None:
            del os.environ["SPT_NOENV"]
        sys.modules.pop("_setproctitle", None)


def run_program(
    target: str,
    args: Sequence[str],
    *,
    is_module: bool,
    failed: Callable[[int, str], None],
) -> None:
    """Run `target` as ``__main__``; return, or raise SystemExit with its exit code.

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
    """Return the line of a message that says what happened.

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
