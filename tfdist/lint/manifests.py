"""Checks Kubernetes manifests, all files together: a Service may be in one of its own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from tfdist.lint.fields import check_fields
from tfdist.lint.findings import Finding, Place
from tfdist.lint.network import Beside, check_network
from tfdist.lint.network_policy import check_network_policies
from tfdist.lint.pod_spec import check_pod_spec
from tfdist.lint.pods import check_pods
from tfdist.lint.policies import check_policies
from tfdist.lint.tf_job import check_tf_job
from tfdist.lint.workloads import KINDS, WORKLOADS, Workload, as_map, as_seq, workload
from tfdist.lint.yaml_text import Map, read_documents

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TEMPLATED = re.compile(r"\{\{|\$\{?\w")


def check_manifests(texts: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yields what is wrong with manifests, each a pair of text and file name."""
    documents: list[tuple[Map, str]] = []
    for text, file in texts:
        made, found = read_documents(text, file)
        yield from found
        documents += [(document, file) for each in made for document in _unlisted(each)]
    right = [pair for pair in documents if pair[0].get("kind") in KINDS]
    for document, file in documents:
        yield from _kind(document, file)
    beside = {
        kind: [Beside(document=d, file=f) for d, f in right if d.get("kind") == kind]
        for kind in ("Service", "NetworkPolicy")
    }
    for document, file in right:
        if document["kind"] not in WORKLOADS:
            continue
        job = workload(document, file)
        if job.is_ours:
            yield from _workload(job)
            yield from check_network(job, beside["Service"])
            yield from check_network_policies(job, beside["NetworkPolicy"])


def _workload(job: Workload) -> Iterator[Finding]:
    yield from _name(job)
    fields = list(check_fields(job))
    yield from fields
    if any(finding.code in ("K8S006", "K8S007") for finding in fields):
        return  # what follows would speak of what these hide
    yield from check_policies(job)
    yield from check_pod_spec(job)
    if job.kind == "TFJob":
        yield from check_tf_job(job)
    if job.name:
        yield from check_pods(job)


def _unlisted(document: Map) -> Iterator[Map]:
    """Yields the documents of a List, and any other as it is."""
    if str(document.get("kind", "")).endswith("List") and "items" in document:
        yield from (as_map(item) for item in as_seq(document["items"]))
    else:
        yield document


def _kind(document: Map, file: str) -> Iterator[Finding]:
    kind, version = str(document.get("kind", "")), str(document.get("apiVersion", ""))
    meant = _meant(kind)
    if meant and kind not in KINDS:
        yield Finding(
            code="K8S004",
            place=Place(file=file, line=document.line_of("kind"), path="kind"),
            received=kind,
            expected=meant,
            fix=f"write kind: {meant}",
        )
    elif kind in KINDS and version != KINDS[kind]:
        yield Finding(
            code="K8S003",
            place=Place(file=file, line=document.line_of("apiVersion"), path="apiVersion"),
            received=f"{version or 'no apiVersion'} for {kind}",
            expected=KINDS[kind],
            fix=f"write apiVersion: {KINDS[kind]}",
        )


def _meant(kind: str) -> str:
    small = {known.lower(): known for known in KINDS}
    close = difflib.get_close_matches(kind.lower(), small, n=1, cutoff=0.9)
    return small[close[0]] if close else ""


def _name(job: Workload) -> Iterator[Finding]:
    metadata = as_map(job.document.get("metadata"))
    if _LABEL.fullmatch(job.name) or _TEMPLATED.search(job.name):
        return
    if not job.name and metadata.get("generateName") and job.kind == "TFJob":
        return  # the operator tells its pods their names
    yield Finding(
        code="K8S005",
        place=Place(
            file=job.file, line=metadata.line_of("name") or job.document.line, path="metadata.name"
        ),
        received=repr(job.name) if job.name else "no name",
        expected="small letters, digits and hyphens, at most 63",
        fix="name it, as mnist: its pods are mnist-0, mnist-1, ...",
    )
