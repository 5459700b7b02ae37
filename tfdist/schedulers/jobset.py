"""Kubernetes: a JobSet, whose Jobs are started again together. Pure.

https://jobset.sigs.k8s.io/docs/concepts/
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.wishes import RESTARTS
from tfdist.errors import EXIT_USAGE
from tfdist.schedulers.indexed_job import host_range, indexed, pod_failure_policy
from tfdist.schedulers.pods import Manifest, PodOptions, Role, all_labels, metadata, template
from tfdist.schedulers.request import JobRequest

_RESTARTS = {RESTARTS: "jobset.sigs.k8s.io/restart-attempt"}


def jobset(request: JobRequest, options: PodOptions) -> list[Manifest]:
    """Returns a set with a Job for each role."""
    name, is_ps = request.name, request.strategy == "ps"
    roles = {"worker": request.workers}
    if is_ps:
        roles = {"chief": 1, **roles, "ps": request.ps}
    done = [next(iter(roles))]
    if request.evaluator:
        roles["evaluator"] = 1
        done.append("evaluator")
    variables = {}
    if request.has_several_tasks:
        hosts = [f"{name}-{role}-0-{host_range(count)}.{name}" for role, count in roles.items()]
        variables["TFDIST_HOSTS"] = ",".join(hosts)
    if is_ps:
        variables["TFDIST_PS"] = f"{request.ps}"
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": done},
        "failurePolicy": _failure_policy(request),
        "replicatedJobs": [
            {
                "name": role,
                "replicas": 1,
                "template": _child(request, options, role, count, variables),
            }
            for role, count in roles.items()
        ],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**kind, "metadata": metadata(request, options), "spec": spec}]


def _failure_policy(request: JobRequest) -> Manifest:
    """Returns what failed Jobs do to the set: the first rule that is for any of them.

    A task that fails has others lose it, who are to be started again however often: where both are
    seen at once, it counts.
    """
    message = f"failed with exit code {EXIT_USAGE} matching"
    return {
        "maxRestarts": request.max_restarts,
        "rules": [
            {
                "name": "mistake",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [message],
            },
            {
                "name": "late",
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            },
            {
                "name": "failed",
                "action": "RestartJobSet",
                "onJobFailureReasons": ["BackoffLimitExceeded"],
            },
            {
                "name": "again",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _child(
    request: JobRequest, options: PodOptions, name: str, count: int, variables: Mapping[str, str]
) -> Manifest:
    """Returns the Job of a role, which any failure of a pod ends."""
    gpus = request.resources.gpus if name == "worker" else 0
    role = Role(gpus=gpus, variables=variables, codes={}, annotations=_RESTARTS)
    spec = indexed(request, count)
    spec["backoffLimit"] = 0
    spec["podFailurePolicy"] = pod_failure_policy(role.container, again="FailJob")
    spec["template"] = template(request, options, role)
    return {"metadata": {"labels": all_labels(request, options)}, "spec": spec}
