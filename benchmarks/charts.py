"""``python -m benchmarks.charts``: draw the charts of docs/evidence.md from the records.

The records are `charts.json` of this directory, and the benchmarks that docs/evidence.md names
write them. ``--scaling``, ``--limited`` and ``--all_reduce`` first take new figures into the
record.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.panels import empty_panels

HERE = Path(__file__).parent
RECORD = HERE / "charts.json"
IMAGES = HERE.parent / "docs" / "images"
_WORKERS_OF_CURVES = (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--scaling", type=Path, help="scaling.json of benchmarks.scaling")
    parser.add_argument("--limited", type=Path, help="the same, of jobs with a CPU limit")
    parser.add_argument("--all_reduce", type=Path, help="record of benchmarks.all_reduce --json")
    options = parser.parse_args(argv)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name, path in vars(options).items():
        if path:
            record[name] = json.loads(path.read_text())
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name in ("scaling", "limited"):
        if name in record:
            print(draw_scaling(record[name], f"{name}.png"))
    if "all_reduce" in record:
        print(draw_all_reduce(record["all_reduce"]))
    return 0


def draw_scaling(table: Mapping[str, Any], name: str) -> Path:
    """Draw examples per second of ps jobs, and the loss over time for each number of workers."""
    figure, (rates, losses) = empty_panels(columns=2, width=5.6)
    rows = table["shapes"]
    for number, row in enumerate(rows):
        rate = row["examples_per_second"]
        spread = [[rate["median"] - rate["least"]], [rate["most"] - rate["median"]]]
        rates.bar(number, rate["median"], yerr=spread, color="C0", capsize=3)
    rates.set_xticks(range(len(rows)), [row["shape"] for row in rows], rotation=30)
    rates.set_title("Examples per second", loc="left", fontsize=10)
    rates.set_xlabel("workers (W) and parameter servers (PS)")
    of_one_ps = [row for row in rows if row["ps"] == 1 and row["workers"] in _WORKERS_OF_CURVES]
    for number, row in enumerate(of_one_ps):
        workers = row["workers"]
        shared = ", oversubscribed" if is_oversubscribed(row, table["cpus"]) else ""
        label = f"{workers} worker{'s' * (workers > 1)}{shared}"
        for curve in row["loss_curves"]:
            losses.plot(
                *zip(*curve, strict=True), color=f"C{number}", marker="o", ms=2.5, label=label
            )
            label = "_"
    losses.set_title("Loss over time, one parameter server", loc="left", fontsize=10)
    percents = {row["cpu_percent"] for row in rows if row.get("cpu_percent")}
    losses.set_xlabel("seconds of training" + " since the first virtual epoch" * bool(percents))
    losses.set_ylim(bottom=0)
    losses.legend(fontsize=8)
    repeats = table["repeats"]
    runs = f"{repeats} run{'s' * (repeats > 1)} of each job"
    machine = f"all measured: {runs} on {table['cpus']} CPUs"
    limit = "".join(f"; {percent:g} % of a CPU for each task" for percent in percents)
    figure.supxlabel(f"{machine}{limit}; bars: median, least and most", fontsize=8)
    return _saved(figure, name)


def is_oversubscribed(row: Mapping[str, Any], cpus: int) -> bool:
    """Return whether the tasks of a job can use more CPU time than the machine has.

    Without a limit, only workers count, because the ps and the chief mostly wait.
    """
    if percent := row.get("cpu_percent"):
        has_chief = row["ps"] > 0
        return bool((row["workers"] + row["ps"] + has_chief) * percent > 100 * cpus)
    return bool(row["workers"] > cpus)


def draw_all_reduce(record: Mapping[str, Any]) -> Path:
    """Draw the seconds of a sum by its size, a panel for each number of tasks."""
    numbers = sorted({row["tasks"] for row in record["rows"]})
    figure, panels = empty_panels(columns=len(numbers), width=3.8)
    for axes, tasks in zip(panels, numbers, strict=True):
        rows = [row for row in record["rows"] if row["tasks"] == tasks]
        sizes = [row["mib"] for row in rows]
        for color, kind in enumerate(("naive", "ring")):
            seconds = [1000 * statistics.median(row[f"{kind}_s"]) for row in rows]
            axes.plot(sizes, seconds, color=f"C{color}", marker="o", ms=3.5, label=kind)
        shared = ", oversubscribed" if tasks > record["cpus"] else ""
        axes.set_title(f"{tasks} tasks{shared}", loc="left", fontsize=10)
        axes.set_xlabel("MiB of gradients")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
    highest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(bottom=min(one.get_ylim()[0] for one in panels), top=highest)
    panels[0].set_ylabel("milliseconds of a sum")
    panels[0].legend()
    figure.supxlabel(f"medians on {record['cpus']} CPUs, Unix sockets", fontsize=8)
    return _saved(figure, "all_reduce.png")


def _saved(figure: Any, name: str) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    Image.open(picture).convert("RGB").quantize(64).save(IMAGES / name, optimize=True)
    return IMAGES / name


if __name__ == "__main__":
    sys.exit(main())
