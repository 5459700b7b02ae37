"""Timeline of a run: its attempts and tasks, each coloured by what it did."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from tfdist.report.charts import ticks
from tfdist.report.pieces import MAX_ROWS, card
from tfdist.report.run import AttemptRecord, Run, TaskSpan
from tfdist.report.text import clock, duration

PARTS = {
    "start": ("start", ("import", "rendezvous")),
    "trace": ("tracing", ("trace",)),
    "step": ("steps", ("step",)),
    "wait": ("waiting for peers", ("sum", "barrier")),
    "validate": ("validation", ("validate",)),
    "save": ("saving", ("save",)),
    "callback": ("callbacks", ("callback",)),
    "serve": ("serving the chief", ("serve",)),
    "other": ("start and end of the process", ("done", "other")),
}
"""Where the time went: each part's class, name and phases."""

_PART_OF = {phase: part for part, (_, phases) in PARTS.items() for phase in phases}


def part_of(phase: str) -> str:
    """Return the part of a phase."""
    return _PART_OF.get(phase, "other")


def bar(part: str, left: float, right: float, tip: str) -> str:
    """Return a bar of a track, from 0 at its left to 1 at its right."""
    place = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"
    style = f"{place};background:var(--{part})"
    return f'<div class="bar" style="{style}" data-tip="{escape(tip)}"></div>'


@dataclass(frozen=True, slots=True)
class _Range:
    begin: float
    end: float

    def at(self, moment: float) -> float:
        return (moment - self.begin) / (self.end - self.begin)


def timeline(run: Run, legend: str) -> str:
    """Return the last attempts with their tasks; the empty text where no times are known."""
    ends = [attempt.end for attempt in run.attempts if attempt.end is not None]
    if not run.begin or not ends or max(ends) <= run.begin:
        return ""
    shown = _Range(run.begin, max(ends))
    rows = _scale(shown.end - shown.begin)
    for attempt in run.attempts[-MAX_ROWS:]:
        rows += _head(attempt)
        rows += "".join(_row(attempt, span, shown) for span in attempt.tasks[:MAX_ROWS])
        if (left_out := len(attempt.tasks) - MAX_ROWS) > 0:
            rows += f'<span></span><span class="soft">and {left_out} more</span>'
    note = f'<p class="note">From {clock(shown.begin)} to {clock(shown.end)}.</p>'
    return card(f'{legend}<div class="rows">{rows}</div>{note}')


def _scale(seconds: float) -> str:
    """Return round times; on a narrow screen a label takes a quarter of the track."""
    unit = 3600 if seconds >= 3600 else 60 if seconds >= 60 else 1
    shown = [0.0]
    for at in (unit * tick for tick in ticks(0, seconds / unit, most=4)):
        if 0.3 * seconds <= at - shown[-1] and at <= 0.6 * seconds:
            shown.append(at)
    labels = "".join(
        f'<span style="left:{100 * at / seconds:.2f}%">{duration(at)}</span>'
        for at in (*shown, seconds)
    )
    return f'<span></span><div class="scale">{labels}</div>'


def _head(attempt: AttemptRecord) -> str:
    facts = []
    if attempt.first_step_s is not None:
        facts.append(f"first step after {duration(attempt.first_step_s)}")
    if attempt.restart_s is not None:
        facts.append(f"restarted in {duration(attempt.restart_s)} after the failure")
    facts.append("runs" if attempt.exit_code is None else f"exit code {attempt.exit_code}")
    return f'<div class="head">Attempt {attempt.number} <span>{", ".join(facts)}</span></div>'


def _row(attempt: AttemptRecord, span: TaskSpan, shown: _Range) -> str:
    if span.begin is None:
        return ""
    until = span.end or attempt.end or shown.end
    name = span.task + (f" (restart {span.restart})" if span.restart else "")
    where = f" on {span.host}" if span.host else ""
    tip = f"{name}{where}: {span.outcome}\n{clock(span.begin)} to {clock(until)}"
    bars = bar("other", shown.at(span.begin), shown.at(until), tip)
    for part, left, right in _stretches(attempt, span.task, span.begin, until):
        about = f"{span.task}: {PARTS[part][0]}, {duration(right - left)}"
        bars += bar(part, shown.at(left), shown.at(right), about)
    if span.is_failure:
        at = f"left:{100 * shown.at(until):.2f}%"
        bars += f'<div class="fail-at" style="{at}" data-tip="{escape(tip)}"></div>'
    mark = ' <span class="bad">▼</span>' if span.is_failure else ""
    return f'<span>{escape(name)}{mark}</span><div class="track">{bars}</div>'


def _stretches(
    attempt: AttemptRecord, task: str, since: float, until: float
) -> list[tuple[str, float, float]]:
    """Return the longest part of each stretch of time, equal neighbours as one."""
    history = attempt.history.get(task)
    found: list[tuple[str, float, float]] = []
    for i in range(len(history.steps) if history else 0):
        assert history is not None
        spent = {p: s[i] for p, s in history.phases.items() if i < len(s) and s[i] > 0}
        left = history.begin + i * history.width_s
        left, right = max(left, since), min(left + history.width_s, until)
        if not spent or right <= left:
            continue
        part = part_of(max(spent, key=lambda phase: spent[phase]))
        if found and found[-1][0] == part and abs(found[-1][2] - left) < 1e-3:
            left = found.pop()[1]
        found.append((part, left, right))
    return found
