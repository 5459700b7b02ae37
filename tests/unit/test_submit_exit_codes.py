"""What each scheduler does with our exit codes: its published rules, applied to what we render.

The Slurm script and the pods' script are run for real, by the shells that will run them.
"""

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.submit import PS, SLURM, manifest, printed
from tfdist.cluster import read_environment

DOCS = Path(__file__).parents[2] / "docs" / "submit.md"

# Of the table in docs/submit.md, row by row.
OUTCOMES = {
    0: ("done", "done", "done", "done"),
    1: ("counted", "counted", "counted", "failed"),
    2: ("failed", "failed", "failed", "failed"),
    75: ("counted", "again", "again", "again"),
    130: ("again", "again", "again", "again"),
    143: ("again", "again", "again", "again"),
    137: ("counted", "counted", "counted", "again"),
}


# --- the rules, as published ---


def of_pod(policy: Mapping[str, Any], *, code: int, conditions: Sequence[str] = ()) -> str:
    """The action for a failed pod: of the first rule that matches, else Count.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
    """
    for rule in policy["rules"]:
        assert len({"onExitCodes", "onPodConditions"} & set(rule)) == 1
        if on := rule.get("onExitCodes"):
            assert 0 not in on["values"]
            assert on["values"] == sorted(set(on["values"]))
            is_in = code in on["values"]
            if code and is_in == (on["operator"] == "In"):
                return str(rule["action"])
        elif any(on["type"] in conditions for on in rule["onPodConditions"]):
            return str(rule["action"])
    return "Count"


def policy_of(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the policy of a Job's pods; a rule for a container that is not there never holds."""
    policy: Mapping[str, Any] = job["podFailurePolicy"]
    containers = {container["name"] for container in job["template"]["spec"]["containers"]}
    for rule in policy["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName") in {None, *containers}
    return policy


def of_job(spec: Mapping[str, Any], *, code: int, conditions: Sequence[str] = ()) -> str:
    if not code:
        return "done"
    action = of_pod(policy_of(spec), code=code, conditions=conditions)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # else there is no such policy
    if action == "Count":
        return "counted" if runs(spec) > 1 else "failed"
    return {"FailJob": "failed", "Ignore": "again"}[action]


def runs(spec: Mapping[str, Any]) -> int:
    """How often the tasks of a Job are started that all fail each time.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index
    """
    tasks = spec["completions"]
    for number in itertools.count(1):
        if "backoffLimitPerIndex" not in spec:
            is_over = number * tasks > spec["backoffLimit"]
        else:
            failed = tasks if number > spec["backoffLimitPerIndex"] else 0
            is_over = failed > spec["maxFailedIndexes"]
        if is_over:
            return number
    raise AssertionError


def of_job_set(spec: Mapping[str, Any], *, code: int, conditions: Sequence[str] = ()) -> str:
    """The set's action for a failed Job: of the first rule that matches, else RestartJobSet.

    https://jobset.sigs.k8s.io/docs/tasks/failure_policy/
    """
    if not code:
        return "done"
    child = spec["replicatedJobs"][0]["template"]["spec"]
    return of_failed_jobs(spec["failurePolicy"], [failure(child, code=code, conditions=conditions)])


Failure = tuple[str, str]
"""Reason and message of a Job that has failed."""


def failure(child: Mapping[str, Any], *, code: int, conditions: Sequence[str] = ()) -> Failure:
    action = of_pod(policy_of(child), code=code, conditions=conditions)
    assert action in ("FailJob", "Count")
    assert child["backoffLimit"] == 0
    if action == "Count":
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    rule = f"exit code {code} matching FailJob rule at index 0"
    return "PodFailurePolicy", f"Container tfdist for pod ml/x-0-0 failed with {rule}"


def of_failed_jobs(policy: Mapping[str, Any], failures: Sequence[Failure]) -> str:
    """What Jobs do to their set that are seen to have failed at the same time."""
    actions = {
        "FailJobSet": "failed",
        "RestartJobSet": "counted" if policy["maxRestarts"] else "failed",
        "RestartJobSetAndIgnoreMaxRestarts": "again",
    }
    for rule in policy["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        for reason, message in failures:
            is_for = reason in rule["onJobFailureReasons"]
            if is_for and any(re.search(pattern, message) for pattern in patterns):
                return actions[rule["action"]]
    return actions["RestartJobSet"]


def of_tfjob(replica: Mapping[str, Any], *, code: int) -> str:
    """https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/"""
    assert replica["restartPolicy"] == "ExitCode"
    if not code:
        return "done"
    return "again" if code >= 128 else "failed"


# --- the scripts, run ---


def fakes(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which the commands are these scripts."""
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def run_batch(
    folder: Path, script: str, environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    path = folder / "job.sbatch"
    path.write_text(script)
    return subprocess.run(
        ["bash", path],
        env=dict(environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def of_slurm(folder: Path, script: str, *, code: int) -> str:
    environ = fakes(folder, python="", srun=f"exit {code}", scontrol='echo "$@" >>requeued')
    done = run_batch(folder, script, environ)
    assert done.returncode == code, done
    requeued = folder / "requeued"
    if not requeued.exists():
        return "failed" if code else "done"
    assert requeued.read_text() == "requeue 7\n"
    return "counted" if list(folder.glob("*-7.failures")) else "again"


def run_container(
    folder: Path, container: Mapping[str, Any], **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs the container's command, by a shell as in an image."""
    words = [text.replace("$$", "$") for text in (*container["command"], *container["args"])]
    env = {**fakes(folder), **environ}
    return subprocess.run(words, env=env, timeout=120, capture_output=True, text=True)


def run_pod(folder: Path, container: Mapping[str, Any], **environ: str) -> int:
    return run_container(folder, container, **environ).returncode


def container_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(template["spec"]["containers"][0])


# --- the table ---


@pytest.mark.parametrize("code", OUTCOMES)
def test_slurm_does_what_the_table_says(code, tmp_path):
    script = printed(SLURM + "--workers 2 train.py")
    assert of_slurm(tmp_path, script, code=code) == OUTCOMES[code][0]


@pytest.mark.parametrize("code", OUTCOMES)
@pytest.mark.parametrize("arguments", ["--workers 2 train.py", "train.py", PS + "train.py"])
def test_a_job_does_what_the_table_says(code, arguments):
    assert of_job(manifest(arguments)["spec"], code=code) == OUTCOMES[code][1]


@pytest.mark.parametrize("code", OUTCOMES)
@pytest.mark.parametrize("arguments", ["--workers 2 train.py", PS + "train.py"])
def test_a_job_set_does_what_the_table_says(code, arguments):
    spec = manifest("--kind jobset " + arguments)["spec"]
    assert of_job_set(spec, code=code) == OUTCOMES[code][2]


@pytest.mark.parametrize("code", OUTCOMES)
@pytest.mark.parametrize(
    ("arguments", "role"), [("--workers 2 train.py", "Worker"), (PS + "train.py", "Chief")]
)
def test_a_tfjob_does_what_the_table_says(code, arguments, role, tmp_path):
    spec = manifest("--kind tfjob " + arguments)["spec"]
    replica = spec["tfReplicaSpecs"][role]
    environ = fakes(tmp_path, python=f'[ "$1" = train.py ] && exit {code}\nexit 0')
    ended = run_pod(tmp_path, container_of(replica["template"]), **environ)
    assert of_tfjob(replica, code=ended) == OUTCOMES[code][3]


def test_every_other_code_is_one_of_the_tables_rows():
    """Below 128 it is that of a program that failed, and 128 + n that of one that was killed."""
    job = manifest("--workers 2 train.py")["spec"]
    job_set = manifest("--kind jobset --workers 2 train.py")["spec"]
    tfjob = manifest("--kind tfjob --workers 2 train.py")["spec"]
    replica = tfjob["tfReplicaSpecs"]["Worker"]
    for code in set(range(256)) - set(OUTCOMES):
        of_all = of_job(job, code=code), of_job_set(job_set, code=code)
        assert (*of_all, of_tfjob(replica, code=code)) == OUTCOMES[1 if code < 128 else 137][1:]


def test_each_job_of_a_set_ends_by_the_same_codes():
    spec = manifest("--kind jobset --gpus 1 --evaluator " + PS + "train.py")["spec"]
    children = [job["template"]["spec"] for job in spec["replicatedJobs"]]
    assert len(children) == 4
    for child in children:
        assert (policy_of(child), child["backoffLimit"]) == (policy_of(children[0]), 0)


def test_the_table_is_in_the_docs():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \|(.+)\|$", DOCS.read_text(), re.MULTILINE)
    table = {int(code): tuple(cell.strip() for cell in cells.split("|")) for code, cells in rows}
    assert table == OUTCOMES


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_pod_that_is_drained_is_started_again(kind):
    spec = manifest(f"--kind {kind} --workers 2 train.py")["spec"]
    evaluate = {"job": of_job, "jobset": of_job_set}[kind]
    assert evaluate(spec, code=137, conditions=["DisruptionTarget"]) == "again"
    assert evaluate(spec, code=2, conditions=["DisruptionTarget"]) == "failed"


def test_a_job_set_that_is_late_has_failed():
    spec = manifest("--kind jobset --time 1h --workers 2 train.py")["spec"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3600
    late = "DeadlineExceeded", "Job was active longer than specified deadline"
    assert of_failed_jobs(spec["failurePolicy"], [late]) == "failed"


@pytest.mark.parametrize(
    ("code", "ended"), [(1, "counted"), (2, "failed"), (137, "counted"), (143, "again")]
)
def test_a_failure_of_a_job_set_is_the_cause_and_not_who_has_lost_it(code, ended):
    spec = manifest("--kind jobset " + PS + "train.py")["spec"]
    child = spec["replicatedJobs"][0]["template"]["spec"]
    cause, follows = failure(child, code=code), failure(child, code=75)
    for failures in ([cause, follows], [follows, cause]):
        assert of_failed_jobs(spec["failurePolicy"], failures) == ended


def test_no_restarts_are_none(tmp_path):
    flags = "--max_restarts 0 --workers 2 train.py"
    assert of_job(manifest(flags)["spec"], code=1) == "failed"
    assert of_job_set(manifest("--kind jobset " + flags)["spec"], code=1) == "failed"
    script = printed(SLURM + flags)
    assert of_slurm(tmp_path, script, code=1) == "failed"


@pytest.mark.parametrize(("workers", "max_restarts"), [(1, 5), (7, 0), (7, 5)])
def test_a_job_is_started_again_as_often_as_asked_for_however_many_tasks_fail(
    workers, max_restarts
):
    flags = f"--max_restarts {max_restarts} --strategy multiworker --workers {workers} train.py"
    assert runs(manifest(flags)["spec"]) == 1 + max_restarts
    assert runs({"completions": 7, "backoffLimit": 5}) == 1  # as it would be without indexes


# --- servers ---


@pytest.mark.parametrize(("index", "ended"), [("0", 0), ("1", 75), ("3", 75)])
def test_a_server_of_a_job_comes_back_if_its_chief_does(index, ended, tmp_path):
    spec = manifest(PS + "train.py")["spec"]
    fakes(tmp_path, python="exit 0")
    container = container_of(spec["template"])
    assert run_pod(tmp_path, container, JOB_COMPLETION_INDEX=index) == ended
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_a_server_of_a_tfjob_comes_back_if_its_chief_does(tmp_path):
    replicas = manifest("--kind tfjob " + PS + "train.py")["spec"]["tfReplicaSpecs"]
    fakes(tmp_path, python="exit 0")
    ended = {n: run_pod(tmp_path, container_of(r["template"])) for n, r in replicas.items()}
    assert ended == {"Chief": 0, "Worker": 138, "PS": 138}


# --- signals, and an image or a Python without tfdist ---

WAITED_FOR = 'until read -r _ _ state _ </proc/$PPID/stat && [ "$state" = S ]; do :; done\n'
"""In a step or a task: waits until the script that has started it sleeps in its wait."""


def test_slurms_warning_is_passed_on_and_the_job_is_queued_again(tmp_path):
    script = printed(SLURM + "--workers 2 train.py")
    # The step warns its parent itself, as Slurm would.
    step = f"trap 'exit 143' USR1\n{WAITED_FOR}kill -USR1 $PPID\nwhile :; do sleep 0.05; done"
    environ = fakes(tmp_path, python="", srun=step, scontrol='echo "$@" >>requeued')
    done = run_batch(tmp_path, script, environ)
    assert done.returncode == 143, done
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_job_that_is_cancelled_is_not_queued_again(tmp_path):
    script = printed(SLURM + "--workers 2 train.py")
    step = f"trap 'touch twice' USR1 TERM\n{WAITED_FOR}kill -TERM $PPID\n"
    step += "[ -e twice ] && exit 1\nexit 143"
    environ = fakes(tmp_path, python="", srun=step, scontrol='echo "$@" >>requeued')
    done = run_batch(tmp_path, script, environ)
    assert done.returncode == 143, done
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("arguments", ["train.py", PS + "train.py"])
@pytest.mark.parametrize("has_handler", [True, False])
def test_a_pods_signal_reaches_its_task(arguments, has_handler, tmp_path):
    """Also one that has no handler yet; in the place of the shell, as process 1, it were deaf."""
    spec = manifest(arguments)["spec"]
    told = tmp_path / "told"
    handler = f"trap 'touch {told}; exit 143' TERM\n" * has_handler
    some_time = "n=0\nwhile [ $((n += 1)) -lt 600 ]; do sleep 0.05; done"
    task = f"{handler}{WAITED_FOR}kill -TERM $PPID\n{some_time}"
    fakes(tmp_path, python=f"[ $1 = train.py ] || exit 0\n{task}")
    assert run_pod(tmp_path, container_of(spec["template"]), JOB_COMPLETION_INDEX="1") == 143
    assert told.exists() == has_handler


def test_a_pods_signal_before_its_task_has_begun_ends_it(tmp_path):
    spec = manifest("train.py")["spec"]
    fakes(tmp_path, python=f"[ $1 = -c ] || exit 1\n{WAITED_FOR}kill -TERM $PPID")
    assert run_pod(tmp_path, container_of(spec["template"])) == 143


def test_without_tfdist_the_first_line_says_so(tmp_path):
    environ = fakes(tmp_path, python="echo no such module >&2; exit 1", srun="exit 0")
    batch = printed(SLURM + "train.py")
    assert_says_so(run_batch(tmp_path, batch, environ))
    pods: Mapping[str, Callable[[Any], Any]] = {
        "job": lambda spec: spec["template"],
        "jobset": lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"],
        "tfjob": lambda spec: spec["tfReplicaSpecs"]["Worker"]["template"],
    }
    for kind, pod_of in pods.items():
        spec = manifest(f"--kind {kind} train.py")["spec"]
        assert_says_so(run_container(tmp_path, container_of(pod_of(spec))))


def assert_says_so(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (2, "", 1)
    assert "received no tfdist" in done.stdout


# --- every task finds its place ---


def environ_of(container: Mapping[str, Any], **annotations: str) -> dict[str, str]:
    """What the kubelet makes of the manifest; an annotation that a pod has not is empty."""
    env = {e["name"]: e["value"].replace("$$", "$") for e in container["env"] if "value" in e}
    for name, source in ((e["name"], e["valueFrom"]) for e in container["env"] if "value" not in e):
        key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"])
        assert key is not None
        env[name] = annotations.get(key[1], "")
    return {**env, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


OF_INDEX = "batch.kubernetes.io/job-index-{}failure-count"
OF_SET = "jobset.sigs.k8s.io/restart-attempt"


@pytest.mark.parametrize(
    ("kind", "annotations", "attempt"),
    [
        ("job", {OF_INDEX.format(""): "0"}, 1),
        ("job", {OF_INDEX.format(""): "2"}, 3),
        ("job", {OF_INDEX.format(""): "1", OF_INDEX.format("ignored-"): "3"}, 5),
        ("jobset", {OF_SET: "0"}, 1),
        ("jobset", {OF_SET: "4"}, 5),
    ],
)
@pytest.mark.parametrize("arguments", ["train.py", PS + "train.py"])
def test_a_pod_is_told_how_often_it_was_started(kind, annotations, attempt, arguments):
    made = manifest(f"--kind {kind} {arguments}")
    spec, pod = made["spec"], made["metadata"]["name"]
    if kind == "jobset":
        first = spec["replicatedJobs"][0]
        spec, pod = first["template"]["spec"], f"{pod}-{first['name']}-0"
    environ = environ_of(container_of(spec["template"]), **annotations)
    config = read_environment({**environ, "HOSTNAME": f"{pod}-0", "JOB_COMPLETION_INDEX": "0"})
    assert config is not None
    assert config.options.attempt == attempt


def test_who_knows_better_how_often_a_task_was_started_says_so():
    spec = manifest("--env TFDIST_RESTARTS=7 train.py")["spec"]
    container = container_of(spec["template"])
    assert [e for e in container["env"] if e["name"] == "TFDIST_RESTARTS"] == [
        {"name": "TFDIST_RESTARTS", "value": "7"}
    ]


@pytest.mark.parametrize(
    ("arguments", "types"),
    [
        ("--workers 3 ", ["worker"] * 3),
        (PS, ["chief", "worker", "worker", "ps"]),
        ("--strategy multiworker ", ["worker"]),
    ],
)
def test_the_pods_of_a_job_find_their_places(arguments, types):
    job = manifest(arguments + "train.py")
    spec, found = job["spec"], []
    for index in range(spec["completions"]):
        name = f"{job['metadata']['name']}-{index}"
        environ = environ_of(container_of(spec["template"]))
        config = read_environment({**environ, "HOSTNAME": name, "JOB_COMPLETION_INDEX": str(index)})
        assert config is not None
        subdomain = spec["template"]["spec"]["subdomain"]
        assert config.cluster.address(config.task) == f"{name}.{subdomain}:2222"
        found.append(config.task.type)
    assert found == types


def test_the_pods_of_a_job_set_find_their_places():
    jobset = manifest("--kind jobset --gpus 1 --evaluator " + PS + "train.py")
    name, found = jobset["metadata"]["name"], []
    for replicated in jobset["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        container = container_of(spec["template"])
        for index in range(spec["completions"]):
            host = f"{name}-{replicated['name']}-0-{index}"
            environ = {**environ_of(container), "HOSTNAME": host}
            config = read_environment({**environ, "JOB_COMPLETION_INDEX": str(index)})
            assert config is not None
            assert config.cluster.address(config.task) == f"{host}.{name}:2222"
            found.append(str(config.task))
        has_gpu = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
        assert has_gpu == (replicated["name"] == "worker")
    assert found == ["chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief", "evaluator"]
