"""What a manifest starts: pods with their names, their template and their variables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.lint.commands import runs_tfdist
from tfdist.lint.findings import Finding, Place
from tfdist.lint.variables import is_ours
from tfdist.lint.yaml_text import Map, Seq, texts

KINDS = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "StatefulSet": "apps/v1",
    "TFJob": "kubeflow.org/v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
"""The kinds that are looked into, and the version that has them."""

_MAX_PODS = 1 << 16

WORKLOADS = ("Job", "JobSet", "StatefulSet", "TFJob")


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container and the variables whose value the manifest says."""

    spec: Map
    values: dict[str, str]
    env_lines: dict[str, int]
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Pods of one template.

    Attributes:
      name: of the replicated job or the type of replica; empty where the workload is one part.
      count: how many pods there are.
      pods: their host names, in order.
      owner: what holds `template`: the spec of a Job, a StatefulSet or of a type of replica.
    """

    name: str
    count: int
    pods: tuple[str, ...]
    owner: Map
    template: Map
    containers: tuple[Container, ...]
    path: str

    @property
    def pod_spec(self) -> Map:
        """Returns the spec of its pods."""
        return as_map(self.template.get("spec"))

    @property
    def labels(self) -> dict[str, str]:
        """Returns the labels that the template gives its pods."""
        labels = as_map(as_map(self.template.get("metadata")).get("labels"))
        return {key: str(value) for key, value in labels.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Job, JobSet, StatefulSet or TFJob."""

    kind: str
    name: str
    file: str
    document: Map
    parts: tuple[Part, ...] = field(default=())

    @property
    def spec(self) -> Map:
        """Returns its spec."""
        return as_map(self.document.get("spec"))

    @property
    def namespace(self) -> str:
        """Returns where it is; empty where the manifest leaves that to kubectl."""
        return str(as_map(self.document.get("metadata")).get("namespace", ""))

    @property
    def count(self) -> int:
        """Returns how many pods it has."""
        return sum(part.count for part in self.parts)

    @property
    def is_ours(self) -> bool:
        """Returns whether its pods are tasks of tfdist, as far as the manifest tells."""
        if self.kind == "TFJob":
            return True
        containers = [container for part in self.parts for container in part.containers]
        return any(
            any(map(is_ours, container.env_lines)) or runs_tfdist(container.words)
            for container in containers
        )

    def place(self, owner: Map, key: str, *, path: str = "") -> Place:
        """Returns the place of `key` in `owner`, or of `owner` where it is not there."""
        return Place(file=self.file, line=owner.line_of(key), path=path or key)

    def finding(
        self, code: str, place: Place, *, received: str, expected: str, fix: str
    ) -> Finding:
        """Returns a finding about this workload."""
        named = Place(
            file=place.file, line=place.line, path=f"{self.kind}/{self.name} {place.path}"
        )
        return Finding(code=code, place=named, received=received, expected=expected, fix=fix)


def as_map(value: Any) -> Map:
    """Returns a mapping; an empty one where `value` is none."""
    return value if isinstance(value, Map) else Map()


def as_seq(value: Any) -> Seq:
    """Returns a list; an empty one where `value` is none."""
    return value if isinstance(value, Seq) else Seq()


def integer(value: Any, default: int) -> int:
    """Returns a number of pods; `default` where `value` is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def workload(document: Map, file: str) -> Workload:
    """Returns what a document of one of `WORKLOADS` starts."""
    kind = str(document.get("kind"))
    name = str(as_map(document.get("metadata")).get("name", ""))
    spec = as_map(document.get("spec"))
    read = {"Job": _job, "StatefulSet": _stateful_set, "JobSet": _job_set, "TFJob": _tf_job}
    parts = tuple(read[kind](name, spec))
    return Workload(kind=kind, name=name, file=file, document=document, parts=parts)


def _job(name: str, spec: Map) -> Iterator[Part]:
    yield _part("", spec, _pods_of_job(spec), name, path="spec")


def _pods_of_job(spec: Map) -> int:
    return integer(spec.get("completions"), integer(spec.get("parallelism"), 1))


def _stateful_set(name: str, spec: Map) -> Iterator[Part]:
    first = integer(as_map(spec.get("ordinals")).get("start"), 0)
    yield _part("", spec, integer(spec.get("replicas"), 1), name, path="spec", first=first)


def _job_set(name: str, spec: Map) -> Iterator[Part]:
    for position, element in enumerate(as_seq(spec.get("replicatedJobs"))):
        job = as_map(element)
        own, jobs = str(job.get("name", "")), integer(job.get("replicas"), 1)
        inner = as_map(as_map(job.get("template")).get("spec"))
        count = _pods_of_job(inner)
        names = (f"{name}-{own}-{i}-{k}" for i in range(jobs) for k in range(count))
        pods = list(itertools.islice(names, _MAX_PODS))
        path = f"spec.replicatedJobs[{position}].template.spec"
        yield _part(own, inner, jobs * count, name, path=path, pods=pods)


def _tf_job(name: str, spec: Map) -> Iterator[Part]:
    for type_, replica in as_map(spec.get("tfReplicaSpecs")).items():
        owner = as_map(replica)
        prefix = f"{name}-{type_.lower()}"
        count = integer(owner.get("replicas"), 1)
        yield _part(type_, owner, count, prefix, path=f"spec.tfReplicaSpecs.{type_}")


def _part(
    name: str,
    owner: Map,
    count: int,
    prefix: str,
    *,
    path: str,
    first: int = 0,
    pods: Sequence[str] | None = None,
) -> Part:
    template = as_map(owner.get("template"))
    made = pods or [f"{prefix}-{first + i}" for i in range(max(0, min(count, _MAX_PODS)))]
    containers = as_map(template.get("spec")).get("containers")
    listed = [containers] if isinstance(containers, Map) else as_seq(containers)
    return Part(
        name=name,
        count=count,
        pods=tuple(made),
        owner=owner,
        template=template,
        containers=tuple(_container(as_map(each)) for each in listed),
        path=path,
    )


def _container(spec: Map) -> Container:
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    for element in map(as_map, as_seq(spec.get("env"))):
        name = str(element.get("name", ""))
        lines[name] = element.line_of("value")
        if isinstance(element.get("value"), str):
            values[name] = element["value"]
    words = [word for key in ("command", "args") for word in texts(spec.get(key))]
    split = [part for word in words for part in re.split(r"\s+", word) if part]
    return Container(spec=spec, values=values, env_lines=lines, words=tuple(split))
