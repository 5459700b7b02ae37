"""Kubernetes: the manifests of a job, by kind. Pure.

The pods find each other by the rules of `tfdist.cluster.environment`: TFDIST_HOSTS names them.

* ``job``: an indexed Job and a headless Service. A pod that fails is started again by itself, and
  the others, whose peer is missing then, with it.
* ``jobset``: a replicated job for each role; whatever fails, all are started again together. Needs
  JobSet 0.10 or newer, which can tell failures by their message.
* ``tfjob``: for clusters with Kubeflow's training operator, which sets TF_CONFIG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from tfdist.cluster.settings import RESTARTS, UNCOUNTED_RESTARTS
from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_PEER_MISSING,
    EXIT_STOPPED,
    EXIT_USAGE,
    require_one_of,
)
from tfdist.ops.submit.pods import (
    SERVER_CODES,
    Manifest,
    Role,
    labels,
    metadata,
    network_policy,
    template,
    without_unset,
)
from tfdist.ops.submit.request import JobRequest, wrong

# An indexed Job with its headless Service, and what all Jobs have in common:
#
# https://kubernetes.io/docs/concepts/workloads/controllers/job/

AGAIN = (EXIT_PEER_MISSING, EXIT_INTERRUPTED, EXIT_STOPPED)
"""Codes of tasks that did nothing wrong, and are started again however often."""

_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}  # drained, preempted, evicted
_JOB_RESTARTS = {
    RESTARTS: "batch.kubernetes.io/job-index-failure-count",
    UNCOUNTED_RESTARTS: "batch.kubernetes.io/job-index-ignored-failure-count",
}


def indexed_job(request: JobRequest) -> list[Manifest]:
    """Return the Job of all tasks, and the Service by which they find each other."""
    is_ps = request.is_ps
    gpus = request.flags.gpus
    if is_ps and gpus:
        received = f"{gpus} in a ps job"
        expected = "no --gpus: all pods of a Job are alike, the ps and the chief too"
        raise wrong("gpus", received, expected, "use --kind jobset or tfjob")
    variables, subdomain = {}, None
    if request.has_several_tasks:
        subdomain = request.name
        variables["TFDIST_HOSTS"] = f"{request.name}-{host_range(request.num_tasks)}.{subdomain}"
    if is_ps:
        variables["TFDIST_PS"] = f"{request.num_ps}"
    role = Role(
        gpus=gpus,
        variables=variables,
        codes=SERVER_CODES if is_ps else {},
        codes_from_index=1 if is_ps else None,
        subdomain=subdomain,
        annotations=_JOB_RESTARTS,
    )
    spec = indexed(request, request.num_tasks)
    # Each task has so many restarts: a count of the whole job would be used up at once by what all
    # of them run into. Pods are told how often they were started only where it is counted so.
    spec |= {"backoffLimitPerIndex": request.launch.max_restarts, "maxFailedIndexes": 0}
    if is_ps:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["podFailurePolicy"] = pod_failure_policy(role.container, again="Ignore")
    spec["template"] = template(request, role)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(request),
        "spec": spec,
    }
    return [*([_service(request)] if subdomain else []), job]


def indexed(request: JobRequest, count: int) -> Manifest:
    """Return the beginning of the spec of a Job with so many tasks."""
    tasks = {"completionMode": "Indexed", "completions": count, "parallelism": count}
    return without_unset({**tasks, "activeDeadlineSeconds": request.time_s})


def pod_failure_policy(container: str, *, again: str) -> Manifest:
    """Return the policy for failed pods; `again` is the action for `AGAIN` and disruptions."""
    return {
        "rules": [
            _on_codes("FailJob", [EXIT_USAGE], container),
            _on_codes(again, AGAIN, container),
            {"action": again, "onPodConditions": [_DISRUPTED]},
        ]
    }


def host_range(count: int) -> str:
    """Return the numbers of pods as a node list has them."""
    return "0" if count == 1 else f"[0-{count - 1}]"


def _on_codes(action: str, values: Sequence[int], container: str) -> Manifest:
    on_codes = {"containerName": container, "operator": "In", "values": list(values)}
    return {"action": action, "onExitCodes": on_codes}


def _service(request: JobRequest) -> Manifest:
    """Return the headless Service by which pods have names, before they are ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(request),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(request),
        },
    }


# A JobSet, whose Jobs are started again together:
#
# https://jobset.sigs.k8s.io/docs/concepts/

_JOBSET_RESTARTS = {RESTARTS: "jobset.sigs.k8s.io/restart-attempt"}


def jobset(request: JobRequest) -> list[Manifest]:
    """Return a set with a Job for each role."""
    name, is_ps = request.name, request.is_ps
    roles = {"worker": request.launch.workers}
    if is_ps:
        roles = {"chief": 1, **roles, "ps": request.num_ps}
    done = [next(iter(roles))]
    if request.launch.evaluator:
        roles["evaluator"] = 1
        done.append("evaluator")
    variables = {}
    if request.has_several_tasks:
        hosts = [f"{name}-{role}-0-{host_range(count)}.{name}" for role, count in roles.items()]
        variables["TFDIST_HOSTS"] = ",".join(hosts)
    if is_ps:
        variables["TFDIST_PS"] = f"{request.num_ps}"
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": done},
        "failurePolicy": _jobset_failure_policy(request),
        "replicatedJobs": [
            {
                "name": role,
                "replicas": 1,
                "template": _child(request, role, count, variables),
            }
            for role, count in roles.items()
        ],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**kind, "metadata": metadata(request), "spec": spec}]


def _jobset_failure_policy(request: JobRequest) -> Manifest:
    """Return the policy for failed Jobs; the first rule that matches any of them holds.

    A task that fails has others lose it, who are to be started again however often: where both are
    seen at once, it counts.
    """
    message = f"failed with exit code {EXIT_USAGE} matching"
    return {
        "maxRestarts": request.launch.max_restarts,
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


def _child(request: JobRequest, name: str, count: int, variables: Mapping[str, str]) -> Manifest:
    """Return the Job of a role, which any failure of a pod ends."""
    gpus = request.flags.gpus if name == "worker" else 0
    role = Role(gpus=gpus, variables=variables, codes={}, annotations=_JOBSET_RESTARTS)
    spec = indexed(request, count)
    spec["backoffLimit"] = 0
    spec["podFailurePolicy"] = pod_failure_policy(role.container, again="FailJob")
    spec["template"] = template(request, role)
    return {"metadata": {"labels": labels(request)}, "spec": spec}


# A TFJob, for clusters with Kubeflow's training operator, which sets TF_CONFIG:
#
# https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/

_TFJOB_AGAIN = 138
"""What the operator retries as the user's own choice; it takes 75 for final."""


def tfjob(request: JobRequest) -> list[Manifest]:
    """Return a TFJob with a type of replica for each role."""
    is_ps = request.is_ps
    roles = {"Worker": request.launch.workers}
    if is_ps:
        roles = {"Chief": 1, **roles, "PS": request.num_ps}
    replicas = {}
    for name, count in roles.items():
        codes = {EXIT_PEER_MISSING: _TFJOB_AGAIN}
        if is_ps and name != "Chief":
            codes = dict.fromkeys([*SERVER_CODES, EXIT_PEER_MISSING], _TFJOB_AGAIN)
        gpus = request.flags.gpus if name == "Worker" else 0
        # By these names the operator finds the container and the port.
        role = Role(container="tensorflow", port="tfjob-port", gpus=gpus, variables={}, codes=codes)
        made = template(request, role)
        del made["spec"]["restartPolicy"]  # the operator's own
        replicas[name] = {"replicas": count, "restartPolicy": "ExitCode", "template": made}
    policy = without_unset({"cleanPodPolicy": "Running", "activeDeadlineSeconds": request.time_s})
    spec = {"runPolicy": policy, "tfReplicaSpecs": replicas}
    kind = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob"}
    return [{**kind, "metadata": metadata(request), "spec": spec}]


# The job, whatever its kind.

KINDS: Mapping[str, Callable[[JobRequest], list[Manifest]]] = {
    "job": indexed_job,
    "jobset": jobset,
    "tfjob": tfjob,
}

_WITHOUT_EVALUATOR = {
    "job": "a pod that is done is not started again with the others",
    "tfjob": "its operator ends it with the chief",
}
_NAME = re.compile("[a-z]([a-z0-9-]{0,37}[a-z0-9])?")  # before role, number, random letters


def kind_of(request: JobRequest) -> str:
    """Return which kind of object the job is to be."""
    return require_one_of("--kind", request.flags.kind or "job", KINDS)


def notes(request: JobRequest) -> tuple[str, ...]:
    """Return notes on the job for the user."""
    writable = [volume.mount for volume in request.volumes if not volume.read_only]
    if any(PurePosixPath(request.run_dir).is_relative_to(mount) for mount in writable):
        return ()
    return (
        f"note: the run directory {request.run_dir} is on no --volume: what the job writes is lost "
        "with its pods, and it cannot go on after a restart",
    )


def render(request: JobRequest, *, kind: str) -> str:
    """Return the manifests of the job's objects, in the order in which they are to be created.

    Raises:
        UsageError: a job that this kind cannot be.
    """
    if request.flags.image is None:
        expected = "the image of the pods, with tfdist in it"
        raise wrong("image", "nothing", expected, "write --image registry/name:tag", "no-value")
    check_name(request.name)
    if request.launch.evaluator and kind in _WITHOUT_EVALUATOR:
        received = f"it with --kind {kind}: {_WITHOUT_EVALUATOR[kind]}"
        expected = "--kind jobset, which waits for the last checkpoint and starts all together"
        fix = "use --kind jobset, or leave --evaluator out"
        raise wrong("evaluator", received, expected, fix)
    made = [network_policy(request), *KINDS[kind](request)]
    kinds = "networkpolicy,service,job" if kind == "job" else f"networkpolicy,{kind}"
    namespace = request.flags.namespace
    above = comments(request.title, kinds=kinds, name=request.name, namespace=namespace)
    return above + text_of(made)


def check_name(name: str) -> None:
    """Raise UsageError for a name with which a pod's own might be no label in DNS."""
    if not _NAME.fullmatch(name):
        expected = "at most 39 small letters, digits and '-', the first a letter"
        raise wrong("name", repr(name), expected, "write --name mnist, for example")


# YAML writer for manifests that every parser reads the same way.

# Everything else is quoted: readers differ in what they take for a number or a truth value, as
# 1e3, 0o17, 12:30 or y.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+( [A-Za-z0-9_./-]+)*")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True  # labels occur in several places, and are written out in each


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    if "\n" in text:
        style = "|"
    elif _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def text_of(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the documents in one file, in their order."""
    made = [
        yaml.dump(dict(d), Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=False)
        for d in documents
    ]
    return "---\n".join(made)


def comments(about: str, *, kinds: str, name: str, namespace: str | None) -> str:
    """Return the comment above the objects of a job, with the command that removes them."""
    space = f" --namespace {namespace}" if namespace else ""
    return (
        f"# {about}; rendered by python -m tfdist.submit.\n"
        f"# To remove it: kubectl{space} delete {kinds} {name} --ignore-not-found\n"
    )
