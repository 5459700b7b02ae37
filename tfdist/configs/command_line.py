"""Command line of `tfdist.train`: a validated configuration or a one-line error."""

from __future__ import annotations

import itertools
import linecache
import re
import runpy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.argument_parser import is_plain
from tfdist.configs.fields import FIELDS, check, flat, unknown
from tfdist.errors import UsageError, near

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_DEFAULT_FILE = str(Path(__file__).with_name("digits.py"))
_FLAGS = ("config", "overwrite", "help")
_TYPES = {field.name: field.optional_type or type(field.default) for field in FIELDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """What the command line asks for."""

    config: Any
    overwrite: bool = False
    help: bool = False


def parse(arguments: Sequence[str]) -> TrainCommand:
    """Read the config file and the overrides; `arguments` are without the program's name.

    Raises UsageError for an unknown flag or field, a value of the wrong type or out of range, and
    a config file that does not run.
    """
    from absl import flags
    from ml_collections import config_flags

    _check_overrides(arguments)
    argv = ["tfdist.train", *arguments]
    values = flags.FlagValues()
    flags.DEFINE_bool("overwrite", False, "move a run in the way aside", flag_values=values)
    flags.DEFINE_bool("help", False, "show this", flag_values=values)
    try:
        config_flags.DEFINE_config_file("config", _DEFAULT_FILE, flag_values=values, sys_argv=argv)
        rest = values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(error.flagname) from None
    except flags.IllegalFlagValueError as error:
        raise _wrong_type(str(error)) from None
    except flags.Error as error:
        raise UsageError(
            "command line",
            received=error,
            expected="--flag=value",
            fix="see --help",
            code="not-a-flag",
        ) from None
    if rest:
        raise UsageError(
            "command line",
            received=f"{rest[0]!r}",
            expected="flags only",
            fix="write --config=FILE, --config.field=value",
            code="not-a-flag",
        )
    if not values.help:
        check(values.config)
    return TrainCommand(config=values.config, overwrite=values.overwrite, help=values.help)


def load(path: str) -> ConfigDict:
    """Run a config file and return its configuration; raise UsageError where it fails."""
    from ml_collections import ConfigDict

    if not Path(path).is_file():
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
        raise _broken_file(path, error) from error
    if not isinstance(config, ConfigDict):
        raise UsageError(
            path,
            received=f"a {type(config).__name__} from get_config()",
            expected="a ConfigDict",
            fix="start from tfdist.configs.base() and return it",
            code="CFG008",
        )
    return config


def help_text() -> str:
    """Return the text of --help."""
    lines = [
        "python -m tfdist.train [--config=FILE] [--config.FIELD=VALUE ...] [--overwrite]",
        "",
        "Trains what FILE describes (default: a CNN on the digits). Under several tasks:",
        "python -m tfdist.launch --strategy ps --workers 4 --ps 1 -m tfdist.train --config=FILE",
        "",
        "  --overwrite  move an earlier run in the run directory aside, into old-1, old-2, ...",
        "",
        "Fields, with their defaults:",
    ]
    for field in FIELDS:
        lines.append(f"  --config.{field.name}={field.default!r}")
        lines.append(f"      {field.help}")
        if field.choices:
            lines.append(f"      one of {', '.join(field.choices)}")
    return "\n".join(lines)


def _check_overrides(arguments: Sequence[str]) -> None:
    """Refuse what config_flags would answer with a traceback: a bad file, an unknown field."""
    path = _DEFAULT_FILE
    for position, argument in enumerate(arguments):
        if match := re.fullmatch(r"--?config(?:=(.*))?", argument, re.DOTALL):
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            path = match[1] if match[1] is not None else following
    config = load(path)
    names = flat(config)
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if match and match[1] not in names:
            raise unknown(match[1])
    for argument, following in itertools.pairwise([*arguments, ""]):
        match = re.fullmatch(r"--?config\.([^=]*)(?:=(.*))?", argument, re.DOTALL)
        if match and _TYPES.get(match[1]) in (int, float):
            _check_number(match[1], following if match[2] is None else match[2])


def _check_number(name: str, text: str) -> None:
    if not is_plain(text):
        raise _wrong_type(f"flag --config.{name}={text}: ")


def _unknown_flag(name: str) -> UsageError:
    return UsageError(
        "command line",
        received=f"unknown flag --{name}{near(name, _FLAGS) or near(f'config.{name}', _dotted())}",
        expected="--config, --config.FIELD or --overwrite",
        fix="see --help",
        code="unknown-flag",
    )


def _dotted() -> list[str]:
    return [f"config.{field.name}" for field in FIELDS]


def _wrong_type(message: str) -> UsageError:
    match = re.match(r"flag --(?:config\.)?([^=]*)=(.*?): ", message, re.DOTALL)
    name, value = (match[1], match[2]) if match else ("", message)
    kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(
        _TYPES.get(name, bool), "another type"
    )
    return UsageError(
        f"--config.{name}" if name in _TYPES else f"--{name}",
        received=repr(value),
        expected=kind,
        fix="see --help for the fields and their defaults",
        code="CFG004",
    )


def _broken_file(path: str, error: Exception) -> UsageError:
    """Report at which line a config file failed, and why, in one line."""
    number = failed_line(path, error)
    line = linecache.getline(path, number).strip() if number else ""
    missing = re.search(r'Key "([^"]*)" does not exist', str(error))
    if missing:
        return unknown(missing[1], where=f"{path}, line {number}")
    if isinstance(error, KeyError) and error.args == ("get_config",):
        code, expected = "CFG002", "a function get_config()"
    elif match := re.search(r"casted to type <class '(\w+)'>", str(error)):
        code, expected = "CFG004", f"a value of type {match[1]}"
    elif isinstance(error, SyntaxError) and not line:
        code, line, expected = "CFG001", "a file that is not Python", "a config file"
    else:
        code = "CFG001" if isinstance(error, SyntaxError) else "CFG024"
        expected = f"a file that runs ({type(error).__name__}: {' '.join(str(error).split())})"
    return UsageError(
        f"{path}, line {number}" if number else path,
        received=line or "what is not there",
        expected=expected,
        fix="correct the config file; configs/ has examples",
        code=code,
    )


def failed_line(path: str, error: BaseException) -> int | None:
    """Return the line of a config file at which it failed, None if it is unknown."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return frames[-1].lineno if frames else None
