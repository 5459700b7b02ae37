"""Examples of launch/ for other systems: their schemas, and the jobs that their commands make.

`make test-flyte` runs the task of launch/flyte.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_katib_api import models

from tests.unit.test_submit_schema import dropped
from tfdist.cluster import read_environment
from tfdist.configs import command_line as train
from tfdist.launch import options as launch

LAUNCH = Path(__file__).parents[2] / "launch"


def manifest(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def validate_pod(template: Mapping[str, Any]) -> None:
    """Validate a template of pods as Kubernetes does, in a Job."""
    pod = copy.deepcopy(dict(template))
    pod["spec"].setdefault("restartPolicy", "Never")
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": pod}}
    kubernetes_validate.validate(job, "1.37", strict=True)


# Katib. The schema of its CustomResourceDefinition is empty, so these are the API's own types.


@pytest.fixture
def experiment() -> Any:
    document = manifest("katib/experiment.yaml")
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1beta1", "Experiment")
    return document["spec"]


def test_an_experiment_has_the_fields_of_katibs_api(experiment):
    read = models.V1beta1ExperimentSpec.from_dict(copy.deepcopy(experiment))
    assert read is not None
    assert list(dropped(experiment, read.to_dict())) == []
    kubernetes_validate.validate(
        copy.deepcopy(experiment["trialTemplate"]["trialSpec"]), "1.37", strict=True
    )


def test_an_experiment_trial_writes_its_objective(experiment):
    template = experiment["trialTemplate"]
    (container,) = template["trialSpec"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == template["primaryContainerName"]
    ends = {"trial": ["digits-abc"] * 2}
    space = {one["name"]: one["feasibleSpace"] for one in experiment["parameters"]}
    for one in template["trialParameters"]:
        if one["reference"] != "${trialSpec.Name}":
            room = space.pop(one["reference"])
            ends[one["name"]] = room.get("list") or [room["min"], room["max"]]
    assert not space, "no trial parameter has these"
    written = experiment["metricsCollectorSpec"]["source"]["fileSystemPath"]["path"]
    for end in (0, -1):
        text = "\n".join(container["command"])
        for name, values in ends.items():
            assert f"${{trialParameters.{name}}}" in text
            text = text.replace(f"${{trialParameters.{name}}}", values[end])
        assert "${" not in text
        python, _, module, *words = text.split("\n")
        assert (python, module) == ("python", "tfdist.launch")
        options = launch.parse(words)
        assert (options.workers, options.run_dir) == (2, "/runs/digits-abc")
        config = train.parse(options.program.args).config
        assert config.objective_file == written
        assert config.optimizer == ends["optimizer"][end]
        assert config.learning_rate == float(ends["learningRate"][end])


# MPI operator, from manifests/base/kubeflow.org_mpijobs.yaml at caa3c47.

ANY: Any = object()
MPIJOB = {
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
    "runLauncherAsWorker": bool,
    "runPolicy": {
        **dict.fromkeys(("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"), int),
        "cleanPodPolicy": {"Running", "None", "All"},
        "managedBy": str,
        "schedulingPolicy": ANY,
        "suspend": bool,
    },
    "slotsPerWorker": int,
    "sshAuthMountPath": str,
    "mpiReplicaSpecs": {
        role: {"replicas": int, "restartPolicy": {"Never", "OnFailure"}, "template": ANY}
        for role in ("Launcher", "Worker")
    },
}
# SkyPilot, from get_task_schema and get_resources_schema of sky/utils/schemas.py (0.14.1).
SKYPILOT = {
    **dict.fromkeys(("name", "workdir", "setup", "run"), str),
    "num_nodes": int,
    "volumes": {"/runs": str},
    "resources": {
        **dict.fromkeys(("cpus", "memory"), str),
        "use_spot": bool,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": list},
    },
}


def unknown(given: Mapping[str, Any], known: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the fields that a table does not have, or that have another type."""
    for name, value in given.items():
        rule = known.get(name)
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            yield from unknown(value, rule, f"{at}.{name}")
        elif isinstance(rule, set):
            yield from () if value in rule else [f"{at}.{name}={value}"]
        elif rule is not ANY and (rule is None or type(value) is not rule):
            yield f"{at}.{name}={value}"


def test_ranks_of_an_mpijob_find_their_peers():
    document = manifest("mpijob/mpijob.yaml")
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    name, spec = document["metadata"]["name"], document["spec"]
    assert list(unknown(spec, MPIJOB)) == []
    roles = spec["mpiReplicaSpecs"]
    for role in roles.values():
        validate_pod(role["template"])
    (launcher,) = roles["Launcher"]["template"]["spec"]["containers"]
    args = launcher["args"]
    passed = {args[number + 1] for number, word in enumerate(args) if word == "-x"}
    environ = {one["name"]: one["value"] for one in launcher["env"] if one["name"] in passed}
    assert environ.keys() == passed
    size = int(args[args.index("-n") + 1])
    assert size == roles["Worker"]["replicas"] * spec["slotsPerWorker"]
    for rank in range(size):
        ompi = {"SIZE": size, "RANK": rank, "LOCAL_SIZE": 1, "LOCAL_RANK": 0}
        of_rank = {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in ompi.items()}
        config = read_environment({**environ, **of_rank})
        assert config is not None
        assert config.task.index == rank
        hosts = [address.rpartition(":")[0] for address in config.cluster.worker]
        assert hosts == [f"{name}-worker-{number}.{name}" for number in range(size)]
        assert config.options.run_dir == "/runs/digits"
    python, _, module, *words = args[args.index("/opt/tfdist/bin/python") :]
    assert (python, module) == ("/opt/tfdist/bin/python", "tfdist.train")
    train.parse(words)


def test_a_skypilot_task_is_one_worker_per_node():
    task = manifest("skypilot/task.yaml")
    assert list(unknown(task, SKYPILOT)) == []
    assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == {75, 143}
    nodes = [f"10.0.0.{number}" for number in range(task["num_nodes"])]
    for rank in range(len(nodes)):
        environ = {"SKYPILOT_NODE_IPS": "\n".join(nodes), "SKYPILOT_NODE_RANK": str(rank)}
        config = read_environment(environ)
        assert config is not None
        assert (config.task.type, config.task.index) == ("worker", rank)
    words = task["run"].split()
    assert words[1:3] == ["-m", "tfdist.train"]
    config = train.parse(words[3:]).config
    assert config.run_dir.startswith(next(iter(task["volumes"])))


def test_fields_that_a_table_does_not_have_are_found():
    task = {"num_node": 2, "resources": {"use_spot": "yes"}, "name": "x"}
    assert list(unknown(task, SKYPILOT)) == [".num_node=2", ".resources.use_spot=yes"]
    assert list(unknown({"mpiImplementation": "OpenMP"}, MPIJOB)) == [".mpiImplementation=OpenMP"]


def test_the_readmes_name_only_files_that_exist():
    for page in LAUNCH.glob("*/README.md"):
        for name in re.findall(r"\b[\w/]+\.(?:yaml|sbatch|sh)\b", page.read_text()):
            assert (page.parent / name).exists() or (LAUNCH.parent / name).exists(), (page, name)
