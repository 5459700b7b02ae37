"""What tfdist.submit renders of a command line, what it refuses, and what it asks schedulers."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.submit import PODS, SLURM, fakes, manifest, printed, refused, run, run_batch
from tfdist.options import LaunchFlags, names_of, table
from tfdist.submit import schedulers
from tfdist.submit.command_line import parse
from tfdist.submit.render import manifests

# Whole files: launch/

ROOT = Path(__file__).parents[2]


def examples() -> Iterator[tuple[str, str]]:
    """The arguments of each command in the pages of launch/, and its file (or them, if none)."""
    for page in schedulers.SCHEDULERS:
        for line in (ROOT / "launch" / page / "README.md").read_text().splitlines():
            if line.startswith("python -m tfdist.submit "):
                arguments, _, path = line.removeprefix("python -m tfdist.submit ").partition(" > ")
                yield path or arguments, arguments


RENDERED = dict(examples())


@pytest.mark.parametrize("path", RENDERED)
def test_rendered_files_are_unchanged(path):
    text = printed(RENDERED[path])
    if path != RENDERED[path]:
        assert text == (ROOT / path).read_text()
    if text.startswith("#!/bin/bash"):
        done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")


def test_every_example_is_compared():
    folders = [ROOT / "launch" / name for name in schedulers.SCHEDULERS]
    files = [path for folder in folders for path in folder.iterdir()]
    there = {str(path.relative_to(ROOT)) for path in files if path.name != "README.md"}
    assert there <= set(RENDERED)


# The launcher's flags reach the tasks

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
    "stages": ("--strategy pipeline --workers 14", "7"),
}


@pytest.mark.parametrize("to", [SLURM, PODS], ids=["slurm", "kubernetes"])
@pytest.mark.parametrize("flag", [f for f in names_of(LaunchFlags) if f not in ("dry_run", "env")])
def test_a_launcher_flag_reaches_the_job_or_is_refused(flag, to):
    others, value = EXAMPLES.get(flag, ("", "7"))
    to += "--kind jobset " * (to == PODS and flag == "evaluator")
    line = f"{to} {others} --{flag} {value} train.py"
    is_shown = re.search(rf"\n  --{flag}\b", printed("--to slurm --help"))
    is_taken = table(LaunchFlags)[flag].submit is not None
    assert bool(is_shown) == is_taken
    if not is_taken or (flag == "hang_timeout_s" and to == PODS):
        assert f"leave --{flag} out" in refused(line)
    else:
        assert printed(line) != printed(f"{to} {others} train.py")


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_port_range_applies_to_pods_and_their_policy(kind):
    flags = f"{PODS} --kind {kind} --workers 2 --ports 20000-20100 "
    text = printed(flags + "train.py")
    policy: Any = next(yaml.safe_load_all(text))
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 20000, "endPort": 20100}]
    assert re.findall("containerPort: (\\d+)", text) == ["20000"]
    assert re.findall('name: TFDIST_PORTS, value: "(.*?)"', text) == ["20000-20100"]
    # With GPUs NCCL listens too, where it likes.
    policy = next(yaml.safe_load_all(printed(flags + "--gpus 1 train.py")))
    assert "ports" not in policy["spec"]["ingress"][0]


def test_shared_memory_of_the_users_own_is_not_replaced():
    job = manifest("--gpus 2 --volume /dev/shm=/dev/shm/ train.py")
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "volume-0", "hostPath": {"path": "/dev/shm"}}]
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [{"name": "volume-0", "mountPath": "/dev/shm/"}]


# The command line

SHOWN = {
    # What only resembles a secret passes.
    "train.py --token_file /run/token --max_tokens 512 --tokenizer bert --key_size 5": "$",
    "train.py --token --lr 0.1": "$",
    "train.py --url https://example.org/a:b@c": "$",
    "train.py --risk-free sk-learn": "$",
    # The program's own flags reach it.
    "train.py --to x --dry_run --name y": "$",
    "-m my.program --image z": "$",
    "--config=a.py --config.steps=3": "$-m tfdist.train --config=a.py --config.steps=3",
    "-- --overwrite": "$-m tfdist.train --overwrite",
    "": "$-m tfdist.train",
    "--time 90m a.py": "--time=0-01:30:00",
    "--time 2d a.py": "--time=2-00:00:00",
    "--time 04:00:00 a.py": "--time=0-04:00:00",
    "--time 1-00:30:00 a.py": "--time=1-00:30:00",
    "--time 75s a.py": "--time=0-00:01:15",
    "--memory 16G a.py": "--mem-per-cpu=16384M",
    "--memory 512Mi a.py": "--mem-per-cpu=512M",
    "--memory 1TB a.py": "--mem-per-cpu=1048576M",
    # A job is named after its program.
    "train.py": "--job-name=train",
    "-m my.pkg.Fit_It": "--job-name=fit-it",
    "01_run.py": "--job-name=run",
    "7.py": "--job-name=tfdist",
}
"""A line of the script for some arguments: an option, or after a $ the program if not the same."""


@pytest.mark.parametrize("arguments", SHOWN)
def test_requested_settings_are_in_the_script(arguments):
    line, program = f"#SBATCH {SHOWN[arguments]}", SHOWN[arguments][1:] or arguments
    if SHOWN[arguments].startswith("$"):
        line = f'    "$python" {program} &'
    assert line in printed(SLURM + arguments).splitlines()


# What a user writes reaches the task as it was

NASTY = ("two words", "", "it's", '"', "$HOME", "$(date)", "$$", "`date`", "a\nb", "\\n", "*")
NASTY += ("é", "-x")
DOUBTFUL = (
    *("yes", "No", "on", "y", "N", "true", "~", "null", "1", "1e3", "0x1f", "0o17"),
    *("1_000", "12:30", ".5", "-", "=", "<<", "2026-01-01", "a:b", "#c"),
)


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument: $$ is a dollar, and $(NAME) the variable's value."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda m: "VALUE" if m[1] is not None else "$", text)


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@pytest.mark.parametrize("kind", ["job", "jobset"])
@given(words=st.lists(st.sampled_from([*NASTY, *DOUBTFUL]) | ANY_TEXT, max_size=4))
def test_words_of_the_user_reach_a_pod_unchanged(kind, words):
    note = "".join(words)
    flags = ["--to=kubernetes", "--image=x", f"--env=NOTE={note}"]
    request = parse([*flags, "-m", "my.program", *words])
    assert request is not None
    made = list(yaml.safe_load_all(manifests(request, kind=kind)))[-1]
    spec = made["spec"] if kind == "job" else made["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    args = [expanded(text) for text in container["args"]]
    assert args == ["python", "-m", "my.program", *words]
    assert [expanded(e["value"]) for e in container["env"] if e["name"] == "NOTE"] == [note]


def test_arguments_and_variables_reach_the_tasks_of_slurm(tmp_path):
    srun = r'printf "%s\0" "$NOTE" "$TFDIST_RUN_DIR" "$@"'
    note = "".join(NASTY).replace("\n", "")
    text = printed(SLURM + shlex.join([f"--env=NOTE={note}", "train.py", *NASTY]))
    done = run_batch(tmp_path, text, fakes(tmp_path, python="exit 0", srun=srun))
    words = done.stdout.split("\0")[:-1]
    assert words[:2] == [note, "runs/train-7"]  # the same directory after a requeue
    assert words[-len(NASTY) - 2 :] == ["python", "train.py", *NASTY]


# What schedulers are asked, and what their answers become

Answer = CompletedProcess[str]


def says(text: str, *, errors: str = "") -> Answer:
    return CompletedProcess([], 0, text, errors)


def fails(text: str) -> Answer:
    return CompletedProcess([], 1, "", text)


@pytest.fixture
def answered(monkeypatch):
    """Has each command answered by the last of the given names that it has; lists commands."""

    def use(**answers: Answer) -> list[str]:
        asked: list[str] = []

        def ask(argv: Sequence[str], *, input: str, **options: Any) -> Answer:
            asked.append(shlex.join(argv) + (" <" if input else ""))
            names = [word.replace("-", "_").strip("_").partition("=")[0] for word in argv]
            return next((answers[name] for name in reversed(names) if name in answers), says(""))

        monkeypatch.setattr(schedulers.subprocess, "run", ask)
        return asked

    return use


PODS_OF_X = "--to kubernetes --namespace ml --name x --image x --run_dir /r --volume r=/r train.py"
WARNED = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true'
LOG = "E1120 14:51:30.399739   31516 memcache.go:265] unknown field\n"
CREATED = says("job.batch/x created\n", errors=f"{LOG}{WARNED}\n\n")


def test_a_job_is_submitted_and_warnings_are_shown(answered):
    commands = answered(sbatch=says("42;cluster\n", errors="sbatch: 3 hours are left\n"))
    shown = "job 42 (x); output: x-42.out\n", "tfdist.submit: sbatch: 3 hours are left\n"
    assert run("--to slurm --name x train.py") == (0, *shown)
    assert commands == ["sbatch --parsable <"]
    commands = answered(apply=CREATED, dry_run=CREATED)
    assert run(PODS_OF_X) == (0, "job.batch/x created\n", f"tfdist.submit: {WARNED}\n")
    assert commands == [
        "kubectl --namespace=ml get job/x --ignore-not-found --output=name",
        "kubectl --namespace=ml apply --dry-run=server --filename=- <",
        "kubectl --namespace=ml apply --filename=- <",
    ]


NO_NAMESPACE = 'Error from server (NotFound): when creating "STDIN": namespaces "ml" not found\n'


@pytest.mark.parametrize(
    ("arguments", "answers", "said"),
    [
        (
            "--to slurm train.py",
            {"sbatch": fails("sbatch: error: invalid partition: nope\nsbatch: error: failed\n")},
            "sbatch: exit code 1: sbatch: error: invalid partition: nope. Fix: ",
        ),
        (PODS_OF_X, {"dry_run": fails(2 * NO_NAMESPACE)}, "kubectl create namespace"),
        (
            PODS_OF_X,
            {"get": fails(f"{LOG}{LOG}It was refused\n")},
            "exit code 1: It was refused. Fix: ",
        ),
        (PODS_OF_X, {"get": says("job.batch/x\n")}, "kubectl --namespace=ml delete job.batch/x"),
    ],
)
def test_a_refusal_of_the_scheduler_submits_nothing(arguments, answers, said, answered):
    commands = answered(**answers)
    assert said in refused(arguments)
    assert all("--dry-run=server" in command for command in commands if " apply " in command)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--to slurm train.py", "sbatch"),
        ("--to kubernetes --image x train.py", "kubectl"),
    ],
)
def test_missing_scheduler_commands_are_a_one_line_error(arguments, command, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(arguments).startswith(f"--to: cannot run the command {command}. ")


def test_a_scheduler_command_without_an_answer_times_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fakes(tmp_path, sbatch="exec sleep 600")["PATH"])
    monkeypatch.setattr(schedulers, "_DEADLINE_S", 0.2)
    code, _, err = run("--to slurm train.py")
    assert (code, err) == (1, "tfdist.submit: sbatch: no answer within 0 s\n")
