"""Kubernetes: a TFJob, for clusters with Kubeflow's training operator, which sets TF_CONFIG. Pure.

https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/
"""

from __future__ import annotations

from tfdist.errors import EXIT_PEER_MISSING
from tfdist.schedulers.pods import SERVER_CODES, Manifest, PodOptions, Role, metadata, template
from tfdist.schedulers.request import JobRequest

_AGAIN = 138
"""What the operator retries as the user's own choice; it takes 75 for final."""


def tfjob(request: JobRequest, options: PodOptions) -> list[Manifest]:
    """Returns a TFJob with a type of replica for each role."""
    is_ps = request.strategy == "ps"
    roles = {"Worker": request.workers}
    if is_ps:
        roles = {"Chief": 1, **roles, "PS": request.ps}
    replicas = {}
    for name, count in roles.items():
        codes = {EXIT_PEER_MISSING: _AGAIN}
        if is_ps and name != "Chief":
            codes = dict.fromkeys([*SERVER_CODES, EXIT_PEER_MISSING], _AGAIN)
        gpus = request.resources.gpus if name == "Worker" else 0
        # By these names the operator finds the container and the port.
        role = Role(container="tensorflow", port="tfjob-port", gpus=gpus, variables={}, codes=codes)
        made = template(request, options, role)
        del made["spec"]["restartPolicy"]  # the operator's own
        replicas[name] = {"replicas": count, "restartPolicy": "ExitCode", "template": made}
    policy: Manifest = {"cleanPodPolicy": "Running"}
    if request.time_s:
        policy["activeDeadlineSeconds"] = request.time_s
    spec = {"runPolicy": policy, "tfReplicaSpecs": replicas}
    kind = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob"}
    return [{**kind, "metadata": metadata(request, options), "spec": spec}]
