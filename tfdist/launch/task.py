"""What a task's process does before and after its program; imports next to nothing."""

from __future__ import annotations

import os
import sys

from tfdist.launch import heartbeat
from tfdist.launch.program import run_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_CAUSE_CHARS = 500  # so that a note, escapes and all, is written to the pipe in one piece


def main(argv: Sequence[str]) -> None:
    """Runs a program: task name, title, descriptor for notes, script or module, target, args."""
    task, title, notes_fd, kind, target, *args = argv
    os.set_inheritable(int(notes_fd), False)
    set_title(title)
    failed = note_to(int(notes_fd), task=task)
    heartbeat.print_stacks_when_asked()
    heartbeat.start(int(notes_fd), task=task)
    run_program(target, args, is_module=kind == "module", failed=failed)


def note_to(notes_fd: int, *, task: str) -> Callable[[int, str], None]:
    """Returns a function that tells the launcher when, how and why a program failed.

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
