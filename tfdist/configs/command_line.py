"""Command line of `tfdist.train`: returns a checked configuration or raises a one-line error."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.configs import FIELDS, check, unknown
from tfdist.errors import UsageError, near
from tfdist.options import (
    TrainFields,
    TrainFlags,
    asks_for_help,
    flags_of,
    names_of,
    read,
    shown,
    underscored,
)

_DEFAULT_FILE = str(Path(__file__).with_name("digits.py"))
_USAGE = """usage: python -m tfdist.train [--config=FILE] [--config.FIELD=VALUE ...] [--overwrite]

Trains what FILE describes (default: a CNN on the digits). Under several tasks:

  python -m tfdist.launch --strategy ps --workers 4 --ps 1 -m tfdist.train --config=FILE"""


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainFlags):
    """Parsed command line of `tfdist.train`."""

    config: Any = None
    """Checked configuration, or `None` if the command line asks for the help text."""


def parse(arguments: Sequence[str]) -> TrainCommand:
    """Read the config file and the overrides. `arguments` do not include the program's name.

    Raises UsageError for an unknown flag or field, a value of the wrong type or out of range, and
    a config file that fails.
    """
    if asks_for_help(arguments):
        return TrainCommand()
    from ml_collections import ConfigDict, config_flags

    made = flags_of(TrainFlags)
    words = [underscored(word, made) if word.startswith("--") else word for word in arguments]
    _check_names(words)
    nulls = [word for word in words if re.fullmatch(r"--config\.\w+=(null|None)", word)]
    words = [word for word in words if word not in nulls]
    path = _config_file(words)
    sys.modules.pop("config_config", None)  # config_flags would run a file in an earlier namespace
    try:
        config_flags.DEFINE_config_file("config", path, flag_values=made, sys_argv=words)
        values = read(made, words)
    except Exception as error:
        raise _refusal(path.partition(":")[0], error) from error
    config = made["config"].value
    if not isinstance(config, ConfigDict):
        problem = f"get_config() returns a {type(config).__name__} instead of a ConfigDict"
        fix = "start from tfdist.configs.base() and return it"
        raise UsageError(path, problem, fix=fix, code="CFG001")
    for word in nulls:
        config[word.partition("=")[0].removeprefix("--config.")] = None
    check(config)
    given = {name: values[name] for name in names_of(TrainFlags) if name in values}
    return TrainCommand(config=config, **given)


def help_text(*, full: bool) -> str:
    """Return the text of ``--help``, or of ``--helpfull``."""
    return shown(_USAGE, flags_of(TrainFlags), flags_of(TrainFields, prefix="config."), full=full)


def _check_names(words: Sequence[str]) -> None:
    """Raise UsageError for an unknown field, and for a field without ``config.``."""
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        field = name.removeprefix("no").removeprefix("config.")
        if field != name.removeprefix("no") and field not in FIELDS:
            raise unknown(field)
        if name in FIELDS and name not in ("config", "overwrite"):
            fix = f"write --config.{name}"
            raise UsageError(
                "command line", f"--{name} is no flag, but a field", fix=fix, code="unknown-flag"
            )


def _config_file(words: Sequence[str]) -> str:
    """Return the last ``--config``. Raise UsageError if it is not a file."""
    path = _DEFAULT_FILE
    for position, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == "--config":
            path = text if equals else "".join(words[position + 1 : position + 2])
    file = path.partition(":")[0]
    if file and not os.path.isfile(file):  # also if the directory is not accessible
        near_by = [str(other) for other in Path(file).parent.glob("*.py")]
        problem = f"{file!r} is not a file{near(file, near_by)}"
        fix = "check the path (see configs/ for examples)"
        raise UsageError("--config", problem, fix=fix, code="no-file")
    return path


def _refusal(path: str, error: BaseException) -> UsageError:
    """Return the error of a config file, or of a flag if `error` is not from the file."""
    cause: BaseException | None = error
    while cause is not None:
        if _line(path, cause):
            return broken_file(path, cause)
        cause = cause.__context__
    return error if isinstance(error, UsageError) else broken_file(path, error)


def _line(path: str, error: BaseException) -> int | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)


def broken_file(path: str, error: BaseException) -> UsageError:
    """Return the error of a config file, with the line that failed."""
    number = _line(path, error)
    where = f"{path}, line {number}" if number else path
    if missing := re.search(r'Key "([^"]*)" does not exist', str(error)):
        return unknown(missing[1], where=where)
    problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    fix = "correct the config file (see configs/ for examples)"
    return UsageError(where, problem, fix=fix, code="CFG001")
