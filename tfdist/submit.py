"""``python -m tfdist.submit --to slurm|kubernetes|kserve ...``: a job or a service.

Takes the launcher's flags and a few of its own, renders an sbatch script or manifests, and submits
them, or prints them with ``--dry_run``. Exit code 2: nothing was submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.argument_parser import run_program
from tfdist.errors import EXIT_OK, UsageError
from tfdist.ops.submit import kserve, kubernetes, slurm, tools
from tfdist.ops.submit.command import Command, help_text, parse
from tfdist.ops.submit.pods import INSTANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.submit", lambda: _run(words), is_report=True)


def _run(words: Sequence[str]) -> int:
    if kserve.is_asked_for(words):
        print(_to_kserve(words), flush=True)
        return EXIT_OK
    command = parse(words)
    print(help_text() if command is None else _answer(command), flush=True)
    return EXIT_OK


def _to_kserve(words: Sequence[str]) -> str:
    service = kserve.parse(words)
    manifest = kserve.render(service)
    if service.dry_run:
        return manifest.rstrip("\n")
    done = tools.apply(manifest, name=service.name, kind=kserve.KIND, namespace=service.namespace)
    for line in done.warnings:
        print(f"tfdist.submit: {line}", file=sys.stderr)
    return done.text.rstrip("\n")


def _answer(command: Command) -> str:
    status, logs = command.one("status"), command.one("logs")
    if status:
        return _status(command, status).rstrip("\n")
    if logs:
        return _logs(command, logs).rstrip("\n")
    done = _to_slurm(command) if command.to == "slurm" else _to_kubernetes(command)
    for line in done.warnings:
        print(f"tfdist.submit: {line}", file=sys.stderr)
    return done.text.rstrip("\n")


def _to_slurm(command: Command) -> tools.Submitted:
    request = slurm.read(command)
    script = slurm.render(request, command)
    if command.launch.dry_run:
        return tools.Submitted(text=script)
    return tools.sbatch(script, name=request.name)


def _to_kubernetes(command: Command) -> tools.Submitted:
    kind, (request, options) = kubernetes.kind_of(command), kubernetes.read(command)
    manifests = kubernetes.render(request, options, kind=kind)
    notes = kubernetes.notes(request, options)
    done = tools.Submitted(text=manifests)
    if not command.launch.dry_run:
        namespace = options.namespace
        done = tools.apply(manifests, name=request.name, kind=kind, namespace=namespace)
    return tools.Submitted(text=done.text, warnings=(*notes, *done.warnings))


def _status(command: Command, name: str) -> str:
    if command.to == "slurm":
        return tools.squeue(name)
    kind, namespace = kubernetes.kind_of(command), command.one("namespace")
    return tools.pods(name, kind=kind, namespace=namespace, label=INSTANCE)


def _logs(command: Command, name: str) -> str:
    if command.to == "kubernetes":
        return tools.pod_logs(name, namespace=command.one("namespace"), label=INSTANCE)
    path = Path(tools.slurm_output(name))
    if path.is_file():
        return path.read_text(errors="replace")
    raise UsageError(
        "--logs",
        received=str(path),
        expected="a file that the job has begun to write",
        fix="wait until the job has begun",
        code="missing-file",
    )


if __name__ == "__main__":
    sys.exit(main())
