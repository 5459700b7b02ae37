"""Manifests against what Kubernetes, JobSet, the training operator and KServe publish.

Core kinds are validated strictly, the pods in the others as well. Of their own fields the names
and types are here, as in their CustomResourceDefinitions: JobSet v0.10.0
(config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml in kubernetes-sigs/jobset), TFJob
v1.9.0 (manifests/base/crds/kubeflow.org_tfjobs.yaml in kubeflow/training-operator) and
InferenceService v1beta1 (config/crd/full/serving.kserve.io_inferenceservices.yaml in
kserve/kserve).
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.submit import printed

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "tests" / "golden").glob("*.yaml"), *ROOT.glob("launch/kubernetes/*.yaml")]
VERSIONS = ("1.31", "1.33", "1.37")
"""From the first that has all we use without a feature gate."""

STRINGS = [str]
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
JOB_SET = {
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "successPolicy": {"operator!": {"All", "Any"}, "targetReplicatedJobs": STRINGS},
    "failurePolicy": {
        "maxRestarts": int,
        "rules": [
            {
                "name!": str,
                "action!": ACTIONS,
                "onJobFailureReasons": STRINGS,
                "onJobFailureMessagePatterns": STRINGS,
            }
        ],
    },
    "replicatedJobs": [{"name!": str, "replicas": int, "template!": dict}],
}
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": dict,
}
TF_JOB = {
    "runPolicy": {"activeDeadlineSeconds": int, "cleanPodPolicy": {"All", "Running", "None"}},
    "tfReplicaSpecs!": {"Chief": REPLICA, "Worker": REPLICA, "PS": REPLICA, "Evaluator": REPLICA},
}
AMOUNTS = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
SERVICE = {
    "predictor!": {
        "minReplicas": int,
        "maxReplicas": int,
        "serviceAccountName": str,
        "model": {
            "modelFormat!": {"name!": str, "version": str},
            "protocolVersion": str,
            "storageUri": str,
            "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
        },
    }
}
CORE = ("v1", "batch/v1", "networking.k8s.io/v1")
SHAPES = {
    "JobSet": (("jobset.x-k8s.io/v1alpha2",), JOB_SET),
    "TFJob": (("kubeflow.org/v1",), TF_JOB),
}


def documents() -> list[Any]:
    made = []
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()):
            made.append(pytest.param(document, id=f"{path.stem}-{document['kind']}"))
    return made


def faults(value: Any, shape: Any, *, at: str = "spec") -> Iterator[str]:
    """What in `value` is not of the shape: a type, a set of words, a list or fields of shapes."""
    if isinstance(shape, set):
        if value not in shape:
            yield f"{at}: {value!r}"
    elif isinstance(shape, list):
        for i, item in enumerate(value):
            yield from faults(item, shape[0], at=f"{at}[{i}]")
    elif isinstance(shape, Mapping):
        fields = {name.rstrip("!"): inner for name, inner in shape.items()}
        yield from (f"{at}.{name}: unknown" for name in value if name not in fields)
        needed = (name.rstrip("!") for name in shape if name.endswith("!"))
        yield from (f"{at}.{name}: missing" for name in needed if name not in value)
        for name in set(value) & set(fields):
            yield from faults(value[name], fields[name], at=f"{at}.{name}")
    elif type(value) is not shape:
        yield f"{at}: {value!r}"


def core_parts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of core kinds that the document is or that its operator makes of it."""
    spec = document["spec"]
    if document["kind"] == "JobSet":
        job = {"apiVersion": "batch/v1", "kind": "Job"}
        return [{**job, **replicated["template"]} for replicated in spec["replicatedJobs"]]
    if document["kind"] == "TFJob":
        pod = {"apiVersion": "v1", "kind": "PodTemplate"}
        return [{**pod, "template": r["template"]} for r in spec["tfReplicaSpecs"].values()]
    return [dict(document)]


@pytest.mark.parametrize("document", documents())
def test_objects_have_the_published_shape(document):
    for part in core_parts(document):
        for version in VERSIONS:
            kubernetes_validate.validate(copy.deepcopy(part), version, strict=True)
    api, shape = SHAPES.get(document["kind"], (CORE, None))
    assert document["apiVersion"] in api
    assert shape is None or list(faults(document["spec"], shape)) == []


def test_a_service_of_kserve_has_the_published_shape_and_what_is_asked_for():
    flags = "--to kserve --name digits --model pvc://models/served/digits --dry_run"
    least = yaml.safe_load(printed(flags))
    assert list(faults(least["spec"], SERVICE)) == []
    more = "--replicas 2 --max_replicas 4 --cpus 2 --memory 4Gi --gpus 1 --namespace ml"
    made = yaml.safe_load(printed(f"{flags} {more} --service_account=reader"))
    assert list(faults(made["spec"], SERVICE)) == []
    kind = "serving.kserve.io/v1beta1", "InferenceService"
    assert (made["apiVersion"], made["kind"]) == kind
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("digits", "ml")
    predictor = made["spec"]["predictor"]
    model, limits = predictor.pop("model"), {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert predictor == {"minReplicas": 2, "maxReplicas": 4, "serviceAccountName": "reader"}
    assert model["storageUri"] == "pvc://models/served/digits"
    assert (model["modelFormat"]["name"], model["resources"]["limits"]) == ("tensorflow", limits)
    # The program of a job may have the flag too.
    assert "#SBATCH" in printed("--to slurm --dry_run train.py --to kserve")


STORES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def not_admitted(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the profile "restricted" of Pod Security has against a pod.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    """
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    for volume in pod.get("volumes", []):
        yield from set(volume) - {"name"} - STORES
    for container in pod["containers"]:
        has = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        capabilities = has.get("capabilities", {})
        rules = {
            "privileged": not has.get("privileged"),
            "allowPrivilegeEscalation": has.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": has.get("runAsNonRoot") is True,
            "runAsUser": has.get("runAsUser") != 0,
            "seccompProfile": has.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "capabilities.drop": "ALL" in capabilities.get("drop", ()),
            "capabilities.add": not set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        yield from (name for name, holds in rules.items() if not holds)


@pytest.mark.parametrize("document", documents())
def test_pods_are_admitted_by_the_restricted_profile(document):
    for part in jobs(document):
        pod = (part.get("template") or part["spec"]["template"])["spec"]
        # A --volume with a leading slash is the one thing that no profile but the widest admits.
        of_node = ["hostPath" for volume in pod.get("volumes", []) if "hostPath" in volume]
        assert list(not_admitted(pod)) == of_node


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_the_jobs_own_pods_are_let_in(path):
    made = list(yaml.safe_load_all(path.read_text()))
    (policy,) = [d["spec"] for d in made if d["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    chosen = policy["podSelector"]["matchLabels"].items()
    templates = [p.get("template") or p["spec"]["template"] for d in made for p in jobs(d)]
    assert templates
    for template in templates:
        assert chosen <= template["metadata"]["labels"].items()


def jobs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    has_pods = document["kind"] in ("Job", "JobSet", "TFJob")
    return core_parts(document) if has_pods else []
