"""Talking to a scheduler through its own commands: submit, state, output."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import TfdistError, UsageError
from tfdist.submit.render import INSTANCE
from tfdist.submit.request import wrong

_DEADLINE_S = 60.0
_MAX_PODS_OF_LOGS = 10_000

Result = subprocess.CompletedProcess[str]


def run(argv: Sequence[str], text: str = "") -> Result:
    """Run a command with a text as its input; return its answer.

    Raises:
        UsageError: there is no such command, or not for this user.
        TfdistError: it did not answer within a minute.
    """
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S
        )
    except (FileNotFoundError, PermissionError):
        fix = f"run it where {argv[0]} is, or see what would be submitted with --dry_run"
        expected = f"the command {argv[0]} on PATH"
        raise wrong("to", f"no {argv[0]}", expected, fix, "no-command") from None
    except subprocess.TimeoutExpired:
        raise TfdistError(f"{argv[0]}: no answer within {_DEADLINE_S:.0f} s") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Answer of a command that took a job, and its warnings."""

    text: str
    warnings: tuple[str, ...] = ()


def sbatch(script: str, *, name: str) -> Submission:
    """Submit a batch script; return a line for the user."""
    answer = _answer(["sbatch", "--parsable"], script)
    job = answer.stdout.strip().partition(";")[0]
    text = f"job {job} ({name}); output: {name}-{job}.out"
    return Submission(text=text, warnings=_lines(answer.stderr))


def squeue(name: str) -> str:
    """Return the state of the user's jobs of this name, those that ended lately too."""
    columns = "%.12i %.20j %.10T %.12M %.6D %R"
    argv = ["squeue", "--me", f"--name={name}", "--states=all", f"--format={columns}"]
    shown = _answer(argv).stdout
    if len(shown.splitlines()) < 2:
        raise _nothing("status", name, "squeue")
    return shown


def slurm_output(name: str) -> str:
    """Return the path of the output of the latest job of this name."""
    listed = ["squeue", "--me", f"--name={name}", "--states=all", "--noheader", "--format=%i"]
    # 7+1 is a component of job 7, which alone has an output.
    jobs = re.findall(r"^\s*(\d+)", _answer(listed).stdout, re.MULTILINE)
    if not jobs:
        raise _nothing("logs", name, "squeue")
    shown = _answer(["scontrol", "show", "job", max(jobs, key=int)]).stdout
    output = re.search(r"^\s*StdOut=(.*\S)", shown, re.MULTILINE)
    if output is None:
        raise _nothing("logs", name, "squeue")
    return output[1]


def apply(manifests: str, *, name: str, kind: str, namespace: str | None) -> Submission:
    """Create the objects of a job, all or none; return the answer of kubectl.

    The server is first asked whether it would take them.

    Raises:
        UsageError: it would not, or a job of this name is there, which would stay as it is.
    """
    kubectl = _kubectl(namespace)
    is_there = [*kubectl, "get", f"{kind}/{name}", "--ignore-not-found", "--output=name"]
    if found := _answer(is_there).stdout.strip():
        fix = f"choose another --name, or remove it: {' '.join(kubectl)} delete {found}"
        received = f"{name}: {found} is there"
        raise wrong("name", received, "a name that no job has", fix, "exists")
    _answer([*kubectl, "apply", "--dry-run=server", "--filename=-"], manifests)
    answer = _answer([*kubectl, "apply", "--filename=-"], manifests)
    # Of pods that the namespace will not admit the server warns, and takes the job all the same.
    return Submission(text=answer.stdout, warnings=_lines(answer.stderr))


def pods(name: str, *, kind: str, namespace: str | None) -> str:
    """Return the state of a job and of its pods."""
    kubectl = _kubectl(namespace)
    job = _answer([*kubectl, "get", f"{kind}/{name}"]).stdout
    made = _answer([*kubectl, "get", "pods", f"--selector={INSTANCE}={name}"]).stdout
    why = f"no pods; why: {' '.join(kubectl)} describe {kind}/{name}\n"
    return f"{job}\n{made or why}"


def pod_logs(name: str, *, namespace: str | None) -> str:
    """Return the output of the pods of a job, each line with its pod's name."""
    selector = f"--selector={INSTANCE}={name}"
    many = f"--max-log-requests={_MAX_PODS_OF_LOGS}"
    argv = [*_kubectl(namespace), "logs", selector, "--prefix", "--tail=-1", many]
    shown = _answer(argv).stdout
    if not shown:
        raise _nothing("logs", name, "kubectl")
    return shown


def _kubectl(namespace: str | None) -> list[str]:
    return ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]


def _answer(argv: Sequence[str], text: str = "") -> Result:
    """Return the answer of a command; raise its own words, in one line, if it failed."""
    answer = run(argv, text)
    if not answer.returncode:
        return answer
    # The line that says most: the first with an error, past the lines of a log.
    lines = _lines(answer.stderr or answer.stdout) or ("nothing",)
    line = next((line for line in lines if "error" in line.lower()), lines[-1])
    fix = "correct what it names"
    if re.search('namespaces "[^"]*" not found', line):
        fix = "correct --namespace, or make it with kubectl create namespace"
    received = f"exit code {answer.returncode}: {line}"
    expected = "it to do as asked"
    raise UsageError(argv[0], received=received, expected=expected, fix=fix, code="refused")


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines of a command, without those of its log."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not re.match(r"[EWIF]\d{4} ", line))


def _nothing(flag: str, name: str, command: str) -> UsageError:
    expected = f"the name of a job that {command} still knows"
    fix = "correct the name" + (", or give its --namespace" if command == "kubectl" else "")
    return wrong(flag, repr(name), expected, fix, "unknown-job")
