"""Checks a value of TF_CONFIG: each part by itself, and then as a task would read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tfdist.cluster.address import check_address, split_address
from tfdist.cluster.config_text import parse_object
from tfdist.cluster.options import JobOptions
from tfdist.cluster.spec import TASK_TYPES, ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig, decode
from tfdist.errors import UsageError
from tfdist.lint.findings import Finding, Place, of_error

_EPHEMERAL = range(32_768, 61_000)  # Linux' default
_PRIVILEGED = range(1, 1024)

# What a whole value is refused for: the place that the error names, and its text.
_CODES: tuple[tuple[str, str, str], ...] = (
    ("", r"one more pair of quotes|single quotes|backslashes", "TFC002"),
    ("", r"twice in one object", "TFC003"),
    ("", r"deep nesting", "TFC004"),
    ("cluster", r"no 'cluster'", "TFC005"),
    ("task", r"no '(task|type|index)'", "TFC006"),
    ("cluster|task|tfdist", r"expected an object", "TFC007"),
    ("cluster", r"expected one of chief", "TFC008"),
    (r"cluster \w+", r'a list of "host:port"', "TFC009"),
    (r"cluster \w+-\d+", r"a port from 1 to 65535", "TFC011"),
    (r"cluster \w+-\d+", r"", "TFC010"),
    ("cluster", r"for both", "TFC012"),
    ("cluster", r"at most one", "TFC013"),
    ("cluster", r"", "TFC014"),
    ("task type", r"", "TFC015"),
    ("task index", r"", "TFC016"),
    ("task", r"", "TFC017"),
    ("tfdist", r"", "TFC018"),
    (r"tfdist\.strategy", r"and a cluster with", "TFC020"),
    (r"tfdist\.\w+", r"", "TFC019"),
    ("key", r"", "TFC021"),
    ("", r"a JSON object", "TFC001"),
)


def code_of(error: UsageError) -> str:
    """Returns the rule for what `decode`, or a part of it, refuses."""
    where = error.where.removeprefix("TF_CONFIG").strip()
    said = f"received {error.received} expected {error.expected}"
    for place, text, code in _CODES:
        if re.fullmatch(place, where) and re.search(text, said):
            if code == "TFC001" and not str(error.received).endswith(")"):
                return "TFC004"  # JSON, and no object
            return code
    return "TFC001"


def check_tf_config(text: str, place: Place) -> Iterator[Finding]:
    """Yields what is wrong with `text` as the value of TF_CONFIG that is in `place`."""
    try:
        fields = parse_object(text, where="TF_CONFIG")
    except UsageError as error:
        yield of_error(code_of(error), place, error)
        return
    found = list(_parts(fields, place))
    if not found:
        found = list(_whole(text, place))
    yield from found


def _parts(fields: Mapping[str, object], place: Place) -> Iterator[Finding]:
    """Yields the first mistake of each part, so that one does not hide those of the others."""
    cluster, task, options = fields.get("cluster"), fields.get("task"), fields.get("tfdist")
    if isinstance(cluster, dict):
        yield from _cluster(cluster, place)
    if isinstance(task, dict) and {"type", "index"} <= set(task):
        yield from _refused(partial(Task, task["type"], task["index"]), place)
    if isinstance(options, dict):
        for name, value in options.items():
            yield from _refused(partial(JobOptions.from_dict, {name: value}), place)


def _cluster(cluster: Mapping[str, object], place: Place) -> Iterator[Finding]:
    found = [each for type_, listed in cluster.items() for each in _of_type(type_, listed, place)]
    yield from found
    if not found:
        yield from _refused(partial(ClusterSpec.from_dict, cluster), place)


def _of_type(type_: str, addresses: object, place: Place) -> Iterator[Finding]:
    if type_ not in TASK_TYPES or not isinstance(addresses, list):
        yield from _refused(partial(ClusterSpec.from_dict, {type_: addresses}), place)
        return
    for index, address in enumerate(addresses):
        where = f"cluster {type_}-{index}"
        yield from _refused(partial(check_address, address, where=where), place)


def _refused(make: Callable[[], object], place: Place) -> Iterator[Finding]:
    """Calls `make` and yields the finding for the `UsageError` that it raises, if it does."""
    try:
        make()
    except UsageError as error:
        yield of_error(code_of(error), _inside(place, error.where), error)


def _whole(text: str, place: Place) -> Iterator[Finding]:
    try:
        config = decode(text)
    except UsageError as error:
        where = error.where.removeprefix("TF_CONFIG").strip()
        yield of_error(code_of(error), _inside(place, where), error)
        return
    yield from _hosts(config, place)
    yield from _min_workers(config, place)
    yield from _of_ps(config, place)


def _inside(place: Place, where: str) -> Place:
    """Returns the place with the JSON path of what an error names."""
    path = "" if where == "key" else where.replace(" ", ".")
    path = re.sub(r"^cluster\.(\w+)-(\d+)$", r"cluster.\1[\2]", path)
    joined = place.path or "$"
    path = f"{joined}.{path}" if path else joined
    return Place(file=place.file, line=place.line, path=path)


def _hosts(config: TaskConfig, place: Place) -> Iterator[Finding]:
    """Yields what is right by itself, and goes wrong between machines."""
    tasks = config.cluster.training_tasks()
    split = [(task, *split_address(config.cluster.address(task))) for task in tasks]
    hosts = {_kind_of_host(host) for _, host, _ in split}
    for task, host, port in split:
        at = _inside(place, f"cluster {task.type}-{task.index}")
        if len(hosts) > 1 and _kind_of_host(host) == "this machine":
            yield Finding(
                code="TFC022",
                place=at,
                received=f"{host} for {task}, and other hosts for other tasks",
                expected="a name that leads to this machine from all others",
                fix="write the machine's own name or address",
            )
        yield from _port(port, at)


def _kind_of_host(host: str) -> str:
    key = check_address(f"[{host}]:1" if ":" in host else f"{host}:1", where="host")[0]
    return "this machine" if key == "localhost" else "another"


def _port(port: int, place: Place) -> Iterator[Finding]:
    if port in _PRIVILEGED:
        yield Finding(
            code="TFC024",
            place=place,
            received=f"port {port}",
            expected="a port from 1024 on",
            fix="take 2222, for example",
        )
    elif port in _EPHEMERAL:
        yield Finding(
            code="TFC023",
            place=place,
            received=f"port {port}",
            expected="a port below 32768 or above 60999",
            fix="take 2222, for example",
        )


def _min_workers(config: TaskConfig, place: Place) -> Iterator[Finding]:
    fewest, cluster = config.options.min_workers, config.cluster
    if fewest is None or (cluster.kind == "ps" and fewest <= len(cluster.worker)):
        return
    has = f"{len(cluster.worker)} workers" if cluster.kind == "ps" else "no ps"
    yield Finding(
        code="TFC025",
        place=_inside(place, "tfdist.min_workers"),
        received=f"{fewest} and a cluster with {has}",
        expected="at most the workers of a ps job",
        fix="lower it, or take it out",
    )


def _of_ps(config: TaskConfig, place: Place) -> Iterator[Finding]:
    if config.cluster.kind == "ps":
        return
    for name in ("split_bytes", "profile_ps"):
        if value := getattr(config.options, name):
            yield Finding(
                code="TFC026",
                place=_inside(place, f"tfdist.{name}"),
                received=f"{value} and a cluster with no ps",
                expected="a ps job",
                fix="take it out, or add ps and a chief to the cluster",
            )
