"""``python -m tfdist.submit --to slurm|kubernetes ...``: submit a job to a scheduler.

Accepts the launcher's flags and a few of its own, and renders an sbatch script or manifests. It
submits them, or prints them with ``--dry_run``. Exit code 2: nothing was submitted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from tfdist.argument_parser import run_program
from tfdist.errors import EXIT_OK, TfdistError, UsageError, require_one_of
from tfdist.submit import render
from tfdist.submit.request import JobRequest, help_text, parse, wrong

_DEADLINE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.submit", lambda: _run(words), is_report=True)


def _run(words: Sequence[str]) -> int:
    if (request := parse(words)) is None:
        text = help_text()
    elif request.flags.to == "slurm":
        text = _to_slurm(request)
    else:
        text = _to_kubernetes(request)
    print(text.rstrip("\n"), flush=True)
    return EXIT_OK


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
    """Run a scheduler's command with a text as its input. Raise a one-line error if it fails."""
    try:
        answer = subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S
        )
    except (FileNotFoundError, PermissionError):
        fix = f"use a machine with {argv[0]}, or print the job with --dry_run"
        raise wrong("to", f"cannot run the command {argv[0]}", fix, "no-command") from None
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


if __name__ == "__main__":
    sys.exit(main())
