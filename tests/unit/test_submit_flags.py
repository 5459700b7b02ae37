"""The command line of tfdist.submit: what is refused, in one line and with exit code 2."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tfdist.launch.options import FLAGS as LAUNCHER
from tfdist.ops.submit.command import NOT_HERE
from tfdist.submit import main

SLURM = "--to slurm --dry_run "
PODS = "--to kubernetes --dry_run --image train:1 "


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that refuses the arguments."""
    assert main(shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfdist.submit: ")
    assert err.count("\n") == 1
    assert "expected" in err
    assert "Fix: " in err
    return err


def printed(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "--to slurm or --to kubernetes"),
        ("--to slrum train.py", "did you mean 'slurm'"),
        ("--to", "received no value"),
        ("--to slurm --to slurm train.py", "twice"),
        (SLURM + "--workers 2 --workers=3 train.py", "--workers: received it twice"),
        (SLURM + "--evaluator --evaluator train.py", "--evaluator: received it twice"),
        (SLURM + "--workers \uff12 train.py", "an integer"),
        (SLURM + "--cpus +2 train.py", "an integer"),
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
        (SLURM + "--cpus 0 train.py", "an integer from 1"),
        (SLURM + "--memory 16 train.py", "16G"),
        (SLURM + "--time 4 train.py", "4h"),
        (SLURM + "--time 0h train.py", "4h"),
        (SLURM + "--name 'a b' train.py", "--name"),
        (SLURM + "--name=-x train.py", "--name"),
        (SLURM + "--partition 'a b' train.py", "--partition"),
        (SLURM + "--node_selector $'a\\nb' train.py", "--node_selector"),
        (SLURM + "--nodes 3 --workers 2 train.py", "--nodes 2"),
        (SLURM + "--nodes 3 --strategy ps --workers 2 --gpus 1 train.py", "no --nodes"),
        (SLURM + "--grace_s 70000 train.py", "65535"),
        (SLURM + "--time 1m train.py", "a longer --time"),
        (SLURM + "--env X train.py", "NAME=VALUE"),
        (SLURM + "--env 1X=2 train.py", "name of a variable"),
        (SLURM + "--env X=1 --secret X=/a train.py", "each name once"),
        ("--to kubernetes --dry_run train.py", "--image"),
        (PODS + "--image '-x y' train.py", "twice"),
        ("--to kubernetes --image 'a b' train.py", "--image"),
        (PODS + "--kind jobs train.py", "did you mean 'job'"),
        (PODS + "--name My_Run train.py", "small letters"),
        (PODS + f"--name {'a' * 62} --workers 2 train.py", "at most 61"),
        (PODS + f"--kind jobset --name {'a' * 47} --workers 2 train.py", "at most 46"),
        (PODS + f"--kind jobset --name {'a' * 44} --workers 2 --evaluator train.py", "at most 43"),
        (PODS + "--namespace 'A B' train.py", "--namespace"),
        (PODS + "--priority_class High train.py", "--priority_class"),
        (PODS + "--label team train.py", "NAME=VALUE"),
        (PODS + "--label team=a/b train.py", "--label team=vision"),
        (PODS + f"--label team={'a' * 64} train.py", "--label team=vision"),
        (PODS + "--label app.kubernetes.io/instance=x train.py", "none of app.kubernetes.io/name"),
        (PODS + "--node_selector disk=a/b train.py", "--node_selector disk=ssd"),
        (PODS + "--toleration gpu:NoShedule train.py", "NoSchedule or PreferNoSchedule"),
        (PODS + "--toleration gpu:yes=NoSchedule train.py", "KEY=VALUE:EFFECT"),
        (PODS + "--toleration =yes:NoExecute train.py", "KEY=VALUE:EFFECT"),
        (PODS + "--toleration 'a b' train.py", "KEY=VALUE:EFFECT"),
        (PODS + "--toleration gpu: train.py", "KEY=VALUE:EFFECT"),
        (PODS + "--run_as_user me train.py", "1000:1000"),
        (PODS + "--run_as_user 1000: train.py", "1000:1000"),
        (PODS + "--run_as_user -1 train.py", "1000:1000"),
        (PODS + "--run_as_user 3000000000 train.py", "2147483647"),
        (SLURM + "--run_as_user 1000 train.py", "expected kubernetes"),
        (PODS + "--volume data train.py", "--volume"),
        (PODS + "--volume data=/data:rw train.py", "--volume"),
        (PODS + "--node_selector ssd train.py", "NAME=VALUE"),
        (PODS + "--strategy ps --gpus 1 train.py", "--kind jobset"),
        ("--to slurm --status '*'", "--status"),
        ("--to slurm --logs=-x", "--logs"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(arguments, capsys)


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
def test_a_secret_on_the_command_line_is_refused_and_not_shown(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(arguments, capsys)
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
def test_what_only_resembles_a_secret_passes(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(arguments)
    assert shlex.join(words) in printed(SLURM + arguments, capsys)


def test_secrets_are_references(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(SLURM + "--secret HF_TOKEN=/home/me/.hf train.py", capsys)
    assert "HF_TOKEN=$(cat /home/me/.hf) || exit 2\nexport HF_TOKEN\n" in script
    text = printed(PODS + "--secret HF_TOKEN=hub/token train.py", capsys)
    job = list(yaml.safe_load_all(text))[-1]
    env = job["spec"]["template"]["spec"]["containers"][0]["env"]
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in env


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
def test_the_programs_own_flags_reach_the_program(
    arguments: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f'"$python" {program} &\n' in printed(SLURM + arguments, capsys)


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
}


@pytest.mark.parametrize("to", [SLURM, PODS], ids=["slurm", "kubernetes"])
@pytest.mark.parametrize("flag", [f.name for f in LAUNCHER if f.name not in ("help", "dry_run")])
def test_a_flag_of_the_launcher_reaches_the_job_or_is_refused(
    flag: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others, value = EXAMPLES.get(flag, ("", "7"))
    to += "--kind jobset " * (to == PODS and flag == "evaluator")
    line = f"{to} {others} --{flag} {value} train.py"
    if flag in NOT_HERE or (flag == "hang_timeout_s" and to == PODS):
        assert f"leave --{flag} out" in refused(line, capsys)
    else:
        assert printed(line, capsys) != printed(f"{to} {others} train.py", capsys)


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_a_range_of_ports_is_that_of_the_pods_and_of_their_policy(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{PODS} --kind {kind} --workers 2 --ports 20000-20100 "
    text = printed(flags + "train.py", capsys)
    policy: Any = next(yaml.safe_load_all(text))
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 20000, "endPort": 20100}]
    assert re.findall("containerPort: (.*)", text) == ["20000"]
    assert re.findall('name: TFDIST_PORTS\n *value: "?(.*?)"?\n', text) == ["20000-20100"]
    # With GPUs NCCL listens too, where it likes.
    policy = next(yaml.safe_load_all(printed(flags + "--gpus 1 train.py", capsys)))
    assert "ports" not in policy["spec"]["ingress"][0]


def test_the_help_has_the_launchers_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("--to slurm --help", capsys)
    for flag in LAUNCHER:
        left_out = flag.name in (*NOT_HERE, "help")
        assert (f"\n  --{flag.name} {flag.shown}".rstrip() + "\n" in text) != left_out, flag.name


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
def test_times_and_memory(flag: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"#SBATCH {line}\n" in printed(f"{SLURM} {flag} train.py", capsys)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("train.py", "train"),
        ("-m my.pkg.Fit_It", "fit-it"),
        ("01_run.py", "run"),
        ("7.py", "tfdist"),
    ],
)
def test_a_job_is_named_after_its_program(
    program: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"#SBATCH --job-name={name}\n" in printed(SLURM + program, capsys)


def test_it_loads_no_tensorflow() -> None:
    program = (
        "import sys, tfdist.submit; tfdist.submit.main(['--to', 'slurm', '--dry_run', 'a.py']);"
        "loaded = {'tensorflow', 'keras', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
