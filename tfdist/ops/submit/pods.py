"""Kubernetes: the pod that runs one task. Pure.

TensorFlow's servers run what anyone sends to their ports, so the pod has no account of the cluster
unless one is asked for, and `network_policy` lets the job's own pods in and nobody else.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.cluster.placement import DEFAULT_PORT
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.ops.submit.request import JobRequest, pairs

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


def metadata(request: JobRequest) -> Manifest:
    """Return the metadata of an object of the job."""
    namespace = request.flags.namespace
    return without_unset({"name": request.name, "namespace": namespace, "labels": labels(request)})


def network_policy(request: JobRequest) -> Manifest:
    """Return the NetworkPolicy that admits the job's own pods only."""
    selector = {"matchLabels": {name: labels(request)[name] for name in (INSTANCE, MANAGED_BY)}}
    ingress: Manifest = {"from": [{"podSelector": selector}]}
    ports = request.launch.port_range
    if ports is not None and not request.flags.gpus:  # NCCL has ports of its own choice
        first, last = ports[0], ports[-1]
        ingress["ports"] = [{"protocol": "TCP", "port": first, "endPort": last}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(request),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [ingress],
        },
    }


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
