"""Kubernetes: an indexed Job with its headless Service, and what all Jobs have in common. Pure.

https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.cluster.wishes import RESTARTS, UNCOUNTED_RESTARTS
from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_PEER_MISSING,
    EXIT_STOPPED,
    EXIT_USAGE,
    UsageError,
)
from tfdist.schedulers.pods import (
    SERVER_CODES,
    Manifest,
    PodOptions,
    Role,
    labels,
    metadata,
    template,
)
from tfdist.schedulers.request import JobRequest

AGAIN = (EXIT_PEER_MISSING, EXIT_INTERRUPTED, EXIT_STOPPED)
"""Codes of tasks that did nothing wrong, and are started again however often."""

_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}  # drained, preempted, evicted
_RESTARTS = {
    RESTARTS: "batch.kubernetes.io/job-index-failure-count",
    UNCOUNTED_RESTARTS: "batch.kubernetes.io/job-index-ignored-failure-count",
}


def indexed_job(request: JobRequest, options: PodOptions) -> list[Manifest]:
    """Returns the Job of all tasks, and the Service by which they find each other."""
    is_ps = request.strategy == "ps"
    if is_ps and request.resources.gpus:
        fix = "use --kind jobset or tfjob"
        expected = "no --gpus: all pods of a Job are alike, the ps and the chief too"
        received = f"{request.resources.gpus} in a ps job"
        raise UsageError("--gpus", received=received, expected=expected, fix=fix)
    variables, subdomain = {}, None
    if request.has_several_tasks:
        subdomain = request.name
        variables["TFDIST_HOSTS"] = f"{request.name}-{host_range(request.num_tasks)}.{subdomain}"
    if is_ps:
        variables["TFDIST_PS"] = f"{request.ps}"
    role = Role(
        gpus=request.resources.gpus,
        variables=variables,
        codes=SERVER_CODES if is_ps else {},
        codes_from_index=1 if is_ps else None,
        subdomain=subdomain,
        annotations=_RESTARTS,
    )
    spec = indexed(request, request.num_tasks)
    # Each task has so many restarts: a count of the whole job would be used up at once by what all
    # of them run into. Pods are told how often they were started only where it is counted so.
    spec |= {"backoffLimitPerIndex": request.max_restarts, "maxFailedIndexes": 0}
    if is_ps:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["podFailurePolicy"] = pod_failure_policy(role.container, again="Ignore")
    spec["template"] = template(request, options, role)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(request, options),
        "spec": spec,
    }
    return [*([_service(request, options)] if subdomain else []), job]


def indexed(request: JobRequest, count: int) -> Manifest:
    """Returns the beginning of the spec of a Job with so many tasks."""
    made: Manifest = {"completionMode": "Indexed", "completions": count, "parallelism": count}
    if request.time_s:
        made["activeDeadlineSeconds"] = request.time_s
    return made


def pod_failure_policy(container: str, *, again: str) -> Manifest:
    """Returns what pods do to their Job; `again` is the action where they did nothing wrong."""
    return {
        "rules": [
            _on_codes("FailJob", [EXIT_USAGE], container),
            _on_codes(again, AGAIN, container),
            {"action": again, "onPodConditions": [_DISRUPTED]},
        ]
    }


def host_range(count: int) -> str:
    """Returns the numbers of pods as a node list has them."""
    return "0" if count == 1 else f"[0-{count - 1}]"


def _on_codes(action: str, values: Sequence[int], container: str) -> Manifest:
    on_codes = {"containerName": container, "operator": "In", "values": list(values)}
    return {"action": action, "onExitCodes": on_codes}


def _service(request: JobRequest, options: PodOptions) -> Manifest:
    """Returns the headless Service by which pods have names, before they are ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(request, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(request),
        },
    }
