"""Checks of what a task starts with: TF_CONFIG, its variables, its command, its configuration.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.cluster import environment, placement, read_environment, settings
from tfdist.cluster.address import check_address, parse_hosts, split_address
from tfdist.cluster.settings import names_a_secret
from tfdist.cluster.tf_config import STRATEGIES, VARIABLE, TaskConfig, decode
from tfdist.errors import UsageError
from tfdist.ops.lint.rules import RULES, Finding, Location, finding_of
from tfdist.ops.rules import Severity

LocationOf = Callable[[str], Location]
"""Gives the location where a variable is set."""

_WITHOUT_RING = ("mirrored", "ps", "pipeline")

_DOUBTFUL_PORTS = (
    (range(1, 1024), "TFC024", "a port from 1024 on"),
    (range(32_768, 61_000), "TFC023", "a port outside of 32768 to 60999"),  # Linux' default
)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads none in capitals
_NO_PROXY = ("no_grpc_proxy", "no_proxy")

_LAUNCH, _TRAIN = "tfdist.launch", "tfdist.train"
_TIMEOUT_S = 60.0
_CHILD = "from tfdist.ops.lint.tasks import print_configuration; print_configuration()"


# The environment


def is_job_variable(name: str) -> bool:
    """Return whether a variable is one of a job of several tasks."""
    return name == VARIABLE or name.startswith("TFDIST_")


def check_environment(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    """Yield the findings for a whole environment, as a task in it would read it."""
    found = list(check_variables(values, location_of))
    yield from found
    if any(RULES[finding.code].severity is Severity.ERROR for finding in found):
        return
    try:
        read_environment(values)
    except UsageError as error:
        yield finding_of(error, location_of(error.where), otherwise="ENV007")


def check_variables(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    """Yield the findings for each variable by itself, and for proxies.

    `values` has the variables whose value is known; it need not be a whole environment.
    """
    for name, value in values.items():
        if name == VARIABLE and value.strip():
            yield from check_tf_config(value, location_of(name))
        elif name.startswith("TFDIST_"):
            yield from _check_variable(name, values, location_of(name))
        if names_a_secret(name) and value.strip():
            received = f"a value for {name}, which is not shown here"
            expected = "a reference to a secret, or a file that only its user reads"
            fix = "use secretKeyRef in a manifest, or read a file of mode 600 in a script"
            yield Finding("ENV005", location_of(name), received, expected, fix)
    if any(is_job_variable(name) and value.strip() for name, value in values.items()):
        yield from _check_other_programs(values, location_of)


def check_size(count: int, values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    """Yield the finding where TFDIST_STRATEGY and TFDIST_PS do not fit `count` tasks."""
    try:
        ours = {name: value for name, value in values.items() if name.startswith("TFDIST_")}
        job_settings = settings.from_environ(ours)
    except UsageError:
        return  # the check of the variable says it
    if job_settings.groups or settings.text(values, settings.CLUSTER) == "none":
        return
    try:
        placement.task_types(count, job_settings=job_settings)
    except UsageError as error:  # of a variable, or of the ps that follow from the strategy
        where = error.where if error.where in values else settings.STRATEGY
        yield finding_of(error, location_of(where), otherwise="ENV004")


def _check_variable(name: str, values: Mapping[str, str], location: Location) -> Iterator[Finding]:
    value, strategy = values[name], settings.text(values, settings.STRATEGY)
    beside = {settings.STRATEGY: strategy} if strategy in STRATEGIES else {}
    try:
        settings.from_environ({**beside, name: value})
        if name in (settings.NODE_RANK, settings.LOCAL_RANK):
            settings.integer({name: value}, name)
        elif name == settings.CLUSTER:
            environment.check_source(value.strip())
    except UsageError as error:
        yield finding_of(error, location, otherwise="ENV001")
        return
    if name == settings.HOSTS and value.strip():
        try:
            parse_hosts(value, where=name)
        except UsageError as error:  # its code may be that of an address in TF_CONFIG
            yield Finding("ENV003", location, str(error.received), error.expected, error.fix)


def _check_other_programs(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    """Yield what gRPC and Keras would make of variables beside a job's."""
    proxy = next((name for name in _PROXIES if settings.text(values, name)), None)
    if proxy and not any(settings.text(values, name) for name in _NO_PROXY):
        received, expected = f"{proxy} without no_proxy", "the job's own hosts in no_proxy"
        fix = f"set no_proxy to the hosts of the job, or unset {proxy} for its tasks"
        yield Finding("ENV008", location_of(proxy), received, expected, fix)
    if settings.legacy_keras(values):
        received = f"{settings.LEGACY_KERAS}={values[settings.LEGACY_KERAS]}"
        fix = "take it out, or make models by `import keras` alone"
        location = location_of(settings.LEGACY_KERAS)
        yield Finding("ENV010", location, received, "Keras 3 as tf.keras", fix)


# TF_CONFIG


def check_tf_config(text: str, location: Location) -> Iterator[Finding]:
    """Yield the findings for `text` as the value of TF_CONFIG."""
    try:
        config = decode(text)
    except UsageError as error:
        where = error.where.removeprefix(VARIABLE).strip()
        yield finding_of(error, _inside(location, where) if where else location)
        return
    yield from _check_addresses(config, location)
    yield from _check_options(config, location)


def _inside(location: Location, where: str) -> Location:
    """Return the location with the JSON path of what an error names."""
    path = "" if where == "key" else where.replace(" ", ".")
    path = re.sub(r"^cluster\.(\w+)-(\d+)$", r"cluster.\1[\2]", path)
    joined = location.path or "$"
    return replace(location, path=f"{joined}.{path}" if path else joined)


def _check_addresses(config: TaskConfig, location: Location) -> Iterator[Finding]:
    """Yield the findings for addresses that are right by themselves alone."""
    tasks = config.cluster.training_tasks()
    split = [(task, *split_address(config.cluster.address(task))) for task in tasks]
    local = {host for _, host, _ in split if _is_local(host)}
    for task, host, port in split:
        at = _inside(location, f"cluster {task.type}-{task.index}")
        if host in local and any(other not in local for _, other, _ in split):
            received = f"{host} for {task}, and other hosts for other tasks"
            expected = "a name that leads to this machine from all others"
            yield Finding("TFC022", at, received, expected, "write the machine's own name")
        for ports, code, expected in _DOUBTFUL_PORTS:
            if port in ports:
                yield Finding(code, at, f"port {port}", expected, "take 2222, for example")


def _is_local(host: str) -> bool:
    return check_address(f"[{host}]:1" if ":" in host else f"{host}:1", where="")[0] == "localhost"


def _check_options(config: TaskConfig, location: Location) -> Iterator[Finding]:
    fewest, cluster = config.options.min_workers, config.cluster
    is_ps = cluster.kind == "ps"
    if fewest is not None and (not is_ps or fewest > len(cluster.worker)):
        has = f"{len(cluster.worker)} workers" if is_ps else "no ps"
        at, received = _inside(location, "tfdist.min_workers"), f"{fewest} and a cluster with {has}"
        expected, fix = "at most the workers of a ps job", "lower it, or take it out"
        yield Finding("TFC025", at, received, expected, fix)


# The command, and the configuration


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
    if program == _LAUNCH:
        from tfdist.launch.options import parse

        try:
            options = parse(arguments)
        except UsageError as error:
            yield finding_of(error, _at(location, error.where), otherwise="LCH002")
            return
        if options is None or options.program.target != _TRAIN:
            return
        strategy, arguments = options.strategy, options.program.args
        if strategy == "auto":
            strategy = "multiworker" if options.ps is None else "ps"
        each = (options.stages or options.workers) if strategy == "pipeline" else 1
        replicas = options.workers // each if options.hosts is None and strategy != "ps" else None
    yield from _check_configuration(arguments, location, replicas=replicas, strategy=strategy)


def check_config_file(text: str, file: str, *, replicas: int | None = None) -> Iterator[Finding]:
    """Run a config file and yield its findings; `replicas` is the number of the job."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(file)
        if not path.is_file():  # standard input
            path = Path(directory) / "config.py"
            path.write_text(text)
        flags, whole = [f"--config={path}"], Location(file=file)
        found = list(_check_configuration(flags, whole, replicas=replicas))
    for finding in found:
        at = finding.location.path
        line = re.search(r", line (\d+)$", at)
        _, _, name = at.partition("--config.")
        location = Location(file=file, line=int(line[1]) if line else None, path=name)
        yield replace(finding, location=location)


def program_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the program of tfdist that a command starts, empty for another, and its flags."""
    for position, word in enumerate(words):
        rest = words[position + 1 :]
        first = rest[0] if rest else ""
        if word in (_LAUNCH, _TRAIN):
            return word, rest
        if word.rpartition("/")[2] == "tfdist":
            if first in ("launch", "train"):
                return f"tfdist.{first}", rest[1:]
            is_program = not position or words[position - 1] == "-m"
            if is_program and (first.startswith("-") or first.endswith(".py")):
                return _LAUNCH, rest
    return "", ()


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


def _configuration_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `print_configuration` in a process of its own; return its values, or raise its error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        received = f"no end within {_TIMEOUT_S:.0f} s"
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:]
        received = f"exit code {done.returncode}" + "".join(f" ({line})" for line in last)
    else:
        if "error" in answer:
            raise UsageError(**answer["error"])
        values: dict[str, Any] = answer["values"]
        return values
    fix = "run get_config() by itself, and correct it"
    raise UsageError("", received=received, expected="a configuration", fix=fix, code="CFG024")


def _check_configuration(
    arguments: Sequence[str], location: Location, *, replicas: int | None, strategy: str = "auto"
) -> Iterator[Finding]:
    try:
        values = _configuration_of(arguments)
    except UsageError as error:
        if error.code != "missing-file":  # it may be in an image
            yield finding_of(error, _at(location, error.where), otherwise="LCH002")
        return
    if values["strategy"] == "auto":
        values["strategy"] = strategy
    for code, field, received, expected, fix in _together(values, replicas):
        at = _at(location, f"config.{field}")
        yield Finding(code, at, received, expected, fix)


def _at(location: Location, where: str) -> Location:
    path = f"--{where}" if where.startswith("config") else where
    return replace(location, path="" if path == location.file else path)  # of all of a command line


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
    if values["sharded_optimizer"] and strategy in _WITHOUT_RING:
        fix = "take it out, or start a multiworker job"
        yield "CFG025", "sharded_optimizer", f"it with {strategy}", "strategy multiworker", fix
