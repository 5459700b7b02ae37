"""The page docs/reference.md, from the tables of options: `python -m tests.tools.options_page`."""

from __future__ import annotations

import argparse
import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path

from tfdist.kinds import KINDS
from tfdist.options import (
    PLACE,
    JobSettings,
    LaunchFlags,
    Option,
    TrainFields,
    TrainFlags,
    names_of,
    table,
)
from tfdist.submit import command_line
from tfdist.tuning.options import SweepOptions

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
_START = """# Flags, variables and fields

`python -m tests.tools.options_page` writes this page from the tables of options. Do not edit it.

In all programs, dashes may replace underscores (`--run-dir`), and the last value of a repeated flag
counts. `tfdist.launch`, `tfdist.train` and `tfdist.tune` read their flags with
[absl](https://abseil.io/docs/python/guides/flags): `--nodry_run` or `--dry_run=false` switches a
flag off, and `--helpfull` lists absl's flags too. An unknown flag or a wrong value is one line and
exit code 2. An empty default means that the option is not set."""


def page() -> str:
    """Return the text of the page."""
    launch, fields, tune = table(LaunchFlags), table(TrainFields), table(SweepOptions)
    flags = [launch[name] for name in names_of(LaunchFlags)]
    variables = [one for one in table(JobSettings).values() if one.variable]
    parts = [
        _START,
        "## tfdist.launch\n\n[launch.md](launch.md) and [hosts.md](hosts.md) show their use.",
        _table("flag", ((f"`--{one.name}`", *_cells(one)) for one in flags)),
        "## Variables\n\nAnother launcher than tfdist's sets these variables in [its "
        "tasks](schedulers.md#variables-for-the-strategy). `tfdist.launch` reads only its flags.",
        _table("variable", ((one.variable, *_cells(one)) for one in variables)),
        "These variables place a task in its job. They have no flag.",
        _rows(("variable", "meaning"), PLACE.items()),
        "## tfdist.train\n\n[configs.md](configs.md) shows the use of `--config=FILE`.",
        _table("flag", ((f"`--{n}`", *_cells(table(TrainFlags)[n])) for n in names_of(TrainFlags))),
        "### Fields of a configuration\n\nWrite `config.NAME = value` in the file, or "
        "`--config.NAME=value`. Fields with * may differ between two starts of the same run.",
        _table("field", ((f"`{o.name}`{' *' * o.free}", *_cells(o)) for o in fields.values())),
        "## tfdist.tune\n\n[tuning.md](tuning.md) shows their use. `--config.NAME=value` changes a "
        "field of every trial.",
        _table("flag", ((f"`--{n}`", *_cells(tune[n])) for n in names_of(SweepOptions))),
        "## tfdist.submit\n\n[submit.md](submit.md) shows their use. It has some of the launcher's "
        "flags, and flags of its own.",
        _rows(("flag", "value", "meaning"), _submit()),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(one: Option) -> tuple[str, str, str]:
    """Return the default, the valid values and the meaning of an option."""
    is_unset = any(one.default is unset for unset in (None, False, MISSING, "", math.inf))
    default = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
    valid = ", ".join(f"`{choice}`" for choice in one.choices) or one.bounds
    return "" if is_unset else f"`{default}`", valid, _under(one) + one.help


def _under(one: Option) -> str:
    """Return the strategies that use an option, if not all do."""
    several = tuple(name for name, kind in KINDS.items() if kind.has_several_tasks)
    names = "several tasks" if one.strategies == several else ", ".join(one.strategies)
    return f"under {names}: " if names else ""


def _submit() -> Iterator[tuple[str, str, str]]:
    for action in command_line._parser()._actions:
        if action.help != argparse.SUPPRESS and action.option_strings[-1] != "--help":
            value = str(action.metavar or "").replace("|", ", ")
            yield f"`{action.option_strings[-1]}`", value, str(action.help)


def _table(first: str, rows: Iterable[Sequence[str]]) -> str:
    return _rows((first, "default", "valid values", "meaning"), rows)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return html.escape("\n".join(lines), quote=False)


if __name__ == "__main__":
    PAGE.write_text(page())
