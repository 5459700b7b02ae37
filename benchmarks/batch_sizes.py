"""``python -m benchmarks.batch_sizes [SUBJECT ...]``: speed and memory by batch size.

SUBJECT is ``file.py:function``, which returns ``(model, x, y)``. Each batch size trains alone in a
child process, from small to large, until a size does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.panels import empty_panels
from benchmarks.subject import of_config, read
from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, require, require_int, require_number
from tfdist.find.batch_size import BatchTrial, memory_limits, request_of, try_out

_USE = 0.9
_HEADER = f"{'model':>24} {'parameters':>12} {'batch size':>10}"
_HEADER += f" {'examples/s':>12} {'peak MiB':>10}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("benchmarks.batch_sizes", lambda: _batch(words))


def arguments(*, prog: str, description: str, steps: int, timeout_s: float) -> Parser:
    """Return a parser of the flags that both measurements by size have."""
    parser = Parser(prog=prog, description=description)
    add = parser.add_argument
    add("--steps", type=int, default=steps, help=f"timed steps of each size or round; {steps}")
    add("--timeout_s", type=float, default=timeout_s, help="of each size, or of each step")
    add("--plot", type=Path, metavar="FILE.png", help="a picture of it")
    add("--json", type=Path, metavar="FILE.jsonl", help="a line for each size")
    return parser


def check(options: Any) -> None:
    require_int("--steps", options.steps, least=1)
    require_number("--timeout_s", options.timeout_s, above=0, unit="seconds")
    for flag in ("plot", "json"):  # before the measurement
        path = getattr(options, flag)
        require(
            path is None or os.access(path.parent, os.W_OK),
            f"--{flag}",
            f"cannot write the file {path}",
            fix="pass a file in an existing directory",
            code="not-writable",
        )


def whole_numbers(flag: str, words: Sequence[str]) -> list[int]:
    """Return the numbers above 0 that the words between commas are; raise UsageError."""
    require(
        all(word.isdecimal() and int(word) for word in words),
        flag,
        f"{','.join(words)} is not a list of whole numbers above 0",
        fix=f"write {flag} 8,12,20",
        code="not-an-int",
    )
    return [int(word) for word in words]


def label_sizes(axes: Any, *, title: str, label: str) -> None:
    """Label a panel whose sizes are powers of two, or near."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)


def _batch(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    options = parse_batch(argv)
    with tempfile.TemporaryDirectory() as folder:
        measured = _measure_batch(options, Path(folder))
    if options.plot:
        _draw_batch(measured, options.plot)
    return EXIT_OK


def parse_batch(argv: Sequence[str]) -> Any:
    """Return the options, `subjects` as lists of words among them; raise UsageError."""
    config, words = of_config(argv)
    parser = arguments(
        prog="python -m benchmarks.batch_sizes",
        description=__doc__.partition("\n\n")[0],
        steps=50,
        timeout_s=600.0,
    )
    add = parser.add_argument
    add("names", nargs="*", default=[], metavar="FILE.py:FUNCTION", help="returns model, x, y")
    add("--sizes", default="8,16,32,64,128,256", help="batch sizes, from small on")
    options = parser.parse_args(words)
    options.sizes = sorted(set(whole_numbers("--sizes", options.sizes.split(","))))
    check(options)
    options.subjects = [*([name] for name in options.names), *([config] if config else [])] or [[]]
    return options


def _measure_batch(options: Any, folder: Path) -> dict[str, list[BatchTrial]]:
    """Train every subject with every size up to one that does not fit, and print each."""
    measured = dict[str, list[BatchTrial]]()
    print(_HEADER)
    for words in options.subjects:
        name = Path(" ".join(words) or "cnn").name
        trials = measured.setdefault(name, [])
        subject = read(words, strategy=tf.distribute.get_strategy())
        request = request_of(subject.model, subject.x, subject.y, folder / "m.keras")
        request["steps"] = options.steps
        limits, parameters = memory_limits(_USE), subject.model.count_params()
        for size in options.sizes:
            trial = try_out(
                {**request, "batch_size": size},
                limits,
                timeout_s=options.timeout_s,
            )
            trials += [trial] if trial.fits else []
            print(_line(name, trial, parameters), flush=True)
            if options.json:
                line = {"subject": name, "parameters": parameters} | dataclasses.asdict(trial)
                with options.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if not trial.fits:
                break
    return measured


def _draw_batch(measured: dict[str, list[BatchTrial]], path: Path) -> None:
    """Draw speed and memory over batch size, a line for each subject, as PNG or PDF."""
    figure, panels = empty_panels(columns=2, width=4.2)
    for name, trials in measured.items():
        if not trials:
            continue
        sizes = [trial.batch_size for trial in trials]
        speeds = [trial.examples_per_second for trial in trials]
        for axes, values in zip(panels, (speeds, map(_mib, trials)), strict=True):
            axes.plot(sizes, list(values), marker="o", ms=3.5, label=name)
    titles = ("Examples a second", "Peak memory in MiB")
    for axes, title in zip(panels, titles, strict=True):
        label_sizes(axes, title=title, label="batch size")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def _line(name: str, trial: BatchTrial, parameters: int) -> str:
    if not trial.fits:
        return f"{name:>24} {'':>12} {trial.batch_size:>10} {trial.cause}"
    line = f"{name:>24} {parameters:>12,} {trial.batch_size:>10}"
    return f"{line} {trial.examples_per_second:>12,.0f} {_mib(trial):>10,.0f}"


def _mib(trial: BatchTrial) -> float:
    """Return the peak of the GPU where there is one, else of the process, all of TensorFlow too."""
    return (trial.gpu_peak_bytes or trial.peak_bytes or 0) / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
