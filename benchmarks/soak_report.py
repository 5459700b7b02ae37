"""SOAK.md and its picture, from the records of a soak; an unfinished one will do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MEBIBYTE = 2**20
KIBIBYTE = 2**10
EARLY_S = 600.0
LEAST_POINTS = 4
EPOCH_STEPS = 100
COLUMNS = (
    "job, task",
    "hours",
    "MiB at 10 min",
    "MiB at the end",
    "MiB per hour",
    "steps",
    "fits",
    "KiB per 1,000 steps",
    "KiB per fit",
    "inside fits",
    "threads",
    "open files",
)

HEAD = """# Memory over hours

Written by `python -m benchmarks.soak` (`make soak`); not by hand.

A job of single, mirrored, multiworker and ps runs, all side by side, for up to {hours:.2f} hours
(column *hours*), and repeats the same round (`benchmarks/soak_job.py`): a fit with validation of a
small model with Dropout and BatchNormalization, with `BackupAndRestore` every 75 steps and Keras
callbacks, on arrays and on a `tf.data` stream in turn; then `evaluate` and `predict`. Ten fits of 2
epochs are followed by three of 30. The memory of each process is read every {every_s:g} s: the
memory that it does not share (USS), so without TensorFlow's libraries.

![Memory of each task over time](../docs/images/{picture})

- *MiB at 10 min*: ten minutes after the start of the job, when everything has been imported and
  traced once;
- *MiB per hour*, *KiB per 1,000 steps*, *KiB per fit*: the slope (least squares) over hours, steps
  and fits in the second half of the time. Each of them contains all growth, whatever its cause;
- *inside fits*: KiB per 1,000 steps between two samples of the same fit, an epoch or more apart;
  the median. If it is small and *KiB per fit* is not, fits leave memory behind and steps do not;
- *threads*, *open files*: at 10 minutes / at the end.

Steps and fits are those of the job, counted by its chief.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The samples of one process from its start on."""

    job: str
    task: str
    start: int
    samples: list[Mapping[str, Any]]

    def values(self, of: str | Callable[[Mapping[str, Any]], float]) -> np.ndarray:
        """Return one number of each sample."""
        take = of if callable(of) else lambda sample: sample[of]
        return np.array([take(sample) for sample in self.samples], dtype=float)

    def early(self) -> Mapping[str, Any] | None:
        """Return the first sample ten minutes after the start."""
        first_s = self.samples[0]["since_s"]
        late = [sample for sample in self.samples if sample["since_s"] - first_s >= EARLY_S]
        return late[0] if late else None

    def second_half(self) -> Series:
        """Return the samples of the second half of the time."""
        middle_s = (self.samples[0]["since_s"] + self.samples[-1]["since_s"]) / 2
        late = [sample for sample in self.samples if sample["since_s"] >= middle_s]
        return Series(job=self.job, task=self.task, start=self.start, samples=late)


def write(records: Path, *, page: Path, picture: Path) -> None:
    """Write the page and its picture; raise ValueError if nothing was sampled."""
    lines = read(records)
    series = collect(lines)
    if not series:
        raise ValueError(f"no sample in {records}")
    draw(series, picture)
    page.write_text(render(lines, series, picture=picture.name))


def read(records: Path) -> list[Mapping[str, Any]]:
    """Return the records; leave out a last line that is not whole."""
    whole = [line for line in records.read_text().splitlines() if line.endswith("}")]
    return [json.loads(line) for line in whole]


def collect(lines: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Return a series for each start of each task, in order of appearance."""
    found: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "sample":
            found.setdefault((line["job"], line["task"], line["start"]), []).append(line)
    return [Series(job=j, task=t, start=s, samples=of) for (j, t, s), of in found.items()]


def render(lines: Sequence[Mapping[str, Any]], series: Sequence[Series], *, picture: str) -> str:
    """Return the page; the first record describes the soak."""
    about = lines[0]
    seconds = max(line["since_s"] for line in lines[1:])
    every_s = about["every_s"]
    parts = [HEAD.format(hours=seconds / 3600, every_s=every_s, picture=picture)]
    if seconds < 0.95 * about["hours"] * 3600:
        parts.append(f"**Interrupted: {about['hours']:g} hours were planned.**\n")
    parts += [*_table(longest(series)), ""]
    if ended := [_ended(line) for line in lines if line["kind"] == "ended"]:
        parts += ["Restarted (the table shows the longest start of each task):\n", *ended, ""]
    parts += ["## Measured with", ""]
    parts += [f"- {name}: {value}" for name, value in about["machine"].items()]
    return "\n".join(parts) + "\n"


def longest(series: Iterable[Series]) -> list[Series]:
    """Return for each task the start from which it ran longest."""
    best: dict[tuple[str, str], Series] = {}
    for one in series:
        known = best.setdefault((one.job, one.task), one)
        if len(one.samples) > len(known.samples):
            best[one.job, one.task] = one
    return list(best.values())


def _table(series: Iterable[Series]) -> list[str]:
    rows = [COLUMNS, *(_row(one) for one in series)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(COLUMNS) + "|", *lines[1:]]


def _row(series: Series) -> tuple[str, ...]:
    early, late = series.early(), series.samples[-1]
    half = series.second_half()
    hours = (late["since_s"] - series.samples[0]["since_s"]) / 3600
    name = f"{series.job}, {series.task}" + (f", start {series.start}" * (series.start > 1))
    return (
        name,
        f"{hours:.2f}",
        _mebibytes(early) if early else "-",
        _mebibytes(late),
        _signed(slope(half, over=lambda sample: sample["since_s"] / 3600), MEBIBYTE),
        f"{late['steps']:,}",
        f"{late['fits']:,}",
        _signed(slope(half, over=lambda sample: sample["steps"] / 1000), KIBIBYTE),
        _signed(slope(half, over="fits"), KIBIBYTE),
        _signed(inside_fits(series), KIBIBYTE),
        _both(early, late, "threads"),
        _both(early, late, "fds"),
    )


def slope(series: Series, *, over: str | Callable[[Mapping[str, Any]], float]) -> float | None:
    """Return the bytes by which the memory grows with one more of `over`, by least squares."""
    x = series.values(over)
    if len(x) < LEAST_POINTS or x[0] == x[-1]:
        return None
    return float(np.polyfit(x, series.values("uss"), 1)[0])


def inside_fits(series: Series) -> float | None:
    """Return the bytes for 1,000 steps between samples of one fit, an epoch or more apart."""
    slopes = [
        (b["uss"] - a["uss"]) / (b["steps"] - a["steps"]) * 1000
        for a, b in zip(series.samples, series.samples[1:], strict=False)
        if a["fits"] == b["fits"]
        and a["phase"] == b["phase"] == "fit"
        and b["steps"] - a["steps"] >= EPOCH_STEPS
    ]
    return float(np.median(slopes)) if len(slopes) >= LEAST_POINTS else None


def _mebibytes(sample: Mapping[str, Any]) -> str:
    return f"{sample['uss'] / MEBIBYTE:.1f}"


def _signed(value: float | None, unit: int) -> str:
    return "-" if value is None else f"{round(value / unit, 1) + 0.0:+,.1f}"


def _both(early: Mapping[str, Any] | None, late: Mapping[str, Any], name: str) -> str:
    return f"{early[name] if early else '-'} / {late[name]}"


def _ended(line: Mapping[str, Any]) -> str:
    at = f"{line['since_s'] / 60:.0f} min"
    return (
        f"- {line['job']}: start {line['start']} ended with exit code {line['exit_code']} at {at}"
    )


def draw(series: Sequence[Series], path: Path) -> None:
    """Draw a panel for each job: the memory of its tasks over time, without launchers."""
    tasks = [one for one in series if one.task != "launcher"]
    jobs = list(dict.fromkeys(one.job for one in tasks))
    figure = Figure(figsize=(9.6, 3.2 * ((len(jobs) + 1) // 2)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots((len(jobs) + 1) // 2, 2, squeeze=False, sharex=True).flat
    for axes, job in zip(panels, jobs, strict=False):
        _draw_panel(axes, job, [one for one in tasks if one.job == job])
    for axes in list(panels)[len(jobs) :]:
        axes.axis("off")
    figure.savefig(path)


def _draw_panel(axes: Any, job: str, series: Sequence[Series]) -> None:
    names = list(dict.fromkeys(one.task for one in series))
    for one in series:
        label = one.task if one.start == 1 else None
        color = f"C{names.index(one.task)}"
        hours, memory = one.values("since_s") / 3600, one.values("uss") / MEBIBYTE
        axes.plot(hours, memory, color=color, label=label, linewidth=1.2)
    axes.set_title(job, fontsize=10)
    axes.set_xlabel("hours")
    axes.set_ylabel("USS, MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
