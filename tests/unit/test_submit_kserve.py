"""The InferenceService of an exported model, against what KServe publishes.

Names and types of the fields are those of its CustomResourceDefinition
(config/crd/full/serving.kserve.io_inferenceservices.yaml in kserve/kserve), of v1beta1.
"""

from typing import Any

import pytest
import yaml

from tests.unit.test_submit_schema import faults
from tfdist.submit import main

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
FLAGS = ["--to", "kserve", "--name", "digits", "--model", "pvc://models/served/digits"]
MORE = "--replicas 2 --max_replicas 4 --cpus 2 --memory 4Gi --gpus 1 --namespace ml"


def rendered(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*FLAGS, *more, "--dry_run"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("more", [[], [*MORE.split(), "--service_account=reader"]])
def test_the_manifest_has_the_published_shape(more, capsys):
    manifest = rendered(capsys, *more)
    assert (manifest["apiVersion"], manifest["kind"]) == (
        "serving.kserve.io/v1beta1",
        "InferenceService",
    )
    assert list(faults(manifest["spec"], SERVICE)) == []


def test_what_is_asked_for_is_in_the_manifest(capsys):
    manifest = rendered(capsys, *MORE.split())
    predictor = manifest["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (2, 4)
    assert predictor["model"]["modelFormat"]["name"] == "tensorflow"
    assert predictor["model"]["storageUri"] == "pvc://models/served/digits"
    assert predictor["model"]["resources"]["limits"] == {
        "cpu": "2",
        "memory": "4Gi",
        "nvidia.com/gpu": "1",
    }
    assert (manifest["metadata"]["name"], manifest["metadata"]["namespace"]) == ("digits", "ml")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--to", "kserve", "--model", "pvc://a/b"], "--name"),
        (["--to=kserve", "--name", "digits", "--model", "/served"], "--model: received '/served'"),
        (["--to=kserve", "--name", "Digits", "--model", "pvc://a/b"], "--name: received 'Digits'"),
        ([*FLAGS, "--replicas", "3", "--max_replicas", "2"], "--max_replicas: received 2"),
        ([*FLAGS, "train.py"], "train.py"),
    ],
)
def test_a_mistake_is_one_line(argv, text, capsys):
    assert main([*argv, "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_program_may_have_the_flag_too(capsys):
    assert main(["--to", "slurm", "--dry_run", "train.py", "--to", "kserve"]) == 0
    assert "#SBATCH" in capsys.readouterr().out
