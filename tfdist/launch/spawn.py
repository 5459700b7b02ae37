"""Functions as jobs: `tfdist.spawn`, in a program or in a notebook cell.

The function and its result are pickled to files in a directory that only this user can enter. This
process and its tasks unpickle only these files. Objects of ``__main__`` are pickled by value.

Run as a module, this file is the program of each task.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import linecache
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist.cluster import KINDS, read_environment
from tfdist.errors import EXIT_FAILED, JobFailed, TfdistError, UsageError
from tfdist.launch.ending import SPAWN
from tfdist.launch.events import exit_code_of
from tfdist.launch.guardian import MARK, bound_command
from tfdist.launch.options import parse
from tfdist.launch.run_dir import chosen_run_dir, earlier_attempts
from tfdist.options import HostFlags, LaunchFlags, names_of, table

_OPTIONS = [name for name in names_of(LaunchFlags) if name not in (*table(HostFlags), "resume")]
_DEFAULTS = {"strategy": "multiworker", "workers": None, "ps": 0}
_READ_BYTES = 1 << 16
_FUNCTION, _ANSWERS = "function", "answers"
_LINES_KEPT = 20


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    strategy: str = "multiworker",
    workers: int | None = None,
    ps: int = 0,
    **options: Any,
) -> Any:
    """Run a function as a job on this machine and return the chief's result.

    Every task calls the function in a new process. The tasks' output is written to `sys.stdout`,
    with the task's name before each line. Ctrl-C, or interrupting a notebook's kernel, stops the
    job. A `fit` with `BackupAndRestore` then saves a checkpoint.

    Args:
      fn: Function to run. A function of ``__main__`` or of a notebook cell is pickled with the
        variables that it uses. Any other function is pickled by the name of its module.
      *args: Arguments of `fn`. The arguments and the result are pickled.
      strategy: Strategy, as the launcher's ``--strategy`` (default: "multiworker").
      workers: Number of workers, as ``--workers`` (default: 2 under multiworker, elastic, ps).
      ps: Number of parameter servers, as ``--ps`` (default: 1 in a ps job, else none).
      **options: Other flags of the launcher by name, such as ``max_restarts=3``. Any other keyword
        is an argument of `fn`.

    Returns:
      The result of `fn` in the chief, or `None` if `fn` called `sys.exit`.

    Raises:
      UsageError: An option is invalid, a keyword is both an option and an argument of `fn`, or
        the caller is a task of a job. No task was started.
      TypeError, pickle.PicklingError: The function does not accept the arguments or cannot be
        pickled. No task was started.
      JobFailed: The job failed. The error has the first failed task and its traceback. The task's
        exception is the cause.
      KeyboardInterrupt: The caller was interrupted, and the job has stopped.
    """
    if MARK in os.environ:
        raise UsageError(
            "tfdist.spawn",
            "a task of a job cannot start another job",
            fix="call the function directly",
            code="nested-launcher",
        )
    named = {"strategy": strategy, "workers": workers, "ps": ps}
    changed = {name: value for name, value in named.items() if value != _DEFAULTS[name]}
    keywords = _keywords(fn, args, {**options, **changed})
    options = {name: value for name, value in options.items() if name not in keywords}
    run_dir = chosen_run_dir(options.pop("run_dir", None), os.environ)
    flags = _flags(strategy, workers, ps, {**options, "run_dir": str(run_dir)})
    parse([*flags, "-m", SPAWN])
    payload = _pickled(fn, args, keywords)
    with tempfile.TemporaryDirectory(prefix="tfdist-spawn-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(payload)
        (folder / _ANSWERS).mkdir()
        before = len(earlier_attempts(run_dir))
        code, is_interrupted, lines = _run([*flags, "-m", SPAWN, name])
        answers = _answers(folder)
    if entries := earlier_attempts(run_dir)[before:]:
        answers = [answer for answer in answers if answer["attempt"] == entries[-1]["attempt"]]
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # the kernel discards the exit code
        code = entries[-1]["exit_code"] if entries else EXIT_FAILED
    if code == 0:
        values = [answer["value"] for answer in answers if answer["kind"] == "result"]
        return pickle.loads(values[-1]) if values else None
    if is_interrupted:
        raise KeyboardInterrupt(f"the job was stopped, exit code {code}")
    failure = entries[-1]["first_failure"] if entries else None
    raise _failed(code, failure, answers, lines)


def _keywords(
    fn: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that are arguments of `fn`, and not options of the launcher.

    Raise UsageError for a keyword that is both, and TypeError as the call would.
    """
    keywords = {name: value for name, value in given.items() if name not in _OPTIONS}
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some functions of C
        return keywords
    taken = {*signature.bind(*args, **keywords).arguments, *getattr(fn, "keywords", ())}
    for name in {*given} & {*_OPTIONS} & {*signature.parameters} - taken:
        raise UsageError(
            "tfdist.spawn",
            f"{name} is an option of the launcher and an argument of the function",
            fix=f"pass the argument by position, or rename it. The keyword {name} sets the option",
            code="exclusive",
        )
    return keywords


def _flags(
    strategy: str, workers: int | None, ps: int, options: Mapping[str, Any]
) -> Sequence[str]:
    several = strategy in KINDS and KINDS[strategy].has_whole_workers
    given = {
        "strategy": strategy,
        "workers": 2 if workers is None and several else workers,
        "ps": ps or None,
        **options,
    }
    return [f"--{n}={v}" for n, v in given.items() if v is not None and v is not False]


# Files to and from the tasks.


def _pickled(fn: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bytes:
    """Return the pickled function, with the data that a task needs to load and trace it."""
    import cloudpickle

    call = cloudpickle.dumps((fn, tuple(args), dict(keywords)))
    known: Mapping[str, Any] = linecache.cache
    # Notebook cells have no file, so a task needs their source lines.
    cells = {name: e[2] for name, e in known.items() if len(e) == 4 and e[1] is None}
    of_caller = {"path": list(sys.path), "argv": list(sys.argv), "cells": cells}
    return pickle.dumps({**of_caller, "call": call})


def _answers(folder: Path) -> list[dict[str, Any]]:
    return [
        pickle.loads(path.read_bytes())
        for path in sorted((folder / _ANSWERS).iterdir())
        if not path.suffix  # files with a suffix are incomplete
    ]


def _failed(
    code: int,
    failure: Mapping[str, Any] | None,
    answers: Sequence[Mapping[str, Any]],
    lines: Sequence[str],
) -> JobFailed:
    if failure is None:  # the launcher rejected the job, or a signal stopped it
        said = lines[-1].removeprefix("[launch] ") if lines else "no output"
        return JobFailed(f"the job failed with exit code {code}: {said}", exit_code=code)
    task = failure["task"]
    errors = [answer for answer in answers if answer["kind"] == "error" and answer["task"] == task]
    trace = errors[-1]["traceback"] if errors else ""
    last = "\n".join(failure.get("last_lines") or ())
    more = trace or last
    message = f"{task} failed first: {failure['cause']}" + (f"\n\n{more}" if more else "")
    failed = JobFailed(message, task=task, exit_code=code, traceback=trace)
    if errors and errors[-1]["value"] is not None:
        with contextlib.suppress(Exception):  # its class may exist only in the task
            failed.__cause__ = pickle.loads(errors[-1]["value"])
    return failed


# The launcher as a child process.


def _run(flags: Sequence[str]) -> tuple[int, bool, Sequence[str]]:
    """Run the launcher. Return its exit code, whether it was interrupted, and its last lines."""
    process: subprocess.Popen[bytes] | None = None
    requests: list[int] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        requests.append(signum)
        if process is not None:
            process.send_signal(signum)

    launcher = [sys.executable, "-m", "tfdist.launch", *flags]
    with _interrupts_to(on_interrupt):
        process = subprocess.Popen(
            bound_command(launcher),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # this process forwards Ctrl-C
        )
        try:
            if requests:
                process.send_signal(signal.SIGINT)
            lines = _shown(process)
            return exit_code_of(process.wait()), bool(requests), lines
        finally:
            if process.stdout is not None:
                process.stdout.close()
            if process.poll() is None:
                process.terminate()
                process.wait()


@contextlib.contextmanager
def _interrupts_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on SIGINT in the block, instead of raising KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else signal.SIG_IGN
    if before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _shown(process: subprocess.Popen[bytes]) -> Sequence[str]:
    """Copy the launcher's output to `sys.stdout` until it exits, and return the last lines."""
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines: deque[str] = deque([""], maxlen=_LINES_KEPT)
    while data := os.read(process.stdout.fileno(), _READ_BYTES):
        text = decoder.decode(data)
        # A character that the caller's encoding lacks must not stop the job.
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
        first, *more = text.split("\n")
        lines[-1] += first
        lines.extend(more)
    return [line for line in lines if line]


# The program of a task.


def serve(argv: Sequence[str]) -> None:
    """Call the function as this task's program. `argv` holds the directory of the files."""
    import cloudpickle

    folder = Path(argv[0])
    given = pickle.loads((folder / _FUNCTION).read_bytes())
    sys.path[:], sys.argv[:] = given["path"], given["argv"]
    for name, lines in given["cells"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    config = read_environment(os.environ)
    attempt = config.options.attempt if config else 1
    me = {"task": str(config.task) if config else "", "attempt": attempt}
    try:
        fn, args, keywords = pickle.loads(given["call"])
        value = fn(*args, **keywords)
        module = sys.modules.get("tfdist.strategy.job")
        job = module.current_job() if module else None
        is_first = config is None or config.task == config.cluster.chief_task
        if job.is_chief if job else is_first:  # in an elastic job, another task may take over
            _answer(folder, {"kind": "result", **me, "value": cloudpickle.dumps(value)})
    except Exception as error:
        trace = "" if isinstance(error, TfdistError) else _traceback(error)
        pickled: bytes | None = None
        with contextlib.suppress(Exception):  # not picklable: the answer has only its text
            pickled = cloudpickle.dumps(error)
        _answer(folder, {"kind": "error", **me, "traceback": trace, "value": pickled})
        raise


def _traceback(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _answer(folder: Path, record: Mapping[str, Any]) -> None:
    path = folder / _ANSWERS / f"{record['attempt']}-{record['task']}"
    path.with_suffix(".part").write_bytes(pickle.dumps(dict(record)))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    # Import this file by its name, so that its globals are not in the function's ``__main__``.
    from tfdist.launch.spawn import serve as _serve

    _serve(sys.argv[1:])
