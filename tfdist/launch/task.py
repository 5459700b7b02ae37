"""Process of a task: runs the program as ``python program args`` does, and sends heartbeats.

Every task imports this module before its program, so it imports only fast standard modules.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import signal
import sys
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

_OURS = {
    __file__,
    f"{__file__[: -len('task.py')]}spawn.py",
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
}
_INTERRUPTED = 130
MAX_CAUSE_CHARS = 500  # a note, with its escapes, fits one atomic write to the pipe


def main(argv: Sequence[str]) -> None:
    """Run the task's program, and report failures and heartbeats to the launcher.

    `argv` holds the file descriptor for notes, then `ProcessSpec.words`.
    """
    descriptor, task, title, claim, kind, target, *args = argv
    notes_fd = int(descriptor)
    os.set_inheritable(notes_fd, False)
    set_title(title)
    failed = note_to(notes_fd, task=task)
    print_stacks_on_request()
    start_heartbeat(notes_fd, task=task)
    if claim:
        watch_keras(task, claim)
    run_program(target, args, is_module=kind == "module", failed=failed)


def note_to(notes_fd: int, *, task: str) -> Callable[[int, str], None]:
    """Return a function that reports the time, exit code and cause of a failure to the launcher.

    The function is inactive in forked children of the program.
    """
    pid = os.getpid()

    def failed(exit_code: int, cause: str) -> None:
        if os.getpid() != pid:
            return
        line = cause.partition("\n")[0][:MAX_CAUSE_CHARS]
        said = {"exit_code": exit_code, "cause": line, "step": steps_done()}
        note = _note("raised", task, at_s=time.monotonic(), **said)
        try:
            os.write(notes_fd, note)
        except OSError:  # the launcher has exited or does not read
            return

    return failed


def _note(event: str, task: str, **fields: object) -> bytes:
    """Return a line that the launcher decodes with `tfdist.launch.events.decode_event`."""
    line = json.dumps({"event": event, "task": task, **fields}, ensure_ascii=False)
    return f"{line}\n".encode(errors="backslashreplace")


def set_title(title: str) -> None:
    """Set this process's name in ``ps`` and ``top``, if setproctitle is installed.

    SPT_NOENV preserves /proc/<pid>/environ, where the guardian looks for the job's mark.
    """
    os.environ["SPT_NOENV"] = "1"
    try:
        from setproctitle import setproctitle

        setproctitle(title)
    except ImportError:
        return
    finally:
        del os.environ["SPT_NOENV"]


def run_program(
    target: str,
    args: Sequence[str],
    *,
    is_module: bool,
    failed: Callable[[int, str], None],
) -> None:
    """Run `target` as ``__main__``. Return, or raise SystemExit with the exit code.

    `failed` is called with exit code and cause as soon as the program fails. A process with
    TensorFlow exits slowly, so its peers may exit earlier.
    """
    try:
        if is_module:
            _run_module(target, args)
        else:
            _run_script(target, args)
    except SystemExit as ended:
        code = 0 if ended.code is None else 1
        if isinstance(ended.code, int):
            code = ended.code & 0xFF
        if code:
            said = isinstance(ended.code, str) or hasattr(ended, "signum")  # tfdist.Stopped
            failed(code, str(ended) if said else f"exit code {code}")
        raise
    except KeyboardInterrupt:
        _line("KeyboardInterrupt")
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
    # `compile` would otherwise apply this file's `from __future__` imports.
    exec(compile(source, full, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, args: Sequence[str]) -> None:
    import runpy

    sys.argv[:] = [name, *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as python -m does


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _explain(error: BaseException, *, failed: Callable[[int, str], None]) -> int:
    """Print one line for a TfdistError, or a traceback. Return the exit code."""
    from tfdist.errors import TfdistError

    if isinstance(error, TfdistError):
        failed(error.exit_code, str(error))
        _line(str(error))
        return error.exit_code
    failed(1, f"{type(error).__name__}: {_gist(str(error))}".removesuffix(": "))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _gist(message: str) -> str:
    """Return the most useful line of an error message.

    TensorFlow's messages begin with "Graph execution error:". The error and the node's name follow.
    """
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith("[[")]
    if len(lines) > 1 and lines[0].endswith(":"):
        roots = [line[4:] for line in lines if line.startswith("(0) ")]  # of several errors
        return f"{lines[0]} {roots[0] if roots else lines[-1]}"
    return lines[0] if lines else ""


def _line(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


_TRAINING = {
    "keras.src.models.model": ("Trainer", ("fit", "train_on_batch")),
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer", ("apply",)),
}
"""Keras modules, with the class and methods that every training calls."""


def watch_keras(task: str, claim: str) -> None:
    """Let `tfdist.launch.alone` wrap Keras' training methods when the program imports Keras."""
    for name in _TRAINING:
        if name in sys.modules:  # imported by a fork server
            _watch(sys.modules[name], task, claim)
    sys.meta_path.insert(0, _KerasFinder(task, claim))


def _watch(module: ModuleType, task: str, claim: str) -> None:
    from tfdist.launch import alone

    owner, names = _TRAINING[module.__name__]
    alone.watch(module, owner, names, task=task, claim=claim)


class _KerasFinder:
    """Import finder that wraps the modules of `_TRAINING`. The other finders find them."""

    def __init__(self, task: str, claim: str) -> None:
        self._task, self._claim = task, claim

    def find_spec(self, name: str, *where: object) -> ModuleSpec | None:
        """Return the spec of a module of `_TRAINING`, or `None` for any other module."""
        if name not in _TRAINING:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, *where) for finder in others)  # type: ignore[arg-type]
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _watch(module, self._task, self._claim)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Heartbeat: one line per second to the launcher, and stack dumps on request.

STACK_SIGNAL = signal.SIGQUIT
"""Signal that makes a task print all Python stacks, unless its program handles the signal."""

_RETRY_S = 0.2
_MAX_PHASE_CHARS = 40  # a line fits one atomic write to the pipe
_STDERR_FD = 2


def start_heartbeat(notes_fd: int, *, task: str, every_s: float = 1.0) -> None:
    """Start a thread that reports this process's phase to the launcher every `every_s` seconds.

    The thread exits after the launcher has exited. It never blocks the program: it skips writes
    while the pipe is full. It blocks all signals, so that the program's threads receive them.
    """
    try:
        # Open the pipe again, so that O_NONBLOCK applies only to this file descriptor. Other
        # tasks and the launcher share `notes_fd`.
        fd = os.open(f"/proc/self/fd/{notes_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the launcher has exited
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _thread.start_new_thread(_beat, (fd, _identity(fd), task, every_s))
    except RuntimeError:  # cannot start a thread: this task sends no heartbeats
        os.close(fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def print_stacks_on_request() -> None:
    """Print the stacks to standard error on `STACK_SIGNAL`, even while Python code is blocked."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR_FD, all_threads=True, chain=False)


def steps_done() -> int | None:
    """Return this process's finished steps, or `None` before training."""
    phases = _phases()
    step = None if phases is None else phases.current().step
    return None if step is None else int(step)


def _phases() -> ModuleType | None:
    """Return `tfdist.phases`, or `None` unless the program has finished importing it."""
    module = sys.modules.get("tfdist.phases")
    return module if hasattr(module, "entered") else None


def _beat(fd: int, pipe: tuple[int, int] | None, task: str, every_s: float) -> None:
    started_s = time.monotonic()
    due_s = started_s + every_s
    while True:
        # Tasks of one machine send heartbeats at the same time. The launcher then wakes up once
        # for all tasks, and a common step is interrupted only once.
        due_s = -(-due_s // every_s) * every_s
        time.sleep(max(0.0, due_s - time.monotonic()))
        while True:
            if _identity(fd) != pipe:  # the program has closed it, and may reuse its number
                return
            try:
                os.write(fd, _beat_note(task, started_s))
                break
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:  # the launcher has exited
                return
        due_s = max(due_s + every_s, time.monotonic())


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _beat_note(task: str, started_s: float) -> bytes:
    phase, step, since_s, first_step_s = "import", None, started_s, None
    awaited = None
    phases = _phases()
    if phases is not None:
        state, awaited = phases.current(), phases.awaited()
        phase, step, first_step_s = phases.reported(), state.step, state.first_step_s
        since_s = max(state.since_s, started_s)  # a fork server may have set it earlier
    return _note(
        "beat",
        task,
        phase=phase[:_MAX_PHASE_CHARS] if phase.isidentifier() and phase.isascii() else "other",
        step=None if step is None else int(step),
        since_s=since_s,
        first_step_s=first_step_s,
        awaited=awaited
        and {"task": awaited.task, "since_s": awaited.since_s, "is_first": awaited.is_first},
        at_s=time.monotonic(),
    )
