"""``python -m tfdist.bench batch [SUBJECT ...]``: speed, busy cores and memory by batch size.

SUBJECT is that of `tfdist.find`; several are models of several sizes. Each batch size of each
trains alone in a process of its own, from small to large until one does not fit.

``python -m tfdist.bench serve URL`` is load on a model server: `tfdist.serving.bench`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser
from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, TfdistError, require, require_int
from tfdist.find.__main__ import of_config
from tfdist.find.batch_size import Limits, Trial, try_out
from tfdist.outputs.plot import require_figure
from tfdist.serving.bench import main as load

_LOG = logging.getLogger(__name__)
_COLORS = ("#1f5fa8", "#d1661a", "#3a8a4d", "#8a4d9e", "#777777")
_USE = 0.9
_COLUMNS = ("model", "parameters", "batch size", "examples/s", "busy cores", "peak MiB")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What one batch size of one subject gave."""

    subject: str
    trial: Trial

    @property
    def row(self) -> tuple[str, ...]:
        trial = self.trial
        if not trial.fits:
            return (self.subject, "", str(trial.batch_size), trial.cause)
        values = (f"{trial.parameters:,}", trial.batch_size, f"{trial.examples_per_second:,.0f}")
        return (self.subject, *map(str, values), f"{trial.cores:.2f}", f"{self.memory_mib:,.0f}")

    @property
    def memory_mib(self) -> float:
        """Peak of the GPU where there is one, else of the process, TensorFlow's own part too."""
        return (self.trial.gpu_peak_bytes or self.trial.peak_bytes or 0) / (1 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        return load(words[1:])
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    try:
        options = parse(words)
        points = measure(options)
    except TfdistError as error:
        print(f"tfdist.bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    widths = [max(map(len, column)) for column in zip(*_filled(points), strict=True)]
    for row in _filled(points):
        print("  ".join(map(str.rjust, row, widths)).rstrip())
    if options.json:
        lines = [json.dumps(dataclasses.asdict(point)) for point in points]
        options.json.write_text("".join(f"{line}\n" for line in lines))
    if options.plot:
        draw(points, options.plot)
    return EXIT_OK


def parse(argv: Sequence[str]) -> Any:
    """Return the options, `subjects` as lists of words among them; raise UsageError."""
    config, ours = of_config(argv)
    parser = Parser(prog="tfdist.bench", description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("batch", "serve"), help="what to measure")
    parser.add_argument("names", nargs="*", metavar="FILE.py:FUNCTION", help="returns model, x, y")
    parser.add_argument("--sizes", default="8,16,32,64,128,256", help="batch sizes, from small on")
    parser.add_argument("--steps", type=int, default=10, help="of a round; the first is left out")
    parser.add_argument("--least_s", type=float, default=2.0, help="how long rounds are repeated")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="of each size")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of it")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="a line for each size")
    options = parser.parse_args(ours)
    sizes = options.sizes.split(",")
    require(
        all(size.isdecimal() and int(size) for size in sizes),
        "--sizes",
        received=options.sizes,
        expected="whole numbers with commas between them",
        fix="write --sizes 8,16,32",
        code="not-an-int",
    )
    require_int("--steps", options.steps, least=1)
    if options.plot:
        require_figure("tfdist.bench --plot")
    options.sizes = sorted({int(size) for size in sizes})
    options.subjects = [*([name] for name in options.names), *([config] if config else [])] or [[]]
    return options


def measure(options: Any) -> list[Point]:
    """Train every subject with every size, up to one that does not fit."""
    limits, points = Limits.of_this_machine(_USE), list[Point]()
    common = {"steps": options.steps, "least_s": options.least_s}
    for words in options.subjects:
        name = " ".join(words).rpartition(":")[2] or "cnn"
        for size in options.sizes:
            request = {**common, "subject": words, "batch_size": size}
            trial = try_out(request, limits, timeout_s=options.timeout_s)
            points.append(Point(subject=name, trial=trial))
            _LOG.info("%s", ", ".join(points[-1].row))
            if not trial.fits:
                break
    return points


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw speed, busy cores and memory over batch size, a line for each subject, as PNG or PDF."""
    figure = require_figure("tfdist.bench --plot", figsize=(12.0, 3.8))
    panels = figure.subplots(1, 3)
    titles = ("Examples a second", "Busy cores", "Peak memory in MiB")
    fitting = [point for point in points if point.trial.fits]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("batch size")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for number, name in enumerate(dict.fromkeys(point.subject for point in fitting)):
        mine = [point for point in fitting if point.subject == name]
        sizes = [point.trial.batch_size for point in mine]
        label = f"{name}, {mine[0].trial.parameters:,} parameters"
        color = _COLORS[number % len(_COLORS)]
        speeds = [point.trial.examples_per_second for point in mine]
        cores = [point.trial.cores for point in mine]
        for axes, values in zip(panels, (speeds, cores, [p.memory_mib for p in mine]), strict=True):
            axes.plot(sizes, values, color=color, marker="o", ms=3.5, label=label)
    for axes in panels:
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _filled(points: Sequence[Point]) -> list[tuple[str, ...]]:
    rows = [_COLUMNS, *(point.row for point in points)]
    return [(*row, *("",) * (len(_COLUMNS) - len(row))) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
