"""Kubernetes: the pod that runs one task. Pure.

TensorFlow's servers run what anyone sends to their ports, so the pod has no account of the cluster
unless one is asked for, and `admission` lets the job's own pods in and nobody else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.cluster.placement import DEFAULT_PORT
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.ops.submit.command import LABEL, Command, wrong
from tfdist.ops.submit.request import JobRequest

Manifest = dict[str, Any]

GPU = "nvidia.com/gpu"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWN_LABELS = ("app.kubernetes.io/name", INSTANCE, MANAGED_BY)

_SHM = "/dev/shm"

SERVER_CODES = {0: EXIT_PEER_MISSING}
"""A server of a ps job ends with 0 when its chief has gone, also if the chief is to come back: as
a pod that is done it would not be there then. The job ends with its chief."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A claim, or a directory of the node where `source` begins with a slash, seen at `mount`."""

    source: str
    mount: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Whom tasks run as; claims are given the group, where there is one."""

    uid: int
    gid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOptions:
    """What only pods have. `user` is None for the image's own, who must not be root then."""

    image: str
    namespace: str | None = None
    node_selector: Mapping[str, str]
    volumes: tuple[Volume, ...] = ()
    service_account: str | None = None
    image_pull_secret: str | None = None
    tolerations: tuple[Manifest, ...] = ()
    priority_class: str | None = None
    user: User | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of all objects and pods, besides those by which they are found."""

    @property
    def is_root(self) -> bool:
        """Return whether tasks run as root, which has to be asked for."""
        return self.user is not None and self.user.uid == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What a pod is for: names of its container and port, GPUs, variables, exit codes."""

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
    """Return what marks everything that belongs to the job."""
    return {"app.kubernetes.io/name": "tfdist", INSTANCE: request.name, MANAGED_BY: "tfdist.submit"}


def all_labels(request: JobRequest, options: PodOptions) -> dict[str, str]:
    """Return the labels of an object or a pod of the job, those that a user wants among them."""
    return {**labels(request), **options.labels}


def metadata(request: JobRequest, options: PodOptions) -> Manifest:
    """Return the metadata of an object of the job."""
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": request.name, **namespace, "labels": all_labels(request, options)}


def admission(request: JobRequest, options: PodOptions) -> Manifest:
    """Return the NetworkPolicy by which the job's pods hear each other, and nobody else."""
    selector = {"matchLabels": {name: labels(request)[name] for name in (INSTANCE, MANAGED_BY)}}
    ingress: Manifest = {"from": [{"podSelector": selector}]}
    ports = request.launch.port_range
    if ports is not None and not request.resources.gpus:  # NCCL has ports of its own choice
        first, last = ports[0], ports[-1]
        ingress["ports"] = [{"protocol": "TCP", "port": first, "endPort": last}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(request, options),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [ingress],
        },
    }


def template(request: JobRequest, options: PodOptions, role: Role) -> Manifest:
    """Return the template of the pods of a role."""
    spec: Manifest = {"restartPolicy": "Never"}
    if role.subdomain:
        spec["subdomain"] = role.subdomain
    spec |= {
        "terminationGracePeriodSeconds": request.grace_s,
        "automountServiceAccountToken": options.service_account is not None,
        "enableServiceLinks": False,
        "securityContext": _security_of_pod(options),
        **_scheduling(options),
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": options.image_pull_secret}]
    spec["containers"] = [_container(request, options, role)]
    volumes = [_volume(i, volume) for i, volume in enumerate(options.volumes)]
    if _needs_shm(options, role):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": {"labels": all_labels(request, options)}, "spec": spec}


def _security_of_pod(options: PodOptions) -> Manifest:
    """Return what the "restricted" profile of Pod Security asks for, unless it is to be root."""
    made: Manifest = {} if options.is_root else {"runAsNonRoot": True}
    if options.user is not None:
        made["runAsUser"] = options.user.uid
        if options.user.gid is not None:
            # A claim with this group already is not gone through again at each start.
            group = {"fsGroup": options.user.gid, "fsGroupChangePolicy": "OnRootMismatch"}
            made |= {"runAsGroup": options.user.gid, **group}
    return {**made, "seccompProfile": {"type": "RuntimeDefault"}}


def _scheduling(options: PodOptions) -> Manifest:
    """Return on which nodes a pod may be, and before whom."""
    made: Manifest = {}
    if options.priority_class:
        made["priorityClassName"] = options.priority_class
    if options.node_selector:
        made["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        made["tolerations"] = list(options.tolerations)
    return made


def _container(request: JobRequest, options: PodOptions, role: Role) -> Manifest:
    text = script(
        image=options.image,
        python=request.python,
        codes=role.codes,
        from_index=role.codes_from_index,
    )
    made: Manifest = {
        "name": role.container,
        "image": options.image,
        "command": ["/bin/sh", "-c", literal(text), "tfdist"],
        "args": [literal(word) for word in (request.python, *request.program)],
        "env": [
            *(
                {"name": name, "value": literal(value)}
                for name, value in {**request.variables(), **role.variables}.items()
            ),
            *(
                _annotation(name, key)
                for name, key in role.annotations.items()
                if name not in request.env
            ),
            *(_secret(name, where) for name, where in request.secrets.items()),
        ],
    }
    if request.has_several_tasks:
        ports = request.launch.port_range
        port = DEFAULT_PORT if ports is None else ports[0]
        made["ports"] = [{"name": role.port, "containerPort": port}]
    if amounts := _amounts(request, role):
        made["resources"] = {"requests": amounts, "limits": amounts}
    made["securityContext"] = {"allowPrivilegeEscalation": False}
    if not options.is_root:  # who without them does not get at other people's files
        made["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    mounts: list[Manifest] = [
        {
            "name": f"volume-{i}",
            "mountPath": volume.mount,
            **({"readOnly": True} if volume.read_only else {}),
        }
        for i, volume in enumerate(options.volumes)
    ]
    if _needs_shm(options, role):
        mounts.append({"name": "shm", "mountPath": _SHM})
    if mounts:
        made["volumeMounts"] = mounts
    return made


def _needs_shm(options: PodOptions, role: Role) -> bool:
    """Return whether a pod is given shared memory: NCCL wants more than a container's 64 MB."""
    return bool(role.gpus) and all(v.mount.rstrip("/") != _SHM for v in options.volumes)


def _annotation(name: str, key: str) -> Manifest:
    """Return a variable that is empty where the pod has no such annotation."""
    path = {"fieldPath": f"metadata.annotations['{key}']"}
    return {"name": name, "valueFrom": {"fieldRef": path}}


def _secret(name: str, where: str) -> Manifest:
    secret, _, key = where.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _amounts(request: JobRequest, role: Role) -> dict[str, str]:
    has = request.resources
    made = {}
    if has.cpus:
        made["cpu"] = f"{has.cpus}"
    if has.memory_mib:
        whole = has.memory_mib % 1024 == 0
        made["memory"] = f"{has.memory_mib // 1024}Gi" if whole else f"{has.memory_mib}Mi"
    if role.gpus:
        made[GPU] = f"{role.gpus}"
    return made


def _volume(number: int, volume: Volume) -> Manifest:
    if volume.source.startswith("/"):
        return {"name": f"volume-{number}", "hostPath": {"path": volume.source}}
    claim = {"claimName": volume.source, **({"readOnly": True} if volume.read_only else {})}
    return {"name": f"volume-{number}", "persistentVolumeClaim": claim}


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


def script(*, image: str, python: str, codes: Mapping[int, int], from_index: int | None) -> str:
    """Return what the pod's shell runs, with the program and its arguments as ``$@``.

    A task that ends with a code in `codes` ends its pod with the other one; `from_index` as in
    `Role.codes_from_index`.
    """
    message = shlex.quote(
        f"image {image}: received no tfdist for {python}; expected it installed. "
        "Fix: build it into the image, or name the Python that has it with --python"
    )
    when = f'[ "$JOB_COMPLETION_INDEX" -ge {from_index} ] && ' if from_index is not None else ""
    changes = [f'{when}[ "$code" = {old} ] && code={new}\n' for old, new in codes.items()]
    return "".join([_TFDIST.format(message=message), _TASK, *changes, 'exit "$code"\n'])


def literal(text: str) -> str:
    """Return what Kubernetes turns into `text`: it replaces $(NAME), and $$ by one dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


# The flags that only pods have: from their texts to `PodOptions`.

_MAX_ID = 2**31 - 1


def pod_options(command: Command) -> PodOptions:
    """Return what the flags of pods say.

    Raises:
        UsageError: there is no image, or a value that Kubernetes would not take.
    """
    image = command.one("image")
    if image is None:
        expected = "the image of the pods, with tfdist in it"
        raise wrong("image", "nothing", expected, "write --image registry/name:tag", "no-value")
    return PodOptions(
        image=image,
        namespace=command.one("namespace"),
        node_selector=_read_labels(command, "node_selector", example="disk=ssd"),
        volumes=tuple(_read_volume(text) for text in command.all("volume")),
        service_account=command.one("service_account"),
        image_pull_secret=command.one("image_pull_secret"),
        tolerations=tuple(_read_toleration(text) for text in command.all("toleration")),
        priority_class=command.one("priority_class"),
        user=_read_user(command.one("run_as_user")),
        labels=_read_labels(command, "label", example="team=vision", without=OWN_LABELS),
    )


def _read_labels(
    command: Command, flag: str, *, example: str, without: tuple[str, ...] = ()
) -> Mapping[str, str]:
    labels = command.pairs(flag)
    for key, value in labels.items():
        text = f"{key}={value}"
        if not re.fullmatch(LABEL, text) or key in without:
            others = f", none of {', '.join(without)}" if without else ""
            expected = f"a label and its value{others}"
            raise wrong(flag, repr(text), expected, f"write --{flag} {example}")
    return labels


def _read_toleration(text: str) -> Manifest:
    """Return the taint that ``kubectl taint`` writes so, or its key alone."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    made = {"key": key, "operator": "Exists"}
    if equals:
        made |= {"operator": "Equal", "value": value}
    return made | ({"effect": effect} if effect else {})


def _read_user(text: str | None) -> User | None:
    if text is None:
        return None
    uid, colon, gid = text.partition(":")
    if int(uid) > _MAX_ID or int(gid or 0) > _MAX_ID:
        fix = "write --run_as_user 1000, or 1000:1000"
        raise wrong("run_as_user", repr(text), f"numbers up to {_MAX_ID}", fix)
    return User(uid=int(uid), gid=int(gid) if colon else None)


def _read_volume(text: str) -> Volume:
    source, _, rest = text.partition("=")
    mount, _, mode = rest.partition(":")
    return Volume(source=source, mount=mount, read_only=mode == "ro")
