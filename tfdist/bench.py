"""``python -m tfdist.bench batch [SUBJECT ...]``: speed, busy cores and memory by batch size.

SUBJECT is that of `tfdist.find`; several are models of several sizes. Each batch size of each
trains alone in a process of its own, from small to large until one does not fit.

``python -m tfdist.bench serve URL`` is load on a model server: `tfdist.serving.load`; ``python -m
tfdist.bench pipeline`` are stages by the size of micro-batches: `tfdist.find.split_size`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser, require_writable, run_program, whole_numbers
from tfdist.errors import EXIT_OK, require_int, require_number, require_packages
from tfdist.find.__main__ import of_config
from tfdist.find.batch_size import BatchTrial, MemoryLimits, try_out
from tfdist.find.split_size import main as split_sizes
from tfdist.outputs.display import empty_panels

_USE = 0.9
_HEADER = f"{'model':>24} {'parameters':>12} {'batch size':>10}"
_HEADER += f" {'examples/s':>12} {'busy cores':>10} {'peak MiB':>10}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        return run_program("tfdist.bench", lambda: _serve(words[1:]))
    if words[:1] == ["pipeline"]:
        return split_sizes(words[1:])
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    return run_program("tfdist.bench", lambda: _batch(words))


def _serve(argv: Sequence[str]) -> int:
    require_packages("tfdist.bench", "httptools", "grpc", extra="serving")
    from tfdist.serving.load import main

    return main(argv)


def _batch(argv: Sequence[str]) -> int:
    options = parse(argv)
    measured = measure(options)
    if options.plot:
        draw(measured, options.plot)
    return EXIT_OK


def parse(argv: Sequence[str]) -> Any:
    """Return the options, `subjects` as lists of words among them; raise UsageError."""
    config, words = of_config(argv)
    parser = Parser(prog="python -m tfdist.bench", description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("batch", "pipeline", "serve"), help="what to measure")
    subject = "returns model, x, y"
    parser.add_argument("names", nargs="*", default=[], metavar="FILE.py:FUNCTION", help=subject)
    parser.add_argument("--sizes", default="8,16,32,64,128,256", help="batch sizes, from small on")
    parser.add_argument("--steps", type=int, default=10, help="of a round; the first is left out")
    parser.add_argument("--least_s", type=float, default=2.0, help="how long rounds are repeated")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="of each size")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of it")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="a line for each size")
    options = parser.parse_args(words)
    options.sizes = sorted(set(whole_numbers("--sizes", options.sizes.split(","))))
    require_int("--steps", options.steps, least=1)
    require_number("--least_s", options.least_s, least=0, unit="seconds")
    require_number("--timeout_s", options.timeout_s, above=0, unit="seconds")
    require_writable("--plot", options.plot)
    require_writable("--json", options.json)
    if options.plot:
        empty_panels("tfdist.bench --plot")  # before minutes of measuring
    options.subjects = [*([name] for name in options.names), *([config] if config else [])] or [[]]
    return options


def measure(options: Any) -> dict[str, list[BatchTrial]]:
    """Train every subject with every size up to one that does not fit, and print each."""
    limits, measured = MemoryLimits.of_this_machine(_USE), dict[str, list[BatchTrial]]()
    common = {"steps": options.steps, "least_s": options.least_s}
    print(_HEADER)
    for words in options.subjects:
        name = Path(" ".join(words) or "cnn").name
        trials = measured.setdefault(name, [])
        for size in options.sizes:
            request = {**common, "subject": words, "batch_size": size}
            trial = try_out(request, limits, timeout_s=options.timeout_s)
            trials += [trial] if trial.fits else []
            print(_line(name, trial), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"subject": name, **dataclasses.asdict(trial)}) + "\n")
            if not trial.fits:
                break
    return measured


def draw(measured: dict[str, list[BatchTrial]], path: Path) -> None:
    """Draw speed, busy cores and memory over batch size, a line for each subject, as PNG or PDF."""
    figure, panels = empty_panels("tfdist.bench --plot", columns=3, width=4.2)
    for name, trials in measured.items():
        if not trials:
            continue
        sizes = [trial.batch_size for trial in trials]
        label = f"{name}, {trials[0].parameters:,} parameters"
        speeds, cores = zip(*((t.examples_per_second, t.cores) for t in trials), strict=True)
        for axes, values in zip(panels, (speeds, cores, map(_mib, trials)), strict=True):
            axes.plot(sizes, list(values), marker="o", ms=3.5, label=label)
    titles = ("Examples a second", "Busy cores", "Peak memory in MiB")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("batch size")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def _line(name: str, trial: BatchTrial) -> str:
    if not trial.fits:
        return f"{name:>24} {'':>12} {trial.batch_size:>10} {trial.cause}"
    line = f"{name:>24} {trial.parameters:>12,} {trial.batch_size:>10}"
    return f"{line} {trial.examples_per_second:>12,.0f} {trial.cores:>10.2f} {_mib(trial):>10,.0f}"


def _mib(trial: BatchTrial) -> float:
    """Return the peak of the GPU where there is one, else of the process, all of TensorFlow too."""
    return (trial.gpu_peak_bytes or trial.peak_bytes or 0) / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
