"""KServe: the InferenceService of an exported model, served by TensorFlow Serving there. Pure.

https://kserve.github.io/website/docs/model-serving/predictive-inference/frameworks/tensorflow
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from tfdist.argument_parser import Parser
from tfdist.errors import require, require_int
from tfdist.ops.submit.kubernetes import comments, text_of
from tfdist.ops.submit.pods import GPU, MANAGED_BY, Manifest, given

KIND = "inferenceservice"
_NAME = r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?"
_STORES = ("pvc://", "s3://", "gs://", "https://", "http://", "hdfs://", "oci://")
_AMOUNTS = {
    "cpus": (r"[1-9][0-9]{0,8}m?", "CPUs as Kubernetes has them: 2, or 500m for a half"),
    "memory": (r"[1-9][0-9]{0,8}[MGT]i?", "a number and M, G, T, Mi, Gi or Ti"),
}


def is_asked_for(argv: Sequence[str]) -> bool:
    """Return whether the first --to of a command line is kserve."""
    words = [*argv, ""]
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--to"), -1)
    return words[at] == "--to=kserve" or words[at : at + 2] == ["--to", "kserve"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the service of a command line, `--to kserve` in it; raise UsageError."""
    values: argparse.Namespace = _parser().parse_args(list(argv))
    _require_form("--name", values.name, _NAME, "at most 42 small letters, digits and '-'")
    require(
        values.model.startswith(_STORES),
        "--model",
        received=repr(values.model),
        expected=f"where the versions of the model are: {', '.join(_STORES)}...",
        fix="write --model pvc://CLAIM/served/NAME, for example",
        code="bad-value",
    )
    for flag, form in _AMOUNTS.items():
        if value := getattr(values, flag):
            _require_form(f"--{flag}", value, *form)
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
    add("--cpus", metavar="2", help="of each pod")
    add("--memory", metavar="4Gi", help="of each pod")
    add("--gpus", type=int, default=0, help="of each pod")
    add("--namespace", metavar="NS", help="default that of kubectl's context")
    add("--service_account", metavar="NAME", help="that may read the model")
    add("--dry_run", action="store_true", help="print what would be submitted")
    return parser


def _require_form(flag: str, value: str, pattern: str, expected: str) -> None:
    require(
        re.fullmatch(pattern, value),
        flag,
        received=repr(value),
        expected=expected,
        fix=f"correct {flag}",
        code="bad-value",
    )


def render(service: argparse.Namespace) -> str:
    """Return the manifest of the InferenceService that `parse` returns."""
    amounts = given({"cpu": service.cpus, "memory": service.memory})
    if service.gpus:
        amounts[GPU] = f"{service.gpus}"
    model: Manifest = {
        "modelFormat": {"name": "tensorflow", "version": "2"},
        "protocolVersion": "v1",
        "storageUri": service.model,
        "resources": given({"requests": amounts, "limits": amounts}),
    }
    manifest: Manifest = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": given(
            {
                "name": service.name,
                "namespace": service.namespace,
                "labels": {"app.kubernetes.io/name": "tfdist", MANAGED_BY: "tfdist.submit"},
            }
        ),
        "spec": {
            "predictor": given(
                {
                    "minReplicas": service.replicas,
                    "maxReplicas": service.max_replicas,
                    "serviceAccountName": service.service_account,
                    "model": given(model),
                }
            )
        },
    }
    about = f"{service.name}: {service.model}"
    above = comments(about, kinds=KIND, name=service.name, namespace=service.namespace)
    return above + text_of([manifest])
