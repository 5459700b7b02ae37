"""Kubernetes: the manifests of a job, by kind, and of a service of KServe. Pure.

The pods find each other by the rules of `tfdist.cluster.environment`: TFDIST_HOSTS names them.

* ``job``: an indexed Job and a headless Service. A pod that fails is started again by itself, and
  the others, whose peer is missing then, with it.
* ``jobset``: a replicated job for each role; whatever fails, all are started again together. Needs
  JobSet 0.10 or newer, which can tell failures by their message.
* ``tfjob``: for clusters with Kubeflow's training operator, which sets TF_CONFIG.

TensorFlow's servers run what anyone sends to their ports, so a pod has no account of the cluster
unless one is asked for, and a NetworkPolicy lets the job's own pods in and nobody else.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from tfdist.cluster.placement import DEFAULT_PORT
from tfdist.cluster.settings import RESTARTS, UNCOUNTED_RESTARTS
from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_PEER_MISSING,
    EXIT_STOPPED,
    EXIT_USAGE,
    require_one_of,
)
from tfdist.ops.submit.request import JobRequest, pairs, wrong

# The pod that runs one task.

Manifest = dict[str, Any]

GPU = "nvidia.com/gpu"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"

_SHM = "/dev/shm"

SERVER_CODES = {0: EXIT_PEER_MISSING}
"""A server of a ps job ends with 0 when its chief has gone, also if the chief is to come back: as
a pod that is done it would not be there then. The job ends with its chief."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Role of a pod: names of its container and port, GPUs, variables, exit codes."""

    container: str = "tfdist"
    port: str = "tensorflow"
    gpus: int = 0
    variables: Mapping[str, str]
    codes: Mapping[int, int]
    """From a task's exit code to what the pod ends with, where another says it better."""
    codes_from_index: int | None = None
    """In an indexed Job, `codes` counts from this index on; None: in every pod."""
    subdomain: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    """From a variable to the annotation with its value, which a controller gives each pod."""


def labels(request: JobRequest) -> dict[str, str]:
    """Return the labels of all objects and pods of the job."""
    return {"app.kubernetes.io/name": "tfdist", INSTANCE: request.name, MANAGED_BY: "tfdist.submit"}


def without_unset(manifest: Manifest) -> Manifest:
    """Return a manifest without its unset fields."""
    return {name: value for name, value in manifest.items() if value not in (None, [], {})}


def _object(version: str, kind: str, request: JobRequest, spec: Manifest) -> Manifest:
    """Return an object of the job."""
    named = {"name": request.name, "namespace": request.flags.namespace}
    metadata = without_unset({**named, "labels": labels(request)})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def network_policy(request: JobRequest) -> Manifest:
    """Return the NetworkPolicy that admits the job's own pods only."""
    selector = {"matchLabels": {name: labels(request)[name] for name in (INSTANCE, MANAGED_BY)}}
    ingress: Manifest = {"from": [{"podSelector": selector}]}
    ports = request.launch.port_range
    if ports is not None and not request.flags.gpus:  # NCCL has ports of its own choice
        first, last = ports[0], ports[-1]
        ingress["ports"] = [{"protocol": "TCP", "port": first, "endPort": last}]
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [ingress]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", request, spec)


def template(request: JobRequest, role: Role) -> Manifest:
    """Return the template of the pods of a role."""
    flags, storage = request.flags, _storage(request, role)
    secret = flags.image_pull_secret
    spec = {
        "restartPolicy": "Never",
        "subdomain": role.subdomain,
        "terminationGracePeriodSeconds": request.grace_s,
        "automountServiceAccountToken": flags.service_account is not None,
        "enableServiceLinks": False,
        # As the profile "restricted" of Pod Security asks for.
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "nodeSelector": pairs("node_selector", flags.node_selector),
        "serviceAccountName": flags.service_account,
        "imagePullSecrets": [{"name": secret}] if secret else [],
        "containers": [_container(request, role, mounts=[mount for _, mount in storage])],
        "volumes": [volume for volume, _ in storage],
    }
    return {"metadata": {"labels": labels(request)}, "spec": without_unset(spec)}


def _container(request: JobRequest, role: Role, *, mounts: Sequence[Manifest]) -> Manifest:
    ports = request.launch.port_range
    port = {"name": role.port, "containerPort": DEFAULT_PORT if ports is None else ports[0]}
    amounts = _amounts(request, role)
    return without_unset(
        {
            "name": role.container,
            "image": request.flags.image,
            "command": ["/bin/sh", "-c", escape_dollars(_script(request, role)), "tfdist"],
            "args": [escape_dollars(word) for word in request.command],
            "env": _env(request, role),
            "ports": [port] if request.has_several_tasks else [],
            "resources": {"requests": amounts, "limits": amounts} if amounts else {},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": list(mounts),
        }
    )


def _env(request: JobRequest, role: Role) -> list[Manifest]:
    """Return the variables of a container; of an annotation that a pod has not, an empty one."""
    made: list[Manifest] = [
        {"name": name, "value": escape_dollars(value)}
        for name, value in {**request.variables(), **role.variables}.items()
    ]
    for name, key in role.annotations.items():
        if name not in request.env:
            path = {"fieldPath": f"metadata.annotations['{key}']"}
            made.append({"name": name, "valueFrom": {"fieldRef": path}})
    for name, where in request.secrets.items():
        secret, _, key = where.partition("/")
        made.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return made


def _amounts(request: JobRequest, role: Role) -> Manifest:
    mib = request.memory_mib or 0
    return without_unset(
        {
            "cpu": f"{request.flags.cpus}" if request.flags.cpus else None,
            "memory": (f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi") if mib else None,
            GPU: f"{role.gpus}" if role.gpus else None,
        }
    )


def _storage(request: JobRequest, role: Role) -> list[tuple[Manifest, Manifest]]:
    """Return the volumes of a pod, each with its mount.

    A pod with GPUs has shared memory: NCCL wants more than a container's 64 MB.
    """
    made: list[tuple[Manifest, Manifest]] = []
    for number, volume in enumerate(request.volumes):
        name, read_only = {"name": f"volume-{number}"}, volume.read_only or None
        source: Manifest = {"hostPath": {"path": volume.source}}
        if not volume.source.startswith("/"):
            claim = without_unset({"claimName": volume.source, "readOnly": read_only})
            source = {"persistentVolumeClaim": claim}
        mount = without_unset({"mountPath": volume.mount, "readOnly": read_only})
        made.append(({**name, **source}, {**name, **mount}))
    if role.gpus and all(volume.mount.rstrip("/") != _SHM for volume in request.volumes):
        memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        made.append((memory, {"name": "shm", "mountPath": _SHM}))
    return made


# What the shell of a pod runs around a task.

# The shell is process 1, to which alone Kubernetes sends SIGTERM. As process 1 it would be deaf to
# it without a trap, and so would be a task in its place that has no handler yet, while it imports
# TensorFlow or waits for its peers.
_TFDIST = """\
trap 'exit 143' TERM
if ! "$1" -c 'import tfdist' 2>/dev/null; then
  echo {message}
  exit 2
fi
"""
# The wait that a trap ends is begun again until the task has ended.
_TASK = """\
"$@" &
trap 'again=yes; kill -TERM "$!"' TERM
code=
again=yes
while [ "$again" ]; do
  again=
  wait "$!"
  now=$?
  case "$now" in
    127 | -1) code=${code:-$now} ;;
    *) code=$now ;;
  esac
done
"""


def _script(request: JobRequest, role: Role) -> str:
    """Return the script of the pod's shell, with the program and its arguments as ``$@``."""
    message = shlex.quote(
        f"image {request.flags.image}: received no tfdist for {request.command[0]}; expected it "
        "installed. "
        "Fix: build it into the image, or name the Python that has it with --python"
    )
    first = role.codes_from_index
    when = "" if first is None else f'[ "$JOB_COMPLETION_INDEX" -ge {first} ] && '
    changes = [f'{when}[ "$code" = {old} ] && code={new}\n' for old, new in role.codes.items()]
    return "".join([_TFDIST.format(message=message), _TASK, *changes, 'exit "$code"\n'])


def escape_dollars(text: str) -> str:
    """Escape a text for Kubernetes, which replaces $(NAME), and $$ by one dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


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
    job = _object("batch/v1", "Job", request, spec)
    return [_service(request), job] if subdomain else [job]


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
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(request)}
    return _object("v1", "Service", request, spec)


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
            {"name": role, "replicas": 1, "template": _child(request, role, count, variables)}
            for role, count in roles.items()
        ],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", request, spec)]


def _jobset_failure_policy(request: JobRequest) -> Manifest:
    """Return the policy for failed Jobs; the first rule that matches any of them holds.

    A task that fails has others lose it, who are to be started again however often: where both are
    seen at once, it counts.
    """
    rules = {
        "mistake": ("FailJobSet", "PodFailurePolicy"),
        "late": ("FailJobSet", "DeadlineExceeded"),
        "failed": ("RestartJobSet", "BackoffLimitExceeded"),
        "again": ("RestartJobSetAndIgnoreMaxRestarts", "PodFailurePolicy"),
    }
    made: list[Manifest] = [
        {"name": name, "action": action, "onJobFailureReasons": [reason]}
        for name, (action, reason) in rules.items()
    ]
    message = f"failed with exit code {EXIT_USAGE} matching"  # what tells a mistake from the rest
    made[0]["onJobFailureMessagePatterns"] = [message]
    return {"maxRestarts": request.launch.max_restarts, "rules": made}


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
    return [_object("kubeflow.org/v1", "TFJob", request, spec)]


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


# A service of KServe, by TensorFlow Serving:
#
# https://kserve.github.io/website/docs/model-serving/predictive-inference/frameworks/tensorflow

SERVICE_KIND = "inferenceservice"


def render_service(service: argparse.Namespace) -> str:
    """Return the manifest of the InferenceService that `request.parse_service` returns."""
    check_name(service.name)
    amounts = without_unset({"cpu": service.cpus, "memory": service.memory})
    if service.gpus:
        amounts[GPU] = f"{service.gpus}"
    model: Manifest = {
        "modelFormat": {"name": "tensorflow", "version": "2"},
        "protocolVersion": "v1",
        "storageUri": service.model,
        "resources": without_unset({"requests": amounts, "limits": amounts}),
    }
    manifest: Manifest = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": without_unset(
            {
                "name": service.name,
                "namespace": service.namespace,
                "labels": {"app.kubernetes.io/name": "tfdist", MANAGED_BY: "tfdist.submit"},
            }
        ),
        "spec": {
            "predictor": without_unset(
                {
                    "minReplicas": service.replicas,
                    "maxReplicas": service.max_replicas,
                    "serviceAccountName": service.service_account,
                    "model": without_unset(model),
                }
            )
        },
    }
    about = f"{service.name}: {service.model}"
    above = comments(about, kinds=SERVICE_KIND, name=service.name, namespace=service.namespace)
    return above + text_of([manifest])


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
