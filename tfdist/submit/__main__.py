"""``python -m tfdist.submit --to slurm|kubernetes ...``: a job for a scheduler.

Takes the launcher's flags and a few of its own, renders an sbatch script or manifests, and submits
them, or prints them with ``--dry_run``. Exit code 2: nothing was submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.argument_parser import run_program
from tfdist.errors import EXIT_OK, UsageError, require_one_of
from tfdist.submit import render, tools
from tfdist.submit.request import JobRequest, help_text, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.submit", lambda: _run(words), is_report=True)


def _run(words: Sequence[str]) -> int:
    if (request := parse(words)) is None:
        done = tools.Submission(text=help_text())
    elif request.flags.status:
        done = tools.Submission(text=_status(request))
    elif request.flags.logs:
        done = tools.Submission(text=_logs(request))
    else:
        done = _to_slurm(request) if request.flags.to == "slurm" else _to_kubernetes(request)
    for line in done.warnings:
        print(f"tfdist.submit: {line}", file=sys.stderr)
    print(done.text.rstrip("\n"), flush=True)
    return EXIT_OK


def _to_slurm(request: JobRequest) -> tools.Submission:
    script = render.batch_script(request)
    if request.launch.dry_run:
        return tools.Submission(text=script)
    return tools.sbatch(script, name=request.name)


def _to_kubernetes(request: JobRequest) -> tools.Submission:
    kind = _kind_of(request)
    manifests = render.manifests(request, kind=kind)
    done = tools.Submission(text=manifests)
    if not request.launch.dry_run:
        namespace = request.flags.namespace
        done = tools.apply(manifests, name=request.name, kind=kind, namespace=namespace)
    return tools.Submission(text=done.text, warnings=(*render.notes(request), *done.warnings))


def _kind_of(request: JobRequest) -> str:
    return require_one_of("--kind", request.flags.kind or "job", render.KINDS)


def _status(request: JobRequest) -> str:
    flags = request.flags
    if flags.to == "slurm":
        return tools.squeue(flags.status)
    kind = _kind_of(request)
    return tools.pods(flags.status, kind=kind, namespace=flags.namespace)


def _logs(request: JobRequest) -> str:
    flags = request.flags
    if flags.to == "kubernetes":
        return tools.pod_logs(flags.logs, namespace=flags.namespace)
    path = Path(tools.slurm_output(flags.logs))
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
