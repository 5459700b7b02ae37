"""Checks the flags of tfdist.train in a command line of a script or a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist.configs.command_line import parse
from tfdist.configs.fields import flat
from tfdist.errors import UsageError
from tfdist.lint.config_file import settings_of
from tfdist.lint.config_values import Setting, check_batch, code_of
from tfdist.lint.findings import Finding, Place, of_error

_FLAG = re.compile(r"--?config\.([\w.]+)(?:=(.*))?", re.DOTALL)
_NO_FLAG = re.compile(r"--?noconfig\.([\w.]+)")


def runs_tfdist(words: Sequence[str]) -> bool:
    """Returns whether a command names a program of tfdist."""
    return any(word in ("tfdist.train", "tfdist.launch", "tfdist") for word in words)


def runs_launcher(words: Sequence[str]) -> bool:
    """Returns whether a command starts the launcher, as a module or by its own name."""
    return "tfdist.launch" in words or any(word.rpartition("/")[2] == "tfdist" for word in words)


def check_flags(
    words: Sequence[str], place: Place, *, replicas: int | None = None
) -> Iterator[Finding]:
    """Yields what is wrong with ``--config.x=...``; `replicas` is how many the job has.

    Values with a variable of the shell in them are not known, and not checked.
    """
    if not _runs_train(words):
        return
    settings: dict[str, Setting] = {}
    for name, value in _overrides(words):
        at = Place(file=place.file, line=place.line, path=f"--config.{name}")
        if "$" in value:
            settings[name] = Setting(name=name, value=None, place=at, known=False)
            continue
        try:
            config = parse([f"--config.{name}={value}"]).config
        except UsageError as error:
            yield of_error(code_of(error), at, error)
            continue
        settings[name] = Setting(name=name, value=flat(config)[name], place=at)
    in_file = _of_file(words)
    if in_file is not None:
        yield from check_batch({**in_file, **settings}, place=place, replicas=replicas)


def _runs_train(words: Sequence[str]) -> bool:
    if "tfdist.train" in words:
        return True
    if not runs_launcher(words):
        return False
    return not any(word.endswith(".py") and not word.startswith("-") for word in _after(words))


def _after(words: Sequence[str]) -> Sequence[str]:
    """Returns what follows the launcher, up to the flags of the program."""
    start = next(i for i, word in enumerate(words) if runs_launcher([word]))
    rest = list(words[start + 1 :])
    stop = next((i for i, word in enumerate(rest) if re.match(r"--?config\b", word)), len(rest))
    return rest[:stop]


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for position, word in enumerate(words):
        if match := _FLAG.fullmatch(word):
            following = words[position + 1] if position + 1 < len(words) else ""
            alone = following.startswith("-") or not following
            yield match[1], match[2] if match[2] is not None else "true" if alone else following
        elif match := _NO_FLAG.fullmatch(word):
            yield match[1], "false"


def _of_file(words: Sequence[str]) -> dict[str, Setting] | None:
    """Returns what the config file of a command sets; None where that cannot be told."""
    path = None
    for position, word in enumerate(words):
        if word in ("--config", "-config") and position + 1 < len(words):
            path = words[position + 1]
        elif match := re.fullmatch(r"--?config=(.*)", word):
            path = match[1]
    if path is None:
        return {}
    try:
        return settings_of(Path(path).read_text(), path)
    except (OSError, ValueError):
        return None
