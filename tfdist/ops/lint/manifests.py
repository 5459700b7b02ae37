"""Checks of a job's Kubernetes manifests, limited to what concerns tfdist.

Schemas, images, security contexts and network policies are for kubeconform and kube-linter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml  # type: ignore[import-untyped]

from tfdist.cluster import settings
from tfdist.cluster.address import parse_hosts, ranks_of
from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import EXIT_INTERRUPTED, EXIT_PEER_MISSING, EXIT_STOPPED, EXIT_USAGE, UsageError
from tfdist.ops.lint.rules import Finding, Location
from tfdist.ops.lint.tasks import check_command, check_size, check_variables, is_job_variable

_DEFAULT_GRACE_S = 30
_MAX_PODS = 1 << 16
_OF_ONE_POD = (VARIABLE, settings.NODE_RANK)
_OF_OPERATOR = (VARIABLE, settings.HOSTS, settings.NODE_RANK, settings.LOCAL_RANK)
_AGAIN = (EXIT_PEER_MISSING, EXIT_INTERRUPTED, EXIT_STOPPED)


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
    """Container of the pods: its command, and the variables with a value in the manifest."""

    spec: Map
    values: Mapping[str, str]
    lines: Mapping[str, int]
    words: tuple[str, ...]
    file: str
    path: str

    def location(self, name: str = "") -> Location:
        """Return where a variable is set, or where the command is."""
        line = self.lines.get(name) or self.spec.line_of("command")
        return Location(file=self.file, line=line, path=f"{self.path} {name}".rstrip())


@dataclass(frozen=True, kw_only=True, slots=True)
class PodGroup:
    """Pods of one template; `owner` is the mapping that holds it, `names` are their host names."""

    owner: Map
    path: str
    count: int
    names: tuple[str, ...] = ()
    containers: tuple[Container, ...] = ()

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
    groups: tuple[PodGroup, ...]

    @property
    def count(self) -> int:
        """Return how many pods it has."""
        return sum(group.count for group in self.groups)

    @property
    def containers(self) -> list[Container]:
        """Return the containers of all templates."""
        return [container for group in self.groups for container in group.containers]

    @property
    def concerns_tfdist(self) -> bool:
        """Return whether it is about tfdist at all."""
        variables = (name for container in self.containers for name in container.lines)
        words = (word for container in self.containers for word in container.words)
        is_program = any(re.search(r"\btfdist\b", word) for word in words)
        return self.kind == "TFJob" or is_program or any(map(is_job_variable, variables))

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

    @property
    def domain(self) -> tuple[Map, str, str]:
        """Return the mapping, path and value of the name in DNS that the pods are below."""
        if self.kind == "StatefulSet":
            return self.spec, "spec.serviceName", str(self.spec.get("serviceName") or "")
        if self.kind == "JobSet":
            network = self.spec.map("network")
            return network, "spec.network.subdomain", str(network.get("subdomain") or self.name)
        spec = self.groups[0].spec
        return spec, "spec.template.spec.subdomain", str(spec.get("subdomain") or "")

    def location(self, owner: Map, path: str) -> Location:
        """Return the location of the last key of `path`, which is in `owner` or missing there."""
        line = owner.line_of(path.rpartition(".")[2])
        return Location(file=self.file, line=line, path=f"{self.kind}/{self.name} {path}")


Services = dict[str, tuple[Map, str]]
"""The spec and the file of each Service, by name."""


def check_manifests(texts: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield the findings for texts with file names, which are checked together."""
    jobs, services, found = _read(texts)
    yield from found
    for job in jobs:
        if not job.concerns_tfdist:
            continue
        for group in job.groups:
            for of_group in _OF_GROUPS:
                yield from of_group(job, group)
        if job.kind != "TFJob" and job.hosts is not None:
            container, names = job.hosts
            yield from check_size(len(names), container.values, container.location)
        if job.kind != "TFJob" and job.count > 1:
            yield from _names(job)
            yield from _service(job, services)
        for container in job.containers:
            yield from check_variables(container.values, container.location)
            yield from check_command(container.words, container.location())


class _Loader(yaml.SafeLoader):
    """YAML loader that reads mappings as `Map` and unknown tags as None."""


def _construct_map(loader: Any, node: Any) -> Map:
    loader.flatten_mapping(node)
    made = Map(loader.construct_mapping(node, deep=True))
    made.line = node.start_mark.line + 1
    made.lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    return made


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)
_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _read(texts: Sequence[tuple[str, str]]) -> tuple[list[Workload], Services, list[Finding]]:
    """Return the workloads and Services of texts with file names, and which are not YAML."""
    jobs: list[Workload] = []
    services: Services = {}
    found: list[Finding] = []
    for text, file in texts:
        try:
            for document in yaml.load_all(text, Loader=_Loader):
                is_list = isinstance(document, Map) and "items" in document
                for each in document.maps("items") if is_list else [document]:
                    _add_document(each, file, jobs, services)
        except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
            found.append(_not_yaml(error, file))
    return jobs, services, found


def _not_yaml(error: Exception, file: str) -> Finding:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    received = " ".join(str(problem).split()) + (f" at column {mark.column + 1}" if mark else "")
    location = Location(file=file, line=mark.line + 1 if mark else 1)
    fix = "correct the indentation, the quotes or the tabs there"
    return Finding("K8S001", location, received, "YAML of a few levels", fix)


def _add_document(document: object, file: str, jobs: list[Workload], services: Services) -> None:
    if not isinstance(document, Map):
        return
    kind, name = str(document.get("kind")), str(document.map("metadata").get("name") or "")
    spec = document.map("spec")
    if kind == "Service":
        services[name] = spec, file
    elif kind in ("Job", "JobSet", "StatefulSet", "TFJob"):
        groups = []
        for group in _groups(kind, name, spec):
            path = f"{kind}/{name} {group.path}.template.spec"
            made = (_container(each, file, path) for each in group.spec.maps("containers"))
            groups.append(replace(group, containers=tuple(made)))
        jobs.append(Workload(kind=kind, name=name, file=file, spec=spec, groups=tuple(groups)))


def _groups(kind: str, name: str, spec: Map) -> Iterator[PodGroup]:
    """Yield the pods of each template of a workload, without their containers."""
    if kind == "TFJob":
        replicas = spec.map("tfReplicaSpecs")
        for type_ in map(str, replicas):
            owner, path = replicas.map(type_), f"spec.tfReplicaSpecs.{type_}"
            yield PodGroup(owner=owner, path=path, count=owner.number("replicas", 1))
    elif kind == "JobSet":
        for position, job in enumerate(spec.maps("replicatedJobs")):
            owner, jobs = job.map("template").map("spec"), job.number("replicas", 1)
            count, prefix = _tasks(owner), f"{name}-{job.get('name')}"
            each = (_numbered(f"{prefix}-{i}", count) for i in range(min(jobs, _MAX_PODS)))
            names = tuple(itertools.islice(itertools.chain.from_iterable(each), _MAX_PODS))
            path = f"spec.replicatedJobs[{position}].template.spec"
            yield PodGroup(owner=owner, path=path, count=jobs * count, names=names)
    elif kind == "StatefulSet":
        count, first = spec.number("replicas", 1), spec.map("ordinals").number("start", 0)
        yield PodGroup(owner=spec, path="spec", count=count, names=_numbered(name, count, first))
    else:
        count = _tasks(spec)
        yield PodGroup(owner=spec, path="spec", count=count, names=_numbered(name, count))


def _tasks(owner: Map) -> int:
    return owner.number("completions", owner.number("parallelism", 1))


def _numbered(prefix: str, count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"{prefix}-{first + i}" for i in range(min(count, _MAX_PODS)))


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


# The rules about the pods of one template.


def _completions(job: Workload, group: PodGroup) -> Iterator[Finding]:
    """Yield what keeps the tasks of a Job from running together, each as one of them."""
    owner = group.owner
    mode = str(owner.get("completionMode", "no completionMode"))
    if job.kind == "Job" and group.count > 1 and mode != "Indexed":
        location = job.location(owner, f"{group.path}.completionMode")
        yield Finding("K8S010", location, mode, "Indexed", "write completionMode: Indexed")
    tasks, together = owner.number("completions", 1), owner.number("parallelism", 1)
    if job.kind in ("Job", "JobSet") and together < tasks:
        location = job.location(owner, f"{group.path}.parallelism")
        received = f"parallelism of {together} for {tasks} completions"
        fix = f"write parallelism: {tasks}"
        yield Finding("K8S011", location, received, "all pods at once", fix)


def _mistake_again(job: Workload, group: PodGroup) -> Iterator[Finding]:
    """Yield a policy by which a usage error is tried again."""
    ends = any(_fails(rule, EXIT_USAGE) for rule in _rules(group))
    expected = f"FailJob onExitCodes In [{EXIT_USAGE}]"
    if _is_restarted_by_set(job):
        fatal = [
            r
            for r in job.spec.map("failurePolicy").maps("rules")
            if r.get("action") == "FailJobSet"
        ]
        reasons = [rule.get("onJobFailureReasons") or ["PodFailurePolicy"] for rule in fatal]
        ends &= any("PodFailurePolicy" in each for each in reasons)
        expected += ", and FailJobSet onJobFailureReasons [PodFailurePolicy]"
    else:
        ends |= 0 in (group.owner.get("backoffLimit"), group.owner.get("backoffLimitPerIndex"))
        expected += ", or backoffLimit: 0"
    if job.kind in ("Job", "JobSet") and not ends:
        location = job.location(group.owner, f"{group.path}.podFailurePolicy")
        fix = "add the rule: a mistake of the user's is the same at every try"
        yield Finding("K8S024", location, f"no rule for exit code {EXIT_USAGE}", expected, fix)


def _given_up(job: Workload, group: PodGroup) -> Iterator[Finding]:
    """Yield rules that give a job up for a code that means: again."""
    if _is_restarted_by_set(job) or job.kind not in ("Job", "JobSet"):
        return
    for rule in _rules(group):
        code = next((code for code in _AGAIN if _fails(rule, code)), None)
        if code is not None:
            location = job.location(rule, f"{group.path}.podFailurePolicy.rules.onExitCodes")
            received, fix = f"{rule['action']} at exit code {code}", f"take {code} out of the rule"
            expected = "another try: the run goes on from its checkpoint"
            yield Finding("K8S025", location, received, expected, fix)


def _rules(group: PodGroup) -> list[Map]:
    return group.owner.map("podFailurePolicy").maps("rules")


def _is_restarted_by_set(job: Workload) -> bool:
    """Return whether a Job that is given up is made again by its JobSet."""
    return bool(job.spec.map("failurePolicy").number("maxRestarts", 0))


def _fails(rule: Map, code: int) -> bool:
    """Return whether a rule gives the job, or the index, up at an exit code."""
    on, values = rule.map("onExitCodes"), rule.map("onExitCodes").get("values")
    if rule.get("action") not in ("FailJob", "FailIndex") or not isinstance(values, list):
        return False
    return (code in values) == (on.get("operator") == "In")


def _short_grace(job: Workload, group: PodGroup) -> Iterator[Finding]:
    """Yield a grace period in which the tasks can hardly save."""
    allowed_s = group.spec.number("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if allowed_s < _DEFAULT_GRACE_S:
        expected = f"{_DEFAULT_GRACE_S} s or more, and longer than a save takes"
        path = f"{group.path}.template.spec.terminationGracePeriodSeconds"
        location = job.location(group.spec, path)
        yield Finding("K8S026", location, f"{allowed_s} s", expected, "raise it")


def _variables(job: Workload, group: PodGroup) -> Iterator[Finding]:
    """Yield variables that an operator sets, or that say for all pods which one each is."""
    for container in group.containers:
        for name in (name for name in _OF_OPERATOR if name in container.lines):
            if job.kind == "TFJob":
                location, fix = container.location(name), f"take {name} out"
                expected = f"only what the operator does not say: it sets {VARIABLE}"
                yield Finding("K8S034", location, f"{name} in env", expected, fix)
            elif group.count > 1 and name in _OF_ONE_POD and name in container.values:
                received = f"one {name} for {group.count} pods"
                expected = "what is the same for all pods"
                fix = f"set {settings.HOSTS} in its place: each pod finds itself there"
                yield Finding("K8S035", container.location(name), received, expected, fix)


_OF_GROUPS = (_completions, _mistake_again, _given_up, _short_grace, _variables)


# The rules about the names of all pods.


def _names(job: Workload) -> Iterator[Finding]:
    """Yield why the pods of a job do not find each other, or themselves, by TFDIST_HOSTS."""
    containers = job.containers
    if any(c.values.get(settings.CLUSTER) == "none" or "envFrom" in c.spec for c in containers):
        return
    if job.hosts is None:
        if containers and not any({settings.HOSTS, VARIABLE} & set(c.lines) for c in containers):
            path = f"{job.groups[0].path}.template.spec.containers.env"
            received = f"{job.count} pods without {settings.HOSTS}"
            expected = f"{settings.HOSTS} with the names of all pods"
            fix = f"add it to env, or {settings.CLUSTER}=none for programs by themselves"
            yield Finding("K8S016", job.location(containers[0].spec, path), received, expected, fix)
        return
    container, names = job.hosts
    wrong = _mismatch(job, names)
    if wrong and settings.NODE_RANK not in container.lines:  # which tells the pods their places
        code, received, expected = wrong
        fix = "name the pods as docs/hosts.md has them, as in mnist-[0-3].train"
        yield Finding(code, container.location(settings.HOSTS), received, expected, fix)


def _mismatch(job: Workload, names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return rule, received and expected where names are not those of the pods of a job."""
    if len(names) != job.count:
        received = f"{len(names)} hosts, and {job.count} pods of the {job.kind}"
        return "K8S014", received, "a host for each pod"
    pods = dict.fromkeys(name for group in job.groups for name in group.names)
    other = next((name for name in names if name.partition(".")[0] not in pods), None)
    if other and job.name:
        received = f"{other!r}, which is no pod of the {job.kind}"
        return "K8S015", received, f"names like {next(iter(pods), job.name)}"
    _, _, domain = job.domain
    other = next((name for name in names if name.split(".")[1:2] != [domain]), None)
    if domain and other:
        return "K8S013", f"{other!r}, and pods below {domain!r}", f"names ending in .{domain}"
    return None


def _service(job: Workload, services: Services) -> Iterator[Finding]:
    """Yield a Service that is missing or not headless; a JobSet makes its own."""
    if job.kind == "JobSet" or job.hosts is None or settings.NODE_RANK in job.hosts[0].lines:
        return
    owner, path, domain = job.domain
    location, field = job.location(owner, path), path.rpartition(".")[2]
    if not domain:
        expected, fix = "the name of a headless Service", f"write {field}, as in {settings.HOSTS}"
        yield Finding("K8S012", location, f"no {field}", expected, fix)
    elif domain not in services:
        received = f"no Service {domain!r} in the files"
        expected = "a Service of this name with clusterIP: None"
        fix = "add it, or check the file that has it together with this one"
        yield Finding("K8S018", location, received, expected, fix)
    elif services[domain][0].get("clusterIP") != "None":
        spec, file = services[domain]
        at = f"Service/{domain} spec.clusterIP"
        location = Location(file=file, line=spec.line_of("clusterIP"), path=at)
        received = str(spec.get("clusterIP", "no clusterIP"))
        yield Finding("K8S019", location, received, "None", "write clusterIP: None")
