"""The launcher's flags reach the tasks that a scheduler starts, through our variables."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml

from tfdist.cluster import read_environment
from tfdist.cluster.job import JobOptions
from tfdist.submit import main

FLAGS = "--run_dir /runs/x --startup_timeout_s 90 --devices_per_worker 2 --min_workers 1 "
SAID: dict[str, Any] = {"run_dir": "/runs/x", "startup_timeout_s": 90.0, "devices_per_worker": 2}


def environ_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The variables of the first container of a job, as far as they are in the manifest."""
    assert main(["--to", "kubernetes", "--dry_run", "--image", "x", *shlex.split(arguments)]) == 0
    spec: Any = list(yaml.safe_load_all(capsys.readouterr().out))[-1]["spec"]
    replicas = spec.get("tfReplicaSpecs")
    template = next(iter(replicas.values()))["template"] if replicas else spec["template"]
    env = template["spec"]["containers"][0]["env"]
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1"} | {
        e["name"]: e["value"] for e in env if "value" in e
    }


def test_those_of_a_job_of_several_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = FLAGS + "--strategy ps --workers 2 --split_bytes 4000000 --profile_ps train.py"
    config = read_environment({**environ_of(flags, capsys), "HOSTNAME": "train-1"})
    assert config is not None
    assert config.options == JobOptions(
        strategy="ps", min_workers=1, split_bytes=4_000_000, profile_ps=True, **SAID
    )


def test_those_of_a_process_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    flags = FLAGS.replace("--min_workers 1 ", "") + "train.py"
    config = read_environment(environ_of(flags, capsys))
    assert config is not None
    assert config.options == JobOptions(**SAID)
    assert config.cluster.tasks() == ()


def test_those_of_a_task_whose_tf_config_the_operator_sets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = environ_of("--kind tfjob --run_dir /runs/x --workers 2 train.py", capsys)
    cluster = {"worker": ["train-worker-0.ml.svc:2222", "train-worker-1.ml.svc:2222"]}
    told = {"cluster": cluster, "task": {"type": "worker", "index": 1}, "environment": "cloud"}
    config = read_environment({**environ, "TF_CONFIG": json.dumps(told)})
    assert config is not None
    assert (config.options.run_dir, config.options.strategy) == ("/runs/x", "multiworker")
    assert config.options.startup_timeout_s == 300


@pytest.mark.parametrize(
    ("arguments", "sources"),
    [
        ("--workers 2 --gpus 4 train.py", [{"emptyDir": {"medium": "Memory"}}]),
        ("--workers 2 train.py", []),
        (
            "--gpus 2 --volume /dev/shm=/dev/shm/ train.py",
            [{"hostPath": {"path": "/dev/shm"}}],
        ),
    ],
)
def test_pods_with_gpus_have_shared_memory(
    arguments: str, sources: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--to", "kubernetes", "--dry_run", "--image", "x", *shlex.split(arguments)]) == 0
    job: Any = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    spec = job["spec"]["template"]["spec"]
    mounts = spec["containers"][0].get("volumeMounts", [])
    at = {mount["name"] for mount in mounts if mount["mountPath"].rstrip("/") == "/dev/shm"}
    volumes = spec.get("volumes", [])
    assert {volume["name"] for volume in volumes} == at
    assert [{k: v for k, v in vol.items() if k != "name"} for vol in volumes] == sources


def pod_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The spec of the pods of a Job."""
    assert main(["--to", "kubernetes", "--dry_run", "--image", "x", *shlex.split(arguments)]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))[-1]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("text", "toleration"),
    [
        ("spot", {"operator": "Exists"}),
        ("spot:NoExecute", {"operator": "Exists", "effect": "NoExecute"}),
        ("spot=yes:NoSchedule", {"operator": "Equal", "value": "yes", "effect": "NoSchedule"}),
        ("spot=:NoSchedule", {"operator": "Equal", "value": "", "effect": "NoSchedule"}),
        ("spot=yes", {"operator": "Equal", "value": "yes"}),
    ],
)
def test_a_toleration_is_written_as_the_taint(
    text: str, toleration: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pod = pod_of(f"--toleration example.org/gpu:NoSchedule --toleration {text} train.py", capsys)
    first = {"key": "example.org/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [first, {"key": "spot", **toleration}]


SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}
GROUP = {"runAsGroup": 20, "fsGroup": 20, "fsGroupChangePolicy": "OnRootMismatch"}


@pytest.mark.parametrize(
    ("flag", "user"),
    [
        ("", {"runAsNonRoot": True}),
        ("--run_as_user 10", {"runAsNonRoot": True, "runAsUser": 10}),
        ("--run_as_user 10:20", {"runAsNonRoot": True, "runAsUser": 10, **GROUP}),
    ],
)
def test_tasks_run_as_an_ordinary_user(
    flag: str, user: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pod = pod_of(f"{flag} train.py", capsys)
    assert pod["securityContext"] == {**user, **SECCOMP}
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["containers"][0]["securityContext"] == own


def test_only_who_asks_for_root_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    pod = pod_of("--run_as_user 0 train.py", capsys)
    assert pod["securityContext"] == {"runAsUser": 0, **SECCOMP}
    assert pod["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}
