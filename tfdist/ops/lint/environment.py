"""Checks of a task's environment: TF_CONFIG and the TFDIST_ variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from tfdist.cluster import environment, placement, read_environment, settings
from tfdist.cluster.address import check_address, parse_hosts, shown, split_address
from tfdist.cluster.settings import names_a_secret
from tfdist.cluster.tf_config import STRATEGIES, VARIABLE, TaskConfig, decode
from tfdist.errors import UsageError
from tfdist.ops.lint.rules import RULES, Finding, Location, finding_of
from tfdist.ops.rules import Severity

LocationOf = Callable[[str], Location]
"""Gives the location where a variable is set."""

_WITHOUT_PS = ("single", "mirrored", "multiworker", "pipeline")

_DOUBTFUL_PORTS = (
    (range(1, 1024), "TFC024", "a port from 1024 on"),
    (range(32_768, 61_000), "TFC023", "a port outside of 32768 to 60999"),  # Linux' default
)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads none in capitals
_NO_PROXY = ("no_grpc_proxy", "no_proxy")


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
        config = read_environment(values)
    except UsageError as error:
        code = error.code if error.code in RULES else "ENV007"
        yield finding_of(code, location_of(error.where), error)
        return
    is_ps = config is not None and config.cluster.kind == "ps"
    if not is_ps and not any(finding.code == "ENV009" for finding in found):
        yield from _check_ps_variables(values, location_of)


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
    yield from _check_proxies(values, location_of)
    yield from _check_legacy_keras(values, location_of)
    if settings.text(values, settings.STRATEGY) in _WITHOUT_PS:
        yield from _check_ps_variables(values, location_of)


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
        yield finding_of("ENV004", location_of(where), error)


def check_tf_config(text: str, location: Location) -> Iterator[Finding]:
    """Yield the findings for `text` as the value of TF_CONFIG."""
    try:
        config = decode(text)
    except UsageError as error:
        where = error.where.removeprefix(VARIABLE).strip()
        yield finding_of(error.code, _inside(location, where) if where else location, error)
        return
    yield from _check_addresses(config, location)
    yield from _check_options(config, location)


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
        yield finding_of(error.code if error.code in RULES else "ENV001", location, error)
        return
    if name == settings.HOSTS and value.strip():
        try:
            parse_hosts(value, where=name)
        except UsageError as error:
            yield finding_of("ENV003", location, error)


def _check_ps_variables(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    for name in (settings.SPLIT_BYTES, settings.PROFILE_PS):
        if settings.text(values, name) not in ("", "0"):
            received = f"{name} in a job without ps"
            fix = f"unset it, or set {settings.STRATEGY}=ps"
            yield Finding("ENV009", location_of(name), received, "a ps job", fix)


def _check_proxies(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    several = _has_job_variable(values)
    proxy = next((name for name in _PROXIES if settings.text(values, name)), None)
    if several and proxy and not any(settings.text(values, name) for name in _NO_PROXY):
        received, expected = f"{proxy} without no_proxy", "the job's own hosts in no_proxy"
        fix = f"set no_proxy to the hosts of the job, or unset {proxy} for its tasks"
        yield Finding("ENV008", location_of(proxy), received, expected, fix)


def _check_legacy_keras(values: Mapping[str, str], location_of: LocationOf) -> Iterator[Finding]:
    if settings.legacy_keras(values) and _has_job_variable(values):
        received = f"{settings.LEGACY_KERAS}={values[settings.LEGACY_KERAS]}"
        fix = "take it out, or make models by `import keras` alone"
        location = location_of(settings.LEGACY_KERAS)
        yield Finding("ENV010", location, received, "Keras 3 as tf.keras", fix)


def _has_job_variable(values: Mapping[str, str]) -> bool:
    return any(is_job_variable(name) and values[name].strip() for name in values)


def _inside(location: Location, where: str) -> Location:
    """Return the location with the JSON path of what an error names."""
    path = "" if where == "key" else where.replace(" ", ".")
    path = re.sub(r"^cluster\.(\w+)-(\d+)$", r"cluster.\1[\2]", path)
    joined = location.path or "$"
    return Location(
        file=location.file, line=location.line, path=f"{joined}.{path}" if path else joined
    )


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
    for name in () if is_ps else ("split_bytes", "profile_ps"):
        if value := getattr(config.options, name):
            at = _inside(location, f"tfdist.{name}")
            received = f"{shown(value)} and a cluster with no ps"
            fix = "take it out, or add ps and a chief to the cluster"
            yield Finding("TFC026", at, received, "a ps job", fix)
