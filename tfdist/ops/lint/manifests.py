"""Checks of a job's Kubernetes manifests, limited to what concerns tfdist.

Schemas, images, security contexts and network policies are for kubeconform and kube-linter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from tfdist.cluster import placement, settings
from tfdist.cluster.hostlist import parse_hosts, ranks_of
from tfdist.cluster.ports import parse_ports
from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import EXIT_INTERRUPTED, EXIT_PEER_MISSING, EXIT_STOPPED, EXIT_USAGE, UsageError
from tfdist.ops.lint.rules import Finding, Location

_DEFAULT_GRACE_S = 30
_MAX_PODS = 1 << 16
_OF_ONE_POD = (VARIABLE, settings.NODE_RANK)
_OF_OPERATOR = (VARIABLE, settings.HOSTS, settings.NODE_RANK, settings.LOCAL_RANK)


class Map(dict[str, Any]):
    """A mapping of a manifest, with the line of each key."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.line = 0
        self.lines: dict[str, int] = {}

    def map(self, key: str) -> Map:
        """Return the mapping at `key`; an empty one where there is none."""
        value = self.get(key)
        return value if isinstance(value, Map) else Map()

    def maps(self, key: str) -> list[Map]:
        """Return the mappings in the list at `key`."""
        value = self.get(key)
        return [each for each in value if isinstance(each, Map)] if isinstance(value, list) else []

    def number(self, key: str, default: int) -> int:
        """Return the number at `key`; `default` where there is none."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def line_of(self, key: str) -> int:
        """Return the line of a key, or where the mapping begins."""
        return self.lines.get(key, self.line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container of the pods: its command, and the variables whose value the manifest says."""

    spec: Map
    values: Mapping[str, str]
    lines: Mapping[str, int]
    words: tuple[str, ...]
    file: str
    path: str

    def place(self, name: str = "") -> Location:
        """Return where a variable is set, or where the command is."""
        line = self.lines.get(name) or self.spec.line_of("command")
        return Location(file=self.file, line=line, path=f"{self.path} {name}".rstrip())


@dataclass(frozen=True, kw_only=True, slots=True)
class PodGroup:
    """Pods of one template; `owner` is the mapping that holds it, `pods` their host names."""

    count: int
    pods: tuple[str, ...]
    owner: Map
    path: str
    containers: tuple[Container, ...]

    @property
    def spec(self) -> Map:
        """Return the spec of the pods."""
        return self.owner.map("template").map("spec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Job, JobSet, StatefulSet or TFJob."""

    kind: str
    name: str
    file: str
    spec: Map
    parts: tuple[PodGroup, ...]

    @property
    def count(self) -> int:
        """Return how many pods it has."""
        return sum(part.count for part in self.parts)

    @property
    def containers(self) -> list[Container]:
        """Return the containers of all templates."""
        return [container for part in self.parts for container in part.containers]

    @property
    def hosts(self) -> tuple[Container, list[str]] | None:
        """Return the first TFDIST_HOSTS that can be read, and the container that has it."""
        for container in self.containers:
            try:
                listed = parse_hosts(container.values.get(settings.HOSTS, ""))
                return container, ranks_of(listed)
            except UsageError:
                continue  # the check of the variables says it
        return None

    def finding(
        self, code: str, owner: Map, path: str, received: str, expected: str, fix: str
    ) -> Finding:
        """Return a finding at the last key of `path`, which is in `owner` or missing there."""
        line = owner.line_of(path.rpartition(".")[2])
        place = Location(file=self.file, line=line, path=f"{self.kind}/{self.name} {path}")
        return Finding(code, place, received, expected, fix)


Services = dict[str, tuple[Map, str]]
"""The spec and the file of each Service, by name."""


def read_manifests(
    texts: Sequence[tuple[str, str]],
) -> tuple[list[Workload], Services, list[Finding]]:
    """Return the workloads and Services of texts with file names, and which are not YAML."""
    jobs: list[Workload] = []
    services: Services = {}
    found: list[Finding] = []
    for text, file in texts:
        try:
            for document in yaml.load_all(text, Loader=_Loader):
                is_list = isinstance(document, Map) and "items" in document
                for each in document.maps("items") if is_list else [document]:
                    _take(each, file, jobs, services)
        except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
            found.append(_not_yaml(error, file))
    return jobs, services, found


def check_workload(job: Workload, services: Services) -> Iterator[Finding]:
    """Yield what keeps the pods of a job from being one job of tfdist."""
    for part in job.parts:
        for container in part.containers:
            yield from _variables(job, part, container)
            yield from _ports(job, part, container)
        if job.kind in ("Job", "JobSet"):
            yield from _indexed(job, part)
            yield from _exit_codes(job, part)
    if job.kind != "TFJob" and job.count > 1:
        yield from _names(job)
        yield from _service(job, services)


def check_grace(
    job: Workload, part: PodGroup, *, launcher_grace_s: float | None = None
) -> Iterator[Finding]:
    """Yield a grace period in which the tasks, or the launcher in the pod, cannot end."""
    grace_s = part.spec.number("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace_s < _DEFAULT_GRACE_S:
        expected = f"{_DEFAULT_GRACE_S} s or more, and longer than a save takes"
    elif launcher_grace_s is not None and grace_s <= launcher_grace_s:
        expected = f"more than --grace_s {launcher_grace_s:g} of the launcher in the pod"
    else:
        return
    path = f"{part.path}.template.spec.terminationGracePeriodSeconds"
    yield job.finding("K8S026", part.spec, path, f"{grace_s} s", expected, "raise it")


class _Loader(yaml.SafeLoader):
    """Reads mappings as `Map`, and what has a tag of somebody else's as nothing."""


def _construct_map(loader: Any, node: Any) -> Map:
    loader.flatten_mapping(node)
    made = Map(loader.construct_mapping(node, deep=True))
    made.line = node.start_mark.line + 1
    made.lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    return made


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)
_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _not_yaml(error: Exception, file: str) -> Finding:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    received = " ".join(str(problem).split()) + (f" at column {mark.column + 1}" if mark else "")
    place = Location(file=file, line=mark.line + 1 if mark else 1)
    fix = "correct the indentation, the quotes or the tabs there"
    return Finding("K8S001", place, received, "YAML of a few levels", fix)


def _take(document: object, file: str, jobs: list[Workload], services: Services) -> None:
    if not isinstance(document, Map):
        return
    kind, name = str(document.get("kind")), str(document.map("metadata").get("name") or "")
    spec = document.map("spec")
    if kind == "Service":
        services[name] = spec, file
    elif kind in _READERS:
        parts = tuple(
            PodGroup(
                count=count,
                pods=pods,
                owner=owner,
                path=path,
                containers=tuple(
                    _container(each, file, f"{kind}/{name} {path}.template.spec")
                    for each in owner.map("template").map("spec").maps("containers")
                ),
            )
            for owner, path, count, pods in _READERS[kind](name, spec)
        )
        jobs.append(Workload(kind=kind, name=name, file=file, spec=spec, parts=parts))


_Templates = Iterator[tuple[Map, str, int, tuple[str, ...]]]
"""Of each template: what holds it, the path of that, how many pods it makes, their names."""


def _of_job(name: str, spec: Map) -> _Templates:
    count = spec.number("completions", spec.number("parallelism", 1))
    yield spec, "spec", count, _numbered(name, count)


def _of_stateful_set(name: str, spec: Map) -> _Templates:
    count, first = spec.number("replicas", 1), spec.map("ordinals").number("start", 0)
    yield spec, "spec", count, _numbered(name, count, first)


def _of_job_set(name: str, spec: Map) -> _Templates:
    for position, job in enumerate(spec.maps("replicatedJobs")):
        owner, jobs = job.map("template").map("spec"), job.number("replicas", 1)
        count = owner.number("completions", owner.number("parallelism", 1))
        names = (
            _numbered(f"{name}-{job.get('name')}-{i}", count) for i in range(min(jobs, _MAX_PODS))
        )
        path = f"spec.replicatedJobs[{position}].template.spec"
        pods = itertools.islice(itertools.chain.from_iterable(names), _MAX_PODS)
        yield owner, path, jobs * count, tuple(pods)


def _of_tf_job(name: str, spec: Map) -> _Templates:
    replicas = spec.map("tfReplicaSpecs")
    for type_ in map(str, replicas):
        owner = replicas.map(type_)
        yield owner, f"spec.tfReplicaSpecs.{type_}", owner.number("replicas", 1), ()


def _numbered(prefix: str, count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"{prefix}-{first + i}" for i in range(min(count, _MAX_PODS)))


_READERS = {
    "Job": _of_job,
    "JobSet": _of_job_set,
    "StatefulSet": _of_stateful_set,
    "TFJob": _of_tf_job,
}


def _container(spec: Map, file: str, path: str) -> Container:
    env = {str(each.get("name", "")): each for each in spec.maps("env")}
    lists = [spec.get(key) for key in ("command", "args")]
    return Container(
        spec=spec,
        values={n: e["value"] for n, e in env.items() if isinstance(e.get("value"), str)},
        lines={name: each.line_of("value") for name, each in env.items()},
        words=tuple(str(word) for each in lists if isinstance(each, list) for word in each),
        file=file,
        path=f"{path} {spec.get('name', '')}".rstrip(),
    )


def _variables(job: Workload, part: PodGroup, container: Container) -> Iterator[Finding]:
    """Yield variables that say for all pods which one each is, or that somebody else sets."""
    for name in _OF_OPERATOR if job.kind == "TFJob" else ():
        if name in container.lines:
            expected = f"only what the operator does not say: it sets {VARIABLE}"
            place, fix = container.place(name), f"take {name} out"
            yield Finding("K8S034", place, f"{name} in env", expected, fix)
    for name in _OF_ONE_POD if job.kind != "TFJob" and part.count > 1 else ():
        if name in container.values:
            received = f"one {name} for {part.count} pods"
            place, expected = container.place(name), "what is the same for all pods"
            fix = f"set {settings.HOSTS} in its place: each pod finds itself there"
            yield Finding("K8S035", place, received, expected, fix)


def _ports(job: Workload, part: PodGroup, container: Container) -> Iterator[Finding]:
    """Yield ports of a container at which a task of TFDIST_HOSTS does not listen."""
    named = [each.number("containerPort", 0) for each in container.spec.maps("ports")]
    if not named or settings.HOSTS not in container.values:
        return
    try:
        port = settings.integer(container.values, settings.PORT) or placement.DEFAULT_PORT
        text = settings.text(container.values, settings.PORTS)
        listens = parse_ports(text, where=settings.PORTS) if text else range(port, port + 1)
    except UsageError:
        return  # the check of the variables says it
    if not any(port in listens for port in named):
        path = f"{part.path}.template.spec.containers.ports"
        received, fix = ", ".join(map(str, named)), f"correct it, or set {settings.PORT}"
        yield job.finding("K8S045", container.spec, path, received, text or str(port), fix)


def _indexed(job: Workload, part: PodGroup) -> Iterator[Finding]:
    owner, mode = part.owner, str(part.owner.get("completionMode", "no completionMode"))
    if job.kind == "Job" and part.count > 1 and mode != "Indexed":
        path, fix = f"{part.path}.completionMode", "write completionMode: Indexed"
        yield job.finding("K8S010", owner, path, mode, "Indexed", fix)
    tasks, together = owner.number("completions", 1), owner.number("parallelism", 1)
    if together < tasks:
        path, fix = f"{part.path}.parallelism", f"write parallelism: {tasks}"
        received = f"parallelism of {together} for {tasks} completions"
        yield job.finding("K8S011", owner, path, received, "all pods at once", fix)


def _exit_codes(job: Workload, part: PodGroup) -> Iterator[Finding]:
    """Yield pod failure policies that try a usage error again, or give up for another code."""
    rules = part.owner.map("podFailurePolicy").maps("rules")
    ends = any(_fails(rule, EXIT_USAGE) for rule in rules)
    expected = f"FailJob onExitCodes In [{EXIT_USAGE}]"
    of_set = job.spec.map("failurePolicy")
    if of_set.number("maxRestarts", 0):  # a Job that is given up is made again by the JobSet
        fatal = [rule for rule in of_set.maps("rules") if rule.get("action") == "FailJobSet"]
        reasons = [rule.get("onJobFailureReasons") or ["PodFailurePolicy"] for rule in fatal]
        ends &= any("PodFailurePolicy" in each for each in reasons)
        expected += ", and FailJobSet onJobFailureReasons [PodFailurePolicy]"
        rules = []
    else:
        ends |= 0 in (part.owner.get("backoffLimit"), part.owner.get("backoffLimitPerIndex"))
        expected += ", or backoffLimit: 0"
    path = f"{part.path}.podFailurePolicy"
    if not ends:
        received = f"no rule for exit code {EXIT_USAGE}"
        fix = "add the rule: a mistake of the user's is the same at every try"
        yield job.finding("K8S024", part.owner, path, received, expected, fix)
    for rule in rules:
        again = (EXIT_PEER_MISSING, EXIT_INTERRUPTED, EXIT_STOPPED)
        code = next((code for code in again if _fails(rule, code)), None)
        if code is not None:
            received, fix = f"{rule['action']} at exit code {code}", f"take {code} out of the rule"
            expected = "another try: the run goes on from its checkpoint"
            at = f"{path}.rules.onExitCodes"
            yield job.finding("K8S025", rule, at, received, expected, fix)


def _fails(rule: Map, code: int) -> bool:
    """Return whether a rule gives the job, or the index, up at an exit code."""
    on, values = rule.map("onExitCodes"), rule.map("onExitCodes").get("values")
    if rule.get("action") not in ("FailJob", "FailIndex") or not isinstance(values, list):
        return False
    return (code in values) == (on.get("operator") == "In")


def _names(job: Workload) -> Iterator[Finding]:
    """Yield why the pods of a job do not find each other, or themselves, by TFDIST_HOSTS."""
    containers = job.containers
    if any(c.values.get(settings.CLUSTER) == "none" or "envFrom" in c.spec for c in containers):
        return
    if job.hosts is None:
        if containers and not any({settings.HOSTS, VARIABLE} & set(c.lines) for c in containers):
            path = f"{job.parts[0].path}.template.spec.containers.env"
            received = f"{job.count} pods without {settings.HOSTS}"
            expected = f"{settings.HOSTS} with the names of all pods"
            fix = f"add it to env, or {settings.CLUSTER}=none for programs by themselves"
            yield job.finding("K8S016", containers[0].spec, path, received, expected, fix)
        return
    container, names = job.hosts
    wrong = _mismatch(job, names)
    if wrong and settings.NODE_RANK not in container.lines:  # which tells the pods their places
        code, received, expected = wrong
        fix = "name the pods as docs/clusters.md has them, as in mnist-[0-3].train"
        yield Finding(code, container.place(settings.HOSTS), received, expected, fix)


def _mismatch(job: Workload, names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return rule, received and expected where names are not those of the pods of a job."""
    if len(names) != job.count:
        received = f"{len(names)} hosts, and {job.count} pods of the {job.kind}"
        return "K8S014", received, "a host for each pod"
    pods = dict.fromkeys(pod for part in job.parts for pod in part.pods)
    other = next((name for name in names if name.partition(".")[0] not in pods), None)
    if other and job.name:
        received = f"{other!r}, which is no pod of the {job.kind}"
        return "K8S015", received, f"names like {next(iter(pods), job.name)}"
    domain = _domain(job)
    other = next((name for name in names if name.split(".")[1:2] != [domain]), None)
    if domain and other:
        return "K8S013", f"{other!r}, and pods below {domain!r}", f"names ending in .{domain}"
    return None


def _domain(job: Workload) -> str:
    """Return the name in DNS that the pods are below, which is that of their Service."""
    if job.kind == "StatefulSet":
        return str(job.spec.get("serviceName") or "")
    if job.kind == "JobSet":
        return str(job.spec.map("network").get("subdomain") or job.name)
    return str(job.parts[0].spec.get("subdomain") or "")


def _service(job: Workload, services: Services) -> Iterator[Finding]:
    """Yield a Service that is missing or not headless; a JobSet makes its own."""
    if job.kind == "JobSet" or job.hosts is None or settings.NODE_RANK in job.hosts[0].lines:
        return
    owner, path = job.parts[0].spec, "spec.template.spec.subdomain"
    if job.kind == "StatefulSet":
        owner, path = job.spec, "spec.serviceName"
    domain, field = _domain(job), path.rpartition(".")[2]
    if not domain:
        expected, fix = "the name of a headless Service", f"write {field}, as in {settings.HOSTS}"
        yield job.finding("K8S012", owner, path, f"no {field}", expected, fix)
    elif domain not in services:
        received = f"no Service {domain!r} in the files"
        expected = "a Service of this name with clusterIP: None"
        fix = "add it, or check the file that has it together with this one"
        yield job.finding("K8S018", owner, path, received, expected, fix)
    elif services[domain][0].get("clusterIP") != "None":
        spec, file = services[domain]
        at = f"Service/{domain} spec.clusterIP"
        place = Location(file=file, line=spec.line_of("clusterIP"), path=at)
        received = str(spec.get("clusterIP", "no clusterIP"))
        yield Finding("K8S019", place, received, "None", "write clusterIP: None")
