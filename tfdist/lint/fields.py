"""The fields of the kinds that are looked into, by their names in the API, and their types."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from tfdist.lint.findings import Finding
from tfdist.lint.workloads import Part, Workload, as_map, as_seq
from tfdist.lint.yaml_text import Map, Seq


def _words(text: str) -> list[str]:
    return text.split()


_NUMBERS = frozenset(
    _words(
        "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completions maxFailedIndexes "
        "parallelism ttlSecondsAfterFinished minReadySeconds replicas revisionHistoryLimit "
        "terminationGracePeriodSeconds maxRestarts priority"
    )
)
_FLAGS = frozenset(
    _words(
        "manualSelector suspend hostNetwork hostPID hostIPC enableServiceLinks "
        "shareProcessNamespace setHostnameAsFQDN enableDNSHostnames publishNotReadyAddresses"
    )
)
_MAPS = frozenset(
    _words(
        "template selector podFailurePolicy successPolicy updateStrategy ordinals network "
        "failurePolicy coordinator runPolicy tfReplicaSpecs resources securityContext"
    )
)
_LISTS = frozenset(_words("containers initContainers volumes env args volumeMounts replicatedJobs"))

_JOB = _words(
    "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy "
    "manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector "
    "successPolicy suspend template ttlSecondsAfterFinished"
)
_STATEFUL_SET = _words(
    "minReadySeconds ordinals persistentVolumeClaimRetentionPolicy podManagementPolicy replicas "
    "revisionHistoryLimit selector serviceName template updateStrategy volumeClaimTemplates"
)
_JOB_SET = _words(
    "coordinator failurePolicy managedBy network replicatedJobs startupPolicy successPolicy "
    "suspend ttlSecondsAfterFinished volumeClaimPolicies"
)
_REPLICATED_JOB = _words("dependsOn groupName name replicas template")
_TF_JOB = _words("enableDynamicWorker runPolicy successPolicy tfReplicaSpecs")
_REPLICA = _words("replicas restartPolicy template")
_POD = _words(
    "activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy "
    "enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers "
    "hostname hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead "
    "preemptionPolicy priority priorityClassName readinessGates resourceClaims resources "
    "restartPolicy runtimeClassName schedulerName schedulingGates securityContext serviceAccount "
    "serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain "
    "terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes"
)
_CONTAINER = _words(
    "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports "
    "readinessProbe resizePolicy resources restartPolicy restartPolicyRules securityContext "
    "startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty "
    "volumeDevices volumeMounts workingDir"
)
_OF_KIND: Mapping[str, list[str]] = {
    "Job": _JOB,
    "StatefulSet": _STATEFUL_SET,
    "JobSet": _JOB_SET,
    "TFJob": _TF_JOB,
}


def check_fields(job: Workload) -> Iterator[Finding]:
    """Yields misspelt fields and values of another type, from the top to the containers."""
    yield from _names(job, job.spec, _OF_KIND[job.kind], "spec")
    for position, element in enumerate(as_seq(job.spec.get("replicatedJobs"))):
        path = f"spec.replicatedJobs[{position}]"
        yield from _names(job, as_map(element), _REPLICATED_JOB, path)
    for part in job.parts:
        if job.kind in ("JobSet", "TFJob"):
            yield from _names(
                job, part.owner, _JOB if job.kind == "JobSet" else _REPLICA, part.path
            )
        yield from _pod(job, part)


def _pod(job: Workload, part: Part) -> Iterator[Finding]:
    path = f"{part.path}.template.spec"
    yield from _names(job, part.pod_spec, _POD, path)
    for position, container in enumerate(part.containers):
        inside = f"{path}.containers[{position}]"
        yield from _names(job, container.spec, _CONTAINER, inside)
        for element in map(as_map, as_seq(container.spec.get("env"))):
            if "value" in element and not isinstance(element["value"], str | None):
                yield _not_a_string(job, element, inside)


def _names(job: Workload, owner: Map, known: list[str], path: str) -> Iterator[Finding]:
    for name, value in owner.items():
        at = job.place(owner, name, path=f"{path}.{name}")
        if name not in known:
            meant = _meant(name, known)
            if meant:
                yield job.finding(
                    "K8S006",
                    at,
                    received=f"the field {name!r}",
                    expected=f"{meant!r}",
                    fix=f"write {meant} for {name}",
                )
        elif wanted := _other_type(name, value):
            yield job.finding(
                "K8S007",
                at,
                received=f"{value!r}" if not isinstance(value, Map | Seq) else "a mapping or list",
                expected=wanted,
                fix="take the quotes away" if isinstance(value, str) else "correct the value",
            )


def _meant(name: str, known: list[str]) -> str:
    by_small = {each.lower(): each for each in known}
    plain = name.lower().replace("_", "").replace("-", "")
    if plain in by_small:
        return by_small[plain]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return close[0] if close else ""


def _other_type(name: str, value: object) -> str:
    """Returns what a field is to be, or nothing where `value` is that."""
    if value is None:
        return ""
    if name in _NUMBERS:
        return "" if isinstance(value, int) and not isinstance(value, bool) else "a number"
    for names, type_, said in (
        (_FLAGS, bool, "true or false"),
        (_MAPS, Map, "a mapping"),
        (_LISTS, Seq, "a list"),
    ):
        if name in names:
            return "" if isinstance(value, type_) else said
    return ""


def _not_a_string(job: Workload, element: Map, path: str) -> Finding:
    name, value = element.get("name"), element["value"]
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return job.finding(
        "K8S008",
        job.place(element, "value", path=f"{path}.env {name}"),
        received=shown[:80],
        expected="a string",
        fix=f'write value: "{shown[:80]}"',
    )
