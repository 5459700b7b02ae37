"""Checks variables, wherever they are set: in an environment, a manifest or a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tfdist.cluster import environment, hosts, placement, wishes
from tfdist.cluster.address import shown
from tfdist.cluster.secret_names import names_a_secret
from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import UsageError, near
from tfdist.lint.config_values import WITHOUT_PS
from tfdist.lint.findings import Finding, Place, of_error
from tfdist.lint.tf_config import check_tf_config

PlaceOf = Callable[[str], Place]
"""Gives the place where a variable is set."""

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_NO_PROXY = ("no_grpc_proxy", "no_proxy", "NO_PROXY")


def is_ours(name: str) -> bool:
    """Returns whether a variable says something about a job of several tasks."""
    return name == VARIABLE or name.startswith("TFDIST_")


def are_alone(values: Mapping[str, str]) -> bool:
    """Returns whether the processes are told to have nothing to do with each other."""
    return values.get(wishes.CLUSTER, "").strip() == "none"


def num_training(count: int, values: Mapping[str, str]) -> int:
    """Returns how many of `count` tasks train: all but the evaluator, where there is to be one."""
    is_one_more = wishes.text(values, wishes.EVALUATOR) not in ("", "0")
    return count - is_one_more


def check_variables(values: Mapping[str, str], place_of: PlaceOf) -> Iterator[Finding]:
    """Yields what is wrong with each variable by itself, and with proxies beside ours.

    `values` has the variables whose value is known; it need not be a whole environment.
    """
    for name, value in values.items():
        if name == VARIABLE and value.strip():
            yield from check_tf_config(value, place_of(name))
        elif name.startswith("TFDIST_"):
            yield from _one(name, value, place_of(name))
        if names_a_secret(name) and value.strip():
            yield _secret(name, place_of(name))
    yield from _proxies(values, place_of)
    if values.get(wishes.STRATEGY, "").strip() in WITHOUT_PS:
        yield from _of_ps(values, place_of)


def check_size(count: int, values: Mapping[str, str], place_of: PlaceOf) -> Iterator[Finding]:
    """Yields why a job of `count` tasks cannot be what TFDIST_STRATEGY and TFDIST_PS ask for."""
    try:
        wished = wishes.from_environ({n: v for n, v in values.items() if n.startswith("TFDIST_")})
    except UsageError:
        return  # said of the variable
    if wished.groups or are_alone(values):
        return
    try:
        placement.task_types(count, wished=wished)
    except UsageError as error:
        if error.where in values:
            yield of_error("ENV004", place_of(error.where), error)
        else:  # ps follows from the strategy
            yield of_error("ENV004", place_of(wishes.STRATEGY), error)


def check_environment(values: Mapping[str, str], place_of: PlaceOf) -> Iterator[Finding]:
    """Yields what is wrong with a whole environment, as a task in it would read it."""
    found = list(check_variables(values, place_of))
    yield from found
    if any(finding.code not in _WARNINGS for finding in found):
        return
    try:
        config = environment.read_environment(values)
        if (config is None or config.cluster.kind != "ps") and "ENV009" not in _codes(found):
            yield from _of_ps(values, place_of)
    except UsageError as error:
        disagree = "the two to agree" in error.expected or "and TF_CONFIG with" in str(
            error.received
        )
        yield of_error("ENV006" if disagree else "ENV007", place_of(error.where), error)


_WARNINGS = ("ENV005", "ENV008", "ENV009", "TFC022", "TFC023", "TFC024", "TFC026")


def _codes(found: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in found}


def _of_ps(values: Mapping[str, str], place_of: PlaceOf) -> Iterator[Finding]:
    for name in (wishes.SPLIT_BYTES, wishes.PROFILE_PS):
        if values.get(name, "").strip() not in ("", "0"):
            yield Finding(
                code="ENV009",
                place=place_of(name),
                received=f"{name} in a job without ps",
                expected="a ps job",
                fix=f"unset it, or set {wishes.STRATEGY}=ps",
            )


def _one(name: str, value: str, place: Place) -> Iterator[Finding]:
    try:
        wishes.from_environ({name: value})
    except UsageError as error:
        yield of_error("ENV002" if error.received == "a value" else "ENV001", place, error)
        return
    try:
        _read(name, value)
    except UsageError as error:
        yield of_error("ENV003" if name == wishes.HOSTS else "ENV001", place, error)


def _read(name: str, value: str) -> None:
    """Reads one variable as whoever reads it does; raises UsageError."""
    if name == wishes.HOSTS and value.strip():
        hosts.parse_hosts(value, where=name)
    elif name in (wishes.NODE_RANK, wishes.LOCAL_RANK):
        wishes.integer({name: value}, name)
    elif name == wishes.CLUSTER:
        choices = ("auto", "none", *environment.SOURCES)
        if value.strip() and value.strip() not in choices:
            raise UsageError(
                name,
                received=f"{shown(value)}{near(value, choices)}",
                expected=f"one of {', '.join(choices)}",
                fix="name one of them, or unset it",
            )


def _secret(name: str, place: Place) -> Finding:
    return Finding(
        code="ENV005",
        place=place,
        received=f"a value for {name}, which is not shown here",
        expected="a reference to a secret, or a file that only its user reads",
        fix="use secretKeyRef in a manifest, or read a file of mode 600 in a script",
    )


def _proxies(values: Mapping[str, str], place_of: PlaceOf) -> Iterator[Finding]:
    several = any(is_ours(name) and values[name].strip() for name in values)
    proxy = next((name for name in _PROXIES if values.get(name, "").strip()), None)
    if proxy is None or not several:
        return
    if any(values.get(name, "").strip() for name in _NO_PROXY):
        return
    yield Finding(
        code="ENV008",
        place=place_of(proxy),
        received=f"{proxy} without no_proxy",
        expected="the job's own hosts in no_proxy",
        fix=f"set no_proxy to the hosts of the job, or unset {proxy} for its tasks",
    )
