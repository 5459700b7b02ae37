"""Manifests against the schemas that Kubernetes, JobSet and Kubeflow Trainer publish.

Core kinds are validated strictly, and so are the pods in the others. JobSets, TrainJobs and their
runtimes are read by the models that Kubeflow generates from the definitions, which drop fields
that they do not know and check types.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.unit.submit import PODS, printed

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path.read_text() for path in ROOT.glob("launch/kubernetes/*.yaml")}
VERSIONS = ("1.31", "1.33", "1.37")
"""From the first that has all we use without a feature gate."""

CORE = ("v1", "batch/v1", "networking.k8s.io/v1")
MODELS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", models.JobsetV1alpha2JobSetSpec),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainJobSpec),
    "TrainingRuntime": (
        "trainer.kubeflow.org/v1alpha1",
        models.TrainerV1alpha1TrainingRuntimeSpec,
    ),
}
MORE = (
    "--name my-run --namespace ml --workers 3 --cpus 8 --memory 1500M --gpus 2 "
    "--node_selector disk=ssd --volume runs=/runs --volume data=/data:ro --secret T=hub/token "
    "--env NOTE=1e3 --service_account trainer --image_pull_secret registry --time 4h ",
    "--strategy ps --workers 2 --ps 2 ",
    "--workers 2 --ports 20000-20100 ",
    "",
)


def texts() -> dict[str, str]:
    """The examples, and jobs of each kind with most flags."""
    made = dict(FILES)
    for number, flags in enumerate(MORE):
        for kind in ("job", "jobset", "trainjob"):
            made[f"{kind}-{number}"] = printed(f"{PODS}--kind {kind} {flags}train.py")
    return made


def documents() -> list[Any]:
    return [
        pytest.param(document, id=f"{name}-{document['kind']}")
        for name, text in texts().items()
        for document in yaml.safe_load_all(text)
    ]


def dropped(given: Any, read: Any, *, at: str = "spec") -> Iterator[str]:
    """Yield the fields that a reader did not take as they are; it may add defaults."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for name, value in given.items():
            yield from dropped(value, read.get(name), at=f"{at}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, pair in enumerate(zip(given, read, strict=True)):
            yield from dropped(*pair, at=f"{at}[{number}]")
    elif given != read:
        yield f"{at}: {given!r}"


def test_an_unknown_field_of_the_definition_is_found():
    spec = {"network": {"enableDNSHostname": True}, "replicatedJobs": []}
    read = MODELS["JobSet"][1].from_dict(spec).to_dict()
    assert "spec.network.enableDNSHostname: True" in dropped(spec, read)


def core_parts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of core kinds that the document is or that its operator makes of it."""
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        return []
    if document["kind"] in ("JobSet", "TrainingRuntime"):
        spec = spec["template"]["spec"] if document["kind"] == "TrainingRuntime" else spec
        job = {"apiVersion": "batch/v1", "kind": "Job"}
        return [{**job, **replicated["template"]} for replicated in spec["replicatedJobs"]]
    return [dict(document)]


@pytest.mark.parametrize("document", documents())
def test_objects_have_the_published_shape(document):
    for part in core_parts(document):
        for version in VERSIONS:
            kubernetes_validate.validate(copy.deepcopy(part), version, strict=True)
    api, model = MODELS.get(document["kind"], (None, None))
    assert document["apiVersion"] in ([api] if api else CORE)
    if model is not None:
        assert list(dropped(document["spec"], model.from_dict(document["spec"]).to_dict())) == []


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
        pod = part["spec"]["template"]["spec"]
        # A --volume with a leading slash is the one thing that no profile but the widest admits.
        of_node = ["hostPath" for volume in pod.get("volumes", []) if "hostPath" in volume]
        assert list(not_admitted(pod)) == of_node


@pytest.mark.parametrize("name", FILES)
def test_only_the_jobs_own_pods_are_let_in(name):
    made = list(yaml.safe_load_all(FILES[name]))
    (policy,) = [d["spec"] for d in made if d["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    chosen = policy["podSelector"]["matchLabels"].items()
    templates = [p["spec"]["template"] for d in made for p in jobs(d)]
    assert templates
    for template in templates:
        assert chosen <= template["metadata"]["labels"].items()


def jobs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    has_pods = document["kind"] in ("Job", "JobSet", "TrainingRuntime")
    return core_parts(document) if has_pods else []
