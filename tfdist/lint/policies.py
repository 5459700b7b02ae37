"""Checks how a workload ends and begins again, and what its pods are given."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdist import errors
from tfdist.lint.findings import Finding
from tfdist.lint.workloads import Part, Workload, as_map, as_seq, integer
from tfdist.lint.yaml_text import Map

_POLICIES = {
    "Job": ("Never", "OnFailure"),
    "JobSet": ("Never", "OnFailure"),
    "StatefulSet": ("Always",),
    "TFJob": ("Always", "OnFailure", "Never", "ExitCode"),
}
_AGAIN = (errors.EXIT_PEER_MISSING, errors.EXIT_INTERRUPTED, errors.EXIT_STOPPED)
_LEAST_GRACE_S = 30


def check_policies(job: Workload) -> Iterator[Finding]:
    """Yields what a workload does wrong at the end of a task."""
    for part in job.parts:
        yield from _restart(job, part)
        yield from _failure(job, part)
        yield from _grace(job, part)
        yield from _images(job, part)
        if part.pod_spec.get("hostNetwork") is True:
            yield job.finding(
                "K8S027",
                job.place(part.pod_spec, "hostNetwork"),
                received="hostNetwork: true",
                expected="the pods' own network",
                fix="take it out, or firewall the tasks' ports on every node",
            )
    if job.kind == "StatefulSet" and job.count > 1:
        yield from _one_by_one(job)


def _restart(job: Workload, part: Part) -> Iterator[Finding]:
    owner = part.owner if job.kind == "TFJob" else part.pod_spec
    policy, taken = owner.get("restartPolicy"), _POLICIES[job.kind]
    if policy is None and job.kind in ("StatefulSet", "TFJob"):
        return
    if policy is None and job.kind == "JobSet":
        return  # OnFailure is its default
    if policy not in taken:
        yield job.finding(
            "K8S022",
            job.place(owner, "restartPolicy"),
            received=str(policy or "none, which is Always"),
            expected=" or ".join(taken),
            fix=f"write restartPolicy: {taken[0]}",
        )


def _failure(job: Workload, part: Part) -> Iterator[Finding]:
    if job.kind not in ("Job", "JobSet"):
        return
    owner = part.owner
    policy = as_map(owner.get("podFailurePolicy"))
    written = part.pod_spec.get("restartPolicy")
    if policy and (written == "OnFailure" or (written is None and job.kind == "JobSet")):
        yield job.finding(
            "K8S023",
            job.place(part.pod_spec, "restartPolicy"),
            received=f"{written or 'none, which is OnFailure,'} beside podFailurePolicy",
            expected="Never",
            fix="write restartPolicy: Never",
        )
    rules = [as_map(rule) for rule in as_seq(policy.get("rules"))]
    if not _gives_up_on_usage(job, owner, rules):
        yield job.finding(
            "K8S024",
            job.place(owner, "podFailurePolicy", path=f"{part.path}.podFailurePolicy"),
            received=f"no rule for exit code {errors.EXIT_USAGE}",
            expected=_expected(job),
            fix="add the rule: a mistake of the user's is the same at every try",
        )
    if _restarts(job):
        return  # a Job that is given up is one that the JobSet makes again
    for rule in rules:
        code = next((code for code in _AGAIN if _fails(rule, code)), None)
        if code is not None:
            yield job.finding(
                "K8S025",
                job.place(rule, "onExitCodes", path=f"{part.path}.podFailurePolicy"),
                received=f"{rule.get('action')} at exit code {code}",
                expected="another try: the run goes on from its checkpoint",
                fix=f"take {code} out of the rule",
            )


def _gives_up_on_usage(job: Workload, owner: Map, rules: list[Map]) -> bool:
    """Returns whether exit code 2 ends the job for good."""
    has_none = 0 in (owner.get("backoffLimit"), owner.get("backoffLimitPerIndex"))
    once = has_none or any(_fails(rule, errors.EXIT_USAGE) for rule in rules)
    if not _restarts(job):
        return once
    ends = (rule for rule in _set_rules(job) if rule.get("action") == "FailJobSet")
    reasons = (as_seq(rule.get("onJobFailureReasons")) for rule in ends)
    named = any(not reason or "PodFailurePolicy" in reason for reason in reasons)
    return named and any(_fails(rule, errors.EXIT_USAGE) for rule in rules)


def _restarts(job: Workload) -> bool:
    """Returns whether a JobSet starts its Jobs again when one of them has failed."""
    policy = as_map(job.spec.get("failurePolicy"))
    again = any(str(rule.get("action")).startswith("Restart") for rule in _set_rules(job))
    return job.kind == "JobSet" and (again or integer(policy.get("maxRestarts"), 0) > 0)


def _set_rules(job: Workload) -> list[Map]:
    return [as_map(rule) for rule in as_seq(as_map(job.spec.get("failurePolicy")).get("rules"))]


def _expected(job: Workload) -> str:
    once = f"FailJob onExitCodes In [{errors.EXIT_USAGE}]"
    if _restarts(job):
        return f"{once}, and FailJobSet onJobFailureReasons [PodFailurePolicy]"
    return f"{once}, or backoffLimit: 0"


def _fails(rule: Map, code: int) -> bool:
    """Returns whether a rule gives the job, or the index, up at an exit code."""
    on = as_map(rule.get("onExitCodes"))
    if rule.get("action") not in ("FailJob", "FailIndex") or not on:
        return False
    listed = code in as_seq(on.get("values"))
    return listed if on.get("operator") == "In" else not listed


def _grace(job: Workload, part: Part) -> Iterator[Finding]:
    grace = part.pod_spec.get("terminationGracePeriodSeconds")
    if isinstance(grace, int) and grace < _LEAST_GRACE_S:
        yield job.finding(
            "K8S026",
            job.place(part.pod_spec, "terminationGracePeriodSeconds"),
            received=f"{grace} s",
            expected=f"{_LEAST_GRACE_S} s or more, and longer than a save takes",
            fix="write terminationGracePeriodSeconds: 120, for example",
        )


def _images(job: Workload, part: Part) -> Iterator[Finding]:
    path = f"{part.path}.template.spec.containers"
    if not part.containers or any(not c.spec.get("image") for c in part.containers):
        yield job.finding(
            "K8S009",
            job.place(part.pod_spec, "containers", path=path),
            received="no container" if not part.containers else "a container without image",
            expected="a container with an image that has tfdist",
            fix="write image: registry/name:version",
        )
    for container in part.containers:
        image = str(container.spec.get("image", "x:1"))
        last = image.rpartition("/")[2]
        if "$" not in image and (":" not in last or re.search(r":latest$", last)):
            yield job.finding(
                "K8S029",
                job.place(container.spec, "image", path=path),
                received=image,
                expected="a tag of one version, or a digest",
                fix=f"write {image.removesuffix(':latest')}:VERSION",
            )
        yield from _gpus(job, container.spec, path)


def _gpus(job: Workload, container: Map, path: str) -> Iterator[Finding]:
    resources = as_map(container.get("resources"))
    requests, limits = as_map(resources.get("requests")), as_map(resources.get("limits"))
    for name, count in requests.items():
        if "/" in name and str(limits.get(name)) != str(count):
            yield job.finding(
                "K8S030",
                job.place(requests, name, path=f"{path}.resources.requests.{name}"),
                received=f"{count} in requests and {limits.get(name, 'none')} in limits",
                expected="the same in both",
                fix=f"write {name}: {count} under limits; requests follow from it",
            )


def _one_by_one(job: Workload) -> Iterator[Finding]:
    if job.spec.get("podManagementPolicy") != "Parallel":
        yield job.finding(
            "K8S037",
            job.place(job.spec, "podManagementPolicy", path="spec.podManagementPolicy"),
            received=str(job.spec.get("podManagementPolicy", "none, which is OrderedReady")),
            expected="Parallel",
            fix="write podManagementPolicy: Parallel",
        )
