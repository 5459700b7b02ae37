"""What is asked of sbatch and kubectl, and what their answers become."""

import shlex
from collections.abc import Sequence
from subprocess import CompletedProcess

import pytest

from tfdist.errors import TfdistError, UsageError
from tfdist.ops.submit import tools
from tfdist.ops.submit.tools import Result
from tfdist.submit import main


class Recorded:
    """Answers each command by the first of the given answers that its words begin."""

    def __init__(self, **answers: Result) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.texts: list[str] = []

    def __call__(self, argv: Sequence[str], text: str = "") -> Result:
        self.asked.append(shlex.join(argv))
        self.texts.append(text)
        names = [word.replace("-", "_").strip("_").partition("=")[0] for word in argv]
        found = [self.answers[name] for name in reversed(names) if name in self.answers]
        return found[0] if found else says("")


def says(text: str, *, errors: str = "") -> Result:
    return CompletedProcess([], 0, text, errors)


def fails(text: str) -> Result:
    return CompletedProcess([], 1, "", text)


@pytest.fixture
def recorded(monkeypatch):
    """Has commands answered, and returns what records them."""

    def use(**answers: Result) -> Recorded:
        ask = Recorded(**answers)
        monkeypatch.setattr(tools, "run", ask)
        return ask

    return use


def test_a_script_is_given_to_sbatch(recorded):
    ask = recorded(sbatch=says("42;cluster\n"))
    submitted = tools.sbatch("#!/bin/bash\n", name="x")
    assert submitted == tools.Submission(text="job 42 (x); output: x-42.out")
    assert (ask.asked, ask.texts) == (["sbatch --parsable"], ["#!/bin/bash\n"])


def test_what_sbatch_says_is_one_line(recorded):
    words = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job failed\n"
    recorded(sbatch=fails(words))
    with pytest.raises(UsageError, match="invalid partition specified: nope; expected") as caught:
        tools.sbatch("", name="x")
    assert "\n" not in str(caught.value)


def test_manifests_are_created_only_if_all_would_be(recorded):
    ask = recorded(apply=says("job.batch/x created\n"))
    shown = tools.apply("kind: Job\n", name="x", kind="job", namespace="ml")
    assert shown == tools.Submission(text="job.batch/x created\n")
    assert ask.asked == [
        "kubectl --namespace=ml get job/x --ignore-not-found --output=name",
        "kubectl --namespace=ml apply --dry-run=server --filename=-",
        "kubectl --namespace=ml apply --filename=-",
    ]
    assert ask.texts == ["", "kind: Job\n", "kind: Job\n"]


def test_warnings_of_those_who_take_the_job_are_passed_on(recorded, capsys):
    refused = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true'
    log = "W1120 14:51:30.399739   31516 warnings.go:70] unknown field"
    created = says("job.batch/x created\n", errors=f"{log}\n{refused}\n\n")
    recorded(apply=created, dry_run=created)
    shown = tools.apply("", name="x", kind="job", namespace=None)
    assert (shown.text, shown.warnings) == ("job.batch/x created\n", (refused,))
    recorded(sbatch=says("42\n", errors="sbatch: 3 hours are left\n"))
    assert main(["--to", "slurm", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out == "job 42 (train); output: train-42.out\n"
    assert err == "tfdist.submit: sbatch: 3 hours are left\n"


def test_a_namespace_that_is_not_there_is_one_line_and_nothing_is_created(recorded):
    line = 'Error from server (NotFound): error when creating "STDIN": namespaces "ml" not found'
    ask = recorded(dry_run=fails(f"{line}\n{line}\n"))
    with pytest.raises(UsageError, match='namespaces "ml" not found') as caught:
        tools.apply("", name="x", kind="job", namespace="ml")
    assert "\n" not in str(caught.value)
    assert "kubectl create namespace" in str(caught.value)
    assert all("--dry-run=server" in asked for asked in ask.asked if " apply " in asked)


def test_the_log_of_kubectl_itself_is_passed_over(recorded):
    log = 'E1120 14:51:30.399739   31516 memcache.go:265] "Unhandled Error"'
    recorded(get=fails(f"{log}\n{log}\nThe connection to the server was refused\n"))
    with pytest.raises(UsageError, match="exit code 1: The connection to the server was refused;"):
        tools.apply("", name="x", kind="job", namespace=None)


def test_a_job_that_is_there_is_left_alone(recorded):
    ask = recorded(get=says("job.batch/x\n"))
    with pytest.raises(UsageError, match=r"kubectl delete job\.batch/x"):
        tools.apply("", name="x", kind="job", namespace=None)
    assert len(ask.asked) == 1


def test_the_state_of_a_job(recorded):
    ask = recorded(squeue=says("JOBID NAME\n 7 x\n"))
    assert tools.squeue("x") == "JOBID NAME\n 7 x\n"
    recorded(squeue=says("JOBID NAME\n"))
    with pytest.raises(UsageError, match="a job that squeue still knows"):
        tools.squeue("x")
    ask = recorded(pods=says("x-0 Running\n"), get=says("x 0/2\n"))
    shown = tools.pods("x", kind="jobset", namespace=None, label="a/b")
    assert shown == "x 0/2\n\nx-0 Running\n"
    assert ask.asked == ["kubectl get jobset/x", "kubectl get pods --selector=a/b=x"]
    ask = recorded(pods=says("", errors="No resources found"), get=says("x 0/2\n"))
    shown = tools.pods("x", kind="job", namespace="ml", label="a/b")
    assert shown == "x 0/2\n\nno pods; why: kubectl --namespace=ml describe job/x\n"


def test_the_output_of_the_latest_job_is_found(recorded):
    job = "JobId=10 JobName=x\n   Command=x\n   StdIn=/dev/null\n   StdOut=/a b/x-10.out\n"
    for more in ("   Power=\n", "", "   TresPerTask=gres/gpu=1\n\nJobId=11 JobName=x\n"):
        ask = recorded(squeue=says("10+0\n10+1\n9\n"), scontrol=says(job + more))
        assert tools.slurm_output("x") == "/a b/x-10.out"
        assert ask.asked[-1] == "scontrol show job 10"
    for answers in ({}, {"squeue": says("9\n"), "scontrol": says("JobId=9 JobName=interactive\n")}):
        recorded(**answers)
        with pytest.raises(UsageError, match="a job that squeue still knows"):
            tools.slurm_output("x")


def test_the_output_of_pods(recorded):
    ask = recorded(logs=says("[pod/x-0/tfdist] step 1\n"))
    assert tools.pod_logs("x", namespace="ml", label="a/b").endswith("step 1\n")
    assert ask.asked[0].startswith(
        "kubectl --namespace=ml logs --selector=a/b=x --prefix --tail=-1"
    )
    recorded()
    with pytest.raises(UsageError, match="kubectl still knows"):
        tools.pod_logs("x", namespace=None, label="a/b")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--to slurm train.py", "sbatch"),
        ("--to kubernetes --image x train.py", "kubectl"),
        ("--to slurm --status x", "squeue"),
        ("--to kubernetes --logs x", "kubectl"),
    ],
)
def test_without_the_schedulers_commands_it_is_one_line_and_exit_code_2(
    arguments, command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"received no {command}; expected the command {command} on PATH" in err


def test_a_command_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    command = tmp_path / "sbatch"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    monkeypatch.setattr(tools, "_DEADLINE_S", 0.2)
    with pytest.raises(TfdistError, match="sbatch: no answer"):
        tools.run([str(command)])
