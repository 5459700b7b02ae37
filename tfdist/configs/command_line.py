"""Command line of `tfdist.train`: returns a checked configuration or raises a one-line error."""

from __future__ import annotations

import ast
import os
import re
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.argument_parser import Parser
from tfdist.configs import FIELDS, check, flat, unknown
from tfdist.errors import UsageError, near

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_DEFAULT_FILE = str(Path(__file__).with_name("digits.py"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """Parsed command line of `tfdist.train`."""

    config: Any
    overwrite: bool = False
    help: bool = False


def parse(arguments: Sequence[str]) -> TrainCommand:
    """Read the config file and the overrides. `arguments` do not include the program's name.

    Raises UsageError for an unknown flag or field, a value of the wrong type or out of range, and
    a config file that fails.
    """
    names = {field.name: field.optional_type or type(field.default) for field in FIELDS}
    optional = {field.name for field in FIELDS if field.optional_type}
    for argument in arguments:
        match = re.match(r"--config\.([^=]*)", argument)
        if match and match[1] not in names:
            raise unknown(match[1])
    values = vars(_parser().parse_args(arguments))
    config = load(values["config"][-1])
    known = flat(config)
    for name, type_ in names.items():
        if texts := values[f"config.{name}"]:
            is_none = name in optional and texts[-1] in ("null", "None")
            value = None if is_none else _read(f"--config.{name}", texts[-1], type_)
            group, _, short = name.rpartition(".")
            if name in known:
                (config[group] if group else config)[short] = value
    if not values["help"]:
        check(config)
    overwrite = _read("--overwrite", values["overwrite"], bool)
    return TrainCommand(config=config, overwrite=overwrite, help=values["help"])


def help_text() -> str:
    """Return the text of --help."""
    return _parser().format_help()


def _parser() -> Parser:
    """Return the parser, which keeps values as texts. The last value of a repeated field wins."""
    parser = Parser(
        prog="python -m tfdist.train",
        usage="python -m tfdist.train [--config=FILE] [--config.FIELD=VALUE ...] [--overwrite]",
        description="Trains what FILE describes (default: a CNN on the digits). Under several "
        "tasks: python -m tfdist.launch --strategy ps --workers 4 --ps 1 -m tfdist.train "
        "--config=FILE",
        add_help=False,
    )
    add = parser.add_argument
    add("--help", "-h", action="store_true", help="show this")
    add("--config", action="append", default=[_DEFAULT_FILE], metavar="FILE", help="a config file")
    overwrite = "move an earlier run in the run directory aside, into old-1, old-2, ..."
    add("--overwrite", nargs="?", const="true", default="false", metavar="true", help=overwrite)
    add = parser.add_argument_group("fields, with their defaults").add_argument
    for field in FIELDS:
        choices = f"; one of {', '.join(field.choices)}" if field.choices else ""
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.default is False else {}
        add(
            f"--config.{field.name}",
            action="append",
            default=[],
            metavar=repr(field.default),
            help=(field.help + choices).replace("%", "%%"),
            **switch,
        )
    return parser


def _numbers(text: str) -> tuple[Any, ...]:
    value = ast.literal_eval(text)
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(number, (int, float)) for number in values):
        raise ValueError(text)
    return values


def _switch(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


_READERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    str: (str, "a text"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_switch, "true or false"),
    tuple: (_numbers, "numbers, as in (0.5,) or 3,5"),
}
"""Function that reads the text of a flag, and the expected value in words, by the field's type."""


def _read(flag: str, text: str, type_: type) -> Any:
    read, expected = _READERS[type_]
    try:
        return read(text)
    except (ValueError, KeyError, SyntaxError):
        fix = "see --help for the fields and their defaults"
        raise UsageError(
            flag, received=repr(text), expected=expected, fix=fix, code="CFG004"
        ) from None


def load(path: str) -> ConfigDict:
    """Run a config file and return its configuration, or raise UsageError if it fails."""
    from ml_collections import ConfigDict

    if not os.path.isfile(path):  # also if the directory is not accessible
        near_by = [str(file) for file in Path(path).parent.glob("*.py")]
        raise UsageError(
            "--config",
            received=f"{path!r}, which is no file{near(path, near_by)}",
            expected="the path of a config file",
            fix="check the path; configs/ has examples",
            code="missing-file",
        )
    try:
        config = runpy.run_path(path)["get_config"]()
    except Exception as error:
        raise broken_file(path, error) from error
    if not isinstance(config, ConfigDict):
        raise UsageError(
            path,
            received=f"a {type(config).__name__} from get_config()",
            expected="a ConfigDict",
            fix="start from tfdist.configs.base() and return it",
            code="CFG008",
        )
    return config


def broken_file(path: str, error: Exception) -> UsageError:
    """Return the error of a config file, with the line that failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    number = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    where = f"{path}, line {number}" if number else path
    if missing := re.search(r'Key "([^"]*)" does not exist', str(error)):
        return unknown(missing[1], where=where)
    return UsageError(
        where,
        received=f"{type(error).__name__}: {' '.join(str(error).split())}",
        expected="a config file that defines get_config()",
        fix="correct the config file; configs/ has examples",
        code="CFG001",
    )
