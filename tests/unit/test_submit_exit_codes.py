"""What each scheduler does with our exit codes: its published rules, applied to what we render.

The Slurm script and the pods' script are run for real, by the shells that will run them.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.submit import PS, SLURM, Done, fakes, manifest, printed, run_batch
from tfdist.cluster import JobOptions, read_environment

DOCS = Path(__file__).parents[2] / "docs" / "submit.md"

# Of the table in docs/submit.md, row by row.
OUTCOMES = {
    0: ("done", "done", "done"),
    1: ("counted", "counted", "counted"),
    2: ("failed", "failed", "failed"),
    75: ("counted", "again", "again"),
    130: ("again", "again", "again"),
    143: ("again", "again", "again"),
    137: ("counted", "counted", "counted"),
}


# The rules, as published. A TrainJob's runtime is a JobSet.


Failure = tuple[str, str]
"""Reason and message of a Job that has failed."""


def spec_of(arguments: str) -> Any:
    return manifest(arguments)["spec"]


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
    if action == "Count":  # each task by itself, and the first that has none left ends the job
        assert spec["maxFailedIndexes"] == 0
        return "counted" if spec["backoffLimitPerIndex"] else "failed"
    return {"FailJob": "failed", "Ignore": "again"}[action]


def of_job_set(spec: Mapping[str, Any], *, code: int, conditions: Sequence[str] = ()) -> str:
    """The set's action for a failed Job: of the first rule that matches, else RestartJobSet.

    https://jobset.sigs.k8s.io/docs/tasks/failure_policy/
    """
    if not code:
        return "done"
    child = spec["replicatedJobs"][0]["template"]["spec"]
    return of_failed_jobs(spec["failurePolicy"], [failure(child, code=code, conditions=conditions)])


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


# The scripts, run


def of_slurm(folder: Path, script: str, *, code: int) -> str:
    environ = fakes(folder, python="", srun=f"exit {code}", scontrol='echo "$@" >>requeued')
    done = run_batch(folder, script, environ)
    assert done.returncode == code, done
    requeued = folder / "requeued"
    if not requeued.exists():
        return "failed" if code else "done"
    assert requeued.read_text() == "requeue 7\n"
    return "counted" if list(folder.glob("*-7.failures")) else "again"


def run_container(folder: Path, container: Mapping[str, Any], **environ: str) -> Done:
    """Runs the container's command, by a shell as in an image."""
    words = [text.replace("$$", "$") for text in (*container["command"], *container["args"])]
    env = {**fakes(folder), **environ}
    return subprocess.run(words, env=env, timeout=120, capture_output=True, text=True)


def run_pod(folder: Path, container: Mapping[str, Any], **environ: str) -> int:
    return run_container(folder, container, **environ).returncode


def container_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(template["spec"]["containers"][0])


# The table


@pytest.mark.parametrize("code", OUTCOMES)
def test_slurm_follows_the_table_of_exit_codes(code, tmp_path):
    script = printed(SLURM + "--workers 2 train.py")
    assert of_slurm(tmp_path, script, code=code) == OUTCOMES[code][0]


@pytest.mark.parametrize("code", OUTCOMES)
@pytest.mark.parametrize("arguments", ["--workers 2 train.py", "train.py", PS + "train.py"])
def test_kubernetes_jobs_follow_the_table_of_exit_codes(code, arguments):
    job, job_set = spec_of(arguments), spec_of("--kind jobset " + arguments)
    assert (of_job(job, code=code), of_job_set(job_set, code=code)) == OUTCOMES[code][1:]


def test_every_other_code_is_one_of_the_tables_rows():
    """Below 128 it is that of a program that failed, and 128 + n that of one that was killed."""
    job, job_set = (spec_of(f"--kind {kind} --workers 2 train.py") for kind in ("job", "jobset"))
    for code in set(range(256)) - set(OUTCOMES):
        of_all = of_job(job, code=code), of_job_set(job_set, code=code)
        assert of_all == OUTCOMES[1 if code < 128 else 137][1:]


def test_the_table_is_in_the_docs():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \|(.+)\|$", DOCS.read_text(), re.MULTILINE)
    table = {int(code): tuple(cell.strip() for cell in cells.split("|")) for code, cells in rows}
    assert table == OUTCOMES


def test_all_jobs_of_a_set_share_exit_codes():
    spec = spec_of("--kind jobset --gpus 1 --evaluator " + PS + "train.py")
    children = [job["template"]["spec"] for job in spec["replicatedJobs"]]
    assert len(children) == 4
    for child in children:
        assert (policy_of(child), child["backoffLimit"]) == (policy_of(children[0]), 0)


@pytest.mark.parametrize(("kind", "evaluate"), [("job", of_job), ("jobset", of_job_set)])
def test_a_pod_that_is_drained_is_started_again(kind, evaluate):
    spec = spec_of(f"--kind {kind} --workers 2 train.py")
    assert evaluate(spec, code=137, conditions=["DisruptionTarget"]) == "again"
    assert evaluate(spec, code=2, conditions=["DisruptionTarget"]) == "failed"


def test_a_job_set_that_is_late_has_failed():
    spec = spec_of("--kind jobset --time 1h --workers 2 train.py")
    assert spec["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3600
    late = "DeadlineExceeded", "Job was active longer than specified deadline"
    assert of_failed_jobs(spec["failurePolicy"], [late]) == "failed"


@pytest.mark.parametrize(
    ("code", "ended"), [(1, "counted"), (2, "failed"), (137, "counted"), (143, "again")]
)
def test_a_job_set_fails_with_the_root_cause(code, ended):
    spec = spec_of("--kind jobset " + PS + "train.py")
    child = spec["replicatedJobs"][0]["template"]["spec"]
    cause, follows = failure(child, code=code), failure(child, code=75)
    for failures in ([cause, follows], [follows, cause]):
        assert of_failed_jobs(spec["failurePolicy"], failures) == ended


def test_no_restarts_are_none(tmp_path):
    flags = "--max_restarts 0 --workers 2 train.py"
    assert of_job(spec_of(flags), code=1) == "failed"
    assert of_job_set(spec_of("--kind jobset " + flags), code=1) == "failed"
    assert of_slurm(tmp_path, printed(SLURM + flags), code=1) == "failed"


# Servers: they come back if their chief does


@pytest.mark.parametrize(("index", "ended"), [("0", 0), ("1", 75), ("3", 75)])
def test_a_server_of_a_job_is_restarted(index, ended, tmp_path):
    spec = spec_of(PS + "train.py")
    fakes(tmp_path, python="exit 0")
    container = container_of(spec["template"])
    assert run_pod(tmp_path, container, JOB_COMPLETION_INDEX=index) == ended
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


# Signals, and an image or a Python without tfdist

WAITED_FOR = 'until read -r _ _ state _ </proc/$PPID/stat && [ "$state" = S ]; do :; done\n'
"""In a step or a task: waits until the script that has started it sleeps in its wait."""


@pytest.mark.parametrize(
    ("step", "is_requeued"),
    [
        # The step warns its parent itself, as Slurm would.
        (
            f"trap 'exit 143' USR1\n{WAITED_FOR}kill -USR1 $PPID\nwhile :; do sleep 0.05; done",
            True,
        ),
        (
            f"trap 'touch twice' USR1 TERM\n{WAITED_FOR}kill -TERM $PPID\n"
            "[ -e twice ] && exit 1\nexit 143",
            False,
        ),
    ],
    ids=["warned", "cancelled"],
)
def test_slurm_signals_reach_tasks_and_requeue_warned_jobs(step, is_requeued, tmp_path):
    script = printed(SLURM + "--workers 2 train.py")
    environ = fakes(tmp_path, python="", srun=step, scontrol='echo "$@" >>requeued')
    done = run_batch(tmp_path, script, environ)
    assert done.returncode == 143, done
    assert (tmp_path / "requeued").exists() == is_requeued


def test_only_the_second_warning_during_import_is_a_failure(tmp_path):
    script = printed(SLURM + "--max_restarts 0 --workers 2 train.py")
    step = f"{WAITED_FOR}kill -USR1 $PPID\nwhile :; do sleep 0.05; done"
    environ = fakes(tmp_path, python="", srun=step, scontrol='echo "$@" >>requeued')
    for said in ("stopped before training; queued again", "failure 1, more than the 0 allowed"):
        done = run_batch(tmp_path, script, environ)
        assert done.returncode == 138, done
        assert said in done.stdout
    assert len((tmp_path / "requeued").read_text().splitlines()) == 1
    last = done.stdout.splitlines()[-1]
    assert last == "tfdist: to resume, submit the job again with --run_dir runs/train-7"


@pytest.mark.parametrize("arguments", ["train.py", PS + "train.py"])
@pytest.mark.parametrize("has_handler", [True, False])
def test_a_pods_signal_reaches_its_task(arguments, has_handler, tmp_path):
    """Also one that has no handler yet; in the place of the shell, as process 1, it were deaf."""
    told = tmp_path / "told"
    handler = f"trap 'touch {told}; exit 143' TERM\n" * has_handler
    some_time = "n=0\nwhile [ $((n += 1)) -lt 600 ]; do sleep 0.05; done"
    task = f"{handler}{WAITED_FOR}kill -TERM $PPID\n{some_time}"
    fakes(tmp_path, python=f"[ $1 = train.py ] || exit 0\n{task}")
    container = container_of(spec_of(arguments)["template"])
    assert run_pod(tmp_path, container, JOB_COMPLETION_INDEX="1") == 143
    assert told.exists() == has_handler


def test_a_pod_signal_before_the_task_starts_ends_it(tmp_path):
    fakes(tmp_path, python=f"[ $1 = -c ] || exit 1\n{WAITED_FOR}kill -TERM $PPID")
    assert run_pod(tmp_path, container_of(spec_of("train.py")["template"])) == 143


def test_a_missing_tfdist_is_reported_in_one_line(tmp_path):
    environ = fakes(tmp_path, python="echo no such module >&2; exit 1", srun="exit 0")
    said = [run_batch(tmp_path, printed(SLURM + "train.py"), environ)]
    said.append(run_container(tmp_path, container_of(spec_of("train.py")["template"])))
    for done in said:
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (2, "", 1)
        assert "has no tfdist" in done.stdout


# Every task finds its place


def pods_of(arguments: str) -> Iterator[tuple[str, str, Any, Mapping[str, str]]]:
    """Role, host name, container and variables of each pod, as the kubelet makes them."""
    job = manifest(arguments)
    name, spec = job["metadata"]["name"], job["spec"]
    jobs = {f"{name}-{r['name']}-0": r for r in spec.get("replicatedJobs", ())}
    for prefix, replicated in (jobs or {name: {"name": "", "template": job}}).items():
        each = replicated["template"]["spec"]
        container = container_of(each["template"])
        for index in range(each["completions"]):
            host = f"{prefix}-{index}"
            more = {"HOSTNAME": host, "JOB_COMPLETION_INDEX": f"{index}"}
            yield replicated["name"], host, container, more


def config_of(container: Mapping[str, Any], more: Mapping[str, str], **annotations: str) -> Any:
    """What a task reads; an annotation that a pod has not is empty."""
    env = {e["name"]: e["value"].replace("$$", "$") for e in container["env"] if "value" in e}
    for name, source in ((e["name"], e["valueFrom"]) for e in container["env"] if "value" not in e):
        key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"])
        assert key is not None
        env[name] = annotations.get(key[1], "")
    return read_environment({**env, **more, "KUBERNETES_SERVICE_HOST": "10.96.0.1"})


OF_INDEX = "batch.kubernetes.io/job-index-{}failure-count"
OF_SET = "jobset.sigs.k8s.io/restart-attempt"


@pytest.mark.parametrize(
    ("kind", "annotations", "attempt"),
    [
        ("job", {OF_INDEX.format(""): "0"}, 1),
        ("job", {OF_INDEX.format(""): "1", OF_INDEX.format("ignored-"): "3"}, 5),
        ("jobset", {OF_SET: "4"}, 5),
    ],
)
@pytest.mark.parametrize("arguments", ["train.py", PS + "train.py"])
def test_a_pod_gets_its_number_of_starts(kind, annotations, attempt, arguments):
    _, _, container, more = next(pods_of(f"--kind {kind} {arguments}"))
    assert config_of(container, more, **annotations).options.attempt == attempt


def test_a_given_number_of_restarts_has_priority():
    _, _, container, _ = next(pods_of("--env TFDIST_RESTARTS=7 train.py"))
    told = [e for e in container["env"] if e["name"] == "TFDIST_RESTARTS"]
    assert told == [{"name": "TFDIST_RESTARTS", "value": "7"}]


FLAGS = "--run_dir /runs/x --startup_timeout_s 90 --devices_per_worker 2 "
SAID: dict[str, Any] = {"run_dir": "/runs/x", "startup_timeout_s": 90.0, "devices_per_worker": 2}
OF_PS = {"strategy": "ps", "min_workers": 1, "split_bytes": 4_000_000}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (PS + "--min_workers 1 --split_bytes 4000000 ", OF_PS),
        ("--stages 2 --workers 4 ", {"strategy": "pipeline", "stages": 2}),
        ("", {}),
    ],
)
def test_tasks_read_the_flags_of_the_launcher(arguments, options):
    _, _, container, more = next(pods_of(f"{FLAGS}{arguments}train.py"))
    assert config_of(container, more).options == JobOptions(**options, **SAID)
    waits = "--wait=300" in printed(f"{SLURM}{arguments}train.py")
    assert waits == (options.get("strategy") == "pipeline")


OF_SET_OF_PS = "--kind jobset --gpus 1 --evaluator " + PS


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [
        ("--workers 3 ", ["worker-0", "worker-1", "worker-2"]),
        (PS, ["chief-0", "worker-0", "worker-1", "ps-0"]),
        ("--strategy multiworker ", ["worker-0"]),
        (OF_SET_OF_PS, ["chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"]),
    ],
)
def test_the_pods_of_a_job_find_their_places(arguments, tasks):
    found = []
    for role, host, container, more in pods_of(arguments + "train.py"):
        config = config_of(container, more)
        assert config.cluster.address(config.task) == f"{host}.train:2222"
        found.append(str(config.task))
        has_gpu = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
        assert has_gpu == (role == "worker")
    assert found == tasks


def test_a_job_set_ends_with_chief_and_evaluator():
    policy = spec_of(OF_SET_OF_PS + "train.py")["successPolicy"]
    assert policy["targetReplicatedJobs"] == ["chief", "evaluator"]
