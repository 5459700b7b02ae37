"""Kubernetes: the manifests of a job, by kind. Pure.

The pods find each other by the rules of `tfdist.cluster.kubernetes`: TFDIST_HOSTS names them.

* ``job``: an indexed Job and a headless Service. A pod that fails is started again by itself, and
  the others, whose peer is missing then, with it.
* ``jobset``: a replicated job for each role; whatever fails, all are started again together. Needs
  JobSet 0.10 or newer, which can tell failures by their message.
* ``tfjob``: for clusters with Kubeflow's training operator, which sets TF_CONFIG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tfdist.errors import UsageError
from tfdist.schedulers.indexed_job import indexed_job
from tfdist.schedulers.jobset import jobset
from tfdist.schedulers.pods import Manifest, PodOptions, admission
from tfdist.schedulers.request import JobRequest
from tfdist.schedulers.tfjob import tfjob

SECRET_FORM = "secret/key"
SECRET_PATTERN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9._-]{1,253}"

KINDS: Mapping[str, Callable[[JobRequest, PodOptions], list[Manifest]]] = {
    "job": indexed_job,
    "jobset": jobset,
    "tfjob": tfjob,
}

_WITHOUT_EVALUATOR = {
    "job": "a pod that is done is not started again with the others",
    "tfjob": "its operator ends it with the chief",
}
_MAX_LABEL = 63
_LABEL = re.compile("[a-z]([a-z0-9-]*[a-z0-9])?")


def render(request: JobRequest, options: PodOptions, *, kind: str) -> list[Manifest]:
    """Returns the job's objects in the order in which they are to be created.

    Raises:
        UsageError: a job that this kind cannot be.
    """
    _check_name(request, kind=kind)
    if request.evaluator and kind in _WITHOUT_EVALUATOR:
        raise UsageError(
            "--evaluator",
            received=f"it with --kind {kind}: {_WITHOUT_EVALUATOR[kind]}",
            expected="--kind jobset, which waits for the last checkpoint and starts all together",
            fix="use --kind jobset, or leave --evaluator out",
        )
    return [admission(request, options), *KINDS[kind](request, options)]


def comments(request: JobRequest, options: PodOptions, *, kind: str) -> list[str]:
    """Returns the lines that stand above the manifests."""
    namespace = f" --namespace {options.namespace}" if options.namespace else ""
    kinds = "networkpolicy,service,job" if kind == "job" else f"networkpolicy,{kind}"
    return [
        f"{request.title}; rendered by python -m tfdist.submit.",
        f"To remove it: kubectl{namespace} delete {kinds} {request.name} --ignore-not-found",
    ]


def _check_name(request: JobRequest, *, kind: str) -> None:
    """Refuses a name with which a pod's own would be no label in DNS."""
    roles = ["worker", *(["evaluator"] if request.evaluator else [])]
    count = request.num_tasks
    ends = {
        "job": [f"-{count}"],
        "jobset": [f"-{role}-0-{count}-abcde" for role in roles],  # five random letters follow
        "tfjob": [f"-worker-{count}"],
    }[kind]
    longest = _MAX_LABEL - max(map(len, ends))
    if not _LABEL.fullmatch(request.name) or len(request.name) > longest:
        expected = f"at most {longest} small letters, digits and '-', the first a letter"
        fix = "write --name mnist, for example"
        raise UsageError("--name", received=repr(request.name), expected=expected, fix=fix)
