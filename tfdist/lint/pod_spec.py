"""Checks what a pod's spec says of the nodes that it may be on and of whom it runs as."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.errors import near
from tfdist.lint.findings import Finding
from tfdist.lint.workloads import Part, Workload, as_map, as_seq
from tfdist.lint.yaml_text import Map

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OPERATORS = ("Exists", "Equal", "Lt", "Gt")
_PROFILES = ("RuntimeDefault", "Localhost", "Unconfined")
_OF_CONTAINERS = (
    *("allowPrivilegeEscalation", "capabilities", "privileged"),
    *("procMount", "readOnlyRootFilesystem"),
)
_OF_PODS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups", "sysctls")

_Wrong = tuple[Map, str, str, str] | None
"""A mapping and the key in it that is wrong, what was received, and what expected."""


def check_pod_spec(job: Workload) -> Iterator[Finding]:
    """Yields tolerations and security contexts that Kubernetes refuses or takes otherwise."""
    for part in job.parts:
        for toleration in map(as_map, as_seq(part.pod_spec.get("tolerations"))):
            yield from _toleration(job, part, toleration)
        yield from _security(job, part)


def _toleration(job: Workload, part: Part, toleration: Map) -> Iterator[Finding]:
    effect, operator = toleration.get("effect"), toleration.get("operator") or "Equal"
    wrong = None
    if effect not in (None, "", *_EFFECTS):
        wrong = "effect", f"{effect}", f"one of {', '.join(_EFFECTS)}{near(str(effect), _EFFECTS)}"
    elif operator not in _OPERATORS:
        wrong = "operator", f"{operator}", f"Exists or Equal{near(str(operator), _OPERATORS)}"
    elif operator == "Exists" and toleration.get("value"):
        wrong = "value", f"{toleration['value']} beside Exists", "no value, or operator: Equal"
    elif operator != "Exists" and not toleration.get("key"):
        wrong = "key", "no key", "a key, or operator: Exists for every taint"
    elif "tolerationSeconds" in toleration and effect != "NoExecute":
        received = f"tolerationSeconds beside {effect or 'no effect'}"
        wrong = "tolerationSeconds", received, "effect: NoExecute, which alone ends a pod later"
    if wrong:
        key, received, expected = wrong
        path = f"{part.path}.template.spec.tolerations.{key}"
        place, fix = job.place(toleration, key, path=path), "correct it, or take it out"
        yield job.finding("K8S042", place, received=received, expected=expected, fix=fix)


def _security(job: Workload, part: Part) -> Iterator[Finding]:
    pod = as_map(part.pod_spec.get("securityContext"))
    path = f"{part.path}.template.spec.securityContext"
    yield from _misplaced(job, pod, _OF_CONTAINERS, path, owner="each container's")
    for container in part.containers:
        own = as_map(container.spec.get("securityContext"))
        inside = f"{part.path}.template.spec.containers.securityContext"
        yield from _misplaced(job, own, _OF_PODS, inside, owner="the pod's")
        yield from _contradiction(job, pod, own, inside)


def _misplaced(
    job: Workload, context: Map, names: tuple[str, ...], path: str, *, owner: str
) -> Iterator[Finding]:
    for name in names:
        if name in context:
            yield job.finding(
                "K8S043",
                job.place(context, name, path=f"{path}.{name}"),
                received=f"{name} here",
                expected=f"it in {owner} securityContext",
                fix="move it there",
            )


def _contradiction(job: Workload, pod: Map, own: Map, path: str) -> Iterator[Finding]:
    """Yields what in a container's context, or in the pod's, which it inherits, does not agree."""
    profiles = own if "seccompProfile" in own else pod
    wrong = _root(pod, own) or _escalation(own) or _seccomp(profiles)
    if wrong:
        owner, key, received, expected = wrong
        place = job.place(owner, key, path=f"{path}.{key}")
        fix = "correct one of them"
        yield job.finding("K8S044", place, received=received, expected=expected, fix=fix)


def _root(pod: Map, own: Map) -> _Wrong:
    must_not = own.get("runAsNonRoot", pod.get("runAsNonRoot")) is True
    if must_not and own.get("runAsUser", pod.get("runAsUser")) == 0:
        received, expected = "user 0 beside runAsNonRoot: true", "another user"
        return own if "runAsUser" in own else pod, "runAsUser", received, expected
    return None


def _escalation(own: Map) -> _Wrong:
    added = {str(name) for name in as_seq(as_map(own.get("capabilities")).get("add"))}
    has_all = own.get("privileged") is True or bool(added & {"SYS_ADMIN", "CAP_SYS_ADMIN"})
    if has_all and own.get("allowPrivilegeEscalation") is False:
        received = "allowPrivilegeEscalation: false beside privileged or SYS_ADMIN"
        return own, "allowPrivilegeEscalation", received, "one of the two"
    return None


def _seccomp(context: Map) -> _Wrong:
    profile = as_map(context.get("seccompProfile"))
    type_, has_file = profile.get("type"), "localhostProfile" in profile
    if profile and type_ not in _PROFILES:
        expected = f"one of {', '.join(_PROFILES)}{near(str(type_), _PROFILES)}"
        return context, "seccompProfile", f"type: {type_}", expected
    if profile and has_file != (type_ == "Localhost"):
        received = f"type: {type_} with{'' if has_file else 'out'} localhostProfile"
        return context, "seccompProfile", received, "localhostProfile with Localhost, and only so"
    return None
