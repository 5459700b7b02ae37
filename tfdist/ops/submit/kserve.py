"""KServe: the InferenceService of an exported model, served by TensorFlow Serving there. Pure.

https://kserve.github.io/website/docs/model-serving/predictive-inference/frameworks/tensorflow
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tfdist.argument_parser import Parser
from tfdist.errors import require, require_int
from tfdist.ops.submit.kubernetes import check_name, comments, text_of
from tfdist.ops.submit.pods import GPU, MANAGED_BY, Manifest, without_unset

KIND = "inferenceservice"
_STORES = ("pvc://", "s3://", "gs://", "https://", "http://", "hdfs://", "oci://")


def is_requested(argv: Sequence[str]) -> bool:
    """Return whether the first --to of a command line is kserve."""
    words = [*argv, ""]
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--to"), -1)
    return words[at] == "--to=kserve" or words[at : at + 2] == ["--to", "kserve"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the service of a command line, `--to kserve` in it; raise UsageError."""
    values: argparse.Namespace = _parser().parse_args(list(argv))
    check_name(values.name)
    require(
        values.model.startswith(_STORES),
        "--model",
        received=repr(values.model),
        expected=f"where the versions of the model are: {', '.join(_STORES)}...",
        fix="write --model pvc://CLAIM/served/NAME, for example",
        code="bad-value",
    )
    require_int("--replicas", values.replicas, least=0)
    if values.max_replicas is None:
        values.max_replicas = max(values.replicas, 1)
    require_int("--max_replicas", values.max_replicas, least=max(values.replicas, 1))
    require_int("--gpus", values.gpus, least=0)
    return values


def _parser() -> Parser:
    about = "Give an exported model to KServe, which serves it by TensorFlow Serving."
    parser = Parser(prog="python -m tfdist.submit --to kserve", description=about)
    add = parser.add_argument
    add("--to", choices=("kserve",), help="kserve")
    add("--name", required=True, help="of the service, and of the model in its addresses")
    add("--model", required=True, metavar="URI", help="the directory that has the versions")
    add("--replicas", type=int, default=1, help="least pods; default 1, 0 with Knative alone")
    add("--max_replicas", type=int, help="most pods; default --replicas")
    add("--cpus", metavar="500m", help="of each pod, as Kubernetes has them")
    add("--memory", metavar="4Gi", help="of each pod, likewise")
    add("--gpus", type=int, default=0, help="of each pod")
    add("--namespace", metavar="NS", help="default that of kubectl's context")
    add("--service_account", metavar="NAME", help="that may read the model")
    add("--dry_run", action="store_true", help="print what would be submitted")
    return parser


def render(service: argparse.Namespace) -> str:
    """Return the manifest of the InferenceService that `parse` returns."""
    amounts = without_unset({"cpu": service.cpus, "memory": service.memory})
    if service.gpus:
        amounts[GPU] = f"{service.gpus}"
    model: Manifest = {
        "modelFormat": {"name": "tensorflow", "version": "2"},
        "protocolVersion": "v1",
        "storageUri": service.model,
        "resources": without_unset({"requests": amounts, "limits": amounts}),
    }
    manifest: Manifest = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": without_unset(
            {
                "name": service.name,
                "namespace": service.namespace,
                "labels": {"app.kubernetes.io/name": "tfdist", MANAGED_BY: "tfdist.submit"},
            }
        ),
        "spec": {
            "predictor": without_unset(
                {
                    "minReplicas": service.replicas,
                    "maxReplicas": service.max_replicas,
                    "serviceAccountName": service.service_account,
                    "model": without_unset(model),
                }
            )
        },
    }
    about = f"{service.name}: {service.model}"
    above = comments(about, kinds=KIND, name=service.name, namespace=service.namespace)
    return above + text_of([manifest])
