"""Schedulers of ``tfdist.submit``, and their registry.

To add a scheduler, write a template, its row in `SCHEDULERS` with a `submit` function, and an
example under ``launch/``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfdist.errors import TfdistError, UsageError, require_one_of
from tfdist.submit import render
from tfdist.submit.request import JobRequest, wrong

_DEADLINE_S = 60.0
WORD = r"[^\s-]\S*", "one word"


class Flag(NamedTuple):
    """Flag of one scheduler. `form` is the format of its value, as a pattern and in words."""

    shown: str
    help: str
    form: tuple[str, str] = WORD
    is_repeated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """A scheduler that runs jobs.

    Attributes:
      title: Name in the help text.
      submit: Function that submits a job, or only renders it with ``dry_run``. It returns the
        output of the program.
      secret: Format of the reference in ``--secret NAME=reference``, in words and as a pattern.
      flags: Flags that no other scheduler has.
      unused: Flags of the launcher that have no meaning in its jobs.
    """

    title: str
    submit: Callable[[JobRequest], str]
    secret: tuple[str, str]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def _to_slurm(request: JobRequest) -> str:
    script = render.batch_script(request)
    if request.launch.dry_run:
        return script
    answer = _answer(["sbatch", "--parsable"], script)
    _warn(_lines(answer.stderr))
    job, name = answer.stdout.strip().partition(";")[0], request.name
    return f"job {job} ({name}); output: {name}-{job}.out"


def _to_kubernetes(request: JobRequest) -> str:
    kind = require_one_of("--kind", request.flags.kind or "job", render.KINDS)
    text = render.manifests(request, kind=kind)
    if not request.launch.dry_run:
        text = _apply(text, f"{kind}/{request.name}", namespace=request.flags.namespace)
    _warn(render.notes(request))
    return text


def _apply(manifests: str, job: str, *, namespace: str | None) -> str:
    """Create all objects of a job or none, and return kubectl's answer.

    The server first validates them. An existing job of this name is an error: it would not change.
    """
    kubectl = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]
    if found := _answer([*kubectl, "get", job, "--ignore-not-found", "--output=name"]).stdout:
        fix = f"choose another --name, or delete it: {' '.join(kubectl)} delete {found.strip()}"
        raise wrong("name", f"{found.strip()} already exists", fix, "exists")
    _answer([*kubectl, "apply", "--dry-run=server", "--filename=-"], manifests)
    answer = _answer([*kubectl, "apply", "--filename=-"], manifests)
    _warn(_lines(answer.stderr))  # such as pods that the namespace rejects
    return answer.stdout


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"tfdist.submit: {line}", file=sys.stderr)


def _answer(argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        answer = subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S
        )
    except (FileNotFoundError, PermissionError):
        fix = f"use a machine with {argv[0]}, or print the job with --dry_run"
        raise wrong("to", f"cannot run the command {argv[0]}", fix, "missing-package") from None
    except subprocess.TimeoutExpired:
        raise TfdistError(f"{argv[0]}: no answer within {_DEADLINE_S:.0f} s") from None
    if not answer.returncode:
        return answer
    # The first line with an error is the most useful.
    lines = _lines(answer.stderr or answer.stdout) or ["no output"]
    line = next((line for line in lines if "error" in line.lower()), lines[-1])
    fix = "correct the flag that the message names"
    if re.search('namespaces "[^"]*" not found', line):
        fix = "correct --namespace, or create it with kubectl create namespace"
    problem = f"exit code {answer.returncode}: {line.rstrip('.')}"
    raise UsageError(argv[0], problem, fix=fix, code="refused")


def _lines(text: str) -> list[str]:
    """Return the output lines of a command, except its log lines."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not re.match(r"[EWIF]\d{4} ", line)]


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm",
        submit=_to_slurm,
        secret=("/path/of/a/file", r"/[^\0\n]+"),
        flags={
            "nodes": Flag("N", "number of nodes", form=(r"[1-9]\d{0,6}", "a number such as 2")),
            "partition": Flag("NAME", "partition"),
            "account": Flag("NAME", "account that pays"),
            "qos": Flag("NAME", "quality of service"),
        },
    ),
    "kubernetes": Scheduler(
        title="Kubernetes",
        submit=_to_kubernetes,
        secret=("secret/key", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9._-]{1,253}"),
        flags={
            "kind": Flag("job|jobset|trainjob", "kind of the object (job)"),
            "image": Flag("IMAGE", "container image with tfdist"),
            "namespace": Flag("NS", "namespace (of kubectl's context)"),
            "volume": Flag(
                "CLAIM=/PATH[:ro]",
                "claim, or directory of the node with a leading /, and its mount point "
                "(repeatable)",
                form=(
                    r"[^\n:=]+=/[^\n:]+(:ro)?",
                    "CLAIM=/PATH or /DIRECTORY=/PATH, and :ro to read only",
                ),
                is_repeated=True,
            ),
            "service_account": Flag("NAME", "service account of the pods"),
            "image_pull_secret": Flag("NAME", "Secret of the image's registry"),
        },
        unused=("hang_timeout_s",),  # a pod that is done does not end the others
    ),
}
"""The schedulers by the value of ``--to``."""
