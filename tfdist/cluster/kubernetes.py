"""Cluster resolver of Kubernetes: pods of an indexed Job, a StatefulSet or a JobSet.

The manifest names the pods in TFDIST_HOSTS, as a node list; a pod finds itself there by its
host name, so that one manifest does for all. With a headless Service ``train`` and the pods'
``subdomain`` set to it:

* an indexed Job ``mnist``: ``TFDIST_HOSTS=mnist-[0-3].train``. The control plane names pods
  ``$(job name)-$(index)`` and sets JOB_COMPLETION_INDEX
  (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/).
* a StatefulSet ``mnist``: the same names.
* a JobSet ``mnist``: ``mnist-worker-0-[0-3].mnist,mnist-ps-0-[0-1].mnist``, with TFDIST_PS=2
  (``site/static/examples/simple/jobset-with-network.yaml`` in
  https://github.com/kubernetes-sigs/jobset).

TFJob sets TF_CONFIG and needs nothing from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.cluster import placement
from tfdist.cluster.address import shown
from tfdist.cluster.hostlist import parse_hosts
from tfdist.cluster.settings import (
    HOSTS,
    NODE_RANK,
    JobSettings,
    contradiction,
    integer,
    missing,
    text,
)
from tfdist.cluster.tf_config import TaskConfig

INDEX = "JOB_COMPLETION_INDEX"


def from_environ(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this pod's part of the job, or None outside a pod that has TFDIST_HOSTS.

    A pod that says its place itself, by TFDIST_NODE_RANK, is a host like any other.

    Raises:
        UsageError: the pod is not in the list, or is where its index does not say.
    """
    is_pod = "KUBERNETES_SERVICE_HOST" in environ or INDEX in environ
    if not is_pod or not text(environ, HOSTS) or text(environ, NODE_RANK):
        return None
    listed = parse_hosts(text(environ, HOSTS), where=HOSTS)
    if any(slots > 1 for _, slots in listed):
        raise contradiction(
            HOSTS, shown(text(environ, HOSTS)), "one task a pod", "write a pod for each task"
        )
    pods = [host for host, _ in listed]
    return placement.one_of(pods, rank=_rank(environ, pods), job_settings=job_settings)


def _rank(environ: Mapping[str, str], pods: Sequence[str]) -> int:
    """Return where this pod is in the list."""
    name = text(environ, "HOSTNAME")
    if not name:
        raise missing("HOSTNAME", "the pod's name, which containers have there")
    ranks = [rank for rank, pod in enumerate(pods) if placement.same_host(pod, name)]
    if len(ranks) != 1:
        raise contradiction(
            "HOSTNAME",
            f"{shown(name)}, which is {len(ranks)} times in {HOSTS}",
            f"one of {shown(environ[HOSTS])}, each once",
            f"write the names of the job's pods into {HOSTS}, with the Service's name",
        )
    index = integer(environ, INDEX)
    if index is not None and name.split(".")[0].rpartition("-")[2] != str(index):
        raise contradiction(
            INDEX,
            f"{index} in the pod {shown(name)}",
            "the number at the end of the pod's name",
            f"leave {INDEX} and HOSTNAME as Kubernetes sets them",
        )
    return ranks[0]
