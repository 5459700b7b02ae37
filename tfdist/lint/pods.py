"""Checks the pods of a workload: whether they can find each other and themselves."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.cluster import hosts, wishes
from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import UsageError
from tfdist.lint.commands import check_flags
from tfdist.lint.findings import Finding, Place
from tfdist.lint.variables import PlaceOf, are_alone, check_size, check_variables, num_training
from tfdist.lint.workloads import Container, Part, Workload, as_map

_SAME = (wishes.HOSTS, wishes.STRATEGY, wishes.PS, wishes.PORT)
_OWN = (VARIABLE, wishes.NODE_RANK)


def check_pods(job: Workload) -> Iterator[Finding]:
    """Yields what keeps the tasks of a workload from forming one job."""
    listed = _listed(job)
    for part, container in _containers(job):
        yield from check_variables(container.values, _places(job, part, container))
        yield from _one_for_all(job, part, container)
        yield from check_flags(container.words, _at(job, part, container), replicas=_replicas(job))
    if job.kind == "TFJob":
        return
    yield from _indexed(job)
    yield from _hosts(job, listed)
    yield from _same_everywhere(job)


def _containers(job: Workload) -> Iterator[tuple[Part, Container]]:
    for part in job.parts:
        for container in part.containers:
            yield part, container


def _at(job: Workload, part: Part, container: Container, name: str = "") -> Place:
    line = container.env_lines.get(name) or container.spec.line_of("command")
    inside = f"{part.path}.template.spec {container.spec.get('name', '')}"
    return Place(file=job.file, line=line, path=f"{job.kind}/{job.name} {inside} {name}".rstrip())


def _places(job: Workload, part: Part, container: Container) -> PlaceOf:
    return lambda name: _at(job, part, container, name)


def _replicas(job: Workload) -> int | None:
    """Returns how many replicas at least compute one global batch; None where that is unsure."""
    if job.kind == "TFJob":
        names = {part.name.lower(): part.count for part in job.parts}
        return None if "ps" in names else sum(n for t, n in names.items() if t != "evaluator")
    count = job.count
    for _, container in _containers(job):
        strategy = container.values.get(wishes.STRATEGY, "auto")
        if strategy == "ps" or wishes.PS in container.env_lines or are_alone(container.values):
            return None
        count = min(count, num_training(job.count, container.values))
    return count if _listed(job) else None


def _listed(job: Workload) -> tuple[Part, Container, list[tuple[str, int]]] | None:
    """Returns the first list of hosts that can be read, and where it is."""
    for part, container in _containers(job):
        value = container.values.get(wishes.HOSTS, "")
        try:
            if value.strip():
                return part, container, hosts.parse_hosts(value)
        except UsageError:
            return None  # said of the variable
    return None


def _indexed(job: Workload) -> Iterator[Finding]:
    for part in job.parts:
        if job.kind not in ("Job", "JobSet"):
            continue
        owner, path = part.owner, part.path
        if job.kind == "Job" and part.count > 1 and owner.get("completionMode") != "Indexed":
            yield job.finding(
                "K8S010",
                job.place(owner, "completionMode", path=f"{path}.completionMode"),
                received=str(owner.get("completionMode", "no completionMode")),
                expected="Indexed",
                fix="write completionMode: Indexed",
            )
        together, tasks = owner.get("parallelism", 1), owner.get("completions")
        if isinstance(together, int) and isinstance(tasks, int) and together < tasks:
            yield job.finding(
                "K8S011",
                job.place(owner, "parallelism", path=f"{path}.parallelism"),
                received=f"parallelism of {together} for {tasks} completions",
                expected="all pods at once",
                fix=f"write parallelism: {tasks}",
            )


def domain_of(job: Workload, part: Part) -> str:
    """Returns the name in DNS that the pods are below."""
    if job.kind == "StatefulSet":
        return str(job.spec.get("serviceName") or "")
    if job.kind == "JobSet":
        return str(as_map(job.spec.get("network")).get("subdomain") or job.name)
    return str(part.pod_spec.get("subdomain") or "")


def _hosts(
    job: Workload, listed: tuple[Part, Container, list[tuple[str, int]]] | None
) -> Iterator[Finding]:
    if listed is None:
        if job.count > 1:
            yield from _without_hosts(job)
        return
    part, container, found = listed
    at = _at(job, part, container, wishes.HOSTS)
    names = [host for host, _ in found]
    if any(slots > 1 for _, slots in found):
        slots = max(slots for _, slots in found)
        yield _refused("K8S017", at, f"{slots} slots of one pod", "a pod for each task")
        return
    if wishes.NODE_RANK in container.env_lines:
        return  # the pods are told their places, and the names are their owner's business
    domain = domain_of(job, part)
    if not domain:
        yield _no_domain(job, part)
    yield from _names(job, at, names, domain=domain)
    yield from check_size(len(names), container.values, _places(job, part, container))


def _names(job: Workload, at: Place, names: list[str], *, domain: str) -> Iterator[Finding]:
    pods = {pod for part in job.parts for pod in part.pods}
    if len(names) != job.count:
        received = f"{len(names)} hosts, and {job.count} pods of the {job.kind}"
        yield _refused("K8S014", at, received, "a host for each pod")
        return
    strange = next((name for name in names if name.partition(".")[0] not in pods), None)
    if strange:
        example = job.parts[0].pods[0] if job.parts[0].pods else job.name
        received = f"{strange!r}, which is no pod of the {job.kind}"
        yield _refused("K8S015", at, received, f"names like {example}")
        return
    below = next((name for name in names if _domain(name) != domain), None)
    if domain and below:
        received = f"{below!r}, and pods below {domain!r}"
        yield _refused("K8S013", at, received, f"names ending in .{domain}")


def _domain(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def _refused(code: str, at: Place, received: str, expected: str) -> Finding:
    fix = "name the pods as docs/clusters.md has them, as in mnist-[0-3].train"
    return Finding(code=code, place=at, received=received, expected=expected, fix=fix)


def _no_domain(job: Workload, part: Part) -> Finding:
    field = "serviceName" if job.kind == "StatefulSet" else "subdomain"
    owner = job.spec if job.kind == "StatefulSet" else part.pod_spec
    return job.finding(
        "K8S012",
        job.place(owner, field, path=f"{part.path}.{field}"),
        received=f"no {field}",
        expected="the name of a headless Service",
        fix=f"write {field}: with the name that stands in {wishes.HOSTS}",
    )


def _without_hosts(job: Workload) -> Iterator[Finding]:
    for part, container in _containers(job):
        if {wishes.HOSTS, VARIABLE} & set(container.env_lines) or "envFrom" in container.spec:
            return
        if are_alone(container.values):
            return
        path = f"{part.path}.template.spec.containers.env"
        yield job.finding(
            "K8S016",
            job.place(container.spec, "env", path=path),
            received=f"{job.count} pods without {wishes.HOSTS}",
            expected=f"{wishes.HOSTS} with the names of all pods",
            fix=f"add it to env, or {wishes.CLUSTER}=none for programs by themselves",
        )
        return


def _one_for_all(job: Workload, part: Part, container: Container) -> Iterator[Finding]:
    for name in _OWN:
        if job.kind == "TFJob" or part.count < 2 or name not in container.values:
            continue
        yield Finding(
            code="K8S035",
            place=_at(job, part, container, name),
            received=f"one {name} for {part.count} pods",
            expected="what is the same for all pods",
            fix=f"set {wishes.HOSTS} in its place: each pod finds itself there",
        )


def _same_everywhere(job: Workload) -> Iterator[Finding]:
    seen: dict[str, tuple[str, str | None]] = {}
    for part, container in _containers(job):
        if not any(name.startswith("TFDIST_") for name in container.env_lines):
            continue
        for name in _SAME:
            value = container.values.get(name)
            first = seen.setdefault(name, (part.name, value))
            if first[1] != value:
                yield Finding(
                    code="K8S039",
                    place=_at(job, part, container, name),
                    received=f"{name}={value!r} here and {first[1]!r} in {first[0] or part.name}",
                    expected="one value in all pods",
                    fix="give all containers the same",
                )
                return
