"""What the pages tell a user to type is understood; every flag and option is in its page."""

import argparse
import ast
import configparser
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import tfdist.tuning.options
from tests.unit.test_docs import _FENCE, DOCS, PAGES, ROOT, name_of
from tfdist import __main__ as programs
from tfdist import check, demo, env, export, serve, top, workers
from tfdist.configs import command_line
from tfdist.launch import options
from tfdist.options import JobOptions, table
from tfdist.report import __main__ as report
from tfdist.submit.__main__ import main as submit

_COMMAND = re.compile(r"(?:python -m tfdist\.|^(?:\S+ )?tfdist )(\w+)(.*)", re.MULTILINE)


def _launch(words: Sequence[str]) -> None:
    asked = options.parse(words)
    if asked is not None and asked.program.target == "tfdist.train":
        command_line.parse(asked.program.args)


def _submit(words: Sequence[str]) -> None:
    assert submit([*["--dry_run"] * ("--dry_run" not in words), *words]) == 0


READ: dict[str, Callable[[Sequence[str]], Any]] = {
    "demo": lambda words: _launch(demo.command(words)),
    "launch": _launch,
    "train": command_line.parse,
    "tune": tfdist.tuning.options.parse,
    "submit": _submit,
}
for _module in (check, export, serve, report, top, workers, env):
    READ[_module.__name__.split(".")[1]] = _module._parser().parse_args


def commands() -> Iterator[tuple[str, str, str]]:
    """Page, program and arguments of every line in a block that starts a program."""
    for page in PAGES:
        for _, language, block in _FENCE.findall(page.read_text()):
            for name, rest in _COMMAND.findall("" if language else block):
                if "[" not in rest:  # not a line of usage
                    yield name_of(page), name, re.split(r"\s+[#>]\s?", rest)[0]


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_command_in_the_pages_is_understood(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for page, rest in ((page, rest) for page, each, rest in commands() if each == name):
        print(page, name, rest)
        READ[name](shlex.split(rest))


def test_every_program_is_indexed_and_has_a_command():
    index = (DOCS / "index.md").read_text()
    assert {name for _, name, _ in commands()} == set(READ) == set(programs.PROGRAMS)
    assert [name for name in programs.PROGRAMS if f"`tfdist {name}`" not in index] == []


def _flags_of(*parsers: argparse.ArgumentParser) -> list[str]:
    actions = [action for parser in parsers for action in parser._actions]
    actions = [action for action in actions if action.help != argparse.SUPPRESS]
    return [action.option_strings[-1][2:] for action in actions if action.option_strings]


def _flags_by_page() -> dict[str, list[str]]:
    """Return the flags of pages that people write; test_docs compares the page of options."""
    return {
        "checks.md": _flags_of(check._parser()),
        "serving.md": _flags_of(export._parser(), serve._parser()),
        "report.md": _flags_of(report._parser(), top._parser()),
    }


@pytest.mark.parametrize(("page", "flags"), _flags_by_page().items())
def test_every_flag_is_in_its_page(page, flags):
    text = (DOCS / page).read_text()
    assert [flag for flag in flags if flag != "help" and f"--{flag}" not in text] == []


def test_every_option_of_tf_config_is_in_the_table():
    rows = [row.split("|") for row in (DOCS / "strategies.md").read_text().splitlines()]
    told = {row[1].strip(): row[2].strip(" `") for row in rows if len(row) > 3}
    for option in table(JobOptions).values():
        default = json.dumps(option.default).removesuffix(".0")
        assert (option.name, told[f"`{option.name}`"]) == (option.name, default)


OF_FUNCTIONS = [
    ("strategy/make.py", "make_strategy", "strategies.md"),
    ("training/run_settings.py", "Run", "training.md"),
]


@pytest.mark.parametrize(("module", "function", "page"), OF_FUNCTIONS)
def test_every_argument_of_our_own_is_in_its_page(module, function, page):
    tree = ast.parse((ROOT / "tfdist" / module).read_text())
    found = next(n for n in tree.body if getattr(n, "name", None) == function)
    if isinstance(found, ast.ClassDef):
        names = [n.target.id for n in found.body if isinstance(n, ast.AnnAssign)]
    else:
        names = [a.arg for a in found.args.kwonlyargs]
    assert names
    text = (DOCS / page).read_text()
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_every_dependency_has_its_reason():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"].values()
    needed = "\n".join([config["options"]["install_requires"], *extras])
    text = (DOCS / "limits.md").read_text()
    names = re.findall(r"^(?!tfdist\[)([\w-]+(?:\[[\w-]+\])?)", needed, re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if name not in text] == []


def test_every_test_file_of_the_evidence_page_exists():
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"\btest_\w+\.py", (DOCS / "evidence.md").read_text())
    assert len(named) > 30
    assert set(named) <= tests


def test_every_troubleshooting_message_is_in_the_source():
    """In backticks, in the first column; an ellipsis stands for what differs."""
    text = (DOCS / "troubleshooting.md").read_text()
    sources = " ".join(path.read_text() for path in sorted((ROOT / "tfdist").rglob("*.py")))
    sources = re.sub(r'"\s*f?"', "", sources)  # of texts that go over several lines
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    told = [message for row in rows for message in row.split("`")[1::2]]
    assert len(told) > 10
    parts = [part.strip() for message in told for part in message.split("…")]
    assert [part for part in parts if part not in sources] == []
