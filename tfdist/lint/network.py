"""Checks what stands beside the workloads: Services, by which pods have names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfdist.lint.findings import Finding, Place
from tfdist.lint.pods import domain_of
from tfdist.lint.workloads import Part, Workload, as_map
from tfdist.lint.yaml_text import Map


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A Service or a NetworkPolicy, and its file."""

    document: Map
    file: str

    @property
    def name(self) -> str:
        """Returns its name."""
        return str(as_map(self.document.get("metadata")).get("name", ""))

    @property
    def namespace(self) -> str:
        """Returns where it is; empty where the manifest leaves that to kubectl."""
        return str(as_map(self.document.get("metadata")).get("namespace", ""))

    @property
    def spec(self) -> Map:
        """Returns its spec."""
        return as_map(self.document.get("spec"))


def check_network(job: Workload, services: Sequence[Beside]) -> Iterator[Finding]:
    """Yields what leaves the pods of a job without names."""
    if job.count < 2:
        return
    yield from _services(job, services)
    yield from _stateful_selector(job)
    if job.kind == "JobSet":
        network = as_map(job.spec.get("network"))
        if network.get("enableDNSHostnames") is False:
            yield job.finding(
                "K8S036",
                job.place(network, "enableDNSHostnames", path="spec.network.enableDNSHostnames"),
                received="false",
                expected="true",
                fix="write enableDNSHostnames: true",
            )


def _services(job: Workload, services: Sequence[Beside]) -> Iterator[Finding]:
    if job.kind not in ("Job", "StatefulSet"):
        return  # the others make their own
    for part in job.parts:
        domain = domain_of(job, part)
        service = next((s for s in services if s.name == domain), None)
        if not domain:
            continue
        if service is None:
            owner = job.spec if job.kind == "StatefulSet" else part.pod_spec
            yield job.finding(
                "K8S018",
                job.place(owner, "subdomain" if job.kind == "Job" else "serviceName"),
                received=f"no Service {domain!r} in the files",
                expected="a Service of this name with clusterIP: None",
                fix="add it, or check the file that has it together with this one",
            )
            continue
        yield from _service(job, part, service)


def _service(job: Workload, part: Part, service: Beside) -> Iterator[Finding]:
    at = f"Service/{service.name} spec"
    selector = {k: str(v) for k, v in as_map(service.spec.get("selector")).items()}
    if service.spec.get("clusterIP") != "None":
        yield Finding(
            code="K8S019",
            place=_place(service, "clusterIP", f"{at}.clusterIP"),
            received=str(service.spec.get("clusterIP", "no clusterIP")),
            expected="None",
            fix="write clusterIP: None",
        )
    if not selector or not matches(selector, labels_of(job, part)):
        missing = next((f"{k}={v}" for k, v in selector.items()), "no selector")
        yield Finding(
            code="K8S020",
            place=_place(service, "selector", f"{at}.selector"),
            received=f"{missing}, which the pods of {job.kind}/{job.name} do not have",
            expected="labels of the pods",
            fix="select a label that the pods' template has",
        )
    probes = any("readinessProbe" in container.spec for container in part.containers)
    if probes and service.spec.get("publishNotReadyAddresses") is not True:
        yield Finding(
            code="K8S021",
            place=_place(service, "publishNotReadyAddresses", at),
            received="a readinessProbe and no publishNotReadyAddresses",
            expected="names from the start",
            fix="write publishNotReadyAddresses: true",
        )


def labels_of(job: Workload, part: Part) -> dict[str, str]:
    """Returns the labels of the pods, with those that the control plane adds."""
    labels = dict(part.labels)
    if job.kind in ("Job", "JobSet"):
        own = job.name if job.kind == "Job" else ""
        labels |= {"job-name": own, "batch.kubernetes.io/job-name": own} if own else {}
    if job.kind == "JobSet":
        labels["jobset.sigs.k8s.io/jobset-name"] = job.name
        labels["jobset.sigs.k8s.io/replicatedjob-name"] = part.name
    if job.kind == "TFJob":
        labels["training.kubeflow.org/job-name"] = job.name
        labels["training.kubeflow.org/replica-type"] = part.name.lower()
    return labels


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Returns whether labels are such as a selector asks for."""
    return all(labels.get(key) == value for key, value in selector.items())


def _stateful_selector(job: Workload) -> Iterator[Finding]:
    if job.kind != "StatefulSet":
        return
    selector = as_map(job.spec.get("selector"))
    wanted = {k: str(v) for k, v in as_map(selector.get("matchLabels")).items()}
    if selector.get("matchExpressions") or (wanted and matches(wanted, job.parts[0].labels)):
        return
    yield job.finding(
        "K8S038",
        job.place(job.spec, "selector", path="spec.selector.matchLabels"),
        received=", ".join(f"{k}={v}" for k, v in wanted.items()) or "no selector",
        expected="labels of the template",
        fix="write the same labels into both",
    )


def _place(beside: Beside, key: str, path: str) -> Place:
    return Place(file=beside.file, line=beside.spec.line_of(key), path=path)
