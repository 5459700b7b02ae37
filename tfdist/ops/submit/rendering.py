"""Rendering of a command line's flags as one text for a scheduler. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.ports import parse_ports
from tfdist.cluster.settings import FLAGS, RUN_DIR, names_a_secret
from tfdist.errors import UsageError, near
from tfdist.ops.submit import flags, kubernetes, slurm
from tfdist.ops.submit.flags import Given
from tfdist.ops.submit.kubernetes import text_of
from tfdist.ops.submit.pods import PodOptions, pod_options, volumes
from tfdist.ops.submit.request import JobRequest, Resources

_FORMS = {
    "slurm": (slurm.SECRET_FORM, slurm.SECRET_PATTERN),
    "kubernetes": (kubernetes.SECRET_FORM, kubernetes.SECRET_PATTERN),
}
_NOT_A_NAME = re.compile("[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherFlags:
    """The launcher's flags that reach a job of a scheduler, as the launcher has checked them."""

    strategy: str
    workers: int
    ps: int | None
    min_workers: int | None
    evaluator: bool
    devices_per_worker: int | None
    threads_per_task: int | None
    startup_timeout_s: float
    grace_s: float
    max_restarts: int
    hang_timeout_s: float
    ports: str | None
    split_bytes: int | None
    profile_ps: bool
    run_dir: str | None
    program: tuple[str, ...]
    program_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What a scheduler is given, the job's name, and what the user should know of it."""

    name: str
    text: str
    notes: tuple[str, ...] = ()


def render(given: Given, *, to: str, job: LauncherFlags) -> Rendered:
    """Return the script or the manifests of a job.

    Raises:
        UsageError: flags that are wrong, or a job that the scheduler cannot have.
    """
    request = request_of(given, to=to, job=job)
    if to == "slurm":
        options = slurm.SlurmOptions(
            partition=given.one("partition"),
            account=given.one("account"),
            qos=given.one("qos"),
            nodes=_count(given, "nodes"),
            features=given.all("node_selector"),
        )
        return Rendered(name=request.name, text=slurm.render(request, options))
    pods = pod_options(given)
    made = kubernetes.render(request, pods, kind=kind(given))
    text = text_of(made, comments=kubernetes.comments(request, pods, kind=kind(given)))
    return Rendered(name=request.name, text=text, notes=_notes(request, pods))


def request_of(given: Given, *, to: str, job: LauncherFlags) -> JobRequest:
    """Return the job, whatever its scheduler."""
    form, pattern = _FORMS[to]
    env = given.pairs("env")
    refuse_values(job.program, env=env, form=form)
    references = (reference(t, pattern=pattern, form=form) for t in given.all("secret"))
    name = given.one("name") or _name_of(job)
    time, memory = given.one("time"), given.one("memory")
    return JobRequest(
        name=name,
        strategy=_strategy(job),
        program=job.program,
        run_dir=job.run_dir or _run_dir(given, name),
        workers=job.workers,
        ps=(job.ps or 1) if _strategy(job) == "ps" else 0,
        evaluator=job.evaluator,
        python=given.one("python") or "python",
        resources=Resources(
            cpus=_count(given, "cpus"),
            memory_mib=flags.mebibytes(memory) if memory else None,
            gpus=_count(given, "gpus", least=0) or 0,
        ),
        env=env,
        secrets=dict(references),
        time_s=flags.seconds(time) if time else None,
        grace_s=math.ceil(job.grace_s),
        max_restarts=job.max_restarts,
        hang_timeout_s=math.ceil(job.hang_timeout_s),
        options=_options(job),
        ports=parse_ports(job.ports, where="--ports") if job.ports else None,
        threads_per_task=job.threads_per_task,
    )


def kind(given: Given) -> str:
    """Return which kind of object the job is to be under Kubernetes."""
    named = given.one("kind") or "job"
    if named not in kubernetes.KINDS:
        expected = "one of " + ", ".join(kubernetes.KINDS)
        fix = f"use one of these{near(named, kubernetes.KINDS)}"
        raise UsageError("--kind", received=repr(named), expected=expected, fix=fix)
    return named


def check_name(name: str) -> None:
    """Refuse what is no job's name, and would be read as a flag or a pattern."""
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        fix = "give the name of the job, as in --status mnist"
        expected = "letters, digits, '.', '_' and '-'"
        raise UsageError("--status or --logs", received=repr(name), expected=expected, fix=fix)


def _strategy(job: LauncherFlags) -> str:
    if job.strategy != "auto":
        return job.strategy
    if job.ps is not None:
        return "ps"
    return "multiworker" if job.workers > 1 else "auto"


def _options(job: LauncherFlags) -> Mapping[str, str]:
    """Return the variables that stand for the launcher's own flags."""
    values = {variable: getattr(job, flag) for flag, variable in FLAGS.items()}
    values[RUN_DIR] = None  # a directory of the job's own, which has a place in the request
    return {name: _text(value) for name, value in values.items() if value not in (None, False)}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return f"{value:d}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _name_of(job: LauncherFlags) -> str:
    stem = job.program_name.removesuffix(".py").rpartition(".")[2].lower()
    return _NOT_A_NAME.sub("-", stem).strip("-0123456789") or "tfdist"


def _run_dir(given: Given, name: str) -> str:
    """Return a directory with a name of its own, by which a job that is started again goes on."""
    writable = [volume for volume in volumes(given) if not volume.read_only]
    return f"{writable[0].mount.rstrip('/')}/{name}" if writable else f"runs/{name}"


def _notes(request: JobRequest, pods: PodOptions) -> tuple[str, ...]:
    is_kept = any(
        f"{request.run_dir}/".startswith(f"{volume.mount.rstrip('/')}/")
        for volume in pods.volumes
        if not volume.read_only
    )
    if is_kept:
        return ()
    return (
        f"note: the run directory {request.run_dir} is on no --volume: what the job writes is lost "
        "with its pods, and it cannot go on after a restart",
    )


def _count(given: Given, flag: str, *, least: int = 1) -> int | None:
    text = given.one(flag)
    return None if text is None else flags.count(text, flag=flag, least=least, most=100_000)


# Secrets: a job names where they are. Their values are in no flag, script or manifest.

_KNOWN = re.compile(
    r"\b(ghp_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"
)
_FIX = "put the value where the scheduler keeps it, and name that: --secret NAME={form}"


def refuse_values(program: Sequence[str], *, env: Mapping[str, str], form: str) -> None:
    """Refuse what looks like a secret's value in --env or among the program's arguments.

    The message has the name of the flag or variable, and not the value.
    """
    for name, value in env.items():
        if is_secret(name, value):
            raise _refused(f"--env {name}", form)
    for i, argument in enumerate(program):
        name, equals, value = argument.partition("=")
        after = program[i + 1] if i + 1 < len(program) else ""
        if name.startswith("-") and not equals:
            name, value = name, "" if after.startswith("-") else after
        elif not name.startswith("-"):
            name, value = "", argument
        if is_secret(name.lstrip("-"), value) or _KNOWN.search(argument):
            raise _refused(name if name.startswith("--") else "the program's arguments", form)


def is_secret(name: str, value: str) -> bool:
    """Returns whether `value`, given for `name`, looks like a secret itself."""
    return bool(value) and bool(names_a_secret(name) or _KNOWN.search(value))


def reference(text: str, *, pattern: str, form: str) -> tuple[str, str]:
    """Split ``NAME=reference``; the message of the `UsageError` shows the name at most."""
    name, equals, where = text.partition("=")
    if equals and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) and re.fullmatch(pattern, where):
        return name, where
    shown = f"{name}=... (not shown)" if equals else "no NAME=reference"
    expected = f"a variable and where its value is: NAME={form}"
    raise UsageError("--secret", received=shown, expected=expected, fix=_FIX.format(form=form))


def _refused(where: str, form: str) -> UsageError:
    received = "what looks like a secret's value (not shown)"
    expected = "no secret in a command line, a script or a manifest"
    return UsageError(where, received=received, expected=expected, fix=_FIX.format(form=form))
