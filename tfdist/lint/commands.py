"""Checks the flags of tfdist.train in a command line of a script or a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.configs.command_line import parse
from tfdist.configs.fields import flat
from tfdist.errors import UsageError
from tfdist.lint.config_file import settings_of
from tfdist.lint.config_values import WITHOUT_PS, Setting, check_batch, code_of
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
    flags = _launcher_flags(words) if runs_launcher(words) else None
    without_ps = flags is not None and _launches_no_ps(flags)
    if flags is not None and without_ps:
        yield from _flags_of_ps(flags, place)
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
    yield from _staleness(settings, without_ps=without_ps)
    in_file = _of_file(words)
    if in_file is not None:
        yield from check_batch({**in_file, **settings}, place=place, replicas=replicas)


def _launcher_flags(words: Sequence[str]) -> dict[str, str]:
    """Returns the launcher's own flags, up to the program, and the word after each."""
    made: dict[str, str] = {}
    rest = list(_after(words))
    for word, following in zip(rest, [*rest[1:], ""], strict=True):
        if word in ("-m", "--") or (word.endswith(".py") and not word.startswith("-")):
            break
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
            made[name] = value if equals else following
    return made


def _launches_no_ps(flags: Mapping[str, str]) -> bool:
    """Returns whether a launcher with these flags starts a job without ps for certain."""
    return "ps" not in flags and flags.get("strategy", "auto") in ("auto", *WITHOUT_PS)


def _flags_of_ps(flags: Mapping[str, str], place: Place) -> Iterator[Finding]:
    for name in ("split_bytes", "profile_ps"):
        if name in flags:
            yield Finding(
                code="LCH001",
                place=Place(file=place.file, line=place.line, path=f"--{name}"),
                received=f"--{name} in a job without ps",
                expected=f"no --{name}",
                fix=f"leave --{name} out, or use --strategy ps",
            )


def _staleness(settings: Mapping[str, Setting], *, without_ps: bool) -> Iterator[Finding]:
    """Yields a bound on what a job without ps has nothing of."""
    bound, strategy = settings.get("max_staleness"), settings.get("strategy")
    if bound is None or bound.value is None:
        return
    if strategy is not None:
        without_ps = strategy.known and strategy.value in WITHOUT_PS
    if without_ps:
        yield Finding(
            code="CFG023",
            place=bound.place,
            received=f"max_staleness of {bound.value} in a job without ps",
            expected="strategy ps",
            fix="take it out, or start a ps job",
        )


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
