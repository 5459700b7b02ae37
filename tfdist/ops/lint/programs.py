"""Checks of `tfdist.launch` and `tfdist.train` command lines, and of config files.

A config file is Python: it runs in a process of its own, with a time limit, and what it returns
goes through the checks that `tfdist.train` starts with.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError
from tfdist.ops.lint.rules import RULES, Finding, Location, finding_of

LAUNCH, TRAIN = "tfdist.launch", "tfdist.train"

_TIMEOUT_S = 60.0
_CHILD = "from tfdist.ops.lint.programs import print_configuration; print_configuration()"
_WITHOUT_PS = ("single", "mirrored", "multiworker", "pipeline")
_WITHOUT_RING = ("mirrored", "ps", "pipeline")


def check_command(
    words: Sequence[str], location: Location, *, replicas: int | None = None
) -> Iterator[Finding]:
    """Yield the findings for the flags of `tfdist.launch` or `tfdist.train`.

    Commands with variables in them (``$(NAME)``) are not checked, nor is what a shell is given, nor
    a configuration whose file is not on this machine.
    `replicas` is how many the job has, where that is known and no launcher in `words` says it.
    """
    program, arguments = program_of(words)
    if not program or any("$" in argument for argument in arguments):
        return
    strategy = "auto"
    if program == LAUNCH:
        from tfdist.launch.options import parse

        try:
            options = parse(arguments)
        except UsageError as error:
            yield finding_of(_rule(error.code), _at(location, error.where), error)
            return
        if options is None or options.program.target != TRAIN:
            return
        strategy, arguments = options.strategy, options.program.args
        if strategy == "auto":
            strategy = "multiworker" if options.ps is None else "ps"
        each = (options.stages or options.workers) if strategy == "pipeline" else 1
        replicas = options.workers // each if options.hosts is None and strategy != "ps" else None
    answer = _configuration_of(arguments)
    if answer.get("error", {}).get("code") != "missing-file":  # it may be in an image
        yield from _findings(answer, location, replicas=replicas, strategy=strategy)


def check_config_file(text: str, file: str, *, replicas: int | None = None) -> Iterator[Finding]:
    """Run a config file and yield its findings; `replicas` is the number of the job."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(file)
        if not path.is_file():  # standard input
            path = Path(directory) / "config.py"
            path.write_text(text)
        answer = _configuration_of([f"--config={path}"])
    for finding in _findings(answer, Location(file=file), replicas=replicas, strategy="auto"):
        at = finding.location.path
        line = re.search(r", line (\d+)$", at)
        _, _, name = at.partition("--config.")
        location = Location(file=file, line=int(line[1]) if line else None, path=name)
        yield replace(finding, location=location)


def print_configuration() -> None:
    """Print the configuration of the arguments as JSON, in a process of its own."""
    from tfdist.configs import flat
    from tfdist.configs.command_line import parse

    with contextlib.redirect_stdout(sys.stderr):
        answer: dict[str, Any]
        try:
            answer = {"values": flat(parse(sys.argv[1:]).config)}
        except UsageError as error:
            parts = {"received": str(error.received), "expected": error.expected, "fix": error.fix}
            answer = {"error": {"where": error.where, "code": error.code, **parts}}
    print(json.dumps(answer, default=str))


def program_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the program of tfdist that a command starts, empty for another, and its flags."""
    for position, word in enumerate(words):
        rest = words[position + 1 :]
        first = rest[0] if rest else ""
        if word in (LAUNCH, TRAIN):
            return word, rest
        if word.rpartition("/")[2] == "tfdist":
            if first in ("launch", "train"):
                return f"tfdist.{first}", rest[1:]
            is_program = not position or words[position - 1] == "-m"
            if is_program and (first.startswith("-") or first.endswith(".py")):
                return LAUNCH, rest
    return "", ()


def _configuration_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `print_configuration` in a process of its own; return its answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except subprocess.TimeoutExpired:
        received = f"no end within {_TIMEOUT_S:.0f} s"
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:]
        received = f"exit code {done.returncode}" + "".join(f" ({line})" for line in last)
    parts = {"expected": "a configuration", "fix": "run get_config() by itself, and correct it"}
    return {"error": {"where": "", "code": "CFG024", "received": received, **parts}}


def _findings(
    answer: Mapping[str, Any], location: Location, *, replicas: int | None, strategy: str
) -> Iterator[Finding]:
    if "error" in answer:
        error = dict(answer["error"])
        at, code = _at(location, error.pop("where")), _rule(error.pop("code"))
        yield Finding(code=code, location=at, **error)
        return
    values = answer["values"]
    if values["strategy"] == "auto":
        values = {**values, "strategy": strategy}
    for code, field, received, expected, fix in _together(values, replicas):
        at = _at(location, f"config.{field}")
        yield Finding(code, at, received, expected, fix)


def _rule(code: str) -> str:
    """Return the rule of an error: its code where that is one's, else that of a refused flag."""
    return code if code in RULES else "LCH002"


def _at(location: Location, where: str) -> Location:
    path = f"--{where}" if where.startswith("config") else where
    path = "" if path == location.file else path  # of the command line as a whole
    return Location(file=location.file, line=location.line, path=path)


def _together(
    values: Mapping[str, Any], replicas: int | None
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield rule, field and texts of fields that are right one by one, and not together."""
    strategy, devices = values["strategy"], values["devices_per_worker"]
    batch = values["global_batch_size"]
    least = max(replicas or 1, devices)
    if batch < least:
        received, expected = f"{batch} for {least} replicas", f"{least} or more"
        fix = "raise global_batch_size, or use fewer tasks or devices"
        yield "CFG014", "global_batch_size", received, expected, fix
    elif strategy == "single" and devices > 1:
        received = f"{devices} with strategy single"
        yield "CFG021", "devices_per_worker", received, "1", "set strategy to mirrored"
    if strategy == "ps" and values["model"] == "resnet20":
        received, fix = "resnet20 with strategy ps", "take cnn or dense, or another strategy"
        yield "CFG015", "model", received, "a model without BatchNormalization", fix
    split = values["validation_split"]
    if split and split == values["train_split"] and not values["overfit_batches"]:
        fix = "name the split that is kept for it, as in test or train[90%:]"
        yield "CFG020", "validation_split", f"{split!r} for both", "examples of its own", fix
    if values["max_staleness"] is not None and strategy in _WITHOUT_PS:
        received = f"{values['max_staleness']} in a job without ps"
        fix = "take it out, or start a ps job"
        yield "CFG023", "max_staleness", received, "strategy ps", fix
    if values["sharded_optimizer"] and strategy in _WITHOUT_RING:
        fix = "take it out, or start a multiworker job"
        yield "CFG025", "sharded_optimizer", f"it with {strategy}", "strategy multiworker", fix
