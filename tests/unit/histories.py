"""Histories of jobs, as text: short names of tasks, and tables of what happens and comes of it."""

import re
from pathlib import Path
from typing import Any

import pytest

from tfdist.cluster import Task
from tfdist.launch.state import JobState

_TYPES = {name[0]: name for name in ("chief", "worker", "ps", "evaluator")}
JOBS = {
    **{"1": "w0", "2": "w0 w1", "3": "w0 w1 w2", "2+e": "w0 w1 e0", "3+e": "w0 e0 w1 w2"},
    **{"ps": "c0 w0 w1 p0", "ps3": "c0 w0 w1 w2 p0", "ps+e": "c0 w0 w1 p0 e0"},
}


def tasks(names: str) -> list[Task]:
    """The tasks that short names with spaces or commas stand for: ``c0 w1``."""
    return [Task(_TYPES[name[0]], int(name[1:])) for name in re.split("[ ,]", names)]


def parsed(history: str) -> tuple[str, dict[str, str], list[str]]:
    """The job of a history, options by name, and what happens: ``JOB name=value: this; that``."""
    head, _, text = history.partition(":")
    job, *words = head.split()
    return job, dict(word.split("=") for word in words), [p for p in text.strip().split("; ") if p]


def short(text: object) -> str:
    """A text with the short names of the tasks in it."""
    names = "|".join(_TYPES.values())
    return re.sub(rf"\b({names})-(\d)", lambda found: found[1][0] + found[2], str(text))


def job_state(job_tasks: list[Task], **more: Any) -> JobState:
    """Return the state of a job that begins."""
    usual = {"logs": Path(), "has_servers": False, "grace_s": 10, "policy": None, "watchdog": None}
    return JobState(**{"job_tasks": job_tasks, "now_s": 0.0, **usual, **more})


def recorded(text: str) -> pytest.MarkDecorator:
    """Have a test called with each history of a table, and with its outcome.

    Each has a line with its name, which begins with ``# ``, then those of the history, and then
    those of the outcome, which begin with ``> ``. All others are headings.
    """
    rows = []
    for part in text.split("\n# ")[1:]:
        name, *lines = part.partition("\n\n")[0].splitlines()
        outcome = [line[2:] for line in lines if line.startswith("> ")]
        history = " ".join(lines[: len(lines) - len(outcome)])
        rows.append(pytest.param(history, " ".join(outcome), id=name))
    return pytest.mark.parametrize(("history", "outcome"), rows)
