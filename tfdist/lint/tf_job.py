"""Checks a TFJob of Kubeflow's training operator."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import near
from tfdist.lint.findings import Finding
from tfdist.lint.workloads import Part, Workload, as_map

_TYPES = ("Chief", "Master", "Worker", "PS", "Evaluator")
_SETS_ITSELF = (VARIABLE, "TFDIST_HOSTS", "TFDIST_NODE_RANK", "TFDIST_LOCAL_RANK")
_PATH = "spec.tfReplicaSpecs"


def check_tf_job(job: Workload) -> Iterator[Finding]:
    """Yields what the operator would not make a job of tfdist from."""
    replicas = as_map(job.spec.get("tfReplicaSpecs"))
    for type_ in replicas:
        if type_.lower() not in map(str.lower, _TYPES):
            yield job.finding(
                "K8S032",
                job.place(replicas, type_, path=f"{_PATH}.{type_}"),
                received=f"{type_!r}{near(type_.capitalize(), _TYPES)}",
                expected=f"one of {', '.join(_TYPES)}",
                fix="use one of these types",
            )
            return
    yield from _counts(job)
    for part in job.parts:
        yield from _containers(job, part)


def _counts(job: Workload) -> Iterator[Finding]:
    counts = {part.name.lower(): part.count for part in job.parts}
    chiefs = counts.get("chief", 0) + counts.get("master", 0)
    wrong = ""
    if chiefs > 1 or counts.get("evaluator", 0) > 1:
        wrong = f"{chiefs} chiefs and {counts.get('evaluator', 0)} evaluators"
    elif counts.get("ps", 0) and not chiefs:
        wrong = "PS without Chief"
    elif counts.get("ps", 0) and not counts.get("worker", 0):
        wrong = "PS without Worker"
    elif not chiefs and not counts.get("worker", 0):
        wrong = "neither Chief nor Worker"
    if wrong:
        yield job.finding(
            "K8S033",
            job.place(job.spec, "tfReplicaSpecs", path=_PATH),
            received=wrong,
            expected="one Chief at most, and a Chief and a Worker beside PS",
            fix="correct the replicas of the types",
        )


def _containers(job: Workload, part: Part) -> Iterator[Finding]:
    path = f"{part.path}.template.spec.containers"
    names = [str(container.spec.get("name")) for container in part.containers]
    if names and "tensorflow" not in names:
        yield job.finding(
            "K8S031",
            job.place(part.containers[0].spec, "name", path=path),
            received=f"{', '.join(names)}",
            expected="a container called tensorflow",
            fix="write name: tensorflow",
        )
    for container in part.containers:
        for name in _SETS_ITSELF:
            if name in container.env_lines:
                yield job.finding(
                    "K8S034",
                    job.place(container.spec, "env", path=f"{path}.env {name}"),
                    received=f"{name} in env",
                    expected=f"only what the operator does not say: it sets {VARIABLE}",
                    fix=f"take {name} out",
                )
