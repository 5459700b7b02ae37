"""Reads a shell script as far as it goes without running it: options, commands, variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_KEYWORDS = frozenset(("if", "then", "else", "elif", "do", "while", "until", "time", "!", "{", "("))
_ENDS = frozenset((";", "&", "&&", "||", ";;", "|", "|&", "(", ")"))
_PREFIXES = frozenset(("exec", "command", "nohup", "env", "time"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Directive:
    """One option of an #SBATCH line: its long or short name, its value, if it has one."""

    name: str
    value: str | None
    line: int
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One simple command: the variables before it, its words, and what follows it."""

    words: tuple[str, ...]
    variables: dict[str, str]
    line: int
    ends_with: str = ""
    is_exec: bool = False

    @property
    def name(self) -> str:
        """Returns the program without its folder."""
        return self.words[0].rpartition("/")[2] if self.words else ""


@dataclass(kw_only=True, slots=True)
class Script:
    """What was read of a script; `late` are #SBATCH lines that sbatch does not read."""

    shebang: bool = False
    directives: list[Directive] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    doubtful: list[tuple[int, str]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    groups: int = 1
    errexit: bool = False
    pipefail: bool = False

    def option(self, *names: str) -> Directive | None:
        """Returns the last option of one of these names in the first component."""
        found = [d for d in self.directives if d.name in names and d.group == 0]
        return found[-1] if found else None


def read_script(text: str) -> Script:
    """Returns what a script of sh or bash says."""
    script = Script(shebang=text.startswith("#!"))
    begun = False
    for number, line in _logical_lines(text):
        plain = line.strip()
        if plain.startswith("#"):
            _comment(script, plain, number, begun=begun)
            continue
        if not plain:
            continue
        begun = True
        for command in _commands(plain, number):
            _take(script, command)
    return script


def _comment(script: Script, plain: str, number: int, *, begun: bool) -> None:
    match = _DIRECTIVE.fullmatch(plain)
    if match is None:
        if re.match(r"#\s*S\s?BATCH\b|#+\s*SBATCH\b|#SBATCH\S", plain, re.IGNORECASE):
            script.doubtful.append((number, plain))
        return
    if begun:
        script.late.append(number)
        return
    words = _words(match[1])
    if words == ["hetjob"] or words == ["packjob"]:
        script.groups += 1
        return
    script.directives += _directives(words, number, script.groups - 1)


def _directives(words: list[str], line: int, group: int) -> Iterator[Directive]:
    position = 0
    while position < len(words):
        word = words[position]
        following = words[position + 1] if position + 1 < len(words) else None
        position += 1
        value: str | None = None
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            value = value if equals else None
        elif word.startswith("-") and len(word) > 1:
            name, value = word[1], word[2:] or None
        else:
            continue
        if value is None and following is not None and not following.startswith("-"):
            value = following
            position += 1
        yield Directive(name=name, value=value, line=line, group=group)


def _take(script: Script, command: Command) -> None:
    """Adds a command, and what it does to variables and to the shell itself."""
    words = command.words
    if command.name in ("export", "declare", "typeset", "readonly") or not words:
        made = dict(command.variables)
        for word in words[1:]:
            if match := _ASSIGNMENT.fullmatch(word):
                made[match[1]] = match[2]
            if command.name == "export":
                script.exported.add(word.partition("=")[0])
        script.variables |= made
        script.lines |= dict.fromkeys(made, command.line)
        return
    if command.name == "set":
        flags = [word for word in words[1:] if word.startswith("-")]
        script.errexit |= any("e" in flag[1:] for flag in flags) or "errexit" in words
        script.pipefail |= "pipefail" in words
        return
    script.lines |= {name: command.line for name in command.variables}
    script.commands.append(command)


def _commands(text: str, line: int) -> Iterator[Command]:
    words: list[str] = []
    for token in [*_words(text, ends=True), ";"]:
        if token not in _ENDS:
            words.append(token)
            continue
        if words:
            yield from _command(words, line, token)
        words = []


def _command(words: list[str], line: int, ends_with: str) -> Iterator[Command]:
    variables: dict[str, str] = {}
    is_exec = False
    while words:
        match = _ASSIGNMENT.fullmatch(words[0])
        if match:
            variables[match[1]] = match[2]
        elif words[0] in _PREFIXES:
            is_exec |= words[0] == "exec"
        elif words[0] not in _KEYWORDS:
            break
        words = words[1:]
    if words or variables:
        yield Command(
            words=tuple(words),
            variables=variables,
            line=line,
            ends_with=ends_with,
            is_exec=is_exec,
        )


def _words(text: str, *, ends: bool = False) -> list[str]:
    """Splits as a shell does; text that it would refuse is split at blanks."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()" if ends else False)
        lexer.whitespace_split = True
        lexer.commenters = "#" if ends else ""
        return list(lexer)
    except ValueError:
        return text.split()


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines with their continuations, and without what is handed to a command."""
    number, until, begun, joined = 0, "", 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if until:
            until = "" if line.strip() == until else until
            continue
        begun = begun or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        joined += line
        if match := _HEREDOC.search(joined):
            until = match[2]
        yield begun, joined
        begun, joined = 0, ""
    if joined:
        yield begun, joined
