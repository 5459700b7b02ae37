"""Whether the hosts have the same software, and processors that compute the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tfdist.lint.rules import error, warning
from tfdist.preflight.facts import HostFacts, JobFacts
from tfdist.preflight.findings import Finding, Topic

NEEDED = ("tensorflow", "keras", "numpy", "tfdist")
"""What a host must have at all."""

_CODES = {
    "python": "D502",
    "tensorflow": "D503",
    "keras": "D504",
    "numpy": "D505",
    "tfdist": "D506",
    "cuda": "D507",
    "cudnn": "D507",
    "nccl": "D507",
    "nvidia driver": "D507",
}
_NONE = "none"

_RULES = (
    error(
        "D501",
        "a host without what a task needs",
        reason="The task ends when it imports it.",
    ),
    error(
        "D502",
        "versions of Python that differ",
        reason="A program may run under one and not under the other.",
    ),
    error(
        "D503",
        "versions of TensorFlow that differ",
        reason="What its servers say to each other is not promised between versions.",
    ),
    error(
        "D504",
        "versions of Keras that differ",
        reason="Tasks would trace different steps of the same program, and wait for each other.",
    ),
    warning(
        "D505",
        "versions of NumPy that differ",
        reason="Data that a program makes by it may differ between tasks.",
    ),
    error(
        "D506",
        "versions of tfdist that differ",
        reason="Its tasks send each other messages of its own.",
    ),
    error(
        "D507",
        "versions of CUDA, cuDNN, NCCL or the driver that differ",
        reason="NCCL refuses, or waits for ever for, a peer of another version.",
    ),
    warning(
        "D508",
        "processors that differ in what they can compute",
        reason="Kernels are chosen by it: the same step has other last bits on another host.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for host in facts.present:
        missing = [name for name in NEEDED if name not in dict(host.machine.versions)]
        if missing:
            here = facts.name(host.index)
            yield Finding(
                code="D501",
                hosts=(here,),
                received=f"no {', '.join(missing)} for {host.machine.host_name}'s Python",
                expected="all that tfdist installs",
                fix=f"install it on {here}, or start the command there by the same Python",
            )
    for name, code in _CODES.items():
        versions = _versions(facts.present, name)
        has = [version for version in versions if version != _NONE]
        if len(has) > 1 or (code == "D507" and len(versions) > 1):
            yield _differing(facts, code=code, what=f"{name} ", groups=versions)
    features = _features(facts.present)
    if len(features) > 1:
        yield _differing(facts, code="D508", what="", groups=features)


def _versions(hosts: Sequence[HostFacts], name: str) -> dict[str, list[int]]:
    groups = defaultdict(list)
    for host in hosts:
        version = dict(host.machine.versions).get(name, _NONE)
        if name == "python":
            version = ".".join(version.split(".")[:2])  # the rest is repairs
        groups[version].append(host.index)
    return groups


def _features(hosts: Sequence[HostFacts]) -> dict[str, list[int]]:
    """Returns the hosts by the features that not all of them have."""
    sets = [set(host.machine.cpu_features) for host in hosts]
    common = set.intersection(*sets) if sets else set()
    groups = defaultdict(list)
    for host, features in zip(hosts, sets, strict=True):
        groups[" ".join(sorted(features - common)) or "none of them"].append(host.index)
    return groups


def _differing(
    facts: JobFacts, *, code: str, what: str, groups: Mapping[str, list[int]]
) -> Finding:
    """Returns the finding that names those who differ from most, the first hosts in doubt."""
    most = max(groups.values(), key=len)
    told = [f"{what}{value} on {_named(facts, hosts)}" for value, hosts in groups.items()]
    others = [index for hosts in groups.values() if hosts is not most for index in hosts]
    fix = "install the same on all, from one list of versions or one image"
    if code == "D508":
        fix = "take hosts of one kind, where the last bits are to be the same"
    return Finding(
        code=code,
        hosts=tuple(facts.name(index) for index in others),
        received="; ".join(told),
        expected="the same on all hosts",
        fix=fix,
    )


def _named(facts: JobFacts, indices: Sequence[int]) -> str:
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return ", ".join(facts.name(index) for index in indices[:8]) + more


def _seen(facts: JobFacts) -> str:
    machine = facts.present[0].machine
    return ", ".join([*(f"{name} {version}" for name, version in machine.versions), machine.cpu])


TOPIC = Topic(name="software", rules=_RULES, check=_check, seen=_seen)
