"""``python -m benchmarks.split_sizes [SUBJECT]``: time of a step by the size of its micro-batches.

Measures a model in stages beside one device that accumulates over the same micro-batches, and both
without micro-batches. The model is a ResNet-50 without a SUBJECT. Each process has a core of its
own while there are enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.batch_sizes import arguments, check, label_sizes, whole_numbers
from benchmarks.panels import empty_panels
from tfdist.argument_parser import run_program
from tfdist.errors import EXIT_OK, TfdistError, require_int, require_one_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("benchmarks.split_sizes", lambda: _pipeline(words))


SIZES = (1, 3, 5, 8, 10, 12, 20, 40, 60)
_AUTO = "auto"
_POLL_S = 0.5
_STOP_S = 20.0
_LAST_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of the timed steps of a cell.

    Attributes:
      stages: 1 for one device.
      size: examples of a micro-batch at the most.
      batch: examples of a step; as many as `size` without micro-batches.
      seconds: of each step.
      found: whether the pipeline chose the size by itself.
    """

    stages: int
    size: int
    batch: int
    seconds: tuple[float, ...]
    found: bool = False

    @property
    def median_s(self) -> float:
        """Return the median of the steps."""
        return statistics.median(self.seconds)

    @property
    def examples_per_second(self) -> float:
        """Return the examples of a step by the median of its seconds."""
        return self.batch / self.median_s


class StepperJob:
    """A job whose program runs one step each time it is told to, and answers with its seconds.

    The program gets the path of a socket, connects to it when it is ready, and then answers each
    line with a JSON object. While it waits it takes no processor, so that several jobs may be up.

    Args:
      command: of the job; the socket's path is its last word.
      timeout_s: of the start and of each step.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float) -> None:
        self._stack = contextlib.ExitStack()
        self._timeout_s = timeout_s
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-"))
        path = f"{directory}/steps"
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(path)
        self._listener.listen()
        self._output = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, path],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._lines: Any = None

    def wait(self) -> None:
        """Wait until the job is ready for its first step; raise TfdistError where it ends."""
        self._listener.settimeout(_POLL_S)
        deadline_s = time.monotonic() + self._timeout_s
        while self._lines is None:
            with contextlib.suppress(TimeoutError):
                end = self._stack.enter_context(self._listener.accept()[0])
                end.settimeout(self._timeout_s)
                self._lines = end.makefile("rw")
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise self._failed("did not begin")

    def step(self) -> dict[str, Any]:
        """Run the next step; return what the job says of it."""
        answer = ""
        with contextlib.suppress(OSError):  # of a job that has ended, or takes too long
            self._lines.write("step\n")
            self._lines.flush()
            answer = self._lines.readline()
        if not answer:
            raise self._failed("did not finish a step")
        return dict(json.loads(answer))

    def close(self) -> None:
        """Let the job end, or end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S if self._lines is not None else 0.0)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what a job that is gone has not read
            if self._lines is not None:
                self._lines.close()
        self._stack.close()

    def _failed(self, what: str) -> TfdistError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)  # for its last words
        self._output.seek(0)
        said = self._output.read().splitlines()[-_LAST_LINES:]
        return TfdistError("\n".join([f"benchmarks.split_sizes: a job {what}. Its output:", *said]))


def _pipeline(argv: Sequence[str]) -> int:
    options = parse_pipeline(argv)
    measured, _ = measure_pipeline(options)
    if options.json:
        lines = [json.dumps(dataclasses.asdict(one)) for one in measured]
        options.json.write_text("\n".join(lines) + "\n")
    print(*_table(measured), sep="\n")
    if options.plot:
        draw_pipeline(measured, options.plot)
    return EXIT_OK


def parse_pipeline(argv: Sequence[str]) -> Any:
    """Return the options; raise UsageError."""
    parser = arguments(
        prog="python -m benchmarks.split_sizes",
        description=__doc__.partition("\n\n")[0],
        steps=5,
        timeout_s=900.0,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="FILE.py:FUNCTION", help="returns model, x, y")
    add("--batch_size", type=int, default=120, help="examples of a step; default 120")
    add("--image_size", type=int, default=128, help="of ResNet-50; default 128")
    add("--sizes", default=",".join(map(str, SIZES)), help="of micro-batches; and auto")
    add("--one_device", metavar="SIZES", help="those of one device; default all of --sizes")
    add("--stages", type=int, default=2, help="default 2")
    add("--schedule", default="1f1b", help="1f1b, gpipe or serial")
    add("--keep", default="tape", help="tape, recompute or compiled")
    add("--fused_kernels", action="store_true", help="train with it, as by tfdist.fit")
    options = parser.parse_args(argv)
    for name, least in (("batch_size", 1), ("image_size", 32), ("stages", 2)):
        require_int(f"--{name}", getattr(options, name), least=least)
    require_one_of("--schedule", options.schedule, ("1f1b", "gpipe", "serial"))
    require_one_of("--keep", options.keep, ("tape", "recompute", "compiled"))
    options.auto, options.sizes = _sizes("--sizes", options.sizes, options.batch_size)
    one = _sizes("--one_device", options.one_device, options.batch_size)[1]
    options.one_device = one if options.one_device else options.sizes
    check(options)
    return options


def _sizes(flag: str, text: str | None, batch: int) -> tuple[bool, list[int]]:
    """Return whether ``auto`` is among the sizes, and the numbers, the whole batch at the end."""
    words = [word for word in (text or "").split(",") if word]
    numbers = whole_numbers(flag, [word for word in words if word != _AUTO])
    return _AUTO in words, sorted({batch, *(number for number in numbers if number < batch)})


def measure_pipeline(
    options: Any, *, beside: Sequence[StepperJob] = ()
) -> tuple[list[StepTimes], list[list[float]]]:
    """Return the times of all sizes, and the seconds of the jobs `beside`, which are ready.

    Their steps are run in turn, one of each in a round.
    """
    cells = [(options.stages, size) for size in options.sizes]
    cells += [(options.stages, 0)] * options.auto  # the size that the job finds
    cells += [(1, size) for size in options.one_device]
    jobs = {}
    with contextlib.ExitStack() as stack:
        for stages in dict.fromkeys(stages for stages, _ in cells):
            own = [size for of, size in cells if of == stages]
            run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-bench-"))
            jobs[stages] = stepper(options, stages=stages, sizes=own, run_dir=run_dir)
            stack.callback(jobs[stages].close)
        for job in jobs.values():
            job.wait()
        found = jobs[options.stages].step()["size"]
        turns = [*(jobs[stages] for stages, _ in cells), *beside]
        seconds = in_turn(turns, rounds=options.steps)
    times = [
        StepTimes(
            stages=stages,
            size=size or found,
            batch=options.batch_size,
            seconds=tuple(taken),
            found=not size,
        )
        for (stages, size), taken in zip(cells, seconds, strict=False)
    ]
    return times, seconds[len(cells) :]


def in_turn(jobs: Sequence[StepperJob], *, rounds: int) -> list[list[float]]:
    """Return the seconds of the jobs, in rounds of a step for each; one may have several.

    The first round, which traces, is left out.
    """
    seconds: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        for job, taken in zip(jobs, seconds, strict=True):
            answer = job.step()
            if number:
                taken.append(answer["seconds"])
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def stepper(options: Any, *, stages: int, sizes: Sequence[int], run_dir: str) -> StepperJob:
    """Return a job that trains in so many stages, with these sizes in turn."""
    request = {
        "subject": options.name,
        "batch_size": options.batch_size,
        "image_size": options.image_size,
        "schedule": options.schedule,
        "keep": options.keep,
        "fused_kernels": options.fused_kernels,
        "first": [0] * (stages > 1),
        "sizes": list(sizes),
        "rounds": options.steps + 1,
    }
    launch = ("--strategy=pipeline", f"--stages={stages}", "--threads_per_task=1")
    command = [sys.executable, "-m", "tfdist.launch", *launch, "--hang_timeout_s=0"]
    command += [f"--run_dir={run_dir}", "-m", "benchmarks.split_trial", json.dumps(request)]
    return StepperJob(command, timeout_s=options.timeout_s)


def _table(measured: Sequence[StepTimes]) -> Iterator[str]:
    """Yield the lines of a table of all cells."""
    alone = [one for one in measured if one.stages == 1]
    best = max((one.examples_per_second for one in alone), default=0.0)
    header = f"{'stages':>6} {'split size':>12} {'s a step':>9} {'examples/s':>11}"
    yield f"{header} {'x one device':>13}" if best else header
    for one in measured:
        size = f"{one.size} (auto)" if one.found else str(one.size)
        line = f"{one.stages:>6} {size:>12} {one.median_s:>9.3f} {one.examples_per_second:>11.1f}"
        yield f"{line} {one.examples_per_second / best:>13.2f}" if best else line


def draw_pipeline(measured: Sequence[StepTimes], path: Path) -> None:
    """Draw examples per second over the split size, as PNG or PDF.

    A line for the stages and one for one device, and dashed what each is without micro-batches.
    """
    figure, (axes,) = empty_panels()
    lines = dict.fromkeys(one.stages for one in measured)
    for color, stages in zip(("C0", "C1"), lines, strict=False):
        name = f"{stages} stages" if stages > 1 else "one device, accumulation"
        own = [one for one in measured if one.stages == stages]
        curve = [one for one in own if not one.found and one.size < one.batch]
        axes.plot(
            [one.size for one in curve],
            [one.examples_per_second for one in curve],
            **{"marker": "o", "ms": 3.5, "color": color, "label": name},
        )
        for one in own:
            if one.size == one.batch:
                label = f"{name.partition(',')[0]}, no micro-batches"
                axes.axhline(one.examples_per_second, ls="--", color=color, lw=1, label=label)
            if one.found:
                axes.plot(one.size, one.examples_per_second, "*", color=color, label="auto")
    title = "Examples a second by split size"
    label_sizes(axes, title=title, label="examples of a micro-batch")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
