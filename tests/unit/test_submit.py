"""What tfdist.submit renders of a command line, and what it refuses."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.submit import PODS, SLURM, manifest, printed, refused
from tfdist.cluster import read_environment
from tfdist.cluster.tf_config import JobOptions
from tfdist.launch.options import FLAGS as LAUNCHER
from tfdist.ops.submit.kubernetes import text_of
from tfdist.ops.submit.pods import escape_dollars
from tfdist.ops.submit.request import NOT_HERE

# --- whole files: tests/golden and launch/ ---

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
IMAGE = "--image registry.example.org/train:1.0 "

# To renew one: python -m tfdist.submit --dry_run ARGUMENTS > FILE, and read the difference.
CASES = {
    "single.sbatch": "--to slurm --gpus 1 train.py",
    "mirrored.sbatch": "--to slurm --strategy mirrored --gpus 4 --time 90m train.py",
    "everything.sbatch": "--to slurm --name my_run.2 --python '/opt/my env/bin/python' --nodes 2 "
    "--workers 4 --cpus 8 --memory 30G --gpus 2 --devices_per_worker 2 --time 2-00:30:00 "
    "--partition gpu --account physics --qos long --node_selector a100 --node_selector ib "
    "--env 'NOTE=it'\"'\"'s $HOME' --secret HF_TOKEN=/home/me/.hf --grace_s 120 --max_restarts 5 "
    "--hang_timeout_s 600 --threads_per_task 6 --run_dir /scratch/run --startup_timeout_s 90 "
    "-m my.program --lr 0.1 --text 'two words; $(date)'",
    "ps_hetjob.sbatch": "--to slurm --strategy ps --workers 3 --ps 2 --gpus 1 --min_workers 2 "
    "--cpus 2 --memory 3G train.py",
    "single_job.yaml": "--to kubernetes " + IMAGE + "train.py",
    "everything_job.yaml": "--to kubernetes --name my-run --namespace ml --workers 3 --cpus 8 "
    "--memory 1500M --gpus 2 --node_selector disk=ssd --node_selector example.org/pool=a "
    "--volume runs=/runs --volume data=/data:ro --volume /mnt/cache=/cache "
    "--secret HF_TOKEN=hub/token --env 'NOTE=$(x) 1e3' --env ONE=1e3 --service_account trainer "
    "--image_pull_secret registry --time 4h --grace_s 120 --max_restarts 5 "
    + IMAGE
    + "train.py --text 'two words; $(date) $$' --no -y",
    "ps_job.yaml": "--to kubernetes --strategy ps --workers 2 --ps 2 " + IMAGE + "train.py",
    "multiworker_jobset.yaml": "--to kubernetes --kind jobset --workers 2 --gpus 1 --time 1h "
    + IMAGE
    + "train.py",
    "multiworker_tfjob.yaml": "--to kubernetes --kind tfjob --workers 2 --gpus 1 --time 1h "
    + IMAGE
    + "train.py",
}


def examples() -> Iterator[tuple[str, str]]:
    """The arguments and the file of each command in the pages of launch/."""
    for page in ("slurm", "kubernetes"):
        for line in (ROOT / "launch" / page / "README.md").read_text().splitlines():
            if line.startswith("python -m tfdist.submit "):
                arguments, _, path = line.removeprefix("python -m tfdist.submit ").partition(" > ")
                yield path, arguments


@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_is_what_it_was(name):
    assert printed("--dry_run " + CASES[name]) == (GOLDEN / name).read_text()


def test_every_golden_file_is_compared():
    assert {path.name for path in GOLDEN.glob("*.*") if path.suffix in (".yaml", ".sbatch")} == set(
        CASES
    )


@pytest.mark.parametrize(("path", "arguments"), list(examples()))
def test_the_examples_are_what_the_command_renders_now(path, arguments):
    assert printed(arguments) == (ROOT / path).read_text()


def test_every_example_is_rendered_by_a_command_of_its_page():
    there = {
        str(path.relative_to(ROOT))
        for page in ("slurm", "kubernetes")
        for path in (ROOT / "launch" / page).iterdir()
        if path.name != "README.md"
    }
    assert there == {path for path, _ in examples()}


@pytest.mark.parametrize(
    "path", [*GOLDEN.glob("*.sbatch"), *(ROOT / "launch" / "slurm").glob("*.sbatch")], ids=str
)
def test_bash_can_read_the_scripts(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- the launcher's flags reach the tasks ---


FLAGS = "--run_dir /runs/x --startup_timeout_s 90 --devices_per_worker 2 --min_workers 1 "
SAID: dict[str, Any] = {"run_dir": "/runs/x", "startup_timeout_s": 90.0, "devices_per_worker": 2}


def environ_of(arguments: str) -> dict[str, str]:
    """The variables of the first container of a job, as far as they are in the manifest."""
    spec: Any = manifest(arguments)["spec"]
    replicas = spec.get("tfReplicaSpecs")
    template = next(iter(replicas.values()))["template"] if replicas else spec["template"]
    env = template["spec"]["containers"][0]["env"]
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1"} | {
        e["name"]: e["value"] for e in env if "value" in e
    }


def test_those_of_a_job_of_several_tasks():
    flags = FLAGS + "--strategy ps --workers 2 --split_bytes 4000000 --profile_ps train.py"
    config = read_environment({**environ_of(flags), "HOSTNAME": "train-1"})
    assert config is not None
    assert config.options == JobOptions(
        strategy="ps", min_workers=1, split_bytes=4_000_000, profile_ps=True, **SAID
    )


def test_those_of_stages():
    """Two pipelines of two stages, whose tasks find each other as those of any other job do."""
    flags = "--stages 2 --workers 4 --run_dir /runs/x train.py"
    config = read_environment({**environ_of(flags), "HOSTNAME": "train-3"})
    assert config is not None
    assert (config.options.strategy, config.options.stages) == ("pipeline", 2)
    assert len(config.cluster.training_tasks()) == 4
    assert "--wait=300" in printed(SLURM + flags)
    assert "--stages: received 2 with --workers 3" in refused(
        SLURM + "--stages 2 --workers 3 train.py"
    )


def test_those_of_a_process_by_itself():
    flags = FLAGS.replace("--min_workers 1 ", "") + "train.py"
    config = read_environment(environ_of(flags))
    assert config is not None
    assert config.options == JobOptions(**SAID)
    assert config.cluster.tasks() == ()


def test_those_of_a_task_whose_tf_config_the_operator_sets():
    environ = environ_of("--kind tfjob --run_dir /runs/x --workers 2 train.py")
    cluster = {"worker": ["train-worker-0.ml.svc:2222", "train-worker-1.ml.svc:2222"]}
    told = {"cluster": cluster, "task": {"type": "worker", "index": 1}, "environment": "cloud"}
    config = read_environment({**environ, "TF_CONFIG": json.dumps(told)})
    assert config is not None
    assert (config.options.run_dir, config.options.strategy) == ("/runs/x", "multiworker")
    assert config.options.startup_timeout_s == 300


# What the pods of tests/golden have not.


def pod_of(arguments: str) -> Any:
    """The spec of the pods of a Job."""
    return manifest(arguments)["spec"]["template"]["spec"]


def test_shared_memory_of_the_users_own_is_not_replaced():
    pod = pod_of("--gpus 2 --volume /dev/shm=/dev/shm/ train.py")
    assert pod["volumes"] == [{"name": "volume-0", "hostPath": {"path": "/dev/shm"}}]
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [{"name": "volume-0", "mountPath": "/dev/shm/"}]


# --- the command line ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "--to slurm or --to kubernetes"),
        ("--to slrum train.py", "did you mean 'slurm'"),
        ("--to kserv --name x", "did you mean 'kserve'"),
        ("--to", "received no value"),
        ("--to slurm --to slurm train.py", "twice"),
        (SLURM + "--workers 2 --workers=3 train.py", "--workers: received it twice"),
        (SLURM + "--evaluator --evaluator train.py", "--evaluator: received it twice"),
        (SLURM + "--env X=1 --env X=2 train.py", "received X twice; expected each name once"),
        (SLURM + "--wrokers 2 train.py", "did you mean '--workers'"),
        (SLURM + "--imag x train.py", "did you mean '--image'"),
        (SLURM + "--image x train.py", "expected kubernetes"),
        (SLURM + "--kind job train.py", "expected kubernetes"),
        (PODS + "--partition gpu train.py", "expected slurm"),
        (PODS + "--nodes 2 train.py", "expected slurm"),
        (SLURM + "--start fork train.py", "leave --start out"),
        (SLURM + "--restart_window_s 3 train.py", "leave --restart_window_s out"),
        (SLURM + "--isolate train.py", "leave --isolate out"),
        (SLURM + "--workers two train.py", "an integer"),
        (SLURM + "--evaluator train.py", "a job of several tasks"),
        (PODS + "--workers 2 --evaluator train.py", "use --kind jobset"),
        (PODS + "--kind tfjob --workers 2 --evaluator train.py", "use --kind jobset"),
        (SLURM + "--workers 2 --strategy mirrored train.py", "one process"),
        (SLURM + "--strategy multiworker train.py", "2 or more"),
        (SLURM + "--cpus 0 train.py", "a whole number of at least 1"),
        (SLURM + "--memory 16 train.py", "16G"),
        (SLURM + "--time 4 train.py", "4h"),
        (SLURM + "--time 0h train.py", "4h"),
        (SLURM + "--name 'a b' train.py", "--name"),
        (SLURM + "--name=-x train.py", "--name"),
        (SLURM + "--partition 'a b' train.py", "--partition"),
        (SLURM + "--node_selector 'a b' train.py", "--node_selector"),
        (SLURM + "--nodes 3 --workers 2 train.py", "--nodes 2"),
        (SLURM + "--nodes 3 --strategy ps --workers 2 --gpus 1 train.py", "no --nodes"),
        (SLURM + "--time 1m train.py", "a longer --time"),
        (SLURM + "--env X train.py", "NAME=VALUE"),
        (SLURM + "--env 1X=2 train.py", "name of a variable"),
        (SLURM + "--env X=1 --secret X=/a train.py", "each name once"),
        ("--to kubernetes --dry_run train.py", "--image"),
        (PODS + "--image '-x y' train.py", "twice"),
        ("--to kubernetes --image 'a b' train.py", "--image"),
        (PODS + "--kind jobs train.py", "did you mean 'job'"),
        (PODS + "--name My_Run train.py", "small letters"),
        (PODS + f"--name {'a' * 40} train.py", "at most 39"),
        (PODS + "--namespace 'A B' train.py", "--namespace"),
        (PODS + "--volume data train.py", "--volume"),
        (PODS + "--volume data=/data:rw train.py", "--volume"),
        (PODS + "--node_selector ssd train.py", "NAME=VALUE"),
        (PODS + "--strategy ps --gpus 1 train.py", "--kind jobset"),
        ("--to slurm --status '*'", "--status"),
        ("--to slurm --logs=-x", "--logs"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says):
    assert says in refused(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        SLURM + "--secret HF_TOKEN=hunter2 train.py",
        PODS + "--secret HF_TOKEN=hunter2 train.py",
        PODS + "--secret hunter2 train.py",
        PODS + "--secret 'HF_TOKEN=hub/to ken hunter2' train.py",
        PODS + "--env HF_TOKEN=hunter2 train.py",
        PODS + "--env http_proxy=http://me:hunter2@proxy:3128 train.py",
        PODS + "--env X=ghp_hunter2hunter2hunter2 train.py",
        SLURM + "--env DB_PASSWORD=hunter2 train.py",
        SLURM + "--env PGPASSWORD=hunter2 train.py",
        SLURM + "train.py --api_key hunter2",
        SLURM + "train.py --wandb.api-key=hunter2",
        SLURM + "train.py --url=https://me:hunter2@example.org/x",
        SLURM + "train.py hf_hunter2hunter2hunter2",
        PODS + "-- --password=hunter2",
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_shown(arguments):
    line = refused(arguments)
    assert "hunter2" not in line
    assert "--secret" in line


@pytest.mark.parametrize(
    "arguments",
    [
        "train.py --token_file /run/token --max_tokens 512 --tokenizer bert --key_size 5",
        "train.py --token --lr 0.1",
        "train.py --url https://example.org/a:b@c",
        "train.py --risk-free sk-learn",
    ],
)
def test_what_only_resembles_a_secret_passes(arguments):
    words = shlex.split(arguments)
    assert shlex.join(words) in printed(SLURM + arguments)


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("train.py --to x --dry_run --name y", "train.py --to x --dry_run --name y"),
        ("-m my.program --image z", "-m my.program --image z"),
        ("--config=a.py --config.steps=3", "-m tfdist.train --config=a.py --config.steps=3"),
        ("-- --overwrite", "-m tfdist.train --overwrite"),
        ("", "-m tfdist.train"),
    ],
)
def test_the_programs_own_flags_reach_the_program(arguments, program):
    assert f'"$python" {program} &\n' in printed(SLURM + arguments)


# Of each flag of the launcher, a job that has it, and what it is given.
EXAMPLES = {
    "strategy": ("--workers 2", "ps"),
    "ps": ("--strategy ps", "3"),
    "min_workers": ("--ps 1 --workers 2", "1"),
    "hang_timeout_s": ("--workers 2", "77"),
    "evaluator": ("--workers 2", ""),
    "ports": ("--workers 2", "20000-20100"),
    "run_dir": ("", "/scratch/other"),
    "split_bytes": ("--ps 1", "77"),
    "profile_ps": ("--ps 1", ""),
    "stages": ("--strategy pipeline --workers 14", "7"),
}


@pytest.mark.parametrize("to", [SLURM, PODS], ids=["slurm", "kubernetes"])
@pytest.mark.parametrize("flag", [f.name for f in LAUNCHER if f.name not in ("help", "dry_run")])
def test_a_flag_of_the_launcher_reaches_the_job_or_is_refused(flag, to):
    others, value = EXAMPLES.get(flag, ("", "7"))
    to += "--kind jobset " * (to == PODS and flag == "evaluator")
    line = f"{to} {others} --{flag} {value} train.py"
    if flag in NOT_HERE or (flag == "hang_timeout_s" and to == PODS):
        assert f"leave --{flag} out" in refused(line)
    else:
        assert printed(line) != printed(f"{to} {others} train.py")


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_a_range_of_ports_is_that_of_the_pods_and_of_their_policy(kind):
    flags = f"{PODS} --kind {kind} --workers 2 --ports 20000-20100 "
    text = printed(flags + "train.py")
    policy: Any = next(yaml.safe_load_all(text))
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 20000, "endPort": 20100}]
    assert re.findall("containerPort: (.*)", text) == ["20000"]
    assert re.findall('name: TFDIST_PORTS\n *value: "?(.*?)"?\n', text) == ["20000-20100"]
    # With GPUs NCCL listens too, where it likes.
    policy = next(yaml.safe_load_all(printed(flags + "--gpus 1 train.py")))
    assert "ports" not in policy["spec"]["ingress"][0]


def test_the_help_has_the_launchers_flags_too():
    text = printed("--to slurm --help")
    for flag in LAUNCHER:
        left_out = flag.name in (*NOT_HERE, "help")
        assert bool(re.search(rf"\n  --{flag.name}\b", text)) != left_out, flag.name


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--time 90m", "--time=0-01:30:00"),
        ("--time 2d", "--time=2-00:00:00"),
        ("--time 04:00:00", "--time=0-04:00:00"),
        ("--time 1-00:30:00", "--time=1-00:30:00"),
        ("--time 75s", "--time=0-00:01:15"),
        ("--memory 16G", "--mem-per-cpu=16384M"),
        ("--memory 512Mi", "--mem-per-cpu=512M"),
        ("--memory 1TB", "--mem-per-cpu=1048576M"),
    ],
)
def test_times_and_memory(flag, line):
    assert f"#SBATCH {line}\n" in printed(f"{SLURM} {flag} train.py")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("train.py", "train"),
        ("-m my.pkg.Fit_It", "fit-it"),
        ("01_run.py", "run"),
        ("7.py", "tfdist"),
    ],
)
def test_a_job_is_named_after_its_program(program, name):
    assert f"#SBATCH --job-name={name}\n" in printed(SLURM + program)


# --- what a user writes reaches the task as it was ---


NASTY = (
    "two words",
    "",
    "it's",
    '"',
    "$HOME",
    "$(date)",
    "$$",
    "`date`",
    "a\nb",
    "\\n",
    "*",
    "é",
    "-x",
)
DOUBTFUL = (
    *("yes", "No", "on", "y", "N", "true", "~", "null", "1", "1e3", "0x1f", "0o17"),
    *("1_000", "12:30", ".5", "-", "=", "<<", "2026-01-01", "a:b", "#c"),
)


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument: $$ is a dollar, and $(NAME) the variable's value."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda m: "VALUE" if m[1] is not None else "$", text)


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans())))
def test_yaml_is_read_as_it_was_written(document):
    assert yaml.safe_load(text_of([document])) == document


@pytest.mark.parametrize("text", DOUBTFUL)
def test_what_a_reader_might_take_for_something_else_is_quoted(text):
    assert text_of([{"name": text}]) == f'name: "{text}"\n'


def test_what_occurs_twice_is_written_twice():
    labels = {"job": "train"}
    assert text_of([{"one": labels, "two": labels}]).count("job: train") == 2


@given(st.text(alphabet="$()aB {", max_size=12))
def test_kubernetes_replaces_nothing_in_what_a_user_wrote(text):
    assert expanded(escape_dollars(text)) == text


def test_arguments_and_variables_reach_the_tasks_of_slurm(tmp_path):
    for name, body in {"python": "exit 0", "srun": r'printf "%s\0" "$NOTE" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    note = "".join(NASTY).replace("\n", "")
    script = printed(SLURM + shlex.join([f"--env=NOTE={note}", "train.py", *NASTY]))
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    words = done.stdout.decode().split("\0")[:-1]
    assert words[0] == note
    assert words[-len(NASTY) - 2 :] == ["python", "train.py", *NASTY]
